"""Ablations: what each setting changes, what is done to the data, how runs are kept and summed up."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fakes import make_table
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestClassifier

from bishop_ray.cli import ablate
from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.refs import DatasetRef, Roles, embedded_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.errors import BadTable, UserError
from bishop_ray.models.bishop.block import BiSHopModule, CellMLP
from bishop_ray.models.bishop.decoder import LinearReadout
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.models.embeddings import PiecewiseLinear
from bishop_ray.models.random_forest import RandomForest
from bishop_ray.paper import printed
from bishop_ray.paper.ablations import told
from bishop_ray.paper.ablations.records import COMPLETE, FAILED, AblationRun, Records
from bishop_ray.paper.ablations.run import AblationConfig, AblationResult
from bishop_ray.paper.ablations.settings import (
    ABLATIONS,
    Change,
    Setting,
    base_params,
    chosen,
    given_values,
    settings_of,
)
from bishop_ray.paper.ablations.summary import curve_rows, run_rows, table
from bishop_ray.paper.ablations.transforms import forest_importance, removed, rotated, rotation, without
from bishop_ray.search.dataset import load, prepare

SPACE = str(Path(__file__).parents[1].joinpath("tiny_space.yaml"))
SPEC = TableSpec(TaskType.BINARY, 3, (4, 5), 2)


def base(name: str = "components", **given: object) -> Params:
    return base_params(name, "bishop", SPACE, {f"model.{k}": v for k, v in given.items()}, 7)


def network(ablation: str, setting: str) -> BiSHop:
    torch.manual_seed(0)
    found = {s.name: s for s in chosen(ablation, ["bishop"], ())}[setting]
    return BiSHop(SPEC, **found.params(base(ablation))["model"])


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["components", "components_regression", "hopfield", "rotation", "depth"])
def test_settings_have_the_names_of_the_papers_tables(name: str) -> None:
    settings = [s.name for s in chosen(name.removesuffix("_regression"), ["bishop"], ())]
    assert set(printed.ablation(name).models) <= set(settings)


def test_runs_are_the_papers() -> None:
    assert {n: ABLATIONS[n].runs for n in ("components", "hopfield", "convergence")} == {
        "components": 3, "hopfield": 10, "convergence": 30,
    }  # fmt: skip
    shares = [s.change.remove for s in chosen("sparsity", ["xgboost"], ())]
    assert shares == [0, *[*range(10, 100, 10)] * 3]
    assert len(chosen("sparsity", (), ())) == 3 * 28


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_base_is_the_configuration_as_it_stands(name: str) -> None:
    """The first point of the space, untouched: same weights, same outputs as a network built from it."""
    point = base(name)
    settings, bases = settings_of(name, {"bishop": point}, ())
    own = next(s for s in settings if s.name == bases["bishop"])
    assert own.change == Change()
    torch.manual_seed(0)
    plain = BiSHop(SPEC, **base("components")["model"])
    built = network(name, own.name)
    x_num, x_cat = torch.randn(5, 3), torch.randint(0, 4, (5, 2))
    assert torch.equal(plain.eval()(x_num, x_cat), built.eval()(x_num, x_cat))


def test_every_other_setting_is_another_network_or_other_data() -> None:
    x_num, x_cat = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.randint(0, 4, (6, 2))
    for name in ABLATIONS:
        outputs: dict[str, torch.Tensor] = {}
        for setting in chosen(name, ["bishop"], ()):
            if setting.change == Change():
                outputs[setting.name] = network(name, setting.name).eval()(x_num, x_cat)
        values = list(outputs.values())
        for i, one in enumerate(values):
            assert torch.isfinite(one).all()
            assert not any(torch.equal(one, other) for other in values[i + 1 :]), (name, list(outputs)[i])


def test_components_are_gone() -> None:
    full = network("components", "full")
    assert isinstance(full.numbers, PiecewiseLinear)
    assert full.categories is not None
    assert full.categories.shared is not None
    without_shared = network("components", "no_cat_emb").categories
    assert without_shared is not None
    assert without_shared.shared is None
    assert without_shared.weight.shape == (9, 8), "the whole width is the category's own"
    assert not isinstance(network("components", "no_num_emb").numbers, PiecewiseLinear)
    assert network("components", "no_patch_emb").patches.n_patches == 8, "a patch per embedding position"
    assert isinstance(network("components", "no_decoder").decoder, LinearReadout)
    parts = [type(m) for m in network("components", "no_module").modules()]
    assert BiSHopModule not in parts
    widths = [
        m.feed_forward[0].out_features for m in network("components", "no_module").modules() if type(m) is CellMLP
    ]
    assert set(widths) == {512}


def test_layers_retrieve_with_what_the_setting_says() -> None:
    found = {n: network("hopfield", n) for n in ("gsh", "hopfield", "attention", "sparsemax", "entmax15")}
    alphas = {n: {a.activation.alpha for a in m.associations().values()} for n, m in found.items()}
    assert {n: round(next(iter(a)), 6) for n, a in alphas.items()} == {
        "gsh": 1.5, "hopfield": 1.0, "attention": 1.0, "sparsemax": 2.0, "entmax15": 1.5,
    }  # fmt: skip
    learned = {n: any("activation.raw" in name for name, _ in m.named_parameters()) for n, m in found.items()}
    assert [n for n, flag in learned.items() if flag] == ["gsh"]
    values = {n: next(iter(m.associations().values())).options.hopfield_values for n, m in found.items()}
    assert [n for n, flag in values.items() if not flag] == ["attention"]
    assert [s.name for s in chosen("convergence", (), ())] == ["gsh", "hopfield"]


def test_depth_and_directions() -> None:
    for depth in (1, 2, 8):
        model = network("depth", str(depth))
        assert len(model.encoder.levels) == depth
        assert len(model.decoder.levels) == depth + 1
    assert [network("rotation", n).swap_directions for n in ("full", "r1", "r2", "r3")] == [False, True, False, True]
    changes = {s.name: s.change.rotate for s in chosen("rotation", (), ())}
    assert changes == {"full": False, "r1": False, "r2": True, "r3": True}


def test_base_of_depth_follows_the_configuration() -> None:
    assert settings_of("depth", {"bishop": base("depth")}, ())[1] == {"bishop": "2"}
    assert settings_of("depth", {"bishop": base("depth", n_encoder_levels=5)}, ())[1] == {"bishop": "5"}
    with pytest.raises(UserError, match="--set: n_encoder_levels: expected the values of a setting of depth"):
        settings_of("depth", {"bishop": base("depth", n_encoder_levels=9)}, ())
    names = [s.name for s in settings_of("depth", {"bishop": base("depth")}, ["7"])[0]]
    assert names == ["2", "7"], "what others are compared with always takes part"


def test_convergence_never_stops_early() -> None:
    assert base("convergence")["train"]["patience"] == 7
    assert base_params("convergence", "bishop", SPACE, {"train.patience": 3}, 7)["train"]["patience"] == 3
    assert "patience" not in base("hopfield")["train"]


# --- changes of the data -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(n=st.integers(2, 40), seed=st.integers(0, 10**6))
def test_rotation_is_a_rotation(n: int, seed: int) -> None:
    matrix = rotation(n, seed)
    assert np.allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1.0)
    assert np.array_equal(matrix, rotation(n, seed))
    assert not np.allclose(matrix, rotation(n, seed + 1))


def test_rotations_are_uniform() -> None:
    """Every entry of a uniform rotation has mean 0 and variance 1/n; QR without the signs would not."""
    entries = np.stack([rotation(3, seed) for seed in range(3000)])
    assert np.abs(entries.mean(0)).max() < 0.05
    assert np.abs(entries.var(0) - 1 / 3).max() < 0.03


def test_rotated_table_keeps_distances_categories_and_indicators() -> None:
    raw = make_table(n_num=4, n_cat=2, with_missing=True)
    preprocessor = Preprocessor.fit(raw)
    encoded = preprocessor.transform(raw)
    matrix = rotation(4, 0)
    turned = rotated(encoded, matrix)
    assert encoded.x_num.shape[1] == 8, "four numbers, four indicators"
    assert np.array_equal(turned.x_num[:, 4:], encoded.x_num[:, 4:])
    assert np.array_equal(turned.x_cat, encoded.x_cat)
    assert np.array_equal(turned.y, encoded.y)
    assert not np.allclose(turned.x_num[:, :4], encoded.x_num[:, :4], atol=0.1)
    assert np.allclose(turned.x_num[:, :4] @ matrix.T, encoded.x_num[:, :4], atol=1e-5)
    assert turned.x_num.dtype == np.float32


def test_one_column_cannot_be_rotated() -> None:
    with pytest.raises(BadTable, match="at least two numerical columns; found 1"):
        rotation(1, 0)


IMPORTANCE = {"a": 0.1, "b": 0.5, "c": 0.05, "d": 0.35}


def test_features_are_removed_in_their_order() -> None:
    columns = list(IMPORTANCE)
    assert removed(columns, Change(False, "increasing", 50), IMPORTANCE, 0) == ["c", "a"]
    assert removed(columns, Change(False, "decreasing", 50), IMPORTANCE, 0) == ["b", "d"]
    assert removed(columns, Change(False, "increasing", 90), IMPORTANCE, 0) == ["c", "a", "d"], "one is left"
    assert removed(columns, Change(), IMPORTANCE, 0) == []


@settings(max_examples=40, deadline=None, derandomize=True)
@given(n=st.integers(1, 30), seed=st.integers(0, 1000), order=st.sampled_from(["random", "increasing", "decreasing"]))
def test_a_larger_share_removes_more_of_the_same(n: int, seed: int, order: str) -> None:
    columns = [f"c{i}" for i in range(n)]
    importance = dict(zip(columns, np.random.default_rng(seed).random(n).tolist(), strict=True))
    gone = [removed(columns, Change(False, order, share), importance, seed) for share in range(0, 100, 10)]
    for small, large in itertools.pairwise(gone):
        assert large[: len(small)] == small
    assert len(gone[-1]) == min(round(0.9 * n), n - 1)
    assert gone == [removed(columns, Change(False, order, share), importance, seed) for share in range(0, 100, 10)]


def test_random_removal_goes_by_the_seed() -> None:
    columns, change = [f"c{i}" for i in range(20)], Change(False, "random", 50)
    assert removed(columns, change, {}, 1) != removed(columns, change, {}, 2)


def test_columns_are_gone_from_the_dataset() -> None:
    raw = make_table(n_num=3, n_cat=2)
    less = without(raw, ["cat_0", "num_1"])
    assert list(less.frame.columns) == ["num_0", "num_2", "cat_1"]
    assert less.categorical == ("cat_1",)
    assert list(raw.frame.columns) == ["num_0", "num_1", "num_2", "cat_0", "cat_1"]


def test_importance_is_the_forests_own() -> None:
    raw = make_table(n_num=3, n_cat=2, rows=200, with_missing=True)
    raw = replace(raw, frame=raw.frame.assign(num_2=np.random.default_rng(99).normal(size=200)))
    found = forest_importance(raw)
    assert list(found) == list(raw.frame.columns)
    assert sum(found.values()) == pytest.approx(1.0)
    assert min(found, key=lambda name: found[name]) == "num_2", "noise matters least"
    preprocessor = Preprocessor.fit(raw, RandomForest.numeric)
    encoded = preprocessor.transform(raw)
    forest = RandomForest(preprocessor.spec)
    forest.seed = 0
    reference = RandomForestClassifier(n_estimators=forest.n_trees, random_state=0, **forest.settings)
    values = reference.fit(forest.inputs(encoded.x_num, encoded.x_cat), encoded.y).feature_importances_
    widths = [c - 1 for c in preprocessor.spec.cat_cardinalities]
    assert found["cat_1"] == pytest.approx(values[-widths[1] :].sum())
    indicators = [c.indicator for c in preprocessor.numbers]
    assert found["num_0"] == pytest.approx(values[0] + (values[3] if indicators[0] else 0.0))


# --- records and tables --------------------------------------------------------------------------------------------


def record(setting: str, seed: int, test: float | None, **more: object) -> AblationRun:
    status = COMPLETE if test is not None else FAILED
    fields = {"validation": None if test is None else test + 0.01, "seconds": 2.0, "started": 1.0, "reason": "r"} | more
    return AblationRun(setting=setting, model="bishop", seed=seed, status=status, test=test, **fields)  # type: ignore[arg-type]


def test_records_come_back_and_guard_what_decides_them(tmp_path: Path) -> None:
    kept = Records(tmp_path / "a", {"metric": "auc", "data": "x"})
    one = record("full", 1, 0.9, epochs={1: {"epoch/val_score": 0.5}}, params={"model.d": 8}, test_openings=1)
    kept.keep(one)
    kept.keep(record("full", 2, None))
    again = Records(tmp_path / "a", {"metric": "auc", "data": "x", "xgboost.model.d": 3})
    assert again.identity == kept.identity
    assert again.runs[one.key] == one
    assert again.complete(one.key)
    assert not again.complete(("full", "bishop", 2)), "one that failed is run again"
    with pytest.raises(UserError, match=r"other settings \(data was x, is y\); --fresh starts over"):
        Records(tmp_path / "a", {"metric": "auc", "data": "y"})
    next((tmp_path / "a" / "runs").glob("*.json")).write_text('{"setting": 1}')
    with pytest.raises(UserError, match="damaged"):
        Records(tmp_path / "a", {"metric": "auc", "data": "x"})


def result(name: str, dataset: str, records: list[AblationRun], settings: tuple[str, ...]) -> AblationResult:
    study = StudyConfig(
        DatasetRef("embedded", dataset, dataset), "bishop", SPACE, 1, 1, "auc", SplitProtocol((0.7, 0.2, 0.1))
    )
    config = AblationConfig(
        name, tuple(Setting(s) for s in settings), {"bishop": base()}, {"bishop": study}, {"bishop": settings[0]}
    )
    return AblationResult(config, tuple(records), {}, len(records), "")


def test_table_by_hand() -> None:
    records = [record("full", s, t) for s, t in ((1, 0.8), (2, 0.9))]
    records += [record("no_decoder", 1, 0.7), record("no_decoder", 2, 0.86), record("no_decoder", 3, None)]
    full, other = table([result("components", "adult", records, ("full", "no_decoder"))])
    assert (full["runs"], full["failed"], full["difference"]) == (2, 0, "")
    assert full["test"] == pytest.approx(0.85)
    assert full["test_std"] == pytest.approx(0.0707106, abs=1e-6)
    assert (other["runs"], other["failed"]) == (2, 1)
    assert other["difference"] == pytest.approx(-0.07), "mean of -0.10 and -0.04, seed by seed"
    assert other["difference_std"] == pytest.approx(0.0424264, abs=1e-6)
    assert full["paper"] == pytest.approx(0.9174)
    assert other["paper"] == pytest.approx(0.8818)
    assert other["paper_difference"] == pytest.approx(0.8818 - 0.9174)


def test_averages_take_whole_datasets_only() -> None:
    whole = [record("full", 1, 0.8), record("no_decoder", 1, 0.6)]
    results = [result("components", name, whole, ("full", "no_decoder")) for name in ("adult", "bank")]
    results.append(result("components", "iris", whole[:1], ("full", "no_decoder")))
    rows = [row for row in table(results) if row["dataset"] == "average"]
    assert [row["setting"] for row in rows] == ["full", "no_decoder"]
    assert rows[1]["test"] == pytest.approx(0.6)
    assert rows[1]["paper"] == pytest.approx((0.8818 + 0.9193) / 2)
    assert rows[0]["note"] == "of 2 datasets: adult, bank"


def test_no_figure_of_the_paper_for_another_metric_or_dataset() -> None:
    found = result("components", "iris", [record("full", 1, 0.8)], ("full",))
    assert table([found])[0]["paper"] == ""
    adult = result("components", "adult", [record("full", 1, 0.8)], ("full",))
    study = replace(adult.config.study, metric="accuracy")
    adult = replace(adult, config=replace(adult.config, studies={"bishop": study}))
    assert table([adult])[0]["paper"] == ""


def test_curves_are_means_over_the_runs_that_reached_the_epoch() -> None:
    scores = {1: [0.5, 0.7], 2: [0.9]}
    records = [
        record("gsh", s, 0.9, epochs={e: {"epoch/val_score": v[s]} for e, v in scores.items() if s < len(v)})
        for s in (0, 1)
    ]
    rows = curve_rows([result("convergence", "iris", records, ("gsh",))])
    assert [(r["epoch"], r["quantity"], r["runs"]) for r in rows] == [(1, "val_score", 2), (2, "val_score", 1)]
    assert rows[0]["mean"] == pytest.approx(0.6)
    assert rows[0]["low"] == pytest.approx(0.6 - 0.1414214, abs=1e-6)
    assert json.dumps(run_rows([result("convergence", "iris", records, ("gsh",))]))


# --- what a user gives ---------------------------------------------------------------------------------------------


def test_values_are_read_with_the_types_of_the_signature() -> None:
    found = given_values(["d_model=64", "train.lr=1e-3", "xgboost.max_depth=4", "decoder=false"], ["bishop", "xgboost"])
    assert found == {
        "bishop": {"model.d_model": 64, "train.lr": 1e-3, "model.decoder": False},
        "xgboost": {"model.max_depth": 4},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("d_model", "expected KEY=VALUE"),
        ("d_modle=8", "did you mean 'd_model'"),
        ("d_model=wide", "--set: model.d_model must be"),
        ("d_model=true", "found 'true'"),
        ("train.seed=3", "--seed sets it"),
        ("xgboost.max_depht=3", "did you mean 'max_depth'"),
    ],
)
def test_wrong_values_are_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        given_values([text], ["bishop", "xgboost"])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


BAD = [
    (["componnts", "--dataset", "iris"], ["unknown ablation 'componnts'", "did you mean 'components'"]),
    (["components", "--dataset", "irs"], ["unknown dataset 'irs'"]),
    (["components"], ["found none of them"]),
    (["components", "--dataset", "iris", "--settings", "no_decodr"], ["did you mean 'no_decoder'"]),
    (["components", "--dataset", "iris", "--models", "xgboost"], ["model of the ablation components", "bishop"]),
    (["sparsity", "--dataset", "iris", "--models", "mlp"], ["unknown model of the ablation sparsity 'mlp'"]),
    (["sparsity", "--dataset", "iris", "--space", "bishop"], ["--space goes with one model"]),
    (["hopfield", "--dataset", "iris", "--set", "n_heads=0"], ["--set: ", "n_heads must be", "found 0"]),
    (["hopfield", "--dataset", "iris", "--metric", "r2"], ["r2", "multiclass"]),
    (["hopfield", "--dataset", "iris", "--runs", "0"], ["--runs", ">= 1"]),
    (["hopfield", "--dataset", "iris", "--output", "/nowhere/x.csv"], ["--output: expected a file"]),
    (["hopfield", "--dataset", "iris", "--tracking-uri", "ftp://x"], ["ftp"]),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=lambda value: " ".join(value))
def test_bad_input_is_one_clear_line(
    flags: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    with pytest.raises(UserError) as caught:
        ablate.run_ablate(ablate.ablate_parser().parse_args(flags))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "home").exists(), "nothing half-written"


@pytest.mark.parametrize(("roles", "tag"), [(Roles(), None), (Roles(balance=True), "balance yes")])
def test_mlflow_is_told_the_roles_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roles: Roles, tag: str | None
) -> None:
    sender = Mock()
    monkeypatch.setattr(told, "AblationRuns", sender)
    study = StudyConfig(
        replace(embedded_ref("iris"), roles=roles), "xgboost", "xgboost", 1, 1, metric="accuracy",
        split=SplitProtocol((0.7, 0.2, 0.1)),
    )  # fmt: skip
    told.Told(study, "components", Records(tmp_path, {}), prepare(load(study)), {})
    assert sender.call_args.args[-1].get("roles") == tag
