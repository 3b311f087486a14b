"""The training loop: it learns, stops, restores, resumes to the bit, fails with a name, and splits over processes."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bishop_ray.config import TrainConfig
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models.base import Network
from bishop_ray.training import checkpoint as checkpoint_module
from bishop_ray.training.checkpoint import FILE, Saver, has_state
from bishop_ray.training.loop import EpochResult, FitResult, fit_network
from bishop_ray.training.metrics import evaluate
from bishop_ray.training.ranks import Ranks
from bishop_ray.training.steps import build_optimizer

TASKS = list(TaskType)
CONFIG = TrainConfig(max_epochs=4, batch_size=32, lr=1e-2, metric="accuracy", seed=3)


class Mlp(Network):
    """Two numbers and one category; a penalty, a buffer filled by `observe`, a switchable poison."""

    def __init__(self, spec: TableSpec, dropout: float = 0.0, width: int = 16, decay: float = 0.0) -> None:
        super().__init__()
        self.spec, self.decay = spec, decay
        self.embed = nn.Embedding(spec.cat_cardinalities[0], 3)
        self.register_buffer("center", torch.zeros(spec.n_num))
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.scale.no_weight_decay = True
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.first = nn.Linear(spec.n_num + 3, width)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, spec.n_out)
        self.seen: list[int] = []

    def observe(self, train: Table) -> None:
        self.center.copy_(torch.from_numpy(train.x_num.mean(axis=0)))

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x_num))
        joined = torch.cat([(x_num - self.center) * self.scale, self.embed(x_cat[:, 0])], dim=1)
        return self.last(self.drop(self.first(joined).relu()))

    def penalty(self) -> Tensor | None:
        return self.decay * self.last.weight.square().sum() if self.decay else None

    def diagnostics(self) -> dict[str, float]:
        return {"scale": float(self.scale.detach())}


def spec_of(task: TaskType) -> TableSpec:
    return TableSpec(task, 2, (4,), {TaskType.REGRESSION: 1, TaskType.BINARY: 2}.get(task, 3))


def table(task: TaskType, rows: int, seed: int, noise: float = 0.1) -> Table:
    rng = np.random.default_rng(seed)
    x_num = rng.normal(1.0, 1.0, (rows, 2)).astype(np.float32)
    x_cat = rng.integers(0, 4, (rows, 1))
    signal = x_num[:, 0] * x_num[:, 1] - 1 + 0.5 * x_cat[:, 0] - 0.75 + rng.normal(0, noise, rows)
    if task is TaskType.REGRESSION:
        return Table(x_num, x_cat, (signal / 1.5).astype(np.float32))
    return Table(x_num, x_cat, np.digitize(signal, [0.0, 1.0][: spec_of(task).n_out - 1]))


def fit(task: TaskType = TaskType.BINARY, config: TrainConfig = CONFIG, rows: int = 203, stop_at: int = 0, **options):
    """A fresh network trained on fresh tables; returns it with the result and all reported epochs."""
    hparams = options.pop("hparams", {})
    noise = options.pop("noise", 0.1)
    torch.manual_seed(0)
    network = options.pop("network", None) or Mlp(spec_of(task), **hparams)
    seen: list[EpochResult] = []

    def on_epoch(result: EpochResult) -> bool:
        seen.append(result)
        return result.epoch == stop_at

    train, val = table(task, rows, 0, noise), table(task, 101, 1, noise)
    result = fit_network(network, train, val, config, on_epoch, **options)
    return network, result, seen


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("task", TASKS)
def test_learns(task):
    metric = "accuracy" if task.is_classification else "r2"
    network, result, seen = fit(task, replace(CONFIG, max_epochs=40, metric=metric), rows=400)
    assert seen[-1].train_loss < seen[0].train_loss / 2
    assert result.last.best_val_score > 0.85
    assert [r.epoch for r in seen] == list(range(1, len(seen) + 1))
    assert network.center.tolist() == pytest.approx(table(task, 400, 0).x_num.mean(axis=0).tolist())


def test_reported_numbers_are_those_of_the_network():
    task, val = TaskType.REGRESSION, table(TaskType.REGRESSION, 101, 1)
    config = replace(CONFIG, metric="rmse")
    network, result, seen = fit(task, config, hparams={"decay": 0.5}, target_scale=3.0)
    prediction = network.predict(val.x_num, val.x_cat)
    assert result.last.best_val_score == evaluate("rmse", task, val.y, prediction, scale=3.0)
    assert result.best_val_loss == pytest.approx(np.mean((val.y - prediction[:, 0]) ** 2), rel=1e-6)
    last = seen[-1]
    assert last.metrics() == {
        "epoch": 4,
        "train_loss": last.train_loss,
        "val_loss": last.val_loss,
        "val_score": last.val_score,
        "best_val_score": max(r.val_score for r in seen),
        "best_epoch": last.best_epoch,
        "lr": 1e-2,
        "epoch_seconds": last.seconds,
        "scale": last.diagnostics["scale"],
    }
    assert last.stop_reason == result.last.stop_reason == "max_epochs"
    assert result.seconds == pytest.approx(sum(r.seconds for r in seen))


def test_train_loss_counts_every_row_once_and_the_penalty():
    """Without a learning rate worth the name the epoch's loss is the loss of the whole table."""
    config = replace(CONFIG, max_epochs=1, lr=1e-30)
    network, _, seen = fit(config=config, hparams={"decay": 0.7})
    train = table(TaskType.BINARY, 203, 0)
    p = network.predict(train.x_num, train.x_cat)
    expected = -np.log(p[np.arange(203), train.y]).mean() + 0.7 * float(network.last.weight.detach().square().sum())
    assert seen[0].train_loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("rows", "sizes"), [(70, [32, 32, 6]), (64, [32, 32]), (65, [32, 33]), (1, [1]), (31, [31])])
