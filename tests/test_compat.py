"""What `bishop_ray._compat` relies on in each library, checked where the library is the one that is installed.

A failure here says that a library has changed behind its public face: read the function that is named again, against
the library's new source, before its upper bound in ``pyproject.toml`` is raised.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from sklearn.tree import DecisionTreeRegressor
from torch.utils.checkpoint import checkpoint

from bishop_ray._compat import optuna as optuna_parts
from bishop_ray._compat import ray as ray_parts
from bishop_ray._compat import sklearn as sklearn_parts
from bishop_ray._compat import torch as torch_parts
from bishop_ray.search.journal import open_journal
from bishop_ray.serving.deployment import RUNNING

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"ray": "ray", "optuna": "optuna", "openml": "openml", "torch": "torch", "sklearn": "scikit-learn"}
TUNE = "ray.tune.execution.tune_controller"
TRAINER = "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer"

# Where, what its source must say (None: that it exists), and who relies on it.
CONTRACTS: list[tuple[str, str | None, Callable[..., Any]]] = [
    ("ray._private.services:start_ray_process", r"command:.*\n\s*process_type:", ray_parts.on_loopback),
    ("ray._private.services:start_ray_process", r"env_updates:", ray_parts.on_loopback),
    ("ray._private.services:get_node_ip_address", "ray_constants.ENABLE_RAY_CLUSTER", ray_parts.on_loopback),
    ("ray._private.ray_constants:PROCESS_TYPE_DASHBOARD", None, ray_parts.on_loopback),
    ("ray._raylet:Config.initialize", None, ray_parts.reread_access),
    ("ray._raylet:AuthenticationTokenLoader.instance", None, ray_parts.reread_access),
    ("ray._private.state:available_resources_per_node", r"\(\):", ray_parts.available_by_node),
    ("ray.tune.execution.class_cache:_ActorClassCache.get", "in ENV_VARS_TO_PROPAGATE", ray_parts.keep_out_of_logs),
    (f"{TUNE}:TrialRunnerWrapper.__init__", "self._tune_controller = tune_controller", ray_parts.TuneProcesses),
    (f"{TUNE}:TuneController.__init__", "self._actor_manager = ", ray_parts.TuneProcesses.end),
    (f"{TUNE}:TuneController.__init__", "self._trial_to_actor", ray_parts.TuneProcesses.starting),
    (f"{TUNE}:TuneController._process_trial_failure", r"trial: Trial,\s+exception:", ray_parts.TuneProcesses.fail),
    (f"{TUNE}:TuneController.update_max_pending_trials", "max_pending_trials:", ray_parts.TuneProcesses.let_wait),
    (
        "ray.air.execution._internal.actor_manager:RayActorManager.is_actor_started",
        "tracked_actor:",
        ray_parts.TuneProcesses.starting,
    ),
    ("ray.air.execution._internal.actor_manager:RayActorManager.cleanup", None, ray_parts.TuneProcesses.end),
    (f"{TRAINER}._create_default_callbacks", "(?s)DatasetsCallback.*PlacementGroupCleaner", ray_parts.lean_trainer),
    (f"{TRAINER}.fit", r"callbacks=self\._create_default_callbacks\(\)", ray_parts.lean_trainer),
    (
        f"{TRAINER}._initialize_and_run_controller",
        r"self\._register_sigint_handler\(controller\)",
        ray_parts.lean_trainer,
    ),
    ("ray.experimental.internal_kv:_internal_kv_put", "(?s)key:.*value:", ray_parts.remember_group),
    ("ray.experimental.internal_kv:_internal_kv_get", "key:", ray_parts.release_group),
    ("ray.experimental.internal_kv:_internal_kv_del", "key:", ray_parts.release_group),
    ("ray.util.placement_group:PlacementGroup.__init__", 'id: "ray._raylet.PlacementGroupID"', ray_parts.release_group),
    ("ray.serve._private.replica", r"add_port_to_grpc_server\(self\._server, ", ray_parts.replica_on_loopback),
    ("ray.serve.context:_get_global_client", None, ray_parts.serve_address),
    ("ray.serve._private.client:ServeControllerClient.http_config", None, ray_parts.serve_address),
    ("optuna.trial:Trial.__init__", "(?s)study.*trial_id: int", optuna_parts.take_up),
    ("openml._api_calls", r"requests\.Session\(\)", importlib.import_module("bishop_ray._compat.openml").variant),
]  # fmt: skip


def found(where: str) -> Any:
    """The object at ``module:name.name``, or the module."""
    module, _, names = where.partition(":")
    thing = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        thing = inspect.getattr_static(thing, name)
    return thing


@pytest.mark.parametrize(("where", "says", "user"), CONTRACTS, ids=lambda value: str(getattr(value, "__name__", value)))
def test_a_private_part_is_as_it_was(where: str, says: str | None, user: Callable[..., Any]) -> None:
    library = LIBRARIES[where.split(".")[0]]
    lacks = "is gone" if says is None else f"lacks {says!r}"
    change = (
        f"{library} {metadata.version(library)} has changed: {where} {lacks}; "
        f"{user.__module__}.{user.__qualname__} relies on it"
    )
    try:
        thing = found(where)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{change} ({error})")
    if says is not None:
        assert re.search(says, inspect.getsource(inspect.unwrap(thing))), change


@pytest.mark.parametrize(("module", "library"), LIBRARIES.items())
def test_a_library_is_bound_to_what_was_verified(module: str, library: str) -> None:
    tree = ast.parse((ROOT / f"bishop_ray/_compat/{module}.py").read_text("utf-8"))
    verified = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERIFIED"
    )
    major, minor = Version(verified).release[:2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    mine = [r for r in map(Requirement, wanted) if canonicalize_name(r.name) == library]
    assert mine
    for requirement in mine:
        assert f"<{major}.{minor + 1}" in str(requirement.specifier), f"{requirement}: verified is {verified}"
        assert verified in requirement.specifier
    locked = re.search(rf"^{library}==(\S+)", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    assert locked is not None
    assert locked[1] == verified, f"{library} {locked[1]} is in requirements.lock; its private parts: {verified}"
    installed = Version(metadata.version(library)).release[:2]
    assert installed == (major, minor), f"{library} {installed} is installed; its private parts were read in {verified}"


def test_ray_starts_on_loopback_within_alone() -> None:
    from ray._private import ray_constants, services

    before = services.start_ray_process, ray_constants.ENABLE_RAY_CLUSTER
    with ray_parts.on_loopback():
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1", (
            "Ray takes another address than it is given"
        )
        assert services.start_ray_process is not before[0]
    assert (services.start_ray_process, ray_constants.ENABLE_RAY_CLUSTER) == before


def test_tune_hands_no_credentials_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.tune.execution import class_cache

    names = {"AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RAY_TRAIN_ENABLE_STATE_TRACKING"}
    monkeypatch.setattr(class_cache, "ENV_VARS_TO_PROPAGATE", names)
    ray_parts.keep_out_of_logs()
    left = class_cache.ENV_VARS_TO_PROPAGATE
    assert left == {"RAY_TRAIN_ENABLE_STATE_TRACKING"}


def test_tune_forgets_averages(tmp_path: Path) -> None:
    from ray.tune.experiment import Trial

    trial = Trial("none", stub=True)
    trial.update_last_result({"score": 1.0, "training_iteration": 1})
    assert trial.metric_analysis["score"]["last"] == 1.0, "Tune's averages are elsewhere now"
    ray_parts.forget_averages(trial)
    assert not trial.metric_analysis
    assert not trial.metric_n_steps
    trial.update_last_result({"score": 2.0, "training_iteration": 2})
    assert trial.metric_analysis["score"]["max"] == 2.0


def test_ray_train_keeps_what_is_used() -> None:
    trainer = ray_parts.lean_trainer()(lambda: None)
    names = {type(part).__name__ for part in trainer._create_default_callbacks()}
    assert "BackendSetupCallback" in names, "the process group would not be set up"
    assert not names & set(ray_parts.UNUSED)


def test_serve_counts_replicas_by_state() -> None:
    from ray.serve import schema

    assert schema.ReplicaState(RUNNING).value == RUNNING
    assert "replica_states: Dict[ReplicaState, int]" in inspect.getsource(schema.DeploymentStatusOverview)


def test_optuna_takes_a_trial_up_again(tmp_path: Path) -> None:
    study = optuna.create_study(storage=open_journal(tmp_path / "journal"))
    study.ask()
    asked = study.ask()
    asked.report(0.5, 1)
    again = optuna_parts.take_up(study, asked.number)
    assert again.number == asked.number
    again.set_user_attr("seen", True)
    study.tell(again, 0.25)
    assert study.trials[1].value == 0.25
    assert study.trials[1].user_attrs == {"seen": True}
    assert study.trials[1].intermediate_values == {1: 0.5}


def test_optuna_names_the_details_of_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    study = optuna.create_study(storage=open_journal(path))

    def codes(act: Callable[[], object]) -> set[int]:
        before = len(path.read_text("utf-8").splitlines())
        act()
        return {json.loads(line)["op_code"] for line in path.read_text("utf-8").splitlines()[before:]}

    details = optuna_parts.DETAILS
    trial = study.ask()
    assert codes(lambda: trial.suggest_float("x", 0, 1)) <= details
    assert codes(lambda: trial.report(1.0, 1)) <= details
    assert codes(lambda: trial.set_user_attr("a", 1)) <= details
    assert not codes(study.ask) & details
    assert not codes(lambda: study.set_user_attr("a", 1)) & details
    assert codes(lambda: study.tell(trial, 1.0)) - details, "the end of a trial would not be on the disk"


@pytest.mark.parametrize("name", ["Session", "Minio"])
def test_openml_makes_requests_by_module_name(name: str) -> None:
    from openml import _api_calls

    from bishop_ray._compat.openml import request_through

    class Own:
        pass

    class Client:
        """A copy of the module, so that this process's own stays as it is."""

        _api_calls = importlib.util.module_from_spec(importlib.util.find_spec("openml._api_calls"))  # type: ignore[arg-type]

    vars(Client._api_calls).update(vars(_api_calls))
    request_through(Client, Own, Own)
    copy: Any = Client._api_calls
    assert {"Session": copy.requests.Session, "Minio": copy.minio.Minio}[name] is Own
    assert {"Session": _api_calls.requests.Session, "Minio": _api_calls.minio.Minio}[name] is not Own
    used = {"Session": r"requests\.Session\(", "Minio": r"minio\.Minio\("}[name]
    assert re.search(used, inspect.getsource(_api_calls)), f"openml makes its requests in another way than {used}"
    assert not re.search(r"from (requests|minio|logging) import", inspect.getsource(_api_calls))


