"""cluster.yaml, checked without a cloud: by Ray's own code, and by rules of ours, each of which is shown to catch the
slip it is for.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import yaml
from cluster_fixtures import CLONE, ROOT, STORAGE, Config, change_at, environment, locked_ray


def on_loopback(command: str, flag: str) -> bool:
    """A command names this host for `flag`."""
    words = shlex.split(command.replace("=", " "))
    return all(after == "127.0.0.1" for word, after in pairwise(words) if word == flag)


@pytest.fixture
def cluster() -> Config:
    loaded: Config = yaml.safe_load((ROOT / "cluster.yaml").read_text("utf-8"))
    return loaded


def prepared(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """What `ray up` makes of the file before it asks the cloud anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.chdir(ROOT)  # the file's own paths are those of the clone
    done: Config = prepare_config(copy.deepcopy(config))
    validate_config(done)
    return done


def cluster_problems(config: Config, version: str) -> list[str]:
    """What would go wrong on a cluster of this file, and Ray's own check does not see."""
    return [
        *_image_problems(config, version),
        *_node_problems(config),
        *_start_problems(config),
    ]


def _image_problems(config: Config, version: str) -> Iterator[str]:
    kinds = config["available_node_types"]
    images = {"docker": config["docker"]["image"]}
    images |= {name: kind["docker"]["worker_image"] for name, kind in kinds.items() if "docker" in kind}
    for name, image in images.items():
        gpu = bool(kinds.get(name, {}).get("resources", {}).get("GPU"))
        expected = f"rayproject/ray:{version}-py311{'-gpu' if gpu else ''}"
        if image != expected:
            yield f"{name}: image {image}, expected {expected} as requirements.lock"
    for name, kind in kinds.items():
        if kind["resources"].get("GPU") and name not in images:
            yield f"{name}: has GPUs and no image for them"


def _node_problems(config: Config) -> Iterator[str]:
    docker = config["docker"]
    for place in ("head_run_options", "worker_run_options"):
        env = environment(docker.get("run_options", []) + docker.get(place, []))
        if env.get("BISHOP_RAY_HOME") != STORAGE:
            yield f"{place}: BISHOP_RAY_HOME is not {STORAGE}"
        if env.get("RAY_AUTH_MODE") != "token":
            yield f"{place}: token authentication is off"
        if not env.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://")):
            yield f"{place}: no MLflow address"
        if int(env.get("RAY_JOB_STOP_WAIT_TIME_S", "3")) < 30:
            yield f"{place}: a stopped job is killed before it has closed its runs"
    if f"{STORAGE}:{STORAGE}" not in " ".join(docker["run_options"]):
        yield "the container does not see the storage"
    if not any("mount -t nfs4" in command and STORAGE in command for command in config["initialization_commands"]):
        yield "the machine does not mount the storage"
    mounts = config["file_mounts"]
    if mounts.get("/home/ray/.ray/auth_token") != "~/.ray/auth_token":
        yield "the token does not reach the nodes"
    if mounts.get(CLONE) != ".":
        yield "the clone does not reach the nodes"
    setup = " ; ".join(config["setup_commands"])
    if f"-r {CLONE}/requirements.lock" not in setup or not re.search(
        rf"pip install .*--no-deps .*{CLONE}( ;|$)", setup
    ):
        yield "the locked libraries or the project are not installed on every node"
    head = config["available_node_types"][config["head_node_type"]]
    if head["resources"] != {"CPU": 0, "GPU": 0}:
        yield "trials may run on the head"
    kinds = [kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]]
    if not any(kind["resources"].get("CPU") and kind["min_workers"] for kind in kinds):
        yield "no worker is up at first: a job would find no CPU"


def _start_problems(config: Config) -> Iterator[str]:
    for place in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in config[place] if "ray start" in command]
        if len(starts) != 1 or not starts[0].startswith(f"cd {CLONE} &&"):
            yield f"{place}: Ray does not start in the clone, where jobs look for jobs/tune.py"
        for command in config[place]:
            for flag in ("--dashboard-host", "--host"):
                if not on_loopback(command, flag):
                    yield f"{place}: {flag} is not 127.0.0.1"


