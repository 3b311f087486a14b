"""Training steps replayed from a CUDA graph are the steps that they were captured from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training_fakes import CONFIG, Mlp, fit, numbers, same_weights, spec_of

from bishop_ray.data.table import TaskType

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# 203 rows in batches of 32: six that can be captured, one of 11 that cannot; the plateau lowers the rate on the way.
SETTING = {"config": replace(CONFIG, max_epochs=8, lr=0.05, plateau_patience=0), "noise": 3.0}


def graphed(setting: dict) -> dict:
    return setting | {"config": replace(setting["config"], cuda_graphs=True)}


def test_without_a_gpu_nothing_is_captured(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    plain, _, seen = fit(**SETTING)
    other, _, same = fit(**graphed(SETTING), stop_at=3, checkpoint_to=tmp_path)
    assert numbers(same) == numbers(seen)[:3]
    other, _, rest = fit(**SETTING, resume_from=tmp_path)  # how steps are launched is no part of a checkpoint
    assert numbers(rest) == numbers(seen)[3:]
    assert same_weights(plain, other)


@pytest.mark.gpu
@NEEDS_GPU
def test_replayed_steps_equal_eager_ones(tmp_path):
    """45 replays and 8 eager rests, dropout off, through changes of the learning rate and a resume."""
    plain, _, seen = fit(**SETTING)
    fast, _, same = fit(**graphed(SETTING), checkpoint_to=tmp_path / "whole")
    assert len({r.lr for r in seen}) > 1, "the plateau did nothing"
    assert [r.lr for r in same] == pytest.approx([r.lr for r in seen], rel=1e-6)
    assert [r.train_loss for r in same] == pytest.approx([r.train_loss for r in seen], rel=1e-3)
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    fit(**graphed(SETTING), stop_at=4, checkpoint_to=tmp_path / "part")
    resumed, _, _ = fit(**graphed(SETTING), resume_from=tmp_path / "part")
    for (name, a), b in zip(resumed.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@NEEDS_GPU
def test_dropout_differs_between_replays_and_repeats_with_the_seed():
    setting = graphed(SETTING) | {"hparams": {"dropout": 0.5}}
    first, _, seen = fit(**setting)
    _, _, same = fit(**setting)
    assert [r.train_loss for r in same] == pytest.approx([r.train_loss for r in seen], rel=1e-3)
    other = fit(**graphed(SETTING))[0]
    assert not same_weights(first, other)


@pytest.mark.gpu
@NEEDS_GPU
def test_a_network_that_asks_the_device_for_a_value_trains_eagerly(caplog):
    class Asks(Mlp):
        def forward(self, x_num, x_cat):
            return super().forward(x_num, x_cat) * float(x_num.isfinite().all())

    torch.manual_seed(0)
    _, _, seen = fit(**graphed(SETTING), network=Asks(spec_of(TaskType.BINARY)))
    assert [r.train_loss for r in seen] == pytest.approx([r.train_loss for r in fit(**SETTING)[2]], rel=1e-3)
    said = [record for record in caplog.records if record.name == "bishop_ray.training.cuda_graphs"]
    assert len(said) == 1
