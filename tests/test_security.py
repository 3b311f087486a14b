"""What others may have written (registry, checkpoints, names, addresses): runs nothing, stays inside, tells no secret.

Starts neither Ray nor MLflow; ``test_security_study.py`` has what does.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import make_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from predictor_fakes import Bomb, copy_of, make_predictor
from safetensors.torch import load_file, save_file

from bishop_ray.data.openml_cache import ServerCache
from bishop_ray.data.openml_client import api_key, server_url
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.refs import DatasetRef, path_part
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.models import create_model
from bishop_ray.models.base import Estimator
from bishop_ray.predictor import MANIFEST, WEIGHTS, Predictor
from bishop_ray.predictor.storage import hash_folder
from bishop_ray.redact import public_address, redacted, scrubbed
from bishop_ray.registry.loading import VARIABLE, check_links, check_source
from bishop_ray.tracking.client import check_names
from bishop_ray.tracking.naming import safe_file_name, safe_key
from bishop_ray.training import checkpoint

ROOT = Path(__file__).resolve().parents[1]
RAW = make_table(TaskType.BINARY, rows=60)
SECRET = "s3cr3t-Tok3n"
QUICK = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def refused(call: Callable[[], object], *words: str) -> str:
    """The one line that a call ends with."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 1000, message
    for word in words:
        assert word in message
    return message


def outcome(call: Callable[[], object]) -> str:
    """The line that a call ends with, "" where it succeeds; any other error is raised."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


# Source code ----------------------------------------------------------------------------------------------------------

FORBIDDEN = {
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load",
    "dill.loads", "marshal.load", "marshal.loads", "shelve.open", "joblib.load", "pd.read_pickle", "pandas.read_pickle",
    "os.system", "os.popen", "eval", "exec", "compile", "__import__", "tempfile.mktemp", "runpy.run_path",
    "mlflow.pyfunc.load_model", "mlflow.pytorch.load_model", "mlflow.sklearn.load_model", "torch.jit.load",
    "torch.package.PackageImporter", "shutil.unpack_archive", "skops.io.load",
}  # fmt: skip
SAFE_WITH = {
    "torch.load": {"weights_only": True},
    "np.load": {"allow_pickle": False},
    "numpy.load": {"allow_pickle": False},
}


def hazards(source: str) -> Iterator[str]:
    """Calls that run what they read, by the name they are called with."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, dot, rest = ast.unparse(node.func).partition(".")
        called = names.get(head, head) + dot + rest
        given_values = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if called in FORBIDDEN:
            yield f"line {node.lineno}: {called}"
        if called.endswith((".extractall", ".extract")) and not called.startswith("str."):
            yield f"line {node.lineno}: {called}: names in an archive may lead anywhere"
        if called in SAFE_WITH and not SAFE_WITH[called].items() <= given_values.items():
            yield f"line {node.lineno}: {called} without {SAFE_WITH[called]}"
        if given_values.get("shell") or given_values.get("allow_pickle"):
            yield f"line {node.lineno}: {called} with shell or allow_pickle"


@pytest.mark.parametrize(
    "code",
    [
        "yaml.load(x, yaml.SafeLoader)", "from yaml import unsafe_load as u\nu(x)", "import numpy as n\nn.load(x)",
        "torch.load(x)", "torch.load(x, weights_only=False)", "np.load(x, allow_pickle=True)", "eval('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)", "import pickle as p\np.loads(b'')",
        "import tarfile\ntarfile.open(x).extractall(y)",
    ],
)  # fmt: skip
def test_the_search_for_hazards_finds_them(code: str) -> None:
    assert list(hazards(code))


