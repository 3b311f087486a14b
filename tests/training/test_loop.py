"""The training loop: it learns, stops, restores the best weights, and fails with a name."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training_fakes import CONFIG, Mlp, Poisoned, fit, same_weights, spec_of, table

from bishop_ray.data.table import TaskType
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.metrics import evaluate
from bishop_ray.training.loop import EpochResult, fit_network
from bishop_ray.training.optimizer import build_optimizer
from bishop_ray.training.results import Patience


@pytest.mark.parametrize("task", list(TaskType))
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
    assert result.last.best_epoch == best < result.last.epoch
    assert all(torch.equal(v, kept[best][k]) for k, v in network.state_dict().items())
    assert not all(torch.equal(v, kept[result.last.epoch][k]) for k, v in network.state_dict().items())
    assert not network.training


def test_best_epoch_is_the_best_score_and_among_equals_the_lower_loss():
    progress = Patience()
    for epoch, (loss, score) in enumerate([(0.5, 0.8), (0.4, 0.7), (0.6, 0.9), (0.3, 0.9), (0.3, 0.9)], 1):
        progress.note(epoch, loss, score)
    assert (progress.best_epoch, progress.best_score, progress.best_loss) == (4, 0.9, 0.3)
    assert (progress.low_epoch, progress.low_loss) == (4, 0.3)


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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("weight", "epoch 2: non-finite weight 'middle.bias'"),
        ("activation", "epoch 2: non-finite activation of layer 'middle'"),
        ("gradient", "epoch 2: non-finite gradient of 'first.bias'"),
    ],
)
@pytest.mark.parametrize(("clip", "wide"), [(1.0, 0), (0.0, 0), (1.0, 10**9)])
def test_numbers_that_stop_being_finite_fail_with_epoch_and_layer(kind, message, clip, wide, monkeypatch):
    monkeypatch.setattr("bishop_ray.models.base.WIDE", wide)
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


def test_needs_neither_ray_nor_mlflow():
    code = (
        "import sys; import bishop_ray.training.loop, bishop_ray.models.bishop.model;"
        "print([m for m in ('ray', 'mlflow', 'optuna', 'openml') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