def test_batches_keep_the_rest_but_no_single_row(rows, sizes):
    network, _, _ = fit(config=replace(CONFIG, max_epochs=1), rows=rows)
    assert network.seen == sizes


def test_patience_counts_epochs_without_lower_validation_loss():
    config = replace(CONFIG, max_epochs=200, patience=5, lr=0.05)
    _, result, seen = fit(config=config, noise=3.0)
    assert result.last.stop_reason == seen[-1].stop_reason == "patience"
    lowest = int(np.argmin([r.val_loss for r in seen])) + 1
    assert result.last.epoch == lowest + 5 < 200
    assert all(r.stop_reason == "" for r in seen[:-1])


def test_plateau_lowers_the_learning_rate():
    config = replace(CONFIG, max_epochs=30, lr=0.05, plateau_patience=2, plateau_factor=0.5)
    _, _, seen = fit(config=config, noise=3.0)
    rates = [r.lr for r in seen]
    assert rates[0] == 0.05
    assert rates == sorted(rates, reverse=True)
    assert 0.025 in rates
    first = rates.index(0.025)
    lowest = int(np.argmin([r.val_loss for r in seen[:first]]))
    assert first - lowest >= 4  # patience 2: the third epoch without improvement lowers the rate of the next


def test_small_rates_are_left_alone_by_eps():
    config = replace(CONFIG, max_epochs=30, lr=1e-3, plateau_patience=0, plateau_eps=1.0)
    _, _, seen = fit(config=config, noise=3.0)
    assert {r.lr for r in seen} == {1e-3}


def test_best_weights_are_restored():
    config = replace(CONFIG, max_epochs=25, lr=0.05)
    kept: dict[int, dict[str, Tensor]] = {}
    torch.manual_seed(0)
    network = Mlp(spec_of(TaskType.BINARY))
    seen = []

    def on_epoch(result: EpochResult) -> bool:
        seen.append(result)
        kept[result.epoch] = {k: v.clone() for k, v in network.state_dict().items()}
        return False

    train, val = table(TaskType.BINARY, 150, 0, 3.0), table(TaskType.BINARY, 60, 1, 3.0)
    result = fit_network(network, train, val, config, on_epoch)
    scores = [(r.val_score, -r.val_loss) for r in seen]
    best = scores.index(max(scores)) + 1
    assert len({r.val_score for r in seen}) < len(seen), "no two epochs tie: the tie rule is not exercised"
    assert result.last.best_epoch == best < result.last.epoch
    assert all(torch.equal(v, kept[best][k]) for k, v in network.state_dict().items())
    assert not all(torch.equal(v, kept[result.last.epoch][k]) for k, v in network.state_dict().items())
    assert not network.training


def test_asked_to_stop():
    _, result, seen = fit(stop_at=2)
    assert len(seen) == 2
    assert result.last.stop_reason == "stopped"
    assert result.last.epoch == 2


def test_same_seed_same_weights_other_seed_other_weights():
    dropout = {"hparams": {"dropout": 0.3}}
    first, second = fit(**dropout)[0], fit(**dropout)[0]
    other = fit(config=replace(CONFIG, seed=4), **dropout)[0]
    assert same_weights(first, second)
    assert not same_weights(first, other)


