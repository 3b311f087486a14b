"""Training spread over real processes (gloo on the loopback) does what one process does."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import make_table
from training_fakes import CONFIG, Cramped, Mlp, Poisoned, spec_of, table

from bishop_ray.config import Resources
from bishop_ray.data import Preprocessor, split_dataset
from bishop_ray.data.table import TaskType
from bishop_ray.errors import TrainingFailed
from bishop_ray.models.base import Network
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.predictor import Predictor
from bishop_ray.search.cluster import connect
from bishop_ray.training.checkpoint import has_state
from bishop_ray.training.distributed import Ranks
from bishop_ray.training.job import StudyData, TrialSettings
from bishop_ray.training.loop import EpochResult, FitResult, fit_network
from bishop_ray.training.trainable import evaluate_seed


def test_shares_cover_every_row_once():
    ranks = Ranks(torch.device("cpu"))
    for rows in (0, 1, 2, 3, 7, 32):
        for ranks.size in (1, 2, 3, 5):
            parts = [ranks._part(rows, rank) for rank in range(ranks.size)]
            assert [i for part in parts for i in range(rows)[part]] == list(range(rows))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


JOBS = (
    (3, "multiclass", ""),
    (2, "regression", ""),
    (2, "binary", "stop"),
    (2, "binary", "poison"),
    (2, "binary", "memory"),
    (2, "multiclass", "bishop"),
    (2, "regression", "bishop"),
)
"""Processes, task, what happens."""


SMALL = {
    "d_embedding": 8, "stride": 2, "n_pool": 2, "n_merge": 2, "d_model": 8, "d_ff": 16, "n_heads": 2,
    "n_encoder_levels": 2, "n_decoded": 4, "dropout": 0.0, "head_dropout": 0.0,
}  # fmt: skip
"""A BiSHop with every part of a big one, and nothing random."""


def train_one(rank: int, task: TaskType, mode: str, folder: Path) -> tuple:
    """What each process does: weights, what it was told, and the outcome."""
    torch.manual_seed(100 * rank)  # every rank starts elsewhere: rank 0's weights must count
    network: Network = Mlp(spec_of(task), decay=0.1)
    config = replace(CONFIG, max_epochs=2, metric="auc" if task.is_classification else "r2")
    if mode == "poison":
        network = Poisoned(spec_of(task), "gradient")
    elif mode == "memory":
        network = Cramped(spec_of(task), most=5 if rank else 100)
    elif mode == "bishop":
        network, config = BiSHop(spec_of(task), **SMALL), replace(config, max_epochs=1, lr=1e-3)
    told: list[EpochResult] = []

    def on_epoch(result: EpochResult) -> bool:
        told.append(replace(result, seconds=0.0))
        return rank == 0 and mode == "stop"  # rank 0 decides alone

    outcome: FitResult | str
    try:
        # 98 rows: the last batch has 2, so that one of 3 ranks has none; 65 divide neither by 2 nor by 3.
        outcome = fit_network(network, table(task, 98, 0), table(task, 65, 1), config, on_epoch, checkpoint_to=folder)
    except TrainingFailed as error:
        outcome = str(error)
    return network.state_dict(), told, outcome


def work(rank: int, ports: list[int], folder: Path) -> None:
    """One of three processes, which form a group per job; starting them is what takes time."""
    torch.set_num_threads(1)
    for (size, task, mode), port in zip(JOBS, ports, strict=True):
        if rank < size:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
            done = train_one(rank, TaskType(task), mode, folder / f"{task}{mode}")
            torch.save(done, folder / f"{task}{mode}-{rank}.pt")
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """The folder in which groups of processes left their results."""
    folder = tmp_path_factory.mktemp("together")
    torch.multiprocessing.spawn(work, ([free_port() for _ in JOBS], folder), nprocs=3)
    return folder


def results(folder: Path, task: TaskType, mode: str = "") -> list[tuple]:
    files = sorted(folder.glob(f"{task.value}{mode}-*.pt"))
    return [torch.load(file, weights_only=False) for file in files]


@pytest.mark.parametrize(("task", "size"), [(TaskType.MULTICLASS, 3), (TaskType.REGRESSION, 2)])
def test_several_processes_do_what_one_does(together, tmp_path, task, size):
    alone, told_alone, _ = train_one(0, task, "", tmp_path)
    ranks = results(together, task)
    assert len(ranks) == size
    for weights, told, _ in ranks:
        assert all(torch.equal(weights[name], ranks[0][0][name]) for name in alone)
        assert told == ranks[0][1], "the ranks were told different numbers"
    for name, tensor in alone.items():
        torch.testing.assert_close(ranks[0][0][name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    for one, more in zip(told_alone, ranks[0][1], strict=True):
        assert one.metrics() == pytest.approx(more.metrics(), rel=1e-5)
    assert has_state(together / task.value)


def test_a_process_short_of_memory_halves_its_passes_alone(together, tmp_path):
    alone, told_alone, _ = train_one(0, TaskType.BINARY, "memory", tmp_path)
    ranks = results(together, TaskType.BINARY, "memory")
    assert ranks[0][1] == ranks[1][1], "the ranks were told different numbers"
    assert [told.diagnostics.get("micro_batch") for told in ranks[0][1]] == [4, 4]
    assert not any("micro_batch" in told.diagnostics for told in told_alone)
    for weights, _, _ in ranks:
        assert largest_difference(weights, alone) <= 1e-5


@pytest.mark.parametrize("task", [TaskType.MULTICLASS, TaskType.REGRESSION])
def test_bishop_on_two_processes_is_bishop_on_one(together, tmp_path, task):
    alone, told_alone, _ = train_one(0, task, "bishop", tmp_path)
    torch.manual_seed(0)
    start = BiSHop(spec_of(task), **SMALL).state_dict()
    assert largest_difference(alone, start) > 1e-3, "an epoch moves the weights"
    ranks = results(together, task, "bishop")
    assert len(ranks) == 2
    for weights, told, _ in ranks:
        assert largest_difference(weights, alone) <= 1e-5
        assert exact(told[0]) == pytest.approx(exact(told_alone[0]), rel=1e-4, abs=1e-5)
        assert told[0].val_score == pytest.approx(told_alone[0].val_score, abs=5e-3)


def exact(result: EpochResult) -> dict[str, float]:
    """What agrees up to rounding.

    Not so the shares of non-zero weights, which each rank takes from its own validation rows, and scores that count
    pairs of rows: rounding can turn a pair over.
    """
    uneven = ("nonzero/", "val_score", "best_val_score")
    return {name: value for name, value in result.metrics().items() if not name.startswith(uneven)}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel())


@pytest.mark.slow
def test_bishop_through_ray_train_is_bishop_in_process(tmp_path):
    import ray

    raw = make_table("regression", rows=140)
    split = split_dataset(raw, 0)
    coder = Preprocessor.fit(split.train)
    tables = coder.transform(split.train), coder.transform(split.validation)
    params = {"model": SMALL, "train": {"lr": 1e-3, "batch_size": 32}}
    connect()
    try:
        data = ray.put(StudyData(coder.spec, *tables, coder.to_dict(), coder.target.scale))
        weights = []
        for trainer, workers in (("inprocess", 1), ("ray", 2)):
            folder, resources = str(tmp_path / trainer), Resources(cpus=0.5, workers=workers)
            settings = TrialSettings("bishop", "r2", 1, 0, resources, trainer, folder, data)
            saved = evaluate_seed(settings, 0, params, seed=5, deadline=0.0)
            weights.append(Predictor.load(saved).model.state_dict())
        groups = ray.util.placement_group_table().values()
        assert [len([b for b in group["bundles"].values() if b.get("CPU") == 0.5]) for group in groups] == [2]
    finally:
        ray.shutdown()
    torch.manual_seed(5)
    assert largest_difference(weights[0], BiSHop(coder.spec, **SMALL).state_dict()) > 1e-3
    assert largest_difference(*weights) <= 1e-5


@pytest.mark.slow
def test_ctrl_c_stops_a_worker_group_and_stays_ctrl_c(tmp_path):
    import ray

    split = split_dataset(make_table("regression", rows=140), 0)
    coder = Preprocessor.fit(split.train)
    tables = coder.transform(split.train), coder.transform(split.validation)
    connect()
    handler = signal.getsignal(signal.SIGINT)
    checkpoint = tmp_path / "final" / "0000-seed-5" / "checkpoint"

    def interrupt() -> None:
        while not has_state(checkpoint):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        data = ray.put(StudyData(coder.spec, *tables, coder.to_dict(), coder.target.scale))
        settings = TrialSettings("bishop", "r2", 5000, 0, Resources(cpus=0.5, workers=2), "ray", str(tmp_path), data)
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            evaluate_seed(settings, 0, {"model": SMALL, "train": {"lr": 1e-6}}, seed=5, deadline=0.0)
        assert signal.getsignal(signal.SIGINT) is handler
        ends = time.monotonic() + 30
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
            assert time.monotonic() < ends, "its workers hold their CPUs"
            time.sleep(0.2)
    finally:
        ray.shutdown()


def test_processes_stop_when_the_first_says_so_and_fail_together(together):
    stopped = results(together, TaskType.BINARY, "stop")
    assert [len(told) for _, told, _ in stopped] == [1, 1]
    assert {outcome.last.stop_reason for _, _, outcome in stopped} == {"stopped"}
    failed = [outcome for _, _, outcome in results(together, TaskType.BINARY, "poison")]
    assert len(failed) == 2
    assert all(isinstance(o, str) and "non-finite gradient of 'first.bias'" in o for o in failed)
