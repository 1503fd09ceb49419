"""torch_geometric: graph networks train as in eager, with graphs of changing sizes, and batched by its loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ecosystem.training import Wrap, compare, train

geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
pytestmark = pytest.mark.usefixtures("quiet")


def graph(nodes: int) -> Any:
    generator = torch.Generator().manual_seed(nodes)
    edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
    data = {"x": torch.randn(nodes, 4, generator=generator), "edge_index": edges, "y": torch.tensor([nodes % 2])}
    return geometric.data.Data(**data)


class Network(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = getattr(geometric.nn, kind)
        self.inward, self.outward = layer(4, 8), layer(8, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = self.inward(x, edges).relu()
        return geometric.nn.global_mean_pool(self.outward(x, edges), batch, 2)


@pytest.mark.parametrize("kind", ["GCNConv", "SAGEConv", "GATConv"])
def test_a_network_trains_on_batches_of_graphs(kind: str) -> None:
    loader = geometric.loader.DataLoader([graph(nodes) for nodes in (4, 6, 5, 7)], batch_size=2)
    batches = list(loader)

    def loss(call: Any, index: int) -> torch.Tensor:
        batch = batches[index % 2]
        return torch.nn.functional.cross_entropy(call(batch.x, batch.edge_index, batch.batch), batch.y)

    def run(wrap: Wrap) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Network(kind)
        call = wrap(model)
        return train(model, call, loss), call

    compare(run)
