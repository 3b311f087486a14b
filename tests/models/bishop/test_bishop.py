"""BiSHop: the authors' numbers, the paper's equations cell by cell, shapes, switches."""

from __future__ import annotations

import copy
import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models.bishop.authors import reference_arguments, reference_state
from bishop_ray.models.bishop.bishop_config import BlockOptions
from bishop_ray.models.bishop.block import BiSHopModule, CellMLP, ColumnBlock, RowBlock
from bishop_ray.models.bishop.encoder import PatchEmbedding, PatchMerge
from bishop_ray.models.bishop.hopfield import Association, GSHLayer, GSHPooling, energy, retrieve
from bishop_ray.models.bishop.model import BiSHop
from tests.reference_bishop import Config, Reference

SHARED = Path(os.environ.get("BISHOP_SHARED") or Path(__file__).resolve().parents[4] / "shared")
GOLDEN = (
    "attention",
    "categorical_multiclass_padded",
    "dense_hopfield",
    "mixed_binary_decoder",
    "numeric_regression_no_decoder",
)
SPEC = TableSpec(TaskType.REGRESSION, 3, (4, 3), 1)
SMALL: dict[str, Any] = {
    "d_embedding": 16,
    "stride": 4,
    "n_pool": 3,
    "n_merge": 2,
    "d_model": 12,
    "d_ff": 16,
    "n_heads": 2,
    "n_encoder_levels": 2,
    "n_decoded": 6,
    "dropout": 0.0,
    "head_dropout": 0.0,
    "mix_heads": False,
}


def make_table(spec: TableSpec, rows: int = 40, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, size, rows) for size in spec.cat_cardinalities]
    x_cat = np.stack(codes, 1) if codes else np.zeros((rows, 0), np.int64)
    y = rng.integers(0, spec.n_out, rows) if spec.task.is_classification else rng.normal(size=rows).astype(np.float32)
    return Table(rng.normal(size=(rows, spec.n_num)).astype(np.float32), x_cat.astype(np.int64), y)


def build(spec: TableSpec = SPEC, seed: int = 0, **arguments: Any) -> tuple[BiSHop, Tensor, Tensor]:
    """A network whose bins are observed and whose α differ, and five rows."""
    torch.manual_seed(seed)
    model = BiSHop(spec, **{**SMALL, **arguments})
    table = make_table(spec)
    model.observe(table)
    for index, association in enumerate(model.associations().values()):
        for parameter in association.activation.parameters():
            parameter.data.add_(0.3 * (index % 5) - 0.6)
    return model, torch.tensor(table.x_num[:5]), torch.tensor(table.x_cat[:5])


# --- the authors' numbers -----------------------------------------------------------------------------------------


