"""bfloat16 forward passes: where they are chosen, what stays float32, and what a checkpoint says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import make_table
from training_fakes import CONFIG, Mlp, fit, same_weights, spec_of, table

from bishop_ray import cli
from bishop_ray.cli.flags import read
from bishop_ray.config import Resources, TrainConfig
from bishop_ray.data import Preprocessor
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.models import create_model
from bishop_ray.search.options import SearchOptions
from bishop_ray.search.plan import plan_studies
from bishop_ray.training import loop
from bishop_ray.training.device_table import Resident
from bishop_ray.training.job import TrialSettings
from bishop_ray.training.precision import bf16_pays, resolve_precision


class Watched(Mlp):
    """Notes the types that its layers and its loss see."""

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.types: dict[str, set[torch.dtype]] = {"hidden": set(), "loss": set()}
        self.first.register_forward_hook(lambda _m, _i, out: self.types["hidden"].add(out.dtype))

    def loss(self, out, y):
        self.types["loss"].add(out.dtype)
        return super().loss(out, y)


@pytest.fixture(scope="module")
def data():
    raw = make_table("binary", rows=600)
    coder = Preprocessor.fit(raw)
    return coder.spec, Resident(coder.transform(raw), torch.int64, torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "hparams", "batch", "pays"),
    [
        ("mlp", {"d_block": 64}, 128, False),
        ("mlp", {"d_block": 128}, 128, False),
        ("mlp", {}, 256, True),
        ("mlp", {}, 1024, True),
        ("bishop", {"d_model": 16, "d_ff": 32}, 64, False),
        ("bishop", {}, 32, True),
        ("ft_transformer", {}, 256, True),
        ("tabnet", {}, 128, False),
    ],
)
def test_it_pays_for_large_matrices(data, model, hparams, batch, pays):
    """What was measured as faster and slower on a CPU with AVX512-bf16."""
    spec, rows = data
    network = create_model(model, spec, hparams)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert bf16_pays(network, rows, batch) is pays
    assert torch.equal(torch.get_rng_state(), state), "asking must not move the training's random numbers"
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("fast", [True, False])
def test_auto_asks_the_processor_first(data, monkeypatch, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast, "amx_tile": False})
    spec, rows = data
    large, small = create_model("mlp", spec, {}), create_model("mlp", spec, {"d_block": 16})
    assert resolve_precision("auto", large, rows, 1024) == ("bf16" if fast else "fp32")
    assert resolve_precision("auto", small, rows, 1024) == "fp32"
    for asked in ("bf16", "fp32"):
        assert resolve_precision(asked, small, rows, 32) == asked


@pytest.mark.parametrize("task", [TaskType.MULTICLASS, TaskType.REGRESSION])
def test_forward_in_bf16_everything_else_in_float32(task):
    metric = "accuracy" if task.is_classification else "r2"
    torch.manual_seed(0)
    network = Watched(spec_of(task))
    config = replace(CONFIG, precision="bf16", max_epochs=30, metric=metric)
    _, result, _ = fit(task, config, rows=400, network=network)
    assert network.types == {"hidden": {torch.bfloat16}, "loss": {torch.float32}}
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert result.last.best_val_score > 0.85
    rows = table(task, 9, 5)
    with torch.no_grad():
        out = network(torch.from_numpy(rows.x_num), torch.from_numpy(rows.x_cat))
    plain = (out.softmax(-1) if task.is_classification else out).numpy()
    assert out.dtype == torch.float32
    np.testing.assert_array_equal(network.predict(rows.x_num, rows.x_cat), plain)


def test_a_training_goes_on_in_the_precision_it_began_with(tmp_path, monkeypatch):
    fit(stop_at=2, checkpoint_to=tmp_path)  # auto: a small network trains in float32
    with pytest.raises(UserError, match=r"belongs to another training.*expected.*'precision': 'bf16'"):
        fit(config=replace(CONFIG, precision="bf16"), resume_from=tmp_path)
    undisturbed = fit()[0]
    monkeypatch.setattr(loop, "resolve_precision", lambda *_: "bf16")  # as a processor of another kind would say
    resumed, _, after = fit(resume_from=tmp_path)
    assert [r.epoch for r in after] == [3, 4]
    assert same_weights(resumed, undisturbed)


def test_bf16_resumes_as_if_nothing_had_been(tmp_path):
    config = replace(CONFIG, precision="bf16")
    whole, _, _ = fit(config=config, hparams={"dropout": 0.3})
    fit(config=config, hparams={"dropout": 0.3}, stop_at=2, checkpoint_to=tmp_path)
    assert same_weights(whole, fit(config=config, hparams={"dropout": 0.3}, resume_from=tmp_path)[0])
    assert not same_weights(whole, fit(hparams={"dropout": 0.3})[0]), "bf16 changed nothing"


def test_the_studys_precision_reaches_the_training():
    settings = TrialSettings("mlp", "auc", 3, 0, Resources(), "auto", "", None, "bf16")
    params = {"model": {}, "train": {"lr": 1e-3}}
    assert settings.trial(params).train.precision == "bf16"
    assert settings.all_params(params)["train.precision"] == "bf16"
    assert TrainConfig().precision == "auto"
    with pytest.raises(ValueError, match="precision must be one of auto, fp32, bf16; found 'fp16'"):
        TrainConfig(precision="fp16")


def test_the_flag_reaches_the_study():
    flags = ["--dataset", "iris", "--models", "mlp", "--precision", "bf16"]
    for given, expected in ((flags, "bf16"), (flags[:4], "auto")):
        args = cli.tune_parser().parse_args(given)
        [study] = plan_studies(read(SearchOptions, args), [embedded_ref("iris")], None)
        assert study.precision == expected
    with pytest.raises(UserError, match="--precision: invalid choice: 'half'"):
        cli.tune_parser().parse_args(["--precision", "half"])