def test_ray_accepts_the_cluster_file(cluster: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    done = prepared(cluster, monkeypatch)
    assert cluster_problems(cluster, locked_ray()) == []
    kinds = done["available_node_types"]
    assert kinds[done["head_node_type"]]["max_workers"] == 0
    assert all(0 < kind["min_workers"] <= kind["max_workers"] for name, kind in kinds.items() if name != "head")
    assert (
        max(kind["max_workers"] for kind in kinds.values())
        < done["max_workers"]
        <= sum(kind["max_workers"] for kind in kinds.values())
    )
    assert any(k["node_config"].get("InstanceMarketOptions") == {"MarketType": "spot"} for k in kinds.values())
    assert done["idle_timeout_minutes"] > 0
    assert any("boto3" in command for command in done["head_setup_commands"]), "the head starts the others"


def _without_env(name: str) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        options = config["docker"]["run_options"]
        kept = [option for option in options if name not in option]
        assert len(kept) == len(options) - 1
        config["docker"]["run_options"] = kept

    return change


def _storage_on_the_head_only(config: Config) -> None:
    _without_env("BISHOP_RAY_HOME")(config)
    config["docker"]["head_run_options"] = [f"--env BISHOP_RAY_HOME={STORAGE}"]


KINDS = "available_node_types"
SLIPS: dict[str, tuple[Callable[[Config], None], str]] = {
    "image of another Ray": (change_at("docker", "image", value="rayproject/ray:2.59.0-py311"), "requirements.lock"),
    "CPU image on GPUs": (
        change_at(KINDS, "gpu_spot", "docker", value={"worker_image": "rayproject/ray:x"}),
        "gpu_spot",
    ),
    "no image for GPUs": (lambda config: config[KINDS]["gpu_spot"].pop("docker"), "gpu_spot"),
    "storage unknown to workers": (_storage_on_the_head_only, "worker_run_options: BISHOP_RAY_HOME"),
    "storage not mounted": (change_at("initialization_commands", value=[]), "does not mount"),
    "no token": (_without_env("RAY_AUTH_MODE"), "token authentication is off"),
    "token left behind": (change_at("file_mounts", value={CLONE: "."}), "token does not reach"),
    "no MLflow": (_without_env("MLFLOW_TRACKING_URI"), "MLflow"),
    "stopped jobs are killed": (_without_env("RAY_JOB_STOP_WAIT_TIME_S"), "killed before"),
    "not installed": (change_at("setup_commands", value=["pip install pandas"]), "not installed"),
    "trials on the head": (change_at(KINDS, "head", "resources", value={"CPU": 4}), "on the head"),
    "nothing up at first": (change_at(KINDS, "cpu", "min_workers", value=0), ""),
    "open dashboard": (
        change_at("head_start_ray_commands", 1, value=f"cd {CLONE} && ray start --head --dashboard-host=0.0.0.0"),
        "--dashboard-host",
    ),
    "started elsewhere": (change_at("worker_start_ray_commands", 1, value="ray start --address=x"), "jobs/tune.py"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_the_cluster_file_is_seen(slip: str, cluster: Config) -> None:
    change, message = SLIPS[slip]
    if slip == "nothing up at first":
        cluster[KINDS]["gpu_spot"]["min_workers"], message = 0, "no CPU"
    change(cluster)
    found = cluster_problems(cluster, locked_ray())
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    "change",
    [
        change_at("max_worker", value=3),
        change_at("docker", "images", value="x"),
        change_at("idle_timeout_minutes", value="ten"),
        change_at("head_node_type", value="heads"),
        change_at("max_workers", value=1),
        lambda config: config["docker"].pop("container_name"),
    ],
)
def test_ray_refuses_a_broken_cluster_file(
    change: Callable[[Config], None], cluster: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jsonschema import ValidationError

    change(cluster)
    with pytest.raises((ValidationError, ValueError, AssertionError)):
        prepared(cluster, monkeypatch)