@pytest.mark.parametrize("folder", ["bishop_ray", "jobs"])
def test_nothing_in_the_package_runs_what_it_reads(folder: str) -> None:
    """Cases 85 and 86: no reader that runs code, nothing that unpacks an archive."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert not [f"{path.relative_to(ROOT)} {found}" for path in files for found in hazards(path.read_text("utf-8"))]


KEYS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY|\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[0-9A-Za-z]{36}|\bglpat-[\w-]{20}"
    rb"|\bsk-[0-9A-Za-z]{32}|\bxox[abp]-[\w-]{20}|\bhf_[0-9A-Za-z]{30}|\bAIza[\w-]{35}"
)


def test_no_key_lies_in_the_tree() -> None:
    """Case 89."""
    assert KEYS.search(b"x = 'AK" + b"IAIOSFODNN7EXAMPLE'")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a clone: the files of the tree are told by git")
    files = [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    assert len(files) > 100
    assert not [str(path) for path in files if KEYS.search(path.read_bytes())]


# Names ----------------------------------------------------------------------------------------------------------------

NASTY = [
    "", ".", "..", "../../etc/passwd", "/etc/passwd", "..\\..\\x", "a\0b", "a\nb", "C:\\x", "C:", "con", "NUL.txt",
    "com1", "x" * 5000, "ä" * 300, "\U0001f40d" * 200, "~root", "-rf", ".ssh", "a/", "a//b",
    "%2e%2e%2f", "‥/‥", "a\u202eb", "\udcff",
    "$(id)", "`id`", "a b", "file:///etc", "a" * 119 + "ä", ("CON" * 60),
]  # fmt: skip
ANY_NAME = st.one_of(st.sampled_from(NASTY), st.text(max_size=300), st.text("./\\\0~:c on-nul"))
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


def assert_one_step(part: str) -> None:
    assert part not in ("", ".", "..")
    assert not set(part) & set("/\\\0:\n\r")
    assert not part.startswith((".", "-", "~"))
    assert part.isprintable()
    assert len(part.encode()) <= 140
    assert part.partition(".")[0].lower() not in RESERVED


@QUICK
@given(name=ANY_NAME, group=ANY_NAME)
def test_a_datasets_names_stay_in_their_folder(name: str, group: str, tmp_path: Path) -> None:
    ref = DatasetRef("openml", "1", name, group=group)
    assert_one_step(path_part(name))
    assert_one_step(safe_file_name(name))
    studies = tmp_path / "studies"
    for step in (f"{ref.key}-bishop-s0", f"{ref.experiment}.csv", safe_file_name(name)):
        assert len(f".{step}.lock.{'0' * 8}.old".encode()) <= 255 + len(path_part(group))
        path = studies / step
        assert path.resolve().parent == studies.resolve()
    folder = tmp_path / path_part(name)
    folder.mkdir(exist_ok=True)
    assert folder.resolve().parent == tmp_path.resolve()


@QUICK
@given(name=ANY_NAME)
def test_what_a_registered_name_and_a_metric_may_be(name: str) -> None:
    key = safe_key(name)
    assert len(key) <= 250
    assert not key.startswith(("/", ".."))
    assert "/../" not in f"/{key}/"
    check_names(DatasetRef("openml", "1", name).key, "bishop")
    if set(name) & set("/\\:\0\n") or name in ("", ".", "..") or len(name) > 250:
        refused(lambda: check_names(name, "bishop"))


@QUICK
@given(first=ANY_NAME, second=ANY_NAME)
def test_two_names_never_share_a_file(first: str, second: str) -> None:
    assert first == second or safe_file_name(first) != safe_file_name(second)


@pytest.mark.parametrize("name", ["a\0b", "a\x1bb", "x" * 251, "../x", "a\u2028b"])
def test_registered_names_that_are_refused(name: str) -> None:
    refused(lambda: check_names(name, "bishop"), "registered name")


# Secrets --------------------------------------------------------------------------------------------------------------

ADDRESSES = [
    f"http://me:{SECRET}@host:5000/x", f"https://{SECRET}@host", f"http://host/x?token={SECRET}",
    f"me:{SECRET}@host:5000",
    f"http://me:a/{SECRET}@host", f"http://me:a?{SECRET}@host", f"http://me:a#{SECRET}@host",
    f"http://me:a@{SECRET}@host",
    f"postgresql://me:{SECRET}@host/db?password={SECRET}", f"http://host/x#{SECRET}",
    f"mssql://h/db?odbc_connect=PWD={SECRET}",
    f"postgresql:///db?user=me&password={SECRET}", f"sqlite:///x.db?key={SECRET}", f"http://h/?a=b@{SECRET}",
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_shown_without_its_secrets(address: str) -> None:
    from bishop_ray.tracking import tracking_uri

    assert SECRET not in public_address(address)
    for call in (lambda: tracking_uri(address), lambda: server_url(address)):
        assert SECRET not in outcome(call)


def test_an_address_without_secrets_is_shown_whole() -> None:
    for address in ("sqlite:////data/a@b/mlflow.db", "http://host:5000/x", "file:///data/a@b", "./a@b", "host:5000"):
        assert public_address(address) == address


def test_the_openml_server_takes_no_password(tmp_path: Path) -> None:
    # The folder of the cache is named after the server.
    assert "secret" not in refused(
        lambda: server_url("http://me:secret@host:8"), "no user or password", "http://host:8"
    )
    assert ServerCache(tmp_path, server_url("http://host:8")).folder.name == "host_8"


@pytest.mark.parametrize("host", ["..", ".", "..:80", "...", "[::1]:80", "a" * 300, "%2e%2e", "..%2f.."])
def test_the_folder_of_a_server_stays_in_the_cache(host: str, tmp_path: Path) -> None:
    folder = ServerCache(tmp_path, f"http://{host}/api/v1/xml").folder
    assert folder.resolve().parent == (tmp_path / "bishop_ray").resolve()
    assert_one_step(folder.name)


def test_a_cached_suite_names_tasks_by_number(tmp_path: Path) -> None:
    cache = ServerCache(tmp_path, "http://host")
    cache.folder.mkdir(parents=True)
    cache.write_suite(1, {"12": "iris"})
    assert cache.read_suite(1) == {"12": "iris"}
    cache.write_suite(1, {"../../../x": "iris"})
    assert cache.read_suite(1) is None


def test_the_openml_key_goes_to_its_own_server_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "openml").mkdir()
    (tmp_path / "openml" / "config").write_text(f"apikey = {SECRET}\n")
    assert api_key(server_url()) == SECRET
    assert api_key("http://127.0.0.1:80/api/v1/xml") == api_key("http://www.openml.org/api/v1/xml") == ""


def test_texts_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "OPENML_APIKEY"):
        monkeypatch.setenv(name, value := f"{name.lower()}-{SECRET}")
        assert scrubbed(f"said {value}!") == "said ***!"
    for text in (*ADDRESSES[:2], f"url: /api/task/1?api_key={SECRET} (refused)", f"password={SECRET}, user=me"):
        assert SECRET not in scrubbed(f"failed: {text}: why")
    monkeypatch.setenv("SOME_TOKEN", "abc")  # a word, not a secret
    for text in ("abc /data/mlflow.db http://host:5000/x", "sqlite:////data/a@b/mlflow.db", "ask me@host"):
        assert scrubbed(text) == text


@pytest.mark.parametrize("error", ["RuntimeError", "UserError"])
def test_a_command_that_fails_shows_no_secret(error: str) -> None:
    code = (
        "from bishop_ray import cli\nfrom bishop_ray.errors import UserError\n"
        f"def main():\n    raise {error}('no answer from http://me:{SECRET}@host:1 to plan')\ncli.run(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if error == "UserError" else 1)
    assert SECRET not in done.stdout + done.stderr
    assert "no answer from http://***@host:1 to plan" in done.stderr
    assert ("Traceback" in done.stderr) == (error == "RuntimeError")


def test_what_a_worker_raised_is_told_in_its_own_words() -> None:
    from ray.exceptions import RayTaskError

    wrapped = RayTaskError("f", "Traceback:\n  line 1\n", UserError("model.txt: damaged")).as_instanceof_cause()
    assert isinstance(wrapped, UserError)
    assert redacted(wrapped) == redacted(UserError("model.txt: damaged")) == "model.txt: damaged"


# Saved predictors -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predictor(RAW).save(tmp_path_factory.mktemp("saved") / "predictor")


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), "utf-8")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every entry of nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


WRONG = [None, True, -1, 0, 1, 2**70, 1e308, "", "../../x", "x" * 300, [], {}, [[]], [{"a": 1}], {"a": []}]


def plant(content: Any, place: tuple[Any, ...], value: object) -> None:
    for key in place[:-1]:
        content = content[key]
    content[place[-1]] = value


@pytest.mark.slow
@settings(QUICK, max_examples=300)
@given(data=st.data())
def test_a_manifest_with_anything_wrong_is_one_clear_line_or_harmless(saved: Path, data: st.DataObject) -> None:
    manifest = json.loads((saved / MANIFEST).read_text("utf-8"))
    place = data.draw(st.sampled_from(sorted(places(manifest), key=str)))
    if place[0] == "hparams" and len(place) > 1:  # 2**70 layers are asked of torch, which is another test
        value = data.draw(st.sampled_from([v for v in WRONG if not isinstance(v, int | float) or v in (-1, 0, 1)]))
    else:
        value = data.draw(st.sampled_from(WRONG))
    plant(manifest, place, value)
    target = saved.with_name("fuzzed")
    if not target.exists():
        copy_of(saved, target)
    (target / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    assert "\n" not in outcome(lambda: Predictor.load(target)), (place, value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": 2, "model": ' + '{"a":' * 50_000, "NaN", "\ufeff{}", '"\\ud800"']
)
def test_a_manifest_that_is_no_manifest(text: str, saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "p")
    (folder / MANIFEST).write_text(text, "utf-8")
    refused(lambda: Predictor.load(folder), MANIFEST)


@pytest.mark.parametrize("name", ["d_model", "n_pool", "d_embedding"])
def test_a_manifest_that_asks_for_more_than_any_machine_has(name: str, saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "p")
    rewrite(folder / MANIFEST, lambda m: m["hparams"].update({name: 2**40}))
    refused(lambda: Predictor.load(folder))


@pytest.mark.parametrize("model", ["../evil", "os:system", "bishop_ray.cli:run", "ensemble"])
def test_a_manifest_that_points_elsewhere(model: str, saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "p")
    rewrite(folder / MANIFEST, lambda m: m.update(model=model))
    refused(lambda: Predictor.load(folder))


ESTIMATORS = ["random_forest", "gbdt", "xgboost", "lightgbm", "catboost"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny fitted estimator."""
    preprocessors = {}
    top = tmp_path_factory.mktemp("estimators")

    def make(name: str) -> Path:
        if (top / name).exists():
            return top / name
        numeric = _numeric(name)
        preprocessor = preprocessors.setdefault(numeric, Preprocessor.fit(RAW, numeric))
        hparams = {"random_forest": {"n_trees": 2}, "xgboost": {"n_rounds": 2}, "lightgbm": {"n_estimators": 2}}
        model = create_model(name, preprocessor.spec, chosen := hparams.get(name, {}))
        assert isinstance(model, Estimator)
        table = preprocessor.transform(RAW)
        model.fit(table, table, lambda done, prediction: True)
        return Predictor(preprocessor, model, name, chosen).save(top / name)

    return make


