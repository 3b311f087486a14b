"""When memory runs out the same step is done in smaller pieces, and the training goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from training_fakes import CONFIG, Cramped, Mlp, fit, numbers, same_weights, spec_of, table

from bishop_ray.data.table import TaskType
from bishop_ray.errors import TrainingFailed
from bishop_ray.training.device_table import Resident
from bishop_ray.training.micro_batch import Passes, is_out_of_memory

CPU = torch.device("cpu")


def resident(task: TaskType, rows: int = 203) -> Resident:
    return Resident(table(task, rows, 0), torch.int64 if task.is_classification else torch.float32, CPU)


def cramped(task: TaskType, most: int, kind: str = "forward") -> Cramped:
    torch.manual_seed(0)
    network = Cramped(spec_of(task), most, kind)
    network.decay = 0.7
    return network


def gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["forward", "backward", "real"])
@pytest.mark.parametrize("task", [TaskType.MULTICLASS, TaskType.REGRESSION])
def test_pieces_give_the_gradient_and_loss_of_the_whole_batch(task, kind):
    data, batch = resident(task), torch.arange(3, 103, 3)  # 34 rows
    whole, pieces = Passes(cramped(task, 1000), "fp32"), Passes(cramped(task, 6, kind), "fp32")
    loss = whole.gradient(data, batch, 0.25)
    assert whole.micro_batch == 0
    torch.testing.assert_close(pieces.gradient(data, batch, 0.25), loss, rtol=1e-6, atol=1e-7)
    assert pieces.micro_batch == 5
    assert pieces.network.rows == [34, 17, 9, 5, 5, 5, 5, 5, 5, 4]
    expected, found = gradients(whole.network), gradients(pieces.network)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_a_failure_between_pieces_starts_the_batch_over():
    """The first piece's gradient must not count twice."""

    class Later(Mlp):
        def forward(self, x_num, x_cat):
            self.seen.append(len(x_num))
            if len(self.seen) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return nn.functional.linear(x_num, self.unused)

    task = TaskType.BINARY
    data, batch = resident(task), torch.arange(16)
    network = Later(spec_of(task))
    passes = Passes(network, "fp32")
    passes.micro_batch = 8
    passes.gradient(data, batch)
    assert network.seen == [8, 8, 4, 4, 4, 4]
    found = gradients(network)["unused"]
    network.unused.grad = None
    network.loss(nn.functional.linear(data.x_num[:16], network.unused), data.y[:16]).backward()
    torch.testing.assert_close(found, network.unused.grad)


@pytest.mark.parametrize("kind", ["forward", "real"])
def test_validation_is_done_in_smaller_pieces(kind):
    task = TaskType.BINARY
    data, network = resident(task), cramped(task, 60, kind)
    passes = Passes(network, "fp32")
    out = passes.outputs(data, slice(2, 203))
    assert passes.eval_rows == 51
    assert network.rows == [201, 101, 51, 51, 51, 48]
    torch.testing.assert_close(out, cramped(task, 1000).eval()(data.x_num[2:], data.x_cat[2:]))
    assert passes.outputs(data, slice(5, 5)).shape == (0, 2)


def test_training_goes_on_with_the_same_steps_and_says_so(caplog):
    config = replace(CONFIG, max_epochs=3)
    free, _, expected = fit(config=config, network=cramped(TaskType.BINARY, 1000))
    network, result, seen = fit(config=config, network=cramped(TaskType.BINARY, 9))
    assert result.last.stop_reason == "max_epochs"
    assert [r.metrics()["micro_batch"] for r in seen] == [8, 8, 8]
    assert not any("micro_batch" in r.metrics() for r in expected)
    assert [r.train_loss for r in seen] == pytest.approx([r.train_loss for r in expected], rel=1e-4)
    for (name, a), b in zip(network.named_parameters(), free.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    said = [record.message for record in caplog.records if record.name == "bishop_ray.training.micro_batch"]
    assert said[0] == "out of memory; from now on training passes of at most 16 rows"
    assert said[-1] == "out of memory; from now on validation passes of at most 7 rows"


def test_a_resumed_training_keeps_the_smaller_pieces(tmp_path):
    setting = {"config": replace(CONFIG, max_epochs=4)}
    whole, _, seen = fit(**setting, network=cramped(TaskType.BINARY, 9))
    _, _, before = fit(**setting, network=cramped(TaskType.BINARY, 9), stop_at=2, checkpoint_to=tmp_path)
    again = cramped(TaskType.BINARY, 9)
    _, _, after = fit(**setting, network=again, resume_from=tmp_path)
    assert again.rows[0] == 8, "the whole batch was tried again"
    assert numbers(before + after) == numbers(seen)
    assert same_weights(whole, again)


def test_not_enough_memory_for_one_row_fails():
    with pytest.raises(TrainingFailed, match="out of memory with a batch of 1 row"):
        fit(network=cramped(TaskType.BINARY, 0))


def test_other_errors_are_not_taken_for_it():
    class Broken(Mlp):
        def forward(self, x_num, x_cat):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit(network=Broken(spec_of(TaskType.BINARY)))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
