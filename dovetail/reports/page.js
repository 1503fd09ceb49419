"use strict";
// Draws an entry when it is opened. Lists draw only the rows that are in view, so that 5,000 operators cost as much as 50.
(() => {
  const HEIGHT = 18;
  const data = JSON.parse(document.getElementById("data").textContent);

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const base = (file) => file.split(/[\\/]/).pop();
  const place = (where) => (where ? `${base(where.file)}:${where.line} ${where.text || ""}` : "");
  const amount = (bytes) => (bytes < 1024 ? `${bytes} B` : bytes < 1048576 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 1048576).toFixed(2)} MiB`);

  // Rows of {text, key, head}; rows with one key belong to one line of the source.
  class List {
    constructor(rows, link) {
      this.rows = rows;
      this.link = link;
      this.element = make("div", "list");
      this.element.tabIndex = 0;
      this.inner = make("div");
      this.inner.style.height = `${rows.length * HEIGHT}px`;
      const widest = rows.reduce((most, row) => Math.max(most, row.text.length), 0);
      this.inner.style.width = `max(100%, ${widest + 2}ch)`;
      this.inner.style.font = "12px/18px ui-monospace, Menlo, Consolas, monospace";
      this.element.append(this.inner);
      this.element.style.maxHeight = `${Math.max(10, rows.length + 1) * HEIGHT}px`;
      this.first = new Map();
      rows.forEach((row, index) => { if (row.key !== null && !this.first.has(row.key)) this.first.set(row.key, index); });
      this.element.addEventListener("scroll", () => this.draw(), { passive: true });
      new ResizeObserver(() => this.draw()).observe(this.element);
      for (const [name, act] of [["mouseover", "hover"], ["click", "pin"]]) {
        this.element.addEventListener(name, (event) => {
          const row = event.target.closest(".row");
          if (row) link[act](rows[Number(row.dataset.index)].key, this);
        });
      }
      this.element.addEventListener("mouseleave", () => link.hover(null, this));
    }
    draw() {
      const start = Math.max(0, Math.floor(this.element.scrollTop / HEIGHT) - 5);
      const end = Math.min(this.rows.length, start + Math.ceil((this.element.clientHeight || 420) / HEIGHT) + 10);
      if (start === this.start && end === this.end) return this.mark();
      this.start = start;
      this.end = end;
      const drawn = [];
      for (let index = start; index < end; index += 1) {
        const row = this.rows[index];
        const element = make("div", row.head ? "row head" : row.key === null ? "row" : "row has", row.text);
        element.style.top = `${index * HEIGHT}px`;
        element.dataset.index = String(index);
        if (row.title) element.title = row.title;
        drawn.push(element);
      }
      this.inner.replaceChildren(...drawn);
      this.mark();
    }
    mark() {
      for (const element of this.inner.children) {
        const key = this.rows[Number(element.dataset.index)].key;
        element.classList.toggle("lit", key !== null && key === this.link.hovered);
        element.classList.toggle("pinned", key !== null && key === this.link.pinned);
      }
    }
    show(key) {
      const index = this.first.get(key);
      if (index === undefined) return;
      const top = index * HEIGHT;
      if (top < this.element.scrollTop || top > this.element.scrollTop + this.element.clientHeight - HEIGHT) {
        this.element.scrollTop = Math.max(0, top - this.element.clientHeight / 3);
      }
    }
  }

  class Link {
    constructor() { this.lists = []; this.hovered = null; this.pinned = null; }
    hover(key) {
      if (key === this.hovered) return;
      this.hovered = key;
      for (const list of this.lists) list.mark();
    }
    pin(key, from) {
      if (key === null) return;
      this.pinned = key === this.pinned ? null : key;
      for (const list of this.lists) {
        if (list !== from && this.pinned !== null) list.show(key);
        list.draw();
      }
    }
  }

  const sourceRows = (entry) => {
    const used = new Set(entry.lines.map(([file, line]) => `${file}:${line}`));
    const rows = [];
    for (const file of entry.source) {
      rows.push({ text: file.name, key: null, head: true, title: file.file });
      let before = null;
      for (const [number, text] of file.rows) {
        if (before !== null && number !== before + 1) rows.push({ text: "   …", key: null });
        before = number;
        const key = `${file.file}:${number}`;
        rows.push({ text: `${String(number).padStart(5)}  ${text}`, key: used.has(key) ? key : null });
      }
    }
    return rows;
  };

  const graphRows = (entry, nodes) => {
    const rows = [];
    let module = -1;
    for (const [name, value, operation, line, own] of nodes) {
      if (own !== module) {
        module = own;
        rows.push({ text: entry.modules[own] || "outside of modules", key: null, head: true });
      }
      const at = line < 0 ? null : entry.lines[line];
      rows.push({
        text: `${name}: ${value} = ${operation}`,
        key: at && `${at[0]}:${at[1]}`,
        title: at ? `${base(at[0])}:${at[1]}` : "",
      });
    }
    return rows;
  };

  const drawGraphs = (entry, slot) => {
    if (entry.graphs_left_out) slot.append(make("p", "faint", entry.graphs_left_out));
    if (!entry.forward) return;
    const link = new Link();
    const panes = make("div", "panes");
    for (const [title, rows] of [
      ["Source", sourceRows(entry)],
      [`Forward, ${entry.forward.length} operators`, graphRows(entry, entry.forward)],
      [`Backward, ${entry.backward.length} operators`, graphRows(entry, entry.backward)],
    ]) {
      const pane = make("div", "pane");
      const list = new List(rows, link);
      link.lists.push(list);
      pane.append(make("p", "", title), list.element);
      panes.append(pane);
    }
    slot.append(make("p", "faint", "Point at a line or an operator: what belongs to the same line is marked. A click keeps the mark and scrolls the others there."), panes);
    for (const list of link.lists) list.draw();
  };

  // A table that is drawn when it is opened, 500 rows at a time.
  const table = (title, head, rows, numbers) => {
    const details = make("details");
    details.append(make("summary", "", title));
    details.addEventListener("toggle", () => {
      const body = make("table");
      const top = make("tr");
      for (const name of head) top.append(make("th", "", name));
      body.append(top);
      let next = 0;
      const more = make("button", "", "more");
      const add = () => {
        for (const cells of rows.slice(next, next + 500)) {
          const row = make("tr");
          cells.forEach((cell, index) => row.append(make("td", index === numbers ? "number" : "code", cell)));
          body.append(row);
        }
        next += 500;
        more.hidden = next >= rows.length;
      };
      more.addEventListener("click", add);
      add();
      const scroll = make("div", "scroll");
      scroll.append(body, more);
      details.append(scroll);
    }, { once: true });
    return details;
  };

  const drawEntry = (entry, slot) => {
    drawGraphs(entry, slot);
    const guards = entry.guards.length + entry.inputs.length + entry.guards_left_out;
    slot.append(table(`Guards (${guards})`, ["What must hold", "Needed at", "Because"], [
      ...entry.inputs.map((row) => [`${row.name} is ${row.is}`, place(row.where), "an input"]),
      ...entry.guards.map((row) => [row.text, place(row.where), row.reason]),
      ...(entry.guards_left_out ? [[`${entry.guards_left_out} more`, "", ""]] : []),
    ]));
    if (entry.saved && entry.saved.length) {
      slot.append(table(`Saved for the backward: ${entry.saved.length} values, ${amount(entry.saved_bytes)}, and ${entry.computed_again} operators computed again`,
        ["Bytes", "Value", "What", "From"], entry.saved.map((row) => [amount(row.bytes), `${row.name}: ${row.is}`, row.what, place(row.where)]), 0));
    }
    if (entry.passes && entry.passes.length) slot.append(table(`Passes (${entry.passes.length})`, ["Pass"], entry.passes.map((row) => [row])));
    if (entry.effects.length) slot.append(table(`Effects after the graph (${entry.effects.length})`, ["Effect"], entry.effects.map((row) => [row])));
    for (const kernel of entry.kernels || []) {
      const details = make("details");
      details.append(make("summary", "", `Generated code, ${kernel.kind}${kernel.was_cached ? ", from Inductor's cache" : ""}: ${kernel.file}`));
      details.addEventListener("toggle", () => details.append(make("pre", "scroll", kernel.code)), { once: true });
      slot.append(details);
    }
  };

  for (const details of document.querySelectorAll("details.entry")) {
    details.addEventListener("toggle", () => {
      const slot = details.querySelector(".slot");
      if (!details.open || slot.childElementCount) return;
      const [f, p, e] = details.dataset.entry.split(" ").map(Number);
      drawEntry(data.functions[f].parts[p].entries[e], slot);
    });
  }
  const open = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.matches("details.entry")) target.open = true;
  };
  addEventListener("hashchange", open);
  const first = document.querySelector("details.entry");
  if (first) first.open = true;
  open();
})();