def _numeric(name: str) -> str:
    from bishop_ray.models import model_class

    return model_class(name).numeric


def payloads(trap: Path) -> dict[str, bytes]:
    """Bytes that run something when they are unpickled."""
    import io

    import cloudpickle
    import joblib

    zipped, packed, array = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": Bomb(trap)}, zipped)
    joblib.dump(Bomb(trap), packed)
    np.save(array, np.array([Bomb(trap)], object), allow_pickle=True)
    return {
        "pickle": pickle.dumps(Bomb(trap)),
        "cloudpickle": cloudpickle.dumps(Bomb(trap)),
        "joblib": packed.getvalue(),
        "torch": zipped.getvalue(),
        "npy": array.getvalue(),
    }


def test_the_payloads_are_live(tmp_path: Path) -> None:
    for number, (kind, content) in enumerate(payloads(tmp_path / "x").items()):
        (tmp_path / "file").write_bytes(content)
        if kind == "npy":
            np.load(tmp_path / "file", allow_pickle=True)
        elif kind == "torch":
            torch.load(tmp_path / "file", weights_only=False)
        elif kind == "joblib":
            import joblib

            joblib.load(tmp_path / "file")
        else:
            pickle.loads(content)
        assert (tmp_path / "x").exists(), (number, kind)
        (tmp_path / "x").unlink()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_file_of_an_estimator_is_unpickled(name: str, fitted: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip(name if name in ("xgboost", "lightgbm", "catboost") else "sklearn")
    source, trap = fitted(name), tmp_path / "executed"
    assert len(Predictor.load(source).predict(RAW.frame)) == len(RAW)
    files = [path.relative_to(source) for path in (source / "model").rglob("*") if path.is_file()]
    for number, (file, content) in enumerate((f, c) for f in files for c in payloads(trap).values()):
        folder = tmp_path / str(number)
        _copy_tree(source, folder)
        (folder / file).write_bytes(content)
        # With a hash that fits: who can write the files can write the manifest too.
        rewrite(folder / MANIFEST, lambda m, f=folder: m.update(weights_sha256=hash_folder(f / "model")))
        refused(lambda f=folder: Predictor.load(f), file.parts[0])
        assert not trap.exists()


def test_no_file_beside_is_unpickled(fitted: Callable[[str], Path], tmp_path: Path) -> None:
    _copy_tree(fitted("random_forest"), folder := tmp_path / "p")
    trap = tmp_path / "executed"
    for kind, content in payloads(trap).items():
        for name in (f"model.{kind}", "model.pkl", "python_model.pkl", "__init__.py", "conftest.py"):
            (folder / name).write_bytes(content)
    assert len(Predictor.load(folder).predict(RAW.frame)) == len(RAW)
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["pickle", "cloudpickle", "joblib", "torch", "npy"])
def test_no_weights_are_unpickled(kind: str, saved: Path, tmp_path: Path) -> None:
    from bishop_ray.predictor.storage import hash_file

    folder, trap = copy_of(saved, tmp_path / "p"), tmp_path / "executed"
    (folder / WEIGHTS).write_bytes(payloads(trap)[kind])
    rewrite(folder / MANIFEST, lambda m: m.update(weights_sha256=hash_file(folder / WEIGHTS)))
    refused(lambda: Predictor.load(folder), WEIGHTS)
    assert not trap.exists()