def largest_differences(name: str) -> dict[str, float]:
    """Relative differences to one golden file, ``max|a - b| / max|b|`` per tensor.

    Two kinds of gradient are smaller than the rounding of the authors' own float32 run resolves to 1e-5 (it is
    up to 3e-4 away from a float64 run there, ours 5e-5). The gradient of a single α is a sum that almost cancels: all α
    of a network count as one tensor. And some projections get gradients that are 1e5 times smaller than others:
    "gradients" measures no tensor on a scale below 1e-4 of the largest gradient. "unscaled" does without that floor,
    except for key biases of plain attention, whose gradient is zero but for rounding.
    """
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(SHARED / "golden" / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def part(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    model = BiSHop.from_reference(config, part("state."), tensors.get("quantiles"))
    output, target = model(tensors["x_num"], tensors["x_cat"]), tensors["target"]
    loss = (
        nn.functional.mse_loss(output, target) if config["n_out"] == 1 else nn.functional.cross_entropy(output, target)
    )
    loss.backward()
    expected = reference_state(config, part("grad."), None)
    found = {key: value.grad for key, value in model.named_parameters()}
    assert set(found) == set(expected)

    def relative(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
        return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=max(floor, 1e-30)))

    alphas = [key for key in expected if key.endswith(".activation.raw")]
    others = [key for key in expected if key not in alphas]
    zero = [key for key in others if key.endswith(".key.bias") and not config["hopfield"]]
    floor = 1e-4 * max(float(value.abs().max()) for value in expected.values())
    result = {"output": relative(output, tensors["output"]), "loss": relative(loss, tensors["loss"][0])}
    result["gradients"] = max(relative(found[key], expected[key], floor) for key in others)
    result["unscaled"] = max(relative(found[key], expected[key]) for key in others if key not in zero)
    if alphas:
        stacked = [torch.stack([source[key] for key in alphas]) for source in (found, expected)]
        result["alphas"] = relative(stacked[0], stacked[1])
    if "train_num" in tensors:
        rows = len(tensors["train_num"])
        model.observe(Table(tensors["train_num"].numpy(), np.zeros((rows, 0), np.int64), np.zeros(rows, np.float32)))
        result["edges"] = relative(model.state_dict()["numbers.edges"], tensors["quantiles"])
    return result


@pytest.mark.skipif(not (SHARED / "golden").is_dir(), reason=f"no golden files in {SHARED / 'golden'}")
@pytest.mark.parametrize("name", GOLDEN)
def test_outputs_and_every_gradient_are_the_authors(name: str) -> None:
    differences = largest_differences(name)
    assert differences.pop("unscaled") < 5e-5
    assert max(differences.values()) < 1e-5, differences


# --- the paper's equations, cell by cell ---------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "per cell": {},
    "no decoder": {"decoder": False},
    "no decoder, one level": {"decoder": False, "n_encoder_levels": 1},
    "no decoder, four levels": {"decoder": False, "n_encoder_levels": 4},
    "padded embedding": {"d_embedding": 13, "stride": 5, "n_decoded": 7},
    "merge remainder": {"d_embedding": 20, "n_merge": 3, "n_encoder_levels": 3},
    "merge repeats": {"n_merge": 7, "n_encoder_levels": 3},
    "heads do not divide": {"n_heads": 5},
    "mixed heads": {"mix_heads": True},
    "plain attention": {"hopfield_values": False, "activation": "softmax"},
    "sparsemax": {"activation": "sparsemax"},
    "fixed": {"activation": "entmax_fixed"},
    "swapped": {"swap_directions": True, "stride": 2},
    "prototypes as they are": {"pool_query_projection": False, "n_heads": 5},
    "bounded ends": {"extrapolate": False},
    "stride 1": {"stride": 1, "d_embedding": 8, "n_decoded": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_equations_cell_by_cell(case: str) -> None:
    model, x_num, x_cat = build(**CASES[case])
    model = model.double().eval()
    x_num = x_num.double()[:2] * 2  # beyond the training range in some columns
    names = Config.__dataclass_fields__
    arguments = {key: value for key, value in {**SMALL, **CASES[case]}.items() if key in names}
    config = Config(n_num=3, cardinalities=(4, 3), **{"decoder": True, **arguments})
    reference = Reference(config, model.state_dict())
    expected = torch.stack([reference(n.tolist(), c.tolist()) for n, c in zip(x_num, x_cat[:2], strict=True)])
    found = model(x_num, x_cat[:2])
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
    assert asdict(config)["d_model"] == SMALL["d_model"]


# --- shapes of each block ------------------------------------------------------------------------------------------

OPTIONS = BlockOptions(d_model=12, n_heads=5, d_ff=16, n_pool=3)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_shapes_of_each_block(rows: int) -> None:
    cells = torch.randn(rows, 7, 4, 12)  # (B, A, P, D)
    assert ColumnBlock(OPTIONS)(cells).shape == cells.shape
    assert RowBlock(OPTIONS, 4)(cells).shape == cells.shape
    assert BiSHopModule(OPTIONS, 4)(cells).shape == cells.shape
    assert CellMLP(OPTIONS)(cells).shape == cells.shape
    assert GSHPooling(OPTIONS, 4)(cells.transpose(1, 2)).shape == (rows, 4, 3, 12)
    assert Association(OPTIONS)(cells, torch.randn(rows, 7, 9, 12)).shape == cells.shape
    assert GSHLayer(12, 6, 8, OPTIONS)(cells).shape == (rows, 7, 4, 8)
    assert PatchMerge(12, 4, 3)(cells).shape == (rows, 7, 2, 12)
    patches = PatchEmbedding(7, 13, 5, 12)
    assert patches(torch.randn(rows, 7, 13)).shape == (rows, 7, 3, 12)


def test_layer_with_stored_patterns_is_retrieval_of_projected_patterns() -> None:
    layer = GSHLayer(8, 20, 5, BlockOptions(d_model=8, n_heads=1, d_ff=1, n_pool=1, activation="sparsemax"))
    query = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = layer.value(retrieve(query, layer.patterns, alpha=2.0, beta=8**-0.5))
    assert torch.allclose(layer(query), expected, atol=1e-5)


@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_every_depth_runs_forward_and_backward(decoder: bool, levels: int, rows: int) -> None:
    model, x_num, x_cat = build(decoder=decoder, n_encoder_levels=levels, n_merge=3, dropout=0.1)
    out = model(x_num[:rows], x_cat[:rows])
    out.sum().backward()
    assert out.shape == (rows, 1)
    used = [p for p in model.parameters() if p.grad is not None]
    assert len(used) == len(list(model.parameters()))
    assert all(p.grad.isfinite().all() for p in used)
    model.eval()
    assert model(x_num[:rows], x_cat[:rows]).shape == (rows, 1)


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec(TaskType.BINARY, 0, (3, 5, 2), 2),
        TableSpec(TaskType.MULTICLASS, 4, (), 5),
        TableSpec(TaskType.REGRESSION, 1, (), 1),
        TableSpec(TaskType.BINARY, 0, (1,), 2),
    ],
)
def test_columns_of_one_kind_only(spec: TableSpec) -> None:
    for arguments in ({}, {"swap_directions": True}, {"numeric_embedding": "raw"}):
        model, x_num, x_cat = build(spec, **arguments)
        out = model(x_num, x_cat)
        assert out.shape == (5, spec.n_out)
        assert out.isfinite().all()


