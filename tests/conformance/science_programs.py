"""Small real trainings with scientific packages: models of the packages' own classes, trained as their users train them.

A program imports its package when it is built. Each batch differs in its numbers, some also in the number of edges.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A model, what makes the batch of a step, and the loss that a step minimises."""

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Program:
    """A training and the packages (as they are imported) that it needs."""

    packages: tuple[str, ...]
    build: Callable[[], Training]
    #: Why the model cannot be compiled by itself, where the package is against it.
    only_steps: str = ""


PROGRAMS: dict[str, Program] = {}


def program(
    name: str, *packages: str, only_steps: str = ""
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Register what builds a training."""

    def register(build: Callable[[], Training]) -> Callable[[], Training]:
        PROGRAMS[name] = Program(packages, build, only_steps)
        return build

    return register


def missing(name: str) -> list[str]:
    """The packages of a program that cannot be imported here, with the reason; any error counts, as eager has it too."""
    os.environ.setdefault("DDE_BACKEND", "pytorch")
    # SchNetPack imports a name that torch 2.13 has dropped.
    loader = importlib.import_module("torch.utils.data.dataloader")
    vars(loader).setdefault("T_co", importlib.import_module("typing").TypeVar("T_co", covariant=True))
    # The constants of e3nn up to 0.5 hold slices, which torch.load has refused since 2.6.
    torch.serialization.add_safe_globals([slice])
    found = []
    for package in PROGRAMS[name].packages:
        module, _, attribute = package.partition(":")
        try:
            imported = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  (old packages raise all kinds of errors with a new torch)
            found.append(f"{package} ({type(error).__name__}: {error})")
        else:
            if attribute and not hasattr(imported, attribute):
                version = importlib.metadata.version(module.partition(".")[0])
                found.append(f"{package} (version {version} of the package has none)")
    return found


# --- atoms -----------------------------------------------------------------------------------------------------------


def _molecules(seed: int, atoms: int = 4, molecules: int = 2, cutoff: float = 3.5) -> Batch:
    """Molecules of random atoms with all pairs within the cutoff, and energies and forces to fit."""
    generator = torch.Generator().manual_seed(seed)
    total = atoms * molecules
    positions = torch.randn(total, 3, generator=generator) * 1.2
    graph = torch.arange(molecules).repeat_interleave(atoms)
    near = (
        (torch.cdist(positions, positions) < cutoff) & (graph[:, None] == graph) & ~torch.eye(total, dtype=torch.bool)
    )
    return {
        "z": torch.tensor([1, 6, 8, 1] * total)[:total],
        "pos": positions,
        "batch": graph,
        "edges": near.nonzero().t().contiguous(),
        "energy": torch.randn(molecules, generator=generator),
        "forces": torch.randn(total, 3, generator=generator),
    }


def _energies_and_forces(energy: Tensor, forces: Tensor, batch: Batch) -> Tensor:
    difference = (energy.reshape(-1) - batch["energy"]).square().mean()
    return difference + 10 * (forces - batch["forces"]).square().mean()


def _own_forces(energy: Callable[[nn.Module, Tensor, Batch], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of a model that gives energies only."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        positions = batch["pos"].detach().requires_grad_()
        energies = energy(model, positions, batch)
        (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return _energies_and_forces(energies, -slope, batch)

    return loss


@program("e3nn", "e3nn")
def _e3nn() -> Training:
    from e3nn import nn as e3nn_nn
    from e3nn import o3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sphere = o3.Irreps.spherical_harmonics(2)
            hidden = o3.Irreps("8x0e + 8x1o + 4x2e")
            self.embed = nn.Embedding(10, 8)
            self.product = o3.FullyConnectedTensorProduct("8x0e", self.sphere, hidden, shared_weights=False)
            self.weights = e3nn_nn.FullyConnectedNet([8, 16, self.product.weight_numel], torch.nn.functional.silu)
            self.gate = e3nn_nn.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
            self.mix = o3.Linear(hidden, self.gate.irreps_in)
            self.out = o3.Linear(self.gate.irreps_out, "1x0e")

        def forward(self, z: Tensor, positions: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
            from e3nn.math import soft_one_hot_linspace

            source, target = edges
            vectors = positions[source] - positions[target]
            harmonics = o3.spherical_harmonics(self.sphere, vectors, True, normalization="component")
            lengths = soft_one_hot_linspace(vectors.norm(dim=1), 0.0, 3.5, 8, basis="smooth_finite", cutoff=True)
            messages = self.product(self.embed(z)[source], harmonics, self.weights(lengths))
            nodes = messages.new_zeros(len(z), messages.shape[1]).index_add(0, target, messages)
            atoms = self.out(self.gate(self.mix(nodes))).squeeze(1)
            return atoms.new_zeros(2).index_add(0, graph, atoms)

    return Training(
        Net(), _molecules, _own_forces(lambda model, pos, batch: model(batch["z"], pos, batch["edges"], batch["batch"]))
    )


def _mace_model() -> nn.Module:
    import numpy
    from e3nn import o3
    from mace import modules

    return modules.ScaleShiftMACE(
        r_max=3.5,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=modules.RealAgnosticResidualInteractionBlock,
        interaction_cls_first=modules.RealAgnosticResidualInteractionBlock,
        num_interactions=2,
        num_elements=3,
        hidden_irreps=o3.Irreps("8x0e + 8x1o"),
        MLP_irreps=o3.Irreps("8x0e"),
        atomic_energies=numpy.array([-1.0, -2.0, -3.0]),
        avg_num_neighbors=3.0,
        atomic_numbers=[1, 6, 8],
        correlation=2,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )


def _mace_batch(seed: int) -> Batch:
    batch = _molecules(seed)
    kinds = torch.searchsorted(torch.tensor([1, 6, 8]), batch["z"])
    count = batch["edges"].shape[1]
    inputs = {
        "positions": batch["pos"],
        "node_attrs": torch.nn.functional.one_hot(kinds, 3).float(),
        "edge_index": batch["edges"],
        "batch": batch["batch"],
        "ptr": torch.tensor([0, 4, 8]),
        "cell": torch.zeros(6, 3),
        "shifts": torch.zeros(count, 3),
        "unit_shifts": torch.zeros(count, 3),
        "head": torch.zeros(2, dtype=torch.long),
    }
    return {"inputs": inputs, "energy": batch["energy"], "forces": batch["forces"]}


def _mace_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(dict(batch["inputs"]), training=True)
    return _energies_and_forces(out["energy"], out["forces"], batch)


@program("mace", "mace.modules")
def _mace() -> Training:
    return Training(_mace_model(), _mace_batch, _mace_loss)


@program("mace-prepared", "mace.modules")
def _mace_prepared() -> Training:
    from mace.tools.compile import prepare

    return Training(prepare(_mace_model)(), _mace_batch, _mace_loss)


@program("nequip", "nequip.model:NequIPGNNModel")
def _nequip() -> Training:
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state

    chosen = torch.get_default_dtype()
    set_global_state()
    # The first call changes the default of the process, a later one does not.
    torch.set_default_dtype(chosen)
    model = NequIPGNNModel(
        seed=0,
        model_dtype="float32",
        type_names=["H", "C", "O"],
        r_max=3.5,
        num_layers=2,
        l_max=1,
        num_features=8,
        radial_mlp_width=8,
        num_bessels=4,
        avg_num_neighbors=3.0,
        per_type_energy_scales=1.0,
        per_type_energy_shifts=0.0,
    )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs = {
            "pos": batch["pos"].double(),
            "edge_index": batch["edges"],
            "atom_types": torch.searchsorted(torch.tensor([1, 6, 8]), batch["z"]),
            "batch": batch["batch"],
            "num_atoms": torch.tensor([4, 4]),
        }
        out = model(inputs)
        return _energies_and_forces(out["total_energy"], out["forces"], batch)

    return Training(model, _molecules, loss)


@program("schnetpack", "schnetpack")
def _schnetpack() -> Training:
    import schnetpack

    representation = schnetpack.representation.SchNet(
        n_atom_basis=16,
        n_interactions=2,
        radial_basis=schnetpack.nn.GaussianRBF(n_rbf=8, cutoff=3.5),
        cutoff_fn=schnetpack.nn.CosineCutoff(3.5),
    )
    model = schnetpack.model.NeuralNetworkPotential(
        representation=representation,
        input_modules=[schnetpack.atomistic.PairwiseDistances()],
        output_modules=[
            schnetpack.atomistic.Atomwise(n_in=16, output_key="energy"),
            schnetpack.atomistic.Forces(energy_key="energy", force_key="forces"),
        ],
    )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        source, target = batch["edges"]
        inputs = {
            "_atomic_numbers": batch["z"],
            "_positions": batch["pos"].clone(),
            "_idx_m": batch["batch"],
            "_idx_i": source,
            "_idx_j": target,
            "_offsets": torch.zeros(len(source), 3),
            "_n_atoms": torch.tensor([4, 4]),
        }
        out = model(inputs)
        return _energies_and_forces(out["energy"], out["forces"], batch)

    return Training(model, _molecules, loss)


@program("torchmd-net", "torchmdnet.models.model")
def _torchmdnet() -> Training:
    from torchmdnet.models.model import create_model

    model = create_model(
        {
            "model": "tensornet",
            "precision": 32,
            "embedding_dimension": 16,
            "num_layers": 1,
            "num_rbf": 8,
            "rbf_type": "expnorm",
            "trainable_rbf": False,
            "activation": "silu",
            "cutoff_lower": 0.0,
            "cutoff_upper": 3.5,
            "max_z": 20,
            "max_num_neighbors": 16,
            "equivariance_invariance_group": "O(3)",
            "atom_filter": -1,
            "derivative": True,
            "prior_model": None,
            "output_model": "Scalar",
            "reduce_op": "add",
        }
    )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        energy, forces = model(batch["z"], batch["pos"], batch["batch"])
        return _energies_and_forces(energy, forces, batch)

    return Training(model, _molecules, loss)


@program("geometric-schnet", "torch_geometric.nn.models")
def _geometric_schnet() -> Training:
    from torch_geometric.nn.models import SchNet

    class Neighbours(nn.Module):
        """All pairs within the cutoff; the package's own needs another package for it."""

        def forward(self, positions: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
            same = (graph[:, None] == graph) & ~torch.eye(len(graph), dtype=torch.bool)
            edges = ((torch.cdist(positions, positions) < 3.5) & same).nonzero().t()
            source, target = edges
            return edges, (positions[source] - positions[target]).norm(dim=-1)

    model = SchNet(
        hidden_channels=16,
        num_filters=16,
        num_interactions=2,
        num_gaussians=8,
        cutoff=3.5,
        interaction_graph=Neighbours(),
    )
    return Training(model, _molecules, _own_forces(lambda model, pos, batch: model(batch["z"], pos, batch["batch"])))


# --- graphs ----------------------------------------------------------------------------------------------------------


def _graph(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(12, 6, generator=generator),
        "edges": torch.randint(0, 12, (2, 30 + seed), generator=generator),
        "labels": torch.randint(0, 3, (12,), generator=generator),
    }


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"], batch["edges"]), batch["labels"])


def _geometric(name: str, make: Callable[[Any, int, int], nn.Module]) -> None:
    """A network of two convolutions of a kind."""

    @program(f"geometric-{name}", "torch_geometric.nn")
    def build() -> Training:
        import torch_geometric.nn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = make(torch_geometric.nn, 6, 8)
                self.second = make(torch_geometric.nn, 8, 3)

            def forward(self, x: Tensor, edges: Tensor) -> Tensor:
                x = torch.nn.functional.dropout(self.first(x, edges).relu(), 0.2, self.training)
                return self.second(x, edges)

        return Training(Net(), _graph, _classify)


def _gin(library: Any, inputs: int, outputs: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))
    return library.GINConv(layers, train_eps=True)


_geometric("gcn", lambda library, inputs, outputs: library.GCNConv(inputs, outputs))
_geometric("cheb", lambda library, inputs, outputs: library.ChebConv(inputs, outputs, K=3))
_geometric("gat", lambda library, inputs, outputs: library.GATConv(inputs, outputs, heads=2, concat=False))
_geometric("gin", _gin)


# --- differential equations, Gaussian processes ---------------------------------------------------------------------


def _points(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.rand(16, 2, generator=generator), "y": torch.rand(16, 1, generator=generator)}


@program("pina", "pina.model", "pina.operator")
def _pina() -> Training:
    from pina import LabelTensor
    from pina.model import FeedForward
    from pina.operator import grad, laplacian

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        points = LabelTensor(batch["x"].clone(), ["x", "t"]).requires_grad_()
        found = LabelTensor(model(points), ["u"])
        slope = grad(found, points, components=["u"], d=["t"])
        residual = slope - 0.1 * laplacian(found, points, components=["u"], d=["x"])
        return residual.tensor.square().mean() + (found.tensor - batch["y"]).square().mean()

    return Training(FeedForward(2, 1, inner_size=16, n_layers=2), _points, loss)


@program("deepxde", "deepxde")
def _deepxde() -> Training:
    import deepxde

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        points = batch["x"].detach().requires_grad_()
        found = model(points)
        residual = deepxde.grad.jacobian(found, points, i=0, j=1)
        residual = residual - 0.1 * deepxde.grad.hessian(found, points, i=0, j=0)
        deepxde.gradients.clear()
        return residual.square().mean() + (found - batch["y"]).square().mean()

    return Training(deepxde.nn.FNN([2, 16, 16, 1], "tanh", "Glorot normal"), _points, loss)


@program("gpytorch", "gpytorch")
def _gpytorch() -> Training:
    import gpytorch

    fixed = _points(0)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(fixed["x"], fixed["y"][:, 0], likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

    model = Process()
    likelihood.train()
    goal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return Training(model, lambda seed: fixed, lambda model, batch: -goal(model(batch["x"]), batch["y"][:, 0]))


@program("torchdiffeq", "torchdiffeq")
def _torchdiffeq() -> Training:
    import torchdiffeq

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.layers(y) * torch.cos(t)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        times = torch.linspace(0.0, 1.0, 3)
        found = torchdiffeq.odeint(model, batch["x"], times, method="dopri5", rtol=1e-3, atol=1e-4)
        return (found[-1] - batch["y"]).square().mean()

    return Training(Field(), _points, loss)


@program("torchdiffeq-lambda", "torchdiffeq")
def _torchdiffeq_lambda() -> Training:
    import torchdiffeq

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        times = torch.linspace(0.0, 1.0, 3)
        found = torchdiffeq.odeint(lambda t, y: model(y) * t, batch["x"], times, method="rk4")
        return (found[-1] - batch["y"]).square().mean()

    return Training(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)), _points, loss)