def _copy_tree(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


# Checkpoints ----------------------------------------------------------------------------------------------------------


class Training:
    """A network of one layer, with everything that a checkpoint holds."""

    def __init__(self) -> None:
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        from bishop_ray.config import TrainConfig
        from bishop_ray.training.distributed import Ranks
        from bishop_ray.training.optimizer import Stepper

        self.network = torch.nn.Linear(2, 1)
        self.stepper = Stepper(self.network, TrainConfig(lr=0.1), Ranks(torch.device("cpu")))
        self.scheduler = ReduceLROnPlateau(self.stepper.optimizer)
        self.network(torch.ones(4, 2)).sum().backward()
        self.stepper.step()

    def save(self, folder: Path) -> Path:
        state = (self.network, self.stepper, self.scheduler, self.network.state_dict())
        checkpoint.save_state(folder, *state, {"epoch": 1}, {"data": "x"})
        return folder / checkpoint.FILE

    def load(self, folder: Path) -> object:
        return checkpoint.load_state(folder, self.network, self.stepper, self.scheduler, {"data": "x"})


@pytest.mark.parametrize("kind", ["pickle", "cloudpickle", "joblib", "torch", "npy"])
def test_no_checkpoint_is_unpickled(kind: str, tmp_path: Path) -> None:
    """Case 85."""
    training, trap = Training(), tmp_path / "executed"
    path = training.save(tmp_path)
    assert training.load(tmp_path)
    path.write_bytes(payloads(trap)[kind])
    refused(lambda: training.load(tmp_path), checkpoint.FILE, "damaged")
    assert not trap.exists()


@pytest.mark.slow
@settings(QUICK, max_examples=100)
@given(data=st.data())
def test_a_checkpoint_with_anything_wrong_is_one_clear_line_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    training = Training()
    path = training.save(tmp_path)
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["state"])
    place = data.draw(st.sampled_from(sorted(places(header), key=str)))
    plant(header, place, data.draw(st.sampled_from(WRONG)))
    save_file(tensors, path, {"state": json.dumps(header)})
    said = outcome(lambda: training.load(tmp_path))
    assert "\n" not in said, place
    if not said:
        training.scheduler.step(1.0)


