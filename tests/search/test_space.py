"""Every YAML fits the code it sets, and a broken one is named by file and key."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path

import optuna
import pytest
import torch
import yaml
from model_training import NEEDS_WEIGHTS

from bishop_ray.config import StudyConfig, TrainConfig, TrialConfig
from bishop_ray.data.refs import DatasetRef
from bishop_ray.data.split import DATASETS_I
from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.errors import BadSearchSpace, UnknownName
from bishop_ray.models import MODELS, create_model
from bishop_ray.models.base import Network
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.search.parameters import Range
from bishop_ray.search.samplers import SAMPLERS, sampler_factory
from bishop_ray.search.searcher import TrialSource
from bishop_ray.search.space import SearchSpace, find_space, flatten, load_space, named_spaces, space_names, unflatten
from bishop_ray.search.study import open_study, trial_rows

SPEC = TableSpec(TaskType.BINARY, 3, (4, 5), 2)
SPACES = [
    (name, next(m for m in sorted(MODELS, key=len, reverse=True) if name.startswith(m))) for name in space_names()
]


def test_every_model_has_a_space() -> None:
    assert set(MODELS) <= set(space_names())


@pytest.mark.parametrize(("name", "model"), SPACES)
def test_space_fits_the_model(name: str, model: str) -> None:
    space = load_space(name, model)
    source = space.source.splitlines()[0]
    assert source.startswith("# "), "the first line names the source"
    assert re.search(r"(19|20)\d\d|this project's own", source), "a citation has a year"
    # Foundation models have nothing to search: their constants are the default configuration.
    assert bool(space.searched) == bool(space.first) == (name not in NEEDS_WEIGHTS), "the default is the first trial"
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for told, outside in space.queue() or [({}, {})]:
        study.enqueue_trial(told)
        params = unflatten(flatten(space.suggest(study.ask())) | outside)
        TrialConfig.from_params(model, params)
    small = {**params["model"]}
    for key in ("d_model", "d_ff"):  # a width of the paper's space would make this test slow
        if key in small:
            small[key] = min(small[key], 32)
    create_model(model, SPEC, small)


def test_first_points_are_tried_first_and_whole() -> None:
    space = load_space("bishop", "bishop")
    study = optuna.create_study()
    for point in space.first:
        study.enqueue_trial(point)
    for point in space.first:
        assert {k: v for k, v in flatten(space.suggest(study.ask())).items() if k in space.searched} == point


OUTSIDE_SPACE = """
model: {n_pool: {int: [2, 6]}, dropout: {float: [0.0, 0.5]}}
train: {weight_decay: {float: [1.0e-3, 1.0], log: true}, lr: {float: [1.0e-4, 1.0e-2], log: true}}
first:
  - model: {n_pool: 12}
    train: {weight_decay: 0.0, lr: 1.0e-3}
    outside: {train.weight_decay: 1.0e-3, model.n_pool: 6}
  - model: {n_pool: 5}
    train: {weight_decay: 0.5, lr: 2.0e-3}
