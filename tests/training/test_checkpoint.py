"""Checkpoints: a resumed training equals the undisturbed one; crashes, damage and strangers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_fakes import CONFIG, Mlp, fit, numbers, same_weights, spec_of, table

from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.training import checkpoint as checkpoint_module
from bishop_ray.training.checkpoint import FILE, Saver, has_state
from bishop_ray.training.loop import EpochResult, fit_network


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
import training_fakes as t
from bishop_ray.training.checkpoint import Saver
Saver.due = lambda self: True
t.torch.manual_seed(0)
task = t.TaskType.BINARY
network = t.Mlp(t.spec_of(task), dropout=0.3)
die = lambda result: os.kill(os.getpid(), signal.SIGKILL) if result.epoch == 3 else False
t.fit_network(network, t.table(task, 203, 0), t.table(task, 101, 1), t.CONFIG, die, checkpoint_to=Path(sys.argv[2]))
"""


def test_killed_training_goes_on_from_its_checkpoint(tmp_path):
    """A process that dies by SIGKILL between two epochs."""
    run = subprocess.run([sys.executable, "-c", KILLED, str(Path(__file__).parents[1]), str(tmp_path)], check=False)
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
    left = tmp_path / f"{FILE}.node-7.new"  # by a kill while writing
    left.write_bytes(good[: len(good) // 2])
    os.utime(left, (0, 0))
    assert fit(resume_from=tmp_path)[2][0].epoch == 3

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken_disk(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    whole = fit(resume_from=tmp_path)
    monkeypatch.setattr(checkpoint_module, "save_file", full_disk)
    without = fit(resume_from=tmp_path, checkpoint_to=tmp_path)
    assert numbers(without[2]) == numbers(whole[2]), "training goes on without a checkpoint"
    assert (tmp_path / FILE).read_bytes() == good
    monkeypatch.setattr(checkpoint_module, "save_file", broken_disk)
    with pytest.raises(OSError, match="Input/output"):
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


def test_loaded_state_does_not_depend_on_the_file(tmp_path):
    """Tensors that stay mapped to the file change, or kill the process, when a storage writes it in place."""
    config = replace(CONFIG, max_epochs=6)
    whole, _, _ = fit(config=config)
    fit(config=config, stop_at=2, checkpoint_to=tmp_path)
    path = tmp_path / FILE

    class Eraser(Mlp):
        def diagnostics(self) -> dict[str, float]:
            path.write_bytes(bytes(path.stat().st_size))
            return super().diagnostics()

    network = Eraser(spec_of(TaskType.BINARY))
    Eraser.__name__ = "Mlp"
    fit(config=config, network=network, resume_from=tmp_path)
    assert same_weights(whole, network)


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
