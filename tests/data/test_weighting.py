"""Row weights: their formula, and that they reach every learner."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fakes import make_table
from model_training import default_params
from sklearn.utils.class_weight import compute_sample_weight

from bishop_ray.cli import doctor as doctor_cli
from bishop_ray.config import StudyConfig, TrialConfig
from bishop_ray.data.preprocess import Preprocessor, class_weights, counted, encoded
from bishop_ray.data.refs import Roles, embedded_ref, file_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import BadTable, UserError
from bishop_ray.models import MODELS, create_model, model_class, not_installed
from bishop_ray.models.base import Network
from bishop_ray.models.xgboost import XGBoost
from bishop_ray.search.dataset import combined, divide, load, prepare, unable
from bishop_ray.search.dataset import test_references as scores_of_references
from bishop_ray.search.search import _able, _Encodings
from bishop_ray.search.space import load_space
from bishop_ray.search.study import open_study
from bishop_ray.training.baselines import reference_scores
from bishop_ray.training.loop import fit_network

WEIGHED = [name for name in MODELS if not not_installed(name) and model_class(name).takes_weights]


def config_of(path: Path, roles: Roles, **changes: Any) -> StudyConfig:
    """A study of a file; of iris, if it is a folder."""
    ref = replace(embedded_ref("iris") if path.is_dir() else file_ref(path, "y"), roles=roles)
    settings: dict[str, Any] = {"model": "xgboost", "space": "xgboost", "metric": "accuracy"} | changes
    return StudyConfig(ref, trials=1, max_epochs=1, split=SplitProtocol((0.7, 0.2, 0.1)), **settings)


def write(path: Path, **columns: Any) -> Path:
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def fitted(name: str, spec: TableSpec, train: Table, val: Table, *, refit: bool = False) -> np.ndarray:
    """Predictions of `val` by a model trained for a moment."""
    torch.manual_seed(0)
    model = create_model(name, spec, default_params(name)["model"])
    if isinstance(model, Network):
        params = default_params(name)
        job = TrialConfig.from_params(name, params, max_epochs=1, metric="auc", precision="fp32")
        fit_network(model, train, val, job.train, lambda result: False, keep_last=True)
    elif refit:
        model.refit(train, 5)
    else:
        model.fit(train, val, lambda rounds, prediction: False)
    return np.asarray(model.predict(val.x_num, val.x_cat))


def tables(categories: int, rows: int = 80) -> tuple[TableSpec, Table, Table]:
    raw = make_table(n_cat=categories, rows=rows)
    preprocessor = Preprocessor.fit(raw, "normal")
    return preprocessor.spec, preprocessor.transform(raw), preprocessor.transform(make_table(n_cat=categories, seed=1))


def test_names_of_models_that_take_weights() -> None:
    assert {name for name in MODELS if name not in WEIGHED} <= {"realmlp", "tabpfn", "tabicl"}
    for name in WEIGHED:
        if issubclass(model := model_class(name), Network):
            assert "weight" in inspect.signature(model.loss).parameters, name


@pytest.mark.parametrize(
    "name", [n for n in WEIGHED if MODELS[n].kind == "estimator" or n in ("mlp", "tabm", "bishop")]
)  # other networks share the loss of the first
def test_rows_without_weight_teach_nothing(name: str) -> None:
    """Their labels are flipped; CatBoost's codes of categories are of labels alone, so it has numbers only here."""
    spec, train, val = tables(0 if name == "catboost" else 2)
    weight = np.where(np.arange(len(train)) % 2, 2.0, 0.0).astype(np.float32)
    weight.setflags(write=False)  # as Ray's object store hands it to trials
    flipped = np.where(weight > 0, train.y, 1 - train.y)
    honest, lied = replace(train, weight=weight), replace(train, y=flipped, weight=weight)
    ways = (False, True) if MODELS[name].kind == "estimator" else (False,)
    for refit in ways:
        expected = fitted(name, spec, honest, val, refit=refit)
        assert np.array_equal(fitted(name, spec, lied, val, refit=refit), expected)
        assert not np.array_equal(fitted(name, spec, replace(lied, weight=None), val, refit=refit), expected)


