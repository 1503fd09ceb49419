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
  const scaled = (value, base, units) => {
    let power = 0;
    while (value >= base && power < units.length - 1) { value /= base; power += 1; }
    return `${power ? value.toFixed(power > 1 ? 2 : 1) : Math.round(value)} ${units[power]}`;
  };
  const amount = (bytes) => scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  const speed = (flops) => scaled(flops, 1000, ["", "K", "M", "G", "T", "P"]);
  const duration = (seconds) => (seconds < 1e-3 ? `${(seconds * 1e6).toFixed(1)} us` : seconds < 1 ? `${(seconds * 1e3).toFixed(2)} ms` : `${seconds.toFixed(2)} s`);

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
        if (row.share) lay(element, row.share);
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

  // A bar under an element, of so many parts of 1.
  const lay = (element, share) => {
    element.classList.add("timed");
    element.style.setProperty("--share", String(100 * share));
  };

  // Seconds by line, in words and as a part of the largest; nothing where nothing was measured.
  const timesOf = (entry) => {
    if (!entry.measured) return () => ({ text: "", share: 0 });
    const times = new Map(entry.measured.lines.map(([line, forward, backward]) => [line < 0 ? null : entry.lines[line].join(":"), forward + backward]));
    const most = Math.max(...times.values(), 1e-12);
    return (key) => {
      const seconds = times.get(key) || 0;
      return { text: (seconds ? duration(seconds) : "").padStart(9), share: seconds / most };
    };
  };

  const sourceRows = (entry) => {
    const timeOf = timesOf(entry);
    const used = new Set(entry.lines.map(([file, line]) => `${file}:${line}`));
    const rows = [];
    for (const file of entry.source) {
      rows.push({ text: file.name, key: null, head: true, title: file.file });
      let before = null;
      for (const [number, text] of file.rows) {
        if (before !== null && number !== before + 1) rows.push({ text: "   …", key: null });
        before = number;
        const key = `${file.file}:${number}`;
        const took = timeOf(key);
        rows.push({ text: `${took.text}${String(number).padStart(5)}  ${text}`, key: used.has(key) ? key : null, share: took.share });
      }
    }
    return rows;
  };

  const graphRows = (entry, nodes) => {
    const rows = [];
    let module = -1;
    const most = nodes.reduce((found, row) => Math.max(found, row[5] || 0), 1e-12);
    for (const [name, value, operation, line, own, seconds] of nodes) {
      if (own !== module) {
        module = own;
        rows.push({ text: entry.modules[own] || "outside of modules", key: null, head: true });
      }
      const at = line < 0 ? null : entry.lines[line];
      rows.push({
        text: `${seconds === undefined ? "" : `${duration(seconds).padStart(9)} `}${name}: ${value} = ${operation}`,
        share: (seconds || 0) / most,
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

  // A table that is drawn when it is opened, 200 rows at a time.
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
        for (const cells of rows.slice(next, next + 200)) {
          const row = make("tr");
          cells.forEach((cell, index) => {
            const made = make("td", index === numbers || cell.share !== undefined ? "number" : "code", cell.text ?? cell);
            if (cell.share) lay(made, cell.share);
            row.append(made);
          });
          body.append(row);
        }
        next += 200;
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

  const draw = (tag, attributes, text, title) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, typeof value === "number" ? value.toFixed(1) : value);
    if (text) element.textContent = text;
    if (title) element.append(draw("title", {}, title));
    return element;
  };
  const picture = (height, label) => draw("svg", { viewBox: `0 0 900 ${height}`, role: "img", "aria-label": label });

  // What is alive over a step: inputs and parameters below, then what is saved for the backward, then the rest.
  const drawMemory = (memory) => {
    const [left, right, top, bottom] = [80, 890, 28, 190];
    const image = picture(215, "memory over a step");
    const x = (index) => left + ((right - left) * index) / Math.max(1, memory.operators);
    const y = (bytes) => bottom - ((bottom - top) * bytes) / Math.max(1, memory.peak);
    const area = (name, low, high) => {
      const upper = memory.points.map((row) => [row[0], high(row)]);
      const there = [...upper, [memory.operators, upper[upper.length - 1][1]]];
      const back = [[memory.operators, low(memory.points[memory.points.length - 1])], ...memory.points.map((row) => [row[0], low(row)]).reverse()];
      image.append(draw("polygon", { class: name, points: [...there, ...back].map(([index, bytes]) => `${x(index).toFixed(1)},${y(bytes).toFixed(1)}`).join(" ") }, "", name));
    };
    area("inputs", () => 0, () => memory.inputs);
    area("saved", () => memory.inputs, (row) => memory.inputs + row[2]);
    area("rest", (row) => memory.inputs + row[2], (row) => Math.max(row[1], memory.inputs + row[2]));
    const at = memory.at ? ` at ${memory.at.name}, ${place(memory.at.where)}` : "";
    image.append(draw("line", { class: "dash", x1: left, x2: right, y1: top, y2: top }, "", `predicted peak${at}`));
    image.append(draw("line", { class: "axis", x1: x(memory.forward), x2: x(memory.forward), y1: top, y2: bottom }));
    image.append(draw("text", { x: left, y: 20 }, `predicted peak ${amount(memory.peak)}${at}`));
    image.append(draw("text", { x: left - 6, y: y(memory.inputs) + 4, "text-anchor": "end" }, amount(memory.inputs)));
    image.append(draw("text", { x: (left + x(memory.forward)) / 2, y: 206, "text-anchor": "middle" }, `forward, ${memory.forward}`));
    if (memory.forward < memory.operators) image.append(draw("text", { x: (right + x(memory.forward)) / 2, y: 206, "text-anchor": "middle" }, `backward, ${memory.operators - memory.forward}`));
    return image;
  };

  // Operations a second over operations a byte, both logarithmic; what has no operations lies at the left edge, at the height of its bytes.
  const drawRoofline = (measured) => {
    const { machine } = measured;
    const groups = [["point", measured.operators], ["square", measured.modules]].flatMap(([kind, rows]) => rows.slice(0, 40).map(([name, forward, backward, flops, bytes, count]) =>
      ({ kind, name: name || "outside of modules", seconds: forward + backward, flops, bytes, count }))).filter((item) => item.seconds && item.bytes);
    if (!groups.length) return null;
    const [left, right, top, bottom] = [70, 890, 24, 270];
    const ridge = machine.flops / machine.bytes;
    const intensities = groups.filter((item) => item.flops).map((item) => item.flops / item.bytes);
    const low = Math.floor(Math.log10(Math.min(0.1, ...intensities)));
    const high = Math.ceil(Math.log10(Math.max(ridge * 4, ...intensities)));
    const most = groups.reduce((found, item) => Math.max(found, item.seconds), 0);
    for (const item of groups) {
      item.intensity = item.flops ? item.flops / item.bytes : 10 ** low;
      item.speed = (item.flops || item.bytes * item.intensity) / item.seconds;
      item.share = item.speed / Math.min(machine.flops, machine.bytes * item.intensity);
    }
    const peak = Math.ceil(Math.log10(Math.max(machine.flops, ...groups.map((item) => item.speed))));
    const floor = Math.max(peak - 8, Math.floor(Math.log10(Math.min(machine.bytes * 10 ** low, ...groups.map((item) => item.speed)))));
    const x = (value) => left + ((right - left) * (Math.log10(value) - low)) / (high - low);
    const y = (value) => bottom - ((bottom - top) * Math.max(0, Math.log10(value) - floor)) / (peak - floor);
    const image = picture(310, "roofline");
    for (let power = low; power <= high; power += 1) image.append(draw("text", { x: x(10 ** power), y: 286, "text-anchor": "middle" }, String(power < 0 ? (10 ** power).toFixed(-power) : 10 ** power)));
    for (let power = floor; power <= peak; power += 1) {
      image.append(draw("line", { class: "axis", x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power) }));
      image.append(draw("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, `${speed(10 ** power)}`));
    }
    const end = machine.bytes * 10 ** low;
    image.append(draw("polyline", { class: "roof", points: `${x(10 ** low)},${y(end)} ${x(ridge)},${y(machine.flops)} ${x(10 ** high)},${y(machine.flops)}` }));
    groups.forEach((item) => {
      const title = `${item.name}: ${item.count} operators, ${duration(item.seconds)}, ${speed(item.flops / item.seconds)}FLOP/s, ${amount(item.bytes / item.seconds)}/s, ${(100 * item.share).toFixed(0)} % of the roof`;
      const size = 3 + 7 * Math.sqrt(item.seconds / most);
      const [middle, height] = [x(item.intensity), y(item.speed)];
      image.append(item.kind === "point" ? draw("circle", { class: "point", cx: middle, cy: height, r: size }, "", title)
        : draw("rect", { class: "square", x: middle - size, y: height - size, width: 2 * size, height: 2 * size }, "", title));
    });
    // Names of the slowest, where there is room for them.
    const named = [];
    for (const item of groups.slice().sort((one, other) => other.seconds - one.seconds)) {
      const [middle, height] = [x(item.intensity) + 12, y(item.speed) + 4];
      if (named.length > 11 || middle + 6.5 * item.name.length > 900 || named.some(([at, where, wide]) => Math.abs(where - height) < 12 && middle < at + wide && at < middle + 6.5 * item.name.length)) continue;
      named.push([middle, height, 6.5 * item.name.length]);
      image.append(draw("text", { x: middle, y: height }, item.name));
    }
    image.append(draw("text", { x: (left + right) / 2, y: 303, "text-anchor": "middle" }, "FLOP a byte read or written"));
    image.append(draw("text", { x: left, y: 14 }, `FLOP/s; the roof: ${speed(machine.flops)}FLOP/s by a product of matrices, ${amount(machine.bytes)}/s by a copy (${machine.device}, ${machine.dtype}, ${machine.threads} threads)`));
    return image;
  };

  const drawMeasured = (entry, slot) => {
    const { measured } = entry;
    if (!measured) return;
    const total = measured.modules.reduce((sum, row) => sum + row[1] + row[2], 0);
    const words = [["forward", measured.forward], ["backward", measured.backward]].filter(([, seconds]) => seconds !== null).map(([name, seconds]) => `${name} ${duration(seconds)}`);
    if (measured.peak_memory !== null) words.push(`measured peak of memory ${amount(measured.peak_memory)}`);
    slot.append(make("p", "", `Measured as compiled: ${words.join(", ") || measured.problem}. Operators one by one, not fused: ${duration(total)}${measured.not_run.length ? `, without ${measured.not_run.length} that cannot run by themselves` : ""}. All on made-up values of the same sizes.`));
    const rowsOf = (rows, name) => {
      const most = Math.max(...rows.map((row) => row[1] + row[2]), 1e-12);
      return rows.map((row) => [{ text: duration(row[1] + row[2]), share: (row[1] + row[2]) / most }, `${(100 * (row[1] + row[2]) / (total || 1)).toFixed(1)} %`,
        name(row[0]), duration(row[1]), duration(row[2]), String(row[5])]);
    };
    const lineOf = (index) => {
      if (index < 0) return "?";
      const [file, line] = entry.lines[index];
      const found = entry.source.find((item) => item.file === file)?.rows.find(([number]) => number === line);
      return `${base(file)}:${line} ${found ? found[1].trim() : ""}`;
    };
    for (const [title, one, rows] of [["module", "Module", rowsOf(measured.modules, (name) => name || "outside of modules")],
      ["line", "Line", rowsOf(measured.lines, lineOf)], ["operator", "Operator", rowsOf(measured.operators, (name) => name)]]) {
      const made = table(`Time by ${title}`, ["Time", "Part", one, "Forward", "Backward", "Operators"], rows);
      made.open = title === "module";
      slot.append(made);
    }
    const roofline = measured.machine && drawRoofline(measured);
    if (roofline) {
      slot.append(make("p", "faint", "Operators (round) and modules (square) under the roof of this machine; the larger, the longer. At the left edge: those without arithmetic that torch counts, by their bytes."), roofline);
    }
  };

  const drawEntry = (entry, slot) => {
    drawGraphs(entry, slot);
    drawMeasured(entry, slot);
    if (entry.memory && entry.memory.points.length) {
      slot.append(make("p", "faint", "Memory over a step, by the graphs: inputs and parameters, saved for the backward, the rest."), drawMemory(entry.memory));
    }
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

  // Stages as bars, a row for each depth in each thread. A pause in which the program runs is drawn as no more than a fiftieth of the rest.
  const drawTimes = (times, element) => {
    const depths = [];
    for (const row of times) depths[row.thread] = Math.max(depths[row.thread] || 1, row.depth + 1);
    const top = (row) => depths.slice(0, row.thread).reduce((sum, depth) => sum + depth, row.depth);
    const busy = times.reduce((sum, row) => sum + (row.depth ? 0 : row.seconds || 0), 0) || 1e-6;
    let [cut, reached, whole] = [0, 0, 1e-6];
    const starts = times.map((row) => {
      cut += Math.max(0, row.start - reached - busy / 50);
      reached = Math.max(reached, row.start + (row.seconds || 0));
      whole = Math.max(whole, row.start - cut + (row.seconds || 0));
      return row.start - cut;
    });
    element.style.height = `${HEIGHT * depths.reduce((sum, depth) => sum + depth, 0)}px`;
    times.forEach((row, index) => {
      const isNote = row.seconds === null;
      const width = (100 * (row.seconds || 0)) / whole;
      const made = make("i", isNote ? "note" : "", width > 6 ? row.name : "");
      made.style.left = `${(100 * starts[index]) / whole}%`;
      made.style.top = `${HEIGHT * top(row) + 1}px`;
      if (!isNote) made.style.width = `${width}%`;
      made.title = `${row.name}${isNote ? "" : ` ${duration(row.seconds)}`} ${row.details}`.trim();
      element.append(made);
    });
  };
  for (const element of document.querySelectorAll(".times")) drawTimes(data.functions[element.dataset.function].timeline, element);

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
