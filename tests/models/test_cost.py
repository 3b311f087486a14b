"""Predicted cost against measurement: the allocator's record of a real training, FLOP counts of a real step."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from model_training import default_params
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bishop_ray.config import TrainConfig
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models import MODELS, create_model, t2g_former
from bishop_ray.models.base import Network
from bishop_ray.models.cost import _training_cost, flops, memory, training_cost, validation_memory
from bishop_ray.training.loop import fit_network

pytestmark = pytest.mark.usefixtures("one_thread")
NETWORKS = tuple(name for name, info in MODELS.items() if info.kind == "network")
FEW = TableSpec(TaskType.BINARY, 3, (5, 4), 2)
MANY = TableSpec(TaskType.REGRESSION, 24, (4, 9, 3, 6, 2, 5), 1)
CASES = (
    pytest.param(FEW, 16, id="few-16"),
    pytest.param(FEW, 80, id="few-80", marks=pytest.mark.slow),
    pytest.param(MANY, 16, id="many-16", marks=pytest.mark.slow),
    pytest.param(MANY, 80, id="many-80"),
)
every_network = pytest.mark.parametrize("name", NETWORKS)


def table(spec: TableSpec, rows: int) -> Table:
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, size, rows) for size in spec.cat_cardinalities]
    y = np.arange(rows) % spec.n_out if spec.task.is_classification else rng.normal(size=rows).astype(np.float32)
    return Table(rng.normal(size=(rows, spec.n_num)).astype(np.float32), np.stack(codes, axis=1), y)


def peak_of(record: profile) -> int:
    """Most bytes that the CPU allocator had given out at once."""
    assert record.profiler is not None
    assert record.profiler.kineto_results is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def memory_of(network: Network) -> int:
    return sum(p.numel() * p.element_size() for p in network.parameters())


def measured(name: str, spec: TableSpec, hparams: dict[str, Any], rows: int, precision: str = "fp32") -> int:
    """Peak of what the CPU allocator gives out to a network and its training, less the tables.

    Two epochs of one step: in the second the optimizer's state and the weights of the best epoch are there.
    """
    train, val = table(spec, rows), table(spec, 8)
    metric = "auc" if spec.task.is_classification else "r2"
    config = TrainConfig(batch_size=rows, max_epochs=2, precision=precision, metric=metric)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        network = create_model(name, spec, hparams)
        assert isinstance(network, Network)
        fit_network(network, train, val, config, lambda result: False)
    return peak_of(record) - sum(part.nbytes for t in (train, val) for part in (t.x_num, t.x_cat, t.y))


@every_network
@pytest.mark.parametrize(("spec", "rows"), CASES)
def test_memory_is_what_the_allocator_gives_out(name: str, spec: TableSpec, rows: int) -> None:
    hparams = default_params(name)["model"]
    assert memory(name, spec, hparams, rows) == pytest.approx(measured(name, spec, hparams, rows), rel=0.2)


@pytest.mark.slow
@every_network
def test_memory_of_mixed_precision(name: str) -> None:
    hparams = default_params(name)["model"]
    predicted = memory(name, MANY, hparams, 80, precision="bf16")
    assert predicted == pytest.approx(measured(name, MANY, hparams, 80, "bf16"), rel=0.2)


@every_network
def test_flops_are_those_of_a_real_step(name: str) -> None:
    hparams = default_params(name)["model"]
    network = create_model(name, FEW, hparams)
    assert isinstance(network, Network)
    data = table(FEW, 16)
    x_num, x_cat, y = torch.tensor(data.x_num), torch.tensor(data.x_cat), torch.tensor(data.y)
    # Counted on attention's plain formula: the counter does not know the CPU's fused kernel.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = network.train().loss(network(x_num, x_cat), y)
        penalty = network.penalty()
        (loss if penalty is None else loss + penalty).backward()
    assert counter.get_total_flops() > 0
    assert flops(name, FEW, hparams, 16) == pytest.approx(counter.get_total_flops(), rel=0.2)


@pytest.mark.slow
@every_network
def test_memory_of_a_validation_pass(name: str) -> None:
    hparams = default_params(name)["model"]
    rows = 600
    network = create_model(name, MANY, hparams)
    assert isinstance(network, Network)
    data = table(MANY, rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, torch.no_grad():
        network.eval()(torch.tensor(data.x_num), torch.tensor(data.x_cat))
    weights = memory_of(network)
    found = peak_of(record) - data.x_num.nbytes - data.x_cat.nbytes
    # The network was there before; beside it are Adam's moments, the gradient, the best epoch's weights.
    assert validation_memory(name, MANY, hparams, rows) == pytest.approx(found + 5 * weights, rel=0.2)


def test_flops_of_an_mlp_by_hand() -> None:
    rows, width, blocks = 50, 40, 3
    inputs = 3 + 4 + 3  # numbers and known levels
    first, others = inputs * width, (blocks - 1) * width * width + width * FEW.n_out
    # Forward, gradients of weights, gradients of inputs; the table needs none.
    expected = 2 * rows * (2 * first + 3 * others)
    assert flops("mlp", FEW, {"n_blocks": blocks, "d_block": width}, rows) == expected


def association(leading: int, queries: int, memories: int, width: int, *, query_rows: int) -> int:
    """Multiply-adds of query, key, value and output projections, scores and weighted values."""
    cells = leading * memories * width * width * 2 + (query_rows + leading * queries) * width * width
    return cells + 2 * leading * queries * memories * width


def bishop_block(rows: int, columns: int, patches: int, width: int, d_ff: int, n_pool: int) -> int:
    cells = rows * columns * patches
    within = association(rows * columns, patches, patches, width, query_rows=cells)
    pool = association(rows * patches, n_pool, columns, width, query_rows=patches * n_pool)
    read = association(rows * patches, columns, n_pool, width, query_rows=cells)
    return within + pool + read + 2 * (2 * cells * width * d_ff)


def test_flops_of_a_bishop_by_hand() -> None:
    rows, columns, stride, width, d_ff, n_pool, merge, decoded = 7, 5, 4, 24, 40, 3, 2, 8
    hparams = {
        "d_embedding": 16, "stride": stride, "n_pool": n_pool, "n_merge": merge, "d_model": width, "d_ff": d_ff,
        "n_heads": 4, "n_encoder_levels": 2, "decoder": False, "n_decoded": decoded, "dropout": 0.1,
    }  # fmt: skip
    patches, merged = 4, 2
    products = rows * columns * patches * stride * width  # patches
    products += bishop_block(rows, columns, patches, width, d_ff, n_pool)
    products += rows * columns * merged * merge * width * width
    products += bishop_block(rows, columns, merged, width, d_ff, n_pool)
    products += rows * columns * merged * width * decoded
    inputs = columns * decoded
    products += rows * (inputs * 4 * inputs + 4 * inputs * 2 * inputs + 2 * inputs * inputs + inputs * FEW.n_out)
    assert flops("bishop", FEW, hparams, rows) == pytest.approx(3 * 2 * products, rel=0.05)


def test_what_does_not_fit_anywhere_is_predicted_without_allocating() -> None:
    hparams = {"d_embedding": 320, "stride": 1, "d_model": 1024, "n_encoder_levels": 3}
    assert memory("bishop", MANY, hparams, 320) > 5e11


def test_pieces_computed_again_keep_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t2g_former, "_WEIGHTS", 8 * 31**2 * 20)  # 20 rows at a time
    _training_cost.cache_clear()
    hparams = {"n_layers": 2, "d_embedding": 64}
    pieces = memory("t2g_former", MANY, hparams, 80, precision="bf16")
    assert pieces == pytest.approx(measured("t2g_former", MANY, hparams, 80, "bf16"), rel=0.2)
    monkeypatch.undo()
    _training_cost.cache_clear()
    assert pieces < 0.6 * memory("t2g_former", MANY, hparams, 80, precision="bf16")


def test_a_prediction_moves_no_seed() -> None:
    before = torch.get_rng_state()
    _training_cost.cache_clear()
    training_cost("tabm", FEW, {"d_block": 16}, 16)  # parts of it are built on the CPU all the same
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_predicted_is_named() -> None:
    with pytest.raises(ValueError, match="only networks have a predicted cost; found 'gbdt'"):
        training_cost("gbdt", FEW, {}, 16)
    with pytest.raises(ValueError, match="batch_size must be >= 1; found 0"):
        training_cost("mlp", FEW, {}, 0)
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16; found 'fp8'"):
        training_cost("mlp", FEW, {}, 16, "fp8")
    with pytest.raises(ValueError, match="n_blocks"):
        training_cost("mlp", FEW, {"n_blocks": 0}, 16)