# --- behaviour ---------------------------------------------------------------------------------------------------


def test_rows_do_not_see_each_other() -> None:
    model, x_num, x_cat = build()
    model.eval()
    together = model(x_num, x_cat)
    alone = torch.cat([model(x_num[i : i + 1], x_cat[i : i + 1]) for i in range(5)])
    assert torch.allclose(together, alone, atol=1e-6)


def test_first_decoder_block_is_the_same_for_all_rows_with_and_without_the_shortcut() -> None:
    model, x_num, x_cat = build(decoder=True)
    assert model.decoder.shared_start
    short = model(x_num, x_cat)
    short.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.decoder.shared_start = False
    long = model(x_num, x_cat)
    long.sum().backward()
    assert torch.allclose(short, long, atol=1e-6)
    for a, b in zip(gradients, (p.grad for p in model.parameters()), strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-7


def test_columns_permuted_with_their_parameters_give_the_same_output() -> None:
    spec = TableSpec(TaskType.REGRESSION, 4, (), 1)
    model, x_num, x_cat = build(spec)
    model.eval()
    expected = model(x_num, x_cat)
    order = torch.tensor([2, 0, 3, 1])
    assert not torch.allclose(model(x_num[:, order], x_cat), expected, atol=1e-4)
    state = model.state_dict()
    for name in ("numbers.edges", "patches.position", "decoder.position"):
        state[name] = state[name][order]
    first = state["head.1.weight"]
    state["head.1.weight"] = first.reshape(len(first), -1, 4)[:, :, order].flatten(1)
    model.load_state_dict(state)
    assert torch.allclose(model(x_num[:, order], x_cat), expected, atol=1e-6)


def test_state_carries_the_bins() -> None:
    model, x_num, x_cat = build()
    other = BiSHop(SPEC, **SMALL)
    assert not torch.equal(other.state_dict()["numbers.edges"], model.state_dict()["numbers.edges"])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(x_num, x_cat), model.eval()(x_num, x_cat))


