"""What defines each network that comes from a kept package, beyond the contract of all models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins
from torch import nn

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import UserError
from bishop_ray.models.embeddings import OneHot
from bishop_ray.models.ft_transformer import FTTransformer
from bishop_ray.models.mlp import MLP
from bishop_ray.models.resnet import ResNet
from bishop_ray.models.tab_transformer import TabTransformer
from bishop_ray.models.tabm import TabM
from bishop_ray.models.tabnet import MAX_INPUTS, TabNet

SPEC = TableSpec(TaskType.MULTICLASS, 2, (3, 4), 3)
REGRESSION = TableSpec(TaskType.REGRESSION, 2, (3, 4), 1)


def rows(spec: TableSpec, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_num = torch.randn(n, spec.n_num, generator=generator)
    codes = [torch.randint(0, size, (n,), generator=generator) for size in spec.cat_cardinalities]
    x_cat = torch.stack(codes, dim=1) if codes else torch.zeros(n, 0, dtype=torch.int64)
    if spec.task.is_classification:
        return x_num, x_cat, torch.randint(0, spec.n_out, (n,), generator=generator)
    return x_num, x_cat, torch.randn(n, generator=generator)


def test_one_hot_has_no_column_for_unknown_levels() -> None:
    inputs = OneHot(1, (3, 1, 4))
    x_num = torch.tensor([[0.5], [1.5]])
    found = inputs(x_num, torch.tensor([[0, 0, 3], [2, 0, 1]]))
    assert inputs.width == found.shape[1] == 6
    assert found.tolist() == [[0.5, 0, 0, 0, 0, 1], [1.5, 0, 1, 1, 0, 0]]


def test_one_hot_of_numbers_alone_is_the_numbers() -> None:
    x_num = torch.randn(3, 2)
    assert torch.equal(OneHot(2, ())(x_num, torch.zeros(3, 0, dtype=torch.int64)), x_num)


@pytest.mark.parametrize("code", [-1, 3])
def test_one_hot_refuses_a_code_of_another_column(code: int) -> None:
    with pytest.raises(IndexError, match=rf"column 1: code must be in \[0, 3\); found {code}"):
        OneHot(0, (5, 3))(torch.zeros(1, 0), torch.tensor([[1, code]]))


@pytest.mark.parametrize(
    ("build", "hparams", "message"),
    [
        (MLP, {"n_blocks": 0}, "n_blocks must be a whole number >= 1; found 0"),
        (MLP, {"dropout": 1.0}, "dropout must lie in"),
        (ResNet, {"d_hidden_factor": 0.0}, "d_hidden_factor must be >="),
        (FTTransformer, {"d_token": 100}, "d_token must be a multiple of n_heads"),
        (TabTransformer, {"d_model": 20}, "d_model must be a multiple of n_heads"),
        (TabNet, {"gamma": 0.5}, "gamma must be >= 1; found 0.5"),
        (TabNet, {"mask_type": "softmax"}, "mask_type must be one of 'sparsemax', 'entmax'"),
        (TabNet, {"n_shared": 0, "n_independent": 0}, "n_independent \\+ n_shared must be >= 1"),
        (TabM, {"n_bins": 1}, "n_bins must be a whole number >= 2; found 1"),
    ],
)
def test_impossible_arguments_are_named(build: type, hparams: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build.check(**hparams)


def test_resnet_has_the_width_it_was_asked_for() -> None:
    network = ResNet(SPEC, n_blocks=2, d_block=10, d_hidden_factor=1.5)
    assert [layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear)] == [
        10,
        15,
        10,
        15,
        10,
        3,
    ]


@pytest.mark.parametrize("build", [FTTransformer, TabTransformer])
def test_a_level_never_trained_on_starts_without_meaning(build: type) -> None:
    """Rows of code 0 are zero, those of known levels are not; no embedding decays."""
    network = build(SPEC)
    if build is FTTransformer:
        tables = [table.weight for table in network.body.cat_embeddings.embeddings]
    else:
        tables = list(network.categories.weight.split(SPEC.cat_cardinalities))
    assert all(not table[0].any() and table[1:].all(dim=1).all() for table in tables)
    exempt = {name for name, parameter in network.named_parameters() if getattr(parameter, "no_weight_decay", False)}
    assert exempt
    assert all("embed" in name or "categories" in name for name in exempt)


@pytest.mark.parametrize("mask_type", ["sparsemax", "entmax"])
def test_tabnet_adds_the_entropy_of_its_masks(mask_type: str) -> None:
    network = TabNet(SPEC, n_steps=4, lambda_sparse=0.5, mask_type=mask_type)
    masks: list[torch.Tensor] = []
    for step in network.body.encoder.att_transformers:
        step.register_forward_hook(lambda _module, _inputs, mask: masks.append(mask.detach()))
    x_num, x_cat, _ = rows(SPEC, 40)
    network(x_num, x_cat)
    entropies = [-sum(p * np.log(p) for p in row.tolist() if p > 0) for mask in masks for row in mask]
    penalty = network.penalty()
    assert len(masks) == 4
    assert all(torch.allclose(mask.sum(-1), torch.ones(40), atol=1e-5) for mask in masks)
    assert any((mask == 0).any() for mask in masks), "masks are sparse"
    assert penalty is not None
    assert penalty.item() == pytest.approx(0.5 * np.mean(entropies), rel=1e-4)
    assert network.penalty() is None, "of the last forward pass, once"
    network.eval()(x_num, x_cat)
    assert network.penalty() is None


def test_tabnet_keeps_its_matrix_where_the_network_is() -> None:
    network = TabNet(SPEC).to("meta")
    assert network.body.encoder.group_attention_matrix.is_meta
    assert not any("group" in name for name in network.state_dict())


def test_tabnet_refuses_what_would_not_fit_in_memory() -> None:
    assert not TabNet.cannot(SPEC, 100)
    assert f"{MAX_INPUTS:,}" in TabNet.cannot(TableSpec(TaskType.BINARY, 0, (MAX_INPUTS + 2,), 2), 100)


def test_tabtransformer_reads_a_category_in_the_context_of_the_others() -> None:
    torch.manual_seed(0)
    network = TabTransformer(SPEC, n_layers=2).eval()
    assert network.categories is not None
    one, other = (network.transformer(network.categories(torch.tensor([[1, code]]))) for code in (1, 2))
    assert (one[0, 0] - other[0, 0]).abs().max() > 1e-3
    assert network.categories.shared is not None
    assert network.categories.shared.shape == (2, 32 // 8)


def test_tabtransformer_without_categories_is_its_mlp() -> None:
    network = TabTransformer(TableSpec(TaskType.BINARY, 3, (), 2)).eval()
    x_num = torch.randn(4, 3)
    assert torch.equal(network(x_num, torch.zeros(4, 0, dtype=torch.int64)), network.head(x_num))


@pytest.mark.parametrize("spec", [SPEC, REGRESSION])
def test_tabm_trains_its_members_apart_and_predicts_their_mean(spec: TableSpec) -> None:
    torch.manual_seed(0)
    network = TabM(spec, d_block=16, k=5, dropout=0.0)
    x_num, x_cat, y = rows(spec, 8)
    members = network(x_num, x_cat)
    assert members.shape == (8, 5, spec.n_out)
    assert (members[:, 0] - members[:, 1]).abs().max() > 1e-3, "members differ from the start"
    shown = network.eval()(x_num, x_cat)
    if spec.task.is_classification:
        losses = [F.cross_entropy(members[:, i], y) for i in range(5)]
        torch.testing.assert_close(
            shown.softmax(-1), torch.stack([members[:, i].softmax(-1) for i in range(5)]).mean(0)
        )
    else:
        losses = [F.mse_loss(members[:, i, 0], y) for i in range(5)]
        torch.testing.assert_close(shown, members.mean(1))
    torch.testing.assert_close(network.loss(members, y), torch.stack(losses).mean())


def test_tabm_encodes_numbers_as_its_authors_package_does() -> None:
    """Bins of any number, filled after construction, give what the package gives when it is told them at once."""
    generator = np.random.default_rng(0)
    x_num = np.stack(
        [generator.normal(size=200), generator.integers(0, 3, 200), generator.integers(0, 2, 200)], axis=1
    ).astype(np.float32)
    spec = TableSpec(TaskType.BINARY, 3, (), 2)
    network = TabM(spec, n_bins=6, d_embedding=4, d_block=8, k=2)
    fresh = {name: tensor.shape for name, tensor in network.state_dict().items()}
    network.observe(Table(x_num, np.zeros((200, 0), np.int64), np.zeros(200, np.int64)))
    assert fresh == {name: tensor.shape for name, tensor in network.state_dict().items()}
    with pytest.warns(UserWarning, match="just two bin edges"):
        bins = compute_bins(torch.from_numpy(x_num), 6)
    assert [len(edges) for edges in bins] == [7, 3, 2]
    with pytest.warns(UserWarning, match="just two bin edges"):
        theirs = PiecewiseLinearEmbeddings(bins, 4, activation=False, version="B").impl
    wanted = torch.from_numpy(np.concatenate([x_num, [[-9, -9, -9], [9, 9, 9]]]).astype(np.float32))
    torch.testing.assert_close(network.body.num_module.impl(wanted), theirs(wanted), rtol=1e-4, atol=1e-4)


def realmlp_table(n: int, seed: int) -> Table:
    x_num, x_cat, y = rows(SPEC, n, seed)
    return Table(x_num.numpy(), x_cat.numpy(), y.numpy())


def test_realmlp_keeps_the_weights_it_says(tmp_path: Path) -> None:
    pytest.importorskip("pytabkit")
    from bishop_ray.models.realmlp import FILE, RealMLP

    train, val = realmlp_table(60, 0), realmlp_table(30, 1)
    model = RealMLP(SPEC, hidden_sizes="16-16", n_epochs=16)
    heard: dict[int, np.ndarray] = {}

    def note(rounds: int, out: np.ndarray) -> bool:
        heard[rounds] = out
        return False

    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    model.fit(train, val, note)
    assert torch.equal(state, torch.random.get_rng_state())
    assert threads == torch.get_num_threads()
    assert list(heard) == [2, 4, 6, 8, 10, 12, 14]
    for rounds, out in heard.items():
        model.rounds = rounds
        np.testing.assert_allclose(model.predict(val.x_num, val.x_cat), out, atol=1e-6)
    model.rounds = 99
    with pytest.raises(RuntimeError, match="found rounds 99"):
        model.predict(val.x_num, val.x_cat)
    model.rounds = 4
    model.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    loaded = RealMLP(SPEC, hidden_sizes="16-16", n_epochs=16)
    loaded.load(tmp_path)
    np.testing.assert_array_equal(loaded.predict(val.x_num, val.x_cat), model.predict(val.x_num, val.x_cat))
    other = RealMLP(SPEC, hidden_sizes="16-8", n_epochs=16)
    with pytest.raises(UserError, match="not of this model"):
        other.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"no weights")
    with pytest.raises(UserError, match=rf"{FILE}: damaged"):
        loaded.load(tmp_path)


def test_realmlp_says_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process of its own: what Lightning logs there does not pass through pytest's handlers."""
    pytest.importorskip("pytabkit")
    lines = [
        "from test_networks import SPEC, realmlp_table",
        "from bishop_ray.models.realmlp import RealMLP",
        "model = RealMLP(SPEC, hidden_sizes='16-16', n_epochs=16)",
        "model.fit(realmlp_table(60, 0), realmlp_table(30, 1), lambda rounds, out: False)",
        "model.refit(realmlp_table(60, 0), 5)",
    ]
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).resolve().parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("hparams", "message"),
    [
        ({"hidden_sizes": "256,256"}, "hidden_sizes must be widths joined by '-'"),
        ({"lr": 0.0}, "lr must be > 0; found 0.0"),
        ({"act": "tanh"}, "act must be one of 'relu', 'selu', 'mish'"),
        ({"wd": -1.0}, "wd must be >= 0"),
    ],
)
def test_realmlp_names_impossible_arguments(hparams: dict[str, object], message: str) -> None:
    pytest.importorskip("pytabkit")
    from bishop_ray.models.realmlp import RealMLP

    with pytest.raises(ValueError, match=message):
        RealMLP.check(**hparams)