def test_openml_describes_a_task_alone() -> None:
    import openml

    source = inspect.getsource(openml.tasks.functions._get_task_description)
    assert "_perform_api_call" in source
    assert "get_dataset" not in source, "it would ask for the data set too"


def test_torch_says_what_an_operation_does() -> None:
    seen = []

    class Seen(torch_parts.UncompiledMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        value = torch.ones(2) + 1
        value.add_(1)
        value.sum().item()
    by_name = {func.overloadpacket.__name__: func for func in seen}
    assert not torch_parts.schema(by_name["add"]).is_mutable
    assert torch_parts.schema(by_name["add_"]).is_mutable
    assert torch_parts.LOCAL_SCALAR in seen
    assert torch_parts.UncompiledMode._should_skip_dynamo() is False
    assert torch_parts.DispatchMode._should_skip_dynamo() is True, "modes are no longer guarded: is this still needed?"


def test_torch_attention_of_a_cpu() -> None:
    query = torch.randn(1, 2, 3, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(torch_parts.CPU_ATTENTION(query, query, query)[0], expected)
    assert torch_parts.CPU_ATTENTION_BACKWARD.default is not None


def test_torch_lists_modes_and_constructors() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    assert not torch_parts.function_modes()
    with Mode() as outer, Mode() as inner:
        assert torch_parts.function_modes() == [outer, inner]
    assert {torch.empty, torch.zeros, torch.arange, torch.tensor} <= torch_parts.device_constructors()
    assert torch.add not in torch_parts.device_constructors()
    assert "context_fn" in inspect.signature(checkpoint).parameters


def test_torch_knows_storages_apart() -> None:
    whole, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    key = torch_parts.storage_key(whole.untyped_storage())
    assert torch_parts.storage_key(whole[:2].untyped_storage()) == key
    assert torch_parts.storage_key(other.untyped_storage()) != key


def test_torch_works_on_lists() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    torch_parts.copy_each(targets, sources)
    assert [t.tolist() for t in targets] == [[1, 1], [2, 2, 2]]
    torch.testing.assert_close(torch.stack(list(torch_parts.norm_each(targets))), torch.tensor([2.0, 12.0]).sqrt())
    torch_parts.assert_async(torch.tensor(True))
    with pytest.raises(RuntimeError):
        torch_parts.assert_async(torch.tensor(False))


def test_sklearn_makes_a_tree_from_arrays() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    fitted = DecisionTreeRegressor(max_depth=4, random_state=0).fit(x, x[:, 0] * x[:, 1]).tree_
    nodes = sklearn_parts.empty_nodes(fitted.node_count)
    nodes["left_child"], nodes["right_child"] = fitted.children_left, fitted.children_right
    nodes["feature"], nodes["threshold"] = fitted.feature, fitted.threshold
    made = sklearn_parts.make_tree(3, fitted.max_depth, nodes, fitted.value.copy())
    np.testing.assert_array_equal(made.predict(x), fitted.predict(x))
