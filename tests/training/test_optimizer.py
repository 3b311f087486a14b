"""A parameter's own learning rate: in the optimizer, under the plateau, and after a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from training_fakes import CONFIG, Mlp, fit, numbers, same_weights, spec_of

from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.training.checkpoint import FILE
from bishop_ray.training.distributed import Ranks
from bishop_ray.training.optimizer import Stepper, build_optimizer, learning_rate

OWN = 0.3


class TwoRates(Mlp):
    """Its first parameter, the embedding, has a rate of its own."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec, dropout=0.3)
        self.embed.weight.learning_rate = OWN
        self.embed.weight.no_weight_decay = True


def two_rates() -> TwoRates:
    torch.manual_seed(0)
    return TwoRates(spec_of(TaskType.BINARY))


def rates(folder: Path) -> list[float]:
    with safe_open(folder / FILE, "pt") as file:
        return json.loads(file.metadata()["state"])["lr"]


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_every_parameter_is_in_one_group_of_its_own_rate_and_decay(kind):
    network = two_rates()
    optimizer = build_optimizer(network, replace(CONFIG, lr=0.01, weight_decay=0.1, optimizer=kind))
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(network.parameters())) == len(found)
    assert found[id(network.embed.weight)] == (OWN, 0.0)
    assert found[id(network.first.weight)] == (0.01, 0.1)
    assert found[id(network.first.bias)] == (0.01, 0.0)
    assert learning_rate(optimizer) == 0.01, "the network's rate is the one that is shown"


def test_a_rate_may_be_below_the_networks_own_and_decay():
    network = two_rates()
    network.embed.weight.learning_rate, network.embed.weight.no_weight_decay = 0.001, False
    optimizer = build_optimizer(network, replace(CONFIG, lr=0.01, weight_decay=0.1))
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found[id(network.embed.weight)] == (0.001, 0.1)
    assert learning_rate(optimizer) == 0.01


def test_a_step_moves_each_parameter_by_its_rate():
    """Adam's first step is its rate times the gradient's sign."""
    network = two_rates().eval()
    stepper = Stepper(network, replace(CONFIG, lr=0.01, clip_norm=0.0), Ranks(torch.device("cpu")))
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, -2.0)
    stepper.step()
    for name, parameter in network.named_parameters():
        rate = OWN if name == "embed.weight" else 0.01
        torch.testing.assert_close(parameter.detach() - before[name], torch.full_like(parameter, rate))


def test_the_plateau_lowers_all_rates_by_its_factor(tmp_path):
    config = replace(CONFIG, max_epochs=30, lr=0.05, plateau_patience=1, plateau_factor=0.5)
    _, _, seen = fit(config=config, noise=3.0, network=two_rates(), checkpoint_to=tmp_path)
    after = rates(tmp_path)
    assert seen[0].lr == 0.05
    assert after[0] < 0.05
    assert after[-1] / after[0] == pytest.approx(OWN / 0.05)
    assert len(set(after)) == 2


def test_a_resume_keeps_both_rates(tmp_path):
    config = replace(CONFIG, max_epochs=12, lr=0.05, plateau_patience=1, plateau_factor=0.5, metric="auc")
    setting = {"config": config, "noise": 3.0}
    whole, _, seen = fit(**setting, network=two_rates())
    _, _, before = fit(**setting, network=two_rates(), stop_at=8, checkpoint_to=tmp_path)
    lowered = rates(tmp_path)
    assert lowered[0] < 0.05, "the plateau did nothing before the interruption"
    assert lowered[-1] / lowered[0] == pytest.approx(OWN / 0.05)
    torch.manual_seed(12345)
    resumed, _, after = fit(**setting, network=TwoRates(spec_of(TaskType.BINARY)), resume_from=tmp_path)
    assert numbers(before + after) == numbers(seen)
    assert same_weights(whole, resumed)


def test_parameters_get_memory_of_their_own_after_training(tmp_path):
    """Views of one flat tensor cannot be saved one by one, and keep all of it alive."""
    network, _, _ = fit(network=two_rates(), checkpoint_to=tmp_path)
    starts = [p.untyped_storage().data_ptr() for p in network.parameters()]
    assert len(set(starts)) == len(starts)
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in network.parameters())
    with safe_open(tmp_path / FILE, "pt") as file:
        for name, parameter in network.named_parameters():
            assert file.get_tensor(f"exp_avg/{name}").shape == parameter.shape
            assert float(file.get_tensor(f"step/{name}")) == 28  # 7 batches, 4 epochs


@pytest.mark.parametrize("wide", [0, 10**9])
def test_finite_gradients_that_overflow_together_name_the_largest(wide, monkeypatch):
    monkeypatch.setattr("bishop_ray.models.base.WIDE", wide)
    network = two_rates()
    stepper = Stepper(network, CONFIG, Ranks(torch.device("cpu")))
    before = [p.detach().clone() for p in network.parameters()]
    for name, parameter in network.named_parameters():
        parameter.grad = torch.full_like(parameter, 1e19 if name == "last.weight" else 5e17)
    stepper.step()
    assert stepper.failed()
    assert stepper.bad_gradient() == "last.weight"
    assert all(torch.equal(a, p) for a, p in zip(before, network.parameters(), strict=True))