@pytest.mark.parametrize("name", [n for n in ("xgboost", "gbdt") if n in WEIGHED])
@pytest.mark.parametrize("task", [TaskType.BINARY, TaskType.REGRESSION])
def test_a_weight_is_as_many_rows(name: str, task: TaskType) -> None:
    """Exactly so for trees whose leaves are sized by weights; few values, since bins follow the rows."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, (90, 3)).astype(np.float32)
    y: Any = x[:, 0] + rng.normal(size=90) > 2 if task is TaskType.BINARY else x[:, 0] * x[:, 1]
    train = Table(x, np.zeros((90, 0), np.int64), y.astype(np.int64 if task is TaskType.BINARY else np.float32))
    times = rng.integers(1, 4, 90)
    repeated = Table(x.repeat(times, 0), np.zeros((times.sum(), 0), np.int64), train.y.repeat(times))
    spec = TableSpec(task, 3, (), 2 if task is TaskType.BINARY else 1)
    outputs = []
    for table in (repeated, replace(train, weight=times.astype(np.float32))):
        model = create_model(name, spec, {})
        assert not isinstance(model, Network)
        model.refit(table, 5)
        outputs.append(model.predict(x, train.x_cat))
    assert np.allclose(*outputs, atol=1e-5)


def test_a_networks_loss_is_the_mean_of_weighted_losses() -> None:
    for name, out in (("mlp", torch.randn(6, 2)), ("tabm", torch.randn(6, 32, 2))):
        network = create_model(name, TableSpec(TaskType.BINARY, 2, (), 2), {})
        assert isinstance(network, Network)
        y, weight = torch.tensor([0, 1, 1, 0, 1, 0]), torch.tensor([0.0, 3, 1, 1, 0.5, 0.5])
        alone = [network.loss(out[i : i + 1], y[i : i + 1]) for i in range(6)]
        assert network.loss(out, y, weight) == pytest.approx(float((torch.stack(alone) * weight).mean()))
        assert network.loss(out, y, torch.ones(6)) == pytest.approx(float(network.loss(out, y)))


def test_balance_is_scikit_learns_formula() -> None:
    y = np.array([0] * 70 + [1] * 25 + [2] * 5)
    assert class_weights(y) == pytest.approx(compute_sample_weight("balanced", y))
    raw = make_table("multiclass", rows=90)
    kept = raw.rows(np.flatnonzero(np.arange(90) % 3 > 0))
    weights = np.linspace(1, 5, len(kept))
    preprocessor = Preprocessor.fit(kept)
    table = encoded(preprocessor, replace(kept, weights=weights), balance=True)
    assert table.weight is not None
    both = weights * compute_sample_weight("balanced", table.y)
    assert table.weight == pytest.approx(both / both.mean(), rel=1e-5)
    assert table.weight.dtype == np.float32
    for balance in (True, False):
        alone = encoded(preprocessor, kept, balance).weight
        assert (alone is not None) is balance
    huge = encoded(preprocessor, replace(kept, weights=np.full(len(kept), 1e308)), balance=False).weight
    assert huge == pytest.approx(1)


def test_rows_of_weight_0_are_no_training_rows() -> None:
    raw = make_table(rows=20)
    heavy = replace(raw, weights=np.arange(20.0) % 4)
    assert len(counted(heavy)) == 15
    assert counted(raw) is raw
    with pytest.raises(BadTable, match=r"weight above 0 of every class of 'y'; found none of 'no'"):
        counted(replace(raw, weights=(raw.target != "no").to_numpy(np.float64)))
    with pytest.raises(BadTable, match="a training row with a weight above 0; found none"):
        counted(replace(raw, weights=np.zeros(20)))


def test_weights_and_time_reach_the_learner(tmp_path: Path) -> None:
    """Weights stay with their rows through a split by time, and the learner heeds them (case 15)."""
    rng = np.random.default_rng(0)
    rows, x = 300, rng.normal(size=300)
    day = rng.permutation(rows)
    weight = np.where(rng.random(rows) < 0.5, 0.001, 1.0) * (1 + day)
    lies = weight < 1
    y = np.where((x > 0) ^ lies, "yes", "no")
    dates = pd.Timestamp("2024-01-01") + pd.to_timedelta(day, "D")
    path = write(tmp_path / "t.csv", x=x, w=weight, day=dates.astype(str), row=np.arange(rows), y=y)
    config = config_of(path, Roles("w", time="day"))
    loaded = load(config)
    order = [loaded.train, loaded.validation]
    assert [len(part) for part in order] == [210, 60]
    for part in order:
        assert part.weights == pytest.approx(weight[part.frame["row"].to_numpy()])
    assert day[loaded.train.frame["row"]].max() < day[loaded.validation.frame["row"]].min()
    data = prepare(loaded).data
    expected = weight[loaded.train.frame["row"].to_numpy()]
    assert data.train.weight == pytest.approx(expected / expected.mean(), rel=1e-5)
    assert data.validation.weight is None, "no score is weighted"
    truth = (loaded.validation.frame["x"] > 0).to_numpy()
    right = []
    for train in (data.train, replace(data.train, weight=None)):
        model = XGBoost(data.spec)
        model.refit(train, 20)
        yes = model.predict(data.validation.x_num, data.validation.x_cat)[:, 1] > 0.5
        right.append(np.mean(yes == truth))
    assert right[0] > 0.9 > 0.75 > right[1]


def test_what_groups_share_is_not_learnt(tmp_path: Path) -> None:
    """A feature tells the group, and the group the target: chance on unseen groups, no more (case 7)."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(200), 10)
    y = np.array(["a", "b"])[rng.integers(0, 2, 200)][group]
    path = write(tmp_path / "t.csv", patient=group, mark=rng.permutation(200)[group] + rng.random(2000) / 9, y=y)
    scores = {}
    for name, roles in (("rows", Roles()), ("groups", Roles(groups="patient"))):
        loaded = load(config_of(path, roles))
        data = prepare(loaded).data
        model = XGBoost(data.spec)
        model.fit(data.train, data.validation, lambda rounds, prediction: False)
        found = model.predict(data.validation.x_num, data.validation.x_cat).argmax(axis=1)
        scores[name] = np.mean(found == data.validation.y)
        assert ("patient" in loaded.train.frame) is (name == "rows")
    assert scores["rows"] > 0.95
    assert abs(scores["groups"] - 0.5) < 0.15