def test_loss_falls_and_alpha_moves() -> None:
    model, _, _ = build()
    table = make_table(SPEC, 64, seed=5)
    x_num, x_cat = torch.tensor(table.x_num), torch.tensor(table.x_cat)
    y = x_num[:, 0] * x_num[:, 1] + (x_cat[:, 0] == 2).float()
    before = {name: a.activation.alpha for name, a in model.associations().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(90):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x_num, x_cat)[:, 0], y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    after = {name: a.activation.alpha for name, a in model.associations().items()}
    assert all(before[name] != after[name] for name in before)
    assert all(1.0 < a <= 2.0 for a in after.values())


def test_categories_start_on_the_scale_of_positions() -> None:
    model, _, _ = build(TableSpec(TaskType.REGRESSION, 0, (30,) * 9, 1))
    assert 0.5 < model.categories.weight.std() / model.patches.position.std() < 1.5


def test_alpha_alone_is_kept_from_weight_decay() -> None:
    model, _, _ = build()
    for network in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        marked = [name for name, p in network.named_parameters() if getattr(p, "no_weight_decay", False)]
        assert marked == [name for name, _ in network.named_parameters() if name.endswith("activation.raw")]
        assert len(marked) == len(network.associations())


def test_diagnostics_name_every_association() -> None:
    model, x_num, x_cat = build(activation="sparsemax")
    kinds = ("column", "pool", "row")
    names = {f"enc{i}.{k}" for i in (1, 2) for k in kinds} | {
        f"dec{i}.{k}" for i in range(3) for k in (*kinds, "cross")
    }
    assert set(model.associations()) == names
    model.train()(x_num, x_cat)
    assert set(model.diagnostics()) == {f"alpha/{name}" for name in names}
    model.eval()
    model(x_num, x_cat)
    first = model.diagnostics()
    assert set(first) == {f"{kind}/{name}" for kind in ("alpha", "nonzero") for name in names}
    assert all(0 < first[f"nonzero/{name}"] <= 1 for name in names)
    assert min(first[f"nonzero/{name}"] for name in names) < 1
    model(x_num * 5, x_cat)
    assert model.diagnostics() == first  # only the first batch of a pass is looked at
    model.train().predict(x_num.numpy() * 5, x_cat.numpy())
    assert model.diagnostics() != first


