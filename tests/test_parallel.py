"""Training spread over real processes (gloo on the loopback) does what one process does."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_fakes import CONFIG, Mlp, Poisoned, spec_of, table

from bishop_ray.data.table import TaskType
from bishop_ray.errors import TrainingFailed
from bishop_ray.training.checkpoint import has_state
from bishop_ray.training.loop import EpochResult, FitResult, fit_network
from bishop_ray.training.ranks import Ranks


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


JOBS = ((3, "multiclass", ""), (2, "regression", ""), (2, "binary", "stop"), (2, "binary", "poison"))
"""Processes, task, what happens."""


def train_one(rank: int, task: TaskType, mode: str, folder: Path) -> tuple:
    """What each process does: weights, what it was told, and the outcome."""
    torch.manual_seed(100 * rank)  # every rank starts elsewhere: rank 0's weights must count
    network = Poisoned(spec_of(task), "gradient") if mode == "poison" else Mlp(spec_of(task), decay=0.1)
    config = replace(CONFIG, max_epochs=2, metric="auc" if task.is_classification else "r2")
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


def test_processes_stop_when_the_first_says_so_and_fail_together(together):
    stopped = results(together, TaskType.BINARY, "stop")
    assert [len(told) for _, told, _ in stopped] == [1, 1]
    assert {outcome.last.stop_reason for _, _, outcome in stopped} == {"stopped"}
    failed = [outcome for _, _, outcome in results(together, TaskType.BINARY, "poison")]
    assert len(failed) == 2
    assert all(isinstance(o, str) and "non-finite gradient of 'first.bias'" in o for o in failed)
