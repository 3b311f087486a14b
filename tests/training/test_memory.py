"""Tables are read where they lie: shared memory that no trial copies and no network writes to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import CONFIG, Mlp, spec_of, table

from bishop_ray.data.table import Table, TaskType
from bishop_ray.models import MODELS, create_model
from bishop_ray.models.embeddings import quantile_edges
from bishop_ray.training.device_table import Resident
from bishop_ray.training.loop import fit_network
from bishop_ray.training.system import PEAK, begin_peaks, peaks

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def read_only(rows: int = 203) -> Table:
    """A table as Ray's object store hands it over."""
    fresh = table(TaskType.BINARY, rows, 0)
    for values in (fresh.x_num, fresh.x_cat, fresh.y):
        values.flags.writeable = False
    return fresh


@pytest.mark.filterwarnings("error")
def test_the_tensors_are_the_tables_memory():
    rows = read_only()
    data = Resident(rows, torch.int64, CPU)
    assert data.x_num.data_ptr() == rows.x_num.ctypes.data
    assert data.x_cat.data_ptr() == rows.x_cat.ctypes.data
    assert data.y.data_ptr() == rows.y.ctypes.data
    index = torch.tensor([7, 0, 7])
    for got, values in zip(data.take(index), (rows.x_num, rows.x_cat, rows.y), strict=True):
        np.testing.assert_array_equal(got.numpy(), values[[7, 0, 7]])
    pieces = list(data.chunks(64))
    assert [len(x_num) for x_num, _ in pieces] == [64, 64, 64, 11]
    np.testing.assert_array_equal(torch.cat([x_num for x_num, _ in pieces]).numpy(), rows.x_num)


def test_other_types_and_layouts_become_what_networks_read():
    rows = table(TaskType.REGRESSION, 20, 0)
    odd = Table(rows.x_num.astype(np.float64)[::-1], rows.x_cat.astype(np.int32), rows.y.astype(np.float64))
    data = Resident(odd, torch.float32, CPU)
    assert (data.x_num.dtype, data.x_cat.dtype, data.y.dtype) == (torch.float32, torch.int64, torch.float32)
    np.testing.assert_array_equal(data.x_num.numpy(), rows.x_num[::-1])


def test_a_training_leaves_the_rows_as_they_are():
    rows, val = read_only(), read_only(101)
    before = [values.copy() for values in (rows.x_num, rows.x_cat, rows.y, val.x_num, val.x_cat, val.y)]
    torch.manual_seed(0)
    network = Mlp(spec_of(TaskType.BINARY))
    fit_network(network, rows, val, CONFIG, lambda _: False)
    for values, kept in zip((rows.x_num, rows.x_cat, rows.y, val.x_num, val.x_cat, val.y), before, strict=True):
        np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("name", [name for name, info in MODELS.items() if info.kind == "network"])
def test_no_network_writes_to_its_input(name):
    rows = table(TaskType.BINARY, 60, 0)
    network = create_model(name, spec_of(TaskType.BINARY), {})
    network.observe(rows)
    data = Resident(rows, torch.int64, CPU)
    before = data.x_num.clone(), data.x_cat.clone()
    for training in (True, False):
        with torch.set_grad_enabled(training):
            network.train(training)(data.x_num, data.x_cat)
        assert torch.equal(data.x_num, before[0])
        assert torch.equal(data.x_cat, before[1])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 60), columns=st.integers(0, 5), bins=st.integers(1, 40), levels=st.integers(1, 50),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_edges_by_column_are_those_of_the_whole_table(rows, columns, bins, levels, seed):
    """Bit for bit the definition: quantiles of the float64 table, made ascending."""
    rng = np.random.default_rng(seed)
    values = (rng.integers(0, levels, (rows, columns)) * rng.normal(size=columns)).astype(np.float32)
    kept = values.copy()
    whole = np.quantile(values.astype(np.float64), np.linspace(0, 1, bins + 1), axis=0)
    np.testing.assert_array_equal(quantile_edges(values, bins), np.maximum.accumulate(whole, axis=0).T)
    np.testing.assert_array_equal(values, kept)


def test_edges_do_not_touch_float64_values():
    values = np.random.default_rng(0).normal(size=(50, 2))
    kept = values.copy()
    quantile_edges(values, 8)
    np.testing.assert_array_equal(values, kept)


@pytest.mark.slow
def test_a_trials_own_memory_does_not_grow_with_the_table():
    """Real processes, Ray's object store, 100 MB of rows; each copy would add 100 MB."""
    command = [sys.executable, str(ROOT / "jobs" / "bench" / "memory.py"), "--gigabytes", "0.1", "--trials", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[0])
    assert facts["table_mb"] == pytest.approx(100)
    for memory in [facts["one_mb"], *facts["together_mb"]]:
        assert memory - facts["bare_mb"] < 30


def test_a_trials_peak_is_its_own() -> None:
    if not peaks():
        pytest.skip("this system does not set the peak of a process back")
    begin_peaks()
    before = peaks()[PEAK]
    block = np.ones(25_000_000)  # 200 MB
    high = peaks()[PEAK]
    del block
    assert high - before > 150
    assert peaks()[PEAK] == pytest.approx(high, abs=30)
    begin_peaks()
    assert peaks()[PEAK] < high - 150