@pytest.mark.parametrize("key", ["exp_avg/weight", "exp_avg_sq/bias", "step/weight", "weights/weight"])
@pytest.mark.parametrize("change", ["short", "long", "whole numbers", "gone"])
def test_tensors_of_a_checkpoint_that_do_not_fit(key: str, change: str, tmp_path: Path) -> None:
    """The optimizer's kernel trusts the sizes it is given: a short one would have it read what lies behind."""
    training = Training()
    path = training.save(tmp_path)
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        header = file.metadata()
    old = tensors.pop(key)
    if change != "gone":
        tensors[key] = {
            "short": old.reshape(-1)[:0], "long": torch.cat([old.reshape(-1)] * 3), "whole numbers": old.long(),
        }[change].contiguous()  # fmt: skip
    save_file(tensors, path, header)
    if (key, change) == ("weights/weight", "whole numbers"):  # torch converts them
        training.load(tmp_path)
    else:
        refused(lambda: training.load(tmp_path), "does not fit")


# Where models may come from -------------------------------------------------------------------------------------------

SERVER = "http://me:pw@mlflow:5000"


def allowed_and_not(folder: Path) -> list[tuple[str, str, bool]]:
    store = f"sqlite:///{folder}/mlflow.db"
    inside = f"{folder}/mlartifacts/CR/models/m-1/artifacts"
    return [
        (f"file://{inside}", store, True), (inside, store, True), (f"{folder}/mlruns/1/models/m-1", store, True),
        ("file:///etc", store, False), ("/etc", store, False), (f"{folder}", store, False), ("../..", store, False),
        (f"{inside}/../../../../..", store, False), (f"file://{inside}/%2e%2e/%2e%2e/%2e%2e/%2e%2e/x", store, False),
        (f"file://{inside}/%252e%252e/x", store, False), (f"file://evil{inside}", store, False),
        (f"{folder}/mlartifacts-evil/x", store, False), ("s3://bucket/x", store, False), ("", store, False),
        ("mlflow-artifacts:/1/models", store, False), ("runs:/1/model", store, False), ("models:/x/1", store, False),
        ("mlflow-artifacts:/1/models/m-1", SERVER, True), ("mlflow-artifacts://mlflow:5000/1", SERVER, True),
        ("mlflow-artifacts://evil:5000/1", SERVER, False), ("mlflow-artifacts://mlflow:5001/1", SERVER, False),
        ("mlflow-artifacts:/../x", SERVER, False), ("mlflow-artifacts:/%2e%2e/x", SERVER, False),
        ("http://evil/api/2.0/mlflow-artifacts/artifacts/x", SERVER, False), ("ftp://evil/x", SERVER, False),
        (f"file://{inside}", SERVER, False), (inside, SERVER, False), ("s3://bucket/x", SERVER, False),
        ("s3://team/mlflow/1", SERVER, True), ("s3://team/mlflow/../other", SERVER, False),
        ("s3://team/mlflow-evil/1", SERVER, False), ("s3://team.evil/mlflow/1", SERVER, False),
        ("/mnt/models/1", SERVER, True), ("/mnt/models/../x", SERVER, False), ("http://[evil", SERVER, False),
    ]  # fmt: skip


def test_where_the_files_of_a_model_may_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "s3://team/mlflow/, /mnt/models")
    for source, uri, fine in allowed_and_not(tmp_path):
        if fine:
            check_source(source, uri)
        else:
            assert "pw" not in refused(lambda s=source, u=uri: check_source(s, u), "expected", VARIABLE)


def test_a_folder_that_is_a_link_out_of_the_roots(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "mlartifacts").mkdir()
    (tmp_path / "mlartifacts" / "m").symlink_to(tmp_path / "secret")
    refused(lambda: check_source(f"{tmp_path}/mlartifacts/m", f"sqlite:///{tmp_path}/mlflow.db"))


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "dangling", "absolute"])
def test_links_out_of_a_models_folder(kind: str, saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "p")
    (folder / "same").symlink_to(folder / MANIFEST)
    check_links(folder)
    bad = folder / "bad"
    if kind == "pipe":
        os.mkfifo(bad)  # reading it would wait for ever
    else:
        targets = {"file": "../x", "folder": "..", "dangling": "../../nowhere", "absolute": "/etc/passwd"}
        (tmp_path / "x").write_text("x")
        bad.symlink_to(targets[kind])
    refused(lambda: check_links(folder), "bad")