def test_a_refit_and_the_references_heed_roles(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    weight = np.arange(200) % 3
    y = np.where((x > 0) ^ (weight == 0), "yes", "no")
    path = write(tmp_path / "t.csv", x=x, w=weight, g=np.arange(200) // 4, y=y)
    config = config_of(path, Roles("w", "g"))
    loaded = load(config)
    both, validation = combined(config)
    heavy = (validation.weights > 0).sum()  # type: ignore[operator]
    assert len(both) == loaded.rows[0] + heavy
    assert both.weights is not None
    assert both.weights.min() > 0
    assert set(both.groups[: loaded.rows[0]]).isdisjoint(set(validation.groups))  # type: ignore[arg-type, index]
    test = validation.rows(np.flatnonzero(validation.weights > 0))  # type: ignore[operator]
    assert scores_of_references(replace(config, metric="accuracy"), test)["linear"] > 0.9
    spec, train, val = tables(0, 200)
    lied = replace(train, y=np.where(np.arange(200) % 4 < 3, 1 - train.y, train.y))
    unlied = replace(lied, weight=(np.arange(200) % 4 == 3).astype(np.float32) * 4)
    scores = [reference_scores(t, val, spec, "accuracy") for t in (unlied, lied)]
    assert scores[0]["linear"] > 0.85 > 0.3 > scores[1]["linear"]
    assert scores[0]["mean"] == scores[1]["mean"], "as unweighted as the score"


def test_models_without_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", x=np.arange(60) % 7, w=np.ones(60), y=["a", "b"] * 30)
    configs = [config_of(path, Roles("w"), model=name, space=name) for name in ("realmlp", "xgboost")]
    if any(not_installed(config.model) for config in configs):
        pytest.skip("needs pytabkit")
    loaded = load(configs[1])
    assert (
        unable(configs[0], prepare(replace(loaded, config=configs[0]))) == "realmlp cannot take row weights (--weights)"
    )
    able, skipped = _able(configs, _Encodings(loaded))
    assert [config.model for config in able] == ["xgboost"]
    assert [(s.model, s.reason) for s in skipped] == [("realmlp", "realmlp cannot take row weights (--weights)")]
    balanced = config_of(path, Roles(balance=True), model="realmlp", space="realmlp")
    assert "(--balance)" in unable(balanced, prepare(load(balanced)))
    grouped = config_of(path, Roles(groups="w"), model="realmlp", space="realmlp")
    assert unable(grouped, prepare(replace(loaded, config=grouped))) == ""


def test_roles_are_settings_of_a_study(tmp_path: Path) -> None:
    """A study that was begun before there were roles goes on; one with other roles is refused."""
    config = replace(config_of(tmp_path, Roles()), storage=str(tmp_path))
    space, loaded = load_space(config.space, config.model), load(config)
    config = replace(config, metric=loaded.config.metric)
    study = open_study(config, space, loaded.fingerprint).study
    facts = json.loads(study.user_attrs["facts"])
    old = {key: value for key, value in facts.items() if key not in Roles().facts()}
    study.set_user_attr("facts", json.dumps(old))
    open_study(config, space, loaded.fingerprint)
    balanced = replace(config, ref=replace(config.ref, roles=Roles(balance=True)))
    assert balanced.name == config.name
    assert load(balanced).fingerprint == loaded.fingerprint, "the same rows: scores may be compared"
    with pytest.raises(UserError, match="exists with other settings: balance was no, is yes; use --fresh"):
        open_study(balanced, space, loaded.fingerprint)
    weighed = replace(config, ref=replace(config.ref, roles=Roles("petal width (cm)")))
    with pytest.raises(UserError, match=r"data was .*; weights was none, is 'petal width \(cm\)'"):
        open_study(weighed, space, load(weighed).fingerprint)


def test_the_doctor_looks_at_the_same_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies within groups lie on both sides of a split by rows, on one side of a split by groups."""
    rng = np.random.default_rng(0)
    case = np.repeat(np.arange(150), 4)
    path = write(tmp_path / "t.csv", case=case, a=rng.normal(size=150)[case], y=rng.normal(size=150)[case])

    def doctor(*words: str) -> int:
        line = [str(path), "--target", "y", "--no-dry-run", *words]
        return doctor_cli.run_doctor(doctor_cli.doctor_parser().parse_args(line))

    assert doctor() == 1
    assert "duplicate rows" in capsys.readouterr().out
    assert doctor("--groups", "case") == 0
    write(path, case=["x"] * 600, a=1, y=range(600))
    with pytest.raises(BadTable, match="--time: column 'case': expected"):
        doctor("--time", "case")


def test_parts_that_a_table_cannot_give_are_told_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", x=range(60), g=[1, 2] * 30, y=["a", "b", "b"] * 20)
    with pytest.raises(BadTable, match=r"t.csv: t: --groups: no split .* expected at least 3 groups; found 2"):
        load(config_of(path, Roles(groups="g")))
    raw = make_table(rows=60)
    with pytest.raises(BadTable, match="weight above 0 of every class"):
        divide(config_of(path, Roles("g")), replace(raw, weights=(raw.target == "no").to_numpy(np.float64)))