SWITCHES: list[dict[str, Any]] = [
    {"activation": "entmax_fixed", "fixed_alpha": 1.25},
    {"activation": "sparsemax"},
    {"activation": "softmax"},
    {"hopfield_values": False},
    {"categorical_embedding": "plain"},
    {"numeric_embedding": "raw"},
    {"stride": 1},
    {"module": "mlp"},
    {"swap_directions": True},
    {"mix_heads": True},
    {"extrapolate": False},
    {"pool_query_projection": False},
    {"decoder": False},
    {"free_alpha": True},
    {"head_max_width": 8},
    {"compat": "authors"},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_builds_learns_and_changes_the_output(switch: dict[str, Any]) -> None:
    outputs = []
    for arguments in ({}, switch):
        model, x_num, x_cat = build(**arguments)
        out = model(x_num * 3, x_cat)
        out.square().sum().backward()
        assert out.isfinite().all()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        outputs.append(out.detach())
    assert (outputs[0] - outputs[1]).abs().max() > 1e-6


def test_head_widths() -> None:
    def widths(**arguments: Any) -> list[int]:
        model = build(**arguments)[0]
        return [layer.out_features for layer in model.head if isinstance(layer, nn.Linear)]

    n_in = 5 * 8  # features times S, six decoded rounded up to two patches of four
    assert widths() == [4 * n_in, 2 * n_in, n_in, 1]
    assert widths(head_max_width=64) == [64, 64, n_in, 1]
    assert widths(d_embedding=256, n_decoded=512)[0] == 1024
    assert widths(d_embedding=256, n_decoded=512, compat="authors")[0] == 4 * 5 * 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stride": 0}, "stride must be a whole number >= 1; found 0"),
        ({"n_merge": 1}, "n_merge must be a whole number >= 2; found 1"),
        ({"d_model": 32.0}, "d_model must be a whole number >= 1; found 32.0"),
        ({"n_encoder_levels": 0}, "n_encoder_levels must be a whole number >= 1; found 0"),
        ({"n_heads": 64, "d_model": 32}, r"n_heads must be <= d_model \(32\); found 64"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\); found 1.0"),
        ({"fixed_alpha": 1.0}, r"fixed_alpha must lie in \(1, 2\]; found 1.0"),
        ({"activation": "relu"}, "activation must be one of 'entmax', .*found 'relu'"),
        ({"categorical_embedding": "onehot"}, "categorical_embedding must be one of .*found 'onehot'"),
        ({"numeric_embedding": "plr"}, "numeric_embedding must be one of .*found 'plr'"),
        ({"module": "gru"}, "module must be one of .*found 'gru'"),
        ({"compat": "paper"}, "compat must be one of None, 'authors'; found 'paper'"),
        ({"head_max_width": 0}, "head_max_width must be a whole number >= 1; found 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BiSHop(SPEC, **arguments)


def test_other_columns_than_the_table_has_are_refused() -> None:
    model, x_num, x_cat = build()
    with pytest.raises(ValueError, match=r"expected 3 numerical and 2 categorical columns; found \(2, 2\)"):
        model(x_num[:, :2], x_cat)


def test_reference_with_other_decoder_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"d_layer must be 0 or >= e_layer \+ 1 = 4; found 2"):
        reference_arguments({"e_layer": 3, "d_layer": 2})


# --- memory retrieval ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
@pytest.mark.parametrize("beta", [0.1, 1.0, 7.0])
def test_energy_never_rises_along_retrieval(alpha: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(30, 10, generator=generator, dtype=torch.float64)
    x = torch.randn(200, 10, generator=generator, dtype=torch.float64) * 3
    fell = 0
    for _ in range(6):
        following = retrieve(x, memory, alpha, beta)
        change = energy(following, memory, alpha, beta) - energy(x, memory, alpha, beta)
        assert change.max() < 1e-9
        fell += int((change < -1e-9).sum())
        x = following
    assert fell > 200


def test_energy_of_the_dense_model_is_the_known_one() -> None:
    generator = torch.Generator().manual_seed(1)
    memory, x = torch.randn(9, 4, generator=generator), torch.randn(5, 4, generator=generator)
    expected = (x * x).sum(-1) / 2 - torch.logsumexp(2.5 * x @ memory.mT, -1) / 2.5
    assert torch.allclose(energy(x, memory, 1.0, 2.5), expected, atol=1e-5)
    assert torch.allclose(energy(x, memory, 1.0 + 1e-5, 2.5), expected, atol=1e-3)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_gradient_of_the_energy_is_the_step_of_the_retrieval(alpha: float) -> None:
    generator = torch.Generator().manual_seed(2)
    memory = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(6, generator=generator, dtype=torch.float64)
    found = [
        float(energy(x + h, memory, alpha, 1.7) - energy(x - h, memory, alpha, 1.7)) / 2e-5
        for h in 1e-5 * torch.eye(6, dtype=torch.float64)
    ]
    expected = x - retrieve(x, memory, alpha, 1.7)
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, atol=1e-6)


def test_a_stored_pattern_is_found_from_a_noisy_one() -> None:
    generator = torch.Generator().manual_seed(3)
    memory = nn.functional.normalize(torch.randn(50, 64, generator=generator), dim=-1)
    noisy = memory + 0.05 * torch.randn(50, 64, generator=generator)
    assert torch.equal(retrieve(noisy, memory, alpha=2.0, beta=10.0, steps=3), memory)
    assert torch.equal(retrieve(noisy, memory, steps=0), noisy)


@pytest.mark.parametrize(("alpha", "beta", "steps"), [(0.9, 1.0, 1), (2.1, 1.0, 1), (1.5, 0.0, 1), (1.5, 1.0, -1)])
def test_retrieval_out_of_range_is_refused(alpha: float, beta: float, steps: int) -> None:
    with pytest.raises(ValueError, match="found"):
        retrieve(torch.zeros(2, 3), torch.zeros(4, 3), alpha, beta, steps)


if __name__ == "__main__":
    for golden in GOLDEN:
        print(golden, {key: f"{value:.1e}" for key, value in largest_differences(golden).items()})