def numbers(seen: list[EpochResult]) -> list[EpochResult]:
    return [replace(r, seconds=0.0) for r in seen]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_resumed_training_equals_the_undisturbed_one(tmp_path, optimizer):
    config = replace(
        CONFIG, max_epochs=9, lr=0.05, optimizer=optimizer, weight_decay=0.01, plateau_patience=1, metric="auc"
    )
    setting = {"config": config, "hparams": {"dropout": 0.3}, "noise": 2.0}
    whole, result, seen = fit(**setting)
    _, _, before = fit(**setting, stop_at=5, checkpoint_to=tmp_path)
    torch.manual_seed(12345)
    resumed, again, after = fit(**setting, resume_from=tmp_path, checkpoint_to=tmp_path)
    assert numbers(before + after) == numbers(seen)
    assert len({r.lr for r in seen}) > 1, "the plateau did nothing: its state is not exercised"
    assert same_weights(whole, resumed)
    assert again.best_val_loss == result.best_val_loss


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_loop as t
t.Saver.due = lambda self: True
t.torch.manual_seed(0)
task = t.TaskType.BINARY
network = t.Mlp(t.spec_of(task), dropout=0.3)
die = lambda result: os.kill(os.getpid(), signal.SIGKILL) if result.epoch == 3 else False
t.fit_network(network, t.table(task, 203, 0), t.table(task, 101, 1), t.CONFIG, die, checkpoint_to=Path(sys.argv[2]))
"""


def test_killed_training_goes_on_from_its_checkpoint(tmp_path):
    """A process that dies by SIGKILL between two epochs."""
    run = subprocess.run([sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)], check=False)
    assert run.returncode == -9
    whole, _, seen = fit(hparams={"dropout": 0.3})
    resumed, _, after = fit(hparams={"dropout": 0.3}, resume_from=tmp_path)
    assert numbers(after) == numbers(seen[2:])
    assert same_weights(whole, resumed)


def test_finished_training_reports_its_last_epoch_again(tmp_path):
    network, result, seen = fit(checkpoint_to=tmp_path)
    again, same, reported = fit(resume_from=tmp_path)
    assert reported == [seen[-1]]
    assert same == result
    assert same_weights(network, again)
    _, longer, more = fit(config=replace(CONFIG, max_epochs=6), resume_from=tmp_path)
    assert [r.epoch for r in more] == [5, 6]
    assert longer.last.stop_reason == "max_epochs"


def test_nothing_to_resume_from_is_a_fresh_start(tmp_path):
    network, _, seen = fit(resume_from=tmp_path / "none")
    assert seen[0].epoch == 1
    assert same_weights(network, fit()[0])


def test_foreign_checkpoint_is_refused(tmp_path):
    fit(checkpoint_to=tmp_path, identity={"data": "abc"})
    fit(resume_from=tmp_path, identity={"data": "abc"})
    for options, message in [
        ({"identity": {"data": "xyz"}}, "data is 'abc', expected 'xyz'"),
        ({"identity": {"data": "abc"}, "config": replace(CONFIG, lr=0.5)}, "config is .*, expected .*0.5"),
        ({"identity": {"data": "abc"}, "rows": 99}, r"rows is \[203, 101\], expected \[99, 101\]"),
        ({"identity": {"data": "abc"}, "hparams": {"width": 8}}, "does not fit the network: .*size mismatch"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            fit(resume_from=tmp_path, **options)
        assert "\n" not in str(caught.value)


def test_checkpoint_survives_a_crash_while_writing(tmp_path, monkeypatch):
    fit(stop_at=2, checkpoint_to=tmp_path)
    good = (tmp_path / FILE).read_bytes()
    (tmp_path / f"{FILE}.new").write_bytes(good[: len(good) // 2])  # what a kill while writing leaves
    assert fit(resume_from=tmp_path)[2][0].epoch == 3

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        fit(resume_from=tmp_path, checkpoint_to=tmp_path)
    assert (tmp_path / FILE).read_bytes() == good
    monkeypatch.undo()
    fit(resume_from=tmp_path, checkpoint_to=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE]


def test_truncated_or_strange_checkpoint_is_one_clear_line(tmp_path):
    fit(stop_at=1, checkpoint_to=tmp_path)
    good = (tmp_path / FILE).read_bytes()
    for damaged in (good[: len(good) // 2], good[:6], b"", b"hello world, this is no checkpoint"):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{FILE} is damaged"):
            fit(resume_from=tmp_path)


def test_checkpoint_is_safetensors_and_json_only(tmp_path):
    fit(checkpoint_to=tmp_path)
    data = (tmp_path / FILE).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    state = json.loads(header.pop("__metadata__")["state"])
    assert state["progress"]["last"]["epoch"] == 4
    assert {key.split("/")[0] for key in header} == {"weights", "best", "exp_avg", "exp_avg_sq", "step"}
    assert b"pickle" not in data


def test_saving_keeps_its_share_of_the_time(tmp_path, monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(checkpoint_module.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(checkpoint_module, "save_state", lambda *_: clock.update(now=clock["now"] + 1.0))
    saver, saves = Saver(tmp_path), []
    for epoch in range(1, 401):
        clock["now"] += 0.5
        if saver.due():
            saver.save()
            saves.append(epoch)
    assert saves[0] == 1
    assert np.diff(saves).min() == 40
    assert len(saves) / clock["now"] < 0.05


def test_first_and_last_epoch_are_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "SHARE", 1e9)
    states = []

    def on_epoch(_: EpochResult) -> bool:
        states.append(has_state(tmp_path))
        return False

    train, val = table(TaskType.BINARY, 64, 0), table(TaskType.BINARY, 64, 1)
    fit_network(Mlp(spec_of(TaskType.BINARY)), train, val, CONFIG, on_epoch, checkpoint_to=tmp_path)
    assert states == [False, True, True, True]
    assert checkpoint_module._read(tmp_path / FILE)[0]["progress"]["last"]["epoch"] == 4


class PoisonedGradient(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


class Poisoned(Mlp):
    """Goes wrong at its fifth training batch, in the way `kind` says."""

    def __init__(self, spec: TableSpec, kind: str) -> None:
        super().__init__(spec)
        self.kind = kind
        self.middle = nn.Linear(16, 16)

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x_num))
        wrong = len(self.seen) >= 5
        joined = torch.cat([x_num, self.embed(x_cat[:, 0])], dim=1)
        hidden = self.first(joined).relu()
        if wrong and self.kind == "weight":
            self.middle.bias.data[3] = math.inf
        if wrong and self.kind == "activation":
            hidden = hidden * 1e38
        if wrong and self.kind == "gradient":
            hidden = PoisonedGradient.apply(hidden)
        return self.last(self.middle(hidden * 10))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("weight", "epoch 2: non-finite weight 'middle.bias'"),
        ("activation", "epoch 2: non-finite activation of layer 'middle'"),
        ("gradient", "epoch 2: non-finite gradient of 'first.bias'"),
    ],
)
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_numbers_that_stop_being_finite_fail_with_epoch_and_layer(kind, message, clip):
    torch.manual_seed(0)
    network = Poisoned(spec_of(TaskType.BINARY), kind)
    with pytest.raises(TrainingFailed, match=message):
        fit(network=network, config=replace(CONFIG, clip_norm=clip), rows=96)
    finite = [name for name, p in network.named_parameters() if not p.isfinite().all()]
    assert finite == (["middle.bias"] if kind == "weight" else [])


def test_validation_that_overflows_fails_too():
    class Overflows(Mlp):
        def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
            return super().forward(x_num, x_cat) * (1.0 if self.training else math.inf)

    with pytest.raises(TrainingFailed, match="epoch 1: non-finite activation of layer 'Overflows' in validation"):
        fit(network=Overflows(spec_of(TaskType.BINARY)))


def test_gradient_clipping_and_weight_decay_groups():
    network = Mlp(spec_of(TaskType.BINARY))
    groups = build_optimizer(network, replace(CONFIG, weight_decay=0.5, optimizer="adamw")).param_groups
    names = {id(p): name for name, p in network.named_parameters()}
    by_decay = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert by_decay[0.5] == {"embed.weight", "unused", "first.weight", "last.weight"}
    assert by_decay[0.0] == {"scale", "first.bias", "last.bias"}
    assert {group["betas"] for group in groups} == {(0.9, 0.999)}


def test_one_step_equals_plain_pytorch():
    """The fused, guarded step against the textbook one."""
    task, config = TaskType.MULTICLASS, replace(CONFIG, max_epochs=1, batch_size=500, weight_decay=0.1)
    torch.manual_seed(0)
    plain = Mlp(spec_of(task), decay=5.0)
    train = table(task, 203, 0)
    plain.observe(train)
    decayed = [p for n, p in plain.named_parameters() if n in ("embed.weight", "unused", "first.weight", "last.weight")]
    free = [p for n, p in plain.named_parameters() if n in ("scale", "first.bias", "last.bias")]
    optimizer = torch.optim.Adam(
        [{"params": decayed, "weight_decay": 0.1}, {"params": free}], lr=1e-2, foreach=False, fused=False
    )
    out = plain(torch.from_numpy(train.x_num), torch.from_numpy(train.x_cat))
    (nn.functional.cross_entropy(out, torch.from_numpy(train.y)) + plain.penalty()).backward()
    plain.unused.grad = torch.zeros(2, 2)
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 1.0, "nothing to clip"
    optimizer.step()
    network, _, _ = fit(task, config, hparams={"decay": 5.0})
    for (name, a), b in zip(network.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_refusals():
    with pytest.raises(UserError, match="metric 'r2' does not fit a binary task"):
        fit(config=replace(CONFIG, metric="r2"))
    with pytest.raises(ValueError, match="rows to train on"):
        fit(rows=0)


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


def test_needs_neither_ray_nor_mlflow():
    code = (
        "import sys; import bishop_ray.training.loop, bishop_ray.models;"
        "print([m for m in ('ray', 'mlflow', 'optuna', 'openml') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