@program("torchdiffeq-adjoint", "torchdiffeq")
def _torchdiffeq_adjoint() -> Training:
    import torchdiffeq

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.layers(y) * torch.cos(t)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = torchdiffeq.odeint_adjoint(model, batch["x"], torch.linspace(0.0, 1.0, 3), method="rk4")
        return (found[-1] - batch["y"]).square().mean()

    return Training(Field(), _points, loss)


# --- learning to learn -----------------------------------------------------------------------------------------------


def _tasks(seed: int) -> Batch:
    return {"support": _points(2 * seed), "query": _points(2 * seed + 1)}


def _regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


@program(
    "higher",
    "higher",
    only_steps="higher derives from the model's class, and that of a compiled model is not its own (torch.compile: RecursionError)",
)
def _higher() -> Training:
    import higher

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, optimizer):
            for _ in range(2):
                optimizer.step((fast(batch["support"]["x"]) - batch["support"]["y"]).square().mean())
            return (fast(batch["query"]["x"]) - batch["query"]["y"]).square().mean()

    return Training(_regressor(), _tasks, loss)


@program("torchopt", "torchopt")
def _torchopt() -> Training:
    import torchopt

    model = _regressor()
    inner = torchopt.MetaSGD(model, lr=0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        before = torchopt.extract_state_dict(model, by="reference"), torchopt.extract_state_dict(inner, by="reference")
        for _ in range(2):
            inner.step((model(batch["support"]["x"]) - batch["support"]["y"]).square().mean())
        result = (model(batch["query"]["x"]) - batch["query"]["y"]).square().mean()
        torchopt.recover_state_dict(model, before[0])
        torchopt.recover_state_dict(inner, before[1])
        return result

    return Training(model, _tasks, loss)


@program("torchopt-functional", "torchopt")
def _torchopt_functional() -> Training:
    import torchopt

    inner = torchopt.sgd(lr=0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        weights = dict(model.named_parameters())
        state = inner.init(weights)
        for _ in range(2):
            found = torch.func.functional_call(model, weights, (batch["support"]["x"],))
            slopes = torch.autograd.grad(
                (found - batch["support"]["y"]).square().mean(), tuple(weights.values()), create_graph=True
            )
            updates, state = inner.update(dict(zip(weights, slopes, strict=True)), state, inplace=False)
            weights = torchopt.apply_updates(weights, updates, inplace=False)
        found = torch.func.functional_call(model, weights, (batch["query"]["x"],))
        return (found - batch["query"]["y"]).square().mean()

    return Training(_regressor(), _tasks, loss)