"""


def outside_space(folder: Path) -> SearchSpace:
    (folder / "x.yaml").write_text(OUTSIDE_SPACE)
    return load_space(str(folder / "x.yaml"), "bishop")


def test_a_point_may_lie_outside_if_it_says_so(tmp_path: Path) -> None:
    space = outside_space(tmp_path)
    assert [(p["train.weight_decay"], p["model.n_pool"]) for p in space.first] == [(0.0, 12), (0.5, 5)]
    (told, meant), (plain, nothing) = space.queue()
    assert (told["train.weight_decay"], told["model.n_pool"], told["train.lr"]) == (1e-3, 6, 1e-3)
    assert meant == {"train.weight_decay": 0.0, "model.n_pool": 12}
    assert plain == space.first[1]
    assert not nothing
    (tmp_path / "y.yaml").write_text(OUTSIDE_SPACE.replace("model.n_pool: 6", "model.n_pool: 5"))
    other = load_space(str(tmp_path / "y.yaml"), "bishop")
    assert other.fingerprint() != space.fingerprint(), "what the sampler is told changes the search"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_goes_on_after_a_point_outside_and_resumes_exactly(tmp_path: Path, sampler: str) -> None:
    def points(folder: Path, interrupt: bool) -> list[dict[str, object]]:
        folder.mkdir()
        space = outside_space(folder)
        config = StudyConfig(
            DatasetRef("file", "x", "x", target="y"), "bishop", "x", 9, 1, "auc", DATASETS_I,
            sampler=sampler, storage=str(folder),
        )  # fmt: skip
        seen = []
        for number in range(9):
            if number == 0 or interrupt:  # as another process would: everything from disk
                opened = open_study(config, space, "hash")
                asker = TrialSource(opened.study, space, sampler_factory(config))
            if interrupt and number in (0, 5):
                asker.ask()  # interrupted before it told anything: the next process gets the same trial again
                asker = TrialSource(open_study(config, space, "hash").study, space, sampler_factory(config))
            asked, params = asker.ask()
            assert asked == number
            opened.study.tell(number, -abs(params["train"]["weight_decay"] - 0.1) - params["model"]["dropout"])
            seen.append(flatten(params))
        rows = trial_rows(opened.study)
        assert next(r for r in rows if r["trial"] == 0)["train.weight_decay"] == 0.0, "shown is what was trained"
        return seen

    whole = points(tmp_path / "a", interrupt=False)
    assert whole[:2] == list(outside_space(tmp_path).first)
    assert all(1e-3 <= p["train.weight_decay"] <= 1 and 2 <= p["model.n_pool"] <= 6 for p in whole[2:])
    # A Gaussian process may like one end of a range.
    assert len({p["train.weight_decay"] for p in whole}) >= (5 if sampler == "gp" else 9), "it is still searched"
    assert points(tmp_path / "b", interrupt=True) == whole


def test_random_points_stay_inside(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {n_pool: {int: [2, 6], step: 2}, dropout: {float: [0.0, 0.5]}}\n"
        "train: {lr: {float: [1.0e-4, 1.0e-2], log: true}, batch_size: {choice: [16, 32]}, weight_decay: 0.5}\n"
    )
    space = load_space(str(path), "bishop")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    seen = [flatten(space.suggest(study.ask())) for _ in range(60)]
    assert {p["model.n_pool"] for p in seen} == {2, 4, 6}, "both ends are included"
    assert all(1e-4 <= p["train.lr"] <= 1e-2 and 0 <= p["model.dropout"] <= 0.5 for p in seen)
    assert {p["train.batch_size"] for p in seen} == {16, 32}
    assert {p["train.weight_decay"] for p in seen} == {0.5}
    below = sum(p["train.lr"] < 1e-3 for p in seen)
    assert 15 <= below <= 45, "log: half of the draws lie below the geometric mean"


def test_flatten_and_back() -> None:
    params = {"model": {"a": 1}, "train": {"lr": 0.1}}
    assert unflatten(flatten(params)) == params


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {d_modle: 4}", ["d_modle", "did you mean 'd_model'"]),
        ("modell: {}", ["modell", "model"]),
        ("model: {d_model: {int: [64, 8]}}", ["d_model", "low end above", "[64, 8]"]),
        ("train: {lr: {float: [0.0, 1.0], log: true}}", ["lr", "> 0", "found 0"]),
        ("train: {lr: {float: [0.1, 1.0], log: true, step: 0.1}}", ["lr", "log and step"]),
        ("model: {d_model: {float: [8.0, 64.0]}}", ["d_model", "int", "8.0"]),
        ("model: {d_model: {int: [8.5, 64]}}", ["d_model", "8.5"]),
        ("model: {d_model: wide}", ["d_model", "int", "'wide'"]),
        ("model: {d_model: true}", ["d_model", "int", "True"]),
        ("model: {d_model: {choice: []}}", ["d_model", "choices"]),
        ("model: {d_model: {choice: [8, x]}}", ["d_model", "'x'"]),
        ("model: {d_model: {int: [8]}}", ["d_model", "[low, high]"]),
        ("model: {d_model: {int: [8, 16], choice: [8]}}", ["d_model", "exactly one"]),
        ("model: {d_model: {int: [8, 16], by: 2}}", ["by", "step"]),
        ("model: [1, 2]", ["model", "mapping"]),
        ("- 1", ["sections"]),
        ("", ["sections"]),
        ("model: {a: [", ["not valid YAML"]),
        ("model: {d_model: !!python/object/apply:os.getcwd []}", ["YAML"]),
        ("model: {d_model: {choice: [8, 16]}}\nfirst: [{model: {d_model: 9}}]", ["first[0]", "d_model", "9"]),
        ("model: {d_model: {choice: [8, 16]}}\nfirst: [{model: {d_ff: 9}}]", ["first[0]", "d_ff"]),
        ("model: {d_model: {choice: [8, 16]}}\nfirst: 5", ["first", "list", "5"]),
        ("model: {d_model: {choice: [8, 16]}}\nfirst: [5]", ["first[0]", "mapping", "5"]),
        ("model: {d_model: {int: [8, 16]}}\nfirst: [{model: {d_model: 17}}]", ["first[0]", "d_model", "17"]),
        (
            "model: {d_model: {int: [8, 16]}}\nfirst: [{model: {d_model: 17}, outside: {d_model: 16}}]",
            ["first[0].outside", "'d_model'", "model.d_model"],
        ),
        (
            "model: {d_model: {int: [8, 16]}}\nfirst: [{model: {d_model: 17}, outside: {model.d_model: 18}}]",
            ["first[0] outside model.d_model", "[8, 16]", "18"],
        ),
        (
            "model: {d_model: {int: [8, 16]}}\nfirst: [{model: {d_model: 12}, outside: {model.d_model: 16}}]",
            ["first[0] model.d_model", "12", "needs no 'outside'"],
        ),
        (
            "model: {d_model: {int: [8, 16]}}\nfirst: [{model: {d_model: x}, outside: {model.d_model: 16}}]",
            ["first[0] model.d_model", "int", "'x'"],
        ),
        (
            "model: {d_model: {int: [8, 16]}}\nfirst: [{model: {d_model: 0}, outside: {model.d_model: 16}}]",
            ["first[0]", "d_model", "found 0"],
        ),
        ("model: {d_model: {int: [8, 16]}}\nfirst: [{outside: 5}]", ["first[0].outside", "mapping", "5"]),
        ("model: {d_model: 8}\nfirst: [{model: {d_model: 16}}]", ["first[0]", "d_model", "constant", "8", "16"]),
        ("model: {decoder: true}\nfirst: [{model: {decoder: 1}}]", ["first[0]", "decoder", "constant", "1"]),
        ("model: {d_model: {choice: [8]}}\nfirst: [{train: {max_epochs: 3}}]", ["train.max_epochs", "--max-epochs"]),
        ("train: {max_epochs: {int: [3, 9]}}", ["train.max_epochs", "--max-epochs"]),
        ("train: {precision: {choice: [fp32, bf16]}}", ["train.precision", "--precision"]),
        ("train: {metric: auc}", ["train.metric", "--metric"]),
        ("train: {seed: 1}", ["train.seed", "--seed"]),
        ("model: {\0: 1}", ["YAML"]),
        ("model: {dropout: {float: [.nan, 1]}}", ["model.dropout", "finite", "nan"]),
        ("train: {lr: {float: [1.0e-3, .inf]}}", ["train.lr", "finite", "inf"]),
        ("train: {lr: {float: [0.1, 1.0], step: .nan}}", ["train.lr", "step", "nan"]),
        ("train: {lr: .nan}", ["train.lr", "finite", "nan"]),
        ("train: {lr: {choice: [0.1, .inf]}}", ["train.lr", "finite", "inf"]),
        ("model: {d_model: null}", ["model.d_model", "int", "None"]),
        ("model: {d_model: {choice: [8, null]}}", ["model.d_model", "int", "None"]),
        ("model: {activation: relu}", ["activation", "'sparsemax'", "'relu'"]),
        ("model: {activation: {choice: [entmax, relu]}}", ["model.activation", "'sparsemax'", "'relu'"]),
        ("model: {compat: 5}", ["compat", "'authors'", "5"]),
        ("model: {d_model: {int: [0, 8]}, n_heads: 1}", ["d_model", ">= 1", "found 0"]),
        ("model: {dropout: {float: [0.0, 1.0]}}", ["model.dropout", "[0, 1)", "1.0"]),
        ("model: {d_model: {choice: [4, 64]}, n_heads: 8}", ["n_heads", "d_model (4)", "8"]),
        ("model: {d_model: {choice: [64, 4]}, n_heads: 8}", ["model.d_model", "d_model (4)", "8"]),
        ("train: {lr: -1.0}", ["lr", "> 0", "-1.0"]),
        ("train: {lr: {float: [0.0, 1.0]}}", ["train.lr", "> 0", "0.0"]),
        ("train: {optimizer: sgd}", ["optimizer", "'adamw'", "'sgd'"]),
        ("train: {batch_size: {choice: [32, 0]}}", ["train.batch_size", ">= 1", "0"]),
        ("train: {weight_decay: -0.1}", ["weight_decay", ">= 0", "-0.1"]),
        ("train: {plateau_factor: 1.0}", ["plateau_factor", "between 0 and 1", "1.0"]),
        (
            "model: {d_model: {int: [4, 64]}, n_heads: {int: [2, 6]}}\n"
            "first: [{model: {d_model: 64}}, {model: {d_model: 4, n_heads: 6}}]",
            ["first[1]", "n_heads", "6"],
        ),
    ],
)
def test_bad_space_is_one_line_naming_file_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(BadSearchSpace) as caught:
        load_space(str(path), "bishop")
    message = str(caught.value)
    assert "\n" not in message
    for word in ["mine.yaml", *words]:
        assert word in message


def test_what_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes("# Größe\nmodel: {d_model: 8}\n".encode("latin-1"))
    with pytest.raises(BadSearchSpace, match=r"mine\.yaml: expected UTF-8 text"):
        load_space(str(path), "bishop")


def test_unusual_but_right(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {head_max_width: null, compat: {choice: [null, authors]}, d_model: {choice: [2, 8]}, n_heads: 2}\n"
        "train: {lr: {float: [1, 2]}}\n"
        "first: [{model: {d_model: 8, n_heads: 2, compat: null}, train: {lr: 1}}]\n"
    )
    space = load_space(str(path), "bishop")
    assert space.first == ({"model.compat": None, "model.d_model": 8, "train.lr": 1},), "an equal constant may be named"
    assert space.entries["model.head_max_width"] is None
    path.write_text("model: {d_model: {choice: [2, 8]}, n_heads: {choice: [1, 2]}}\nfirst:\n")
    assert load_space(str(path), "bishop").first == (), "the default n_heads, 4, is not in the space and not asked for"


@pytest.mark.parametrize("section", ["model", "train"])
def test_every_argument_of_the_code_may_be_set_to_its_default(section: str, tmp_path: Path) -> None:
    defaults = BiSHop.__init__.__kwdefaults__
    if section == "train":
        defaults = {
            k: v for k, v in asdict(TrainConfig()).items() if k not in ("max_epochs", "metric", "seed", "precision")
        }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({section: defaults}))
    assert load_space(str(path), "bishop").entries == {f"{section}.{k}": v for k, v in defaults.items()}


class Plain(Network):
    """A network without a check of its own."""

    def __init__(self, spec: TableSpec, *, width: int = 4) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even; found {width}")
        self.layer = torch.nn.Linear(width, width)
        Plain.device = self.layer.weight.device.type

    def forward(self, x_num: torch.Tensor, x_cat: torch.Tensor) -> torch.Tensor:
        return self.layer(x_num)


def test_a_network_is_checked_without_weights() -> None:
    Plain.check(width=1 << 20)  # 4 TiB
    assert Plain.device == "meta"
    with pytest.raises(ValueError, match="width must be even; found 3"):
        Plain.check(width=3)


def test_reading_a_space_is_fast() -> None:
    load_space("bishop", "bishop")
    started = time.process_time()
    load_space("bishop", "bishop")
    assert time.process_time() - started < 0.5


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="did you mean 'bishop_small'"):
        find_space("bishop_smal")
    with pytest.raises(BadSearchSpace, match="no such file"):
        find_space("nowhere.yaml")
    with pytest.raises(UnknownName, match="did you mean 'bishop'"):
        load_space("bishop", "bishup")


def test_folder_of_the_user_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "bishop.yaml").write_text("model: {d_model: {choice: [8, 16]}}\n")
    monkeypatch.chdir(tmp_path)
    assert load_space("bishop", "bishop").entries == {"model.d_model": Range("choice", (8, 16))}
    assert "bishop_small" in named_spaces()
