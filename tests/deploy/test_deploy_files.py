"""deploy/Dockerfile and deploy/rayjob.yaml, checked without a cluster: by KubeRay's own schema where
``BISHOP_KUBERAY_CRD`` names it, and by rules of ours, each of which is shown to catch the slip it is for.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_fixtures import CLONE, ROOT, Config, change_at, locked_ray

from bishop_ray import cli


@pytest.fixture
def manifest() -> dict[str, Config]:
    documents = yaml.safe_load_all((ROOT / "deploy" / "rayjob.yaml").read_text("utf-8"))
    return {document["kind"]: document for document in documents}


def pods(job: Config) -> dict[str, Config]:
    """The pod template of every part of the job."""
    cluster = job["spec"]["rayClusterSpec"]
    found = {"head": cluster["headGroupSpec"]["template"], "submitter": job["spec"]["submitterPodTemplate"]}
    return found | {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}


def rayjob_problems(manifest: dict[str, Config], version: str) -> list[str]:
    """What would go wrong with this manifest, and no schema sees."""
    job = manifest["RayJob"]
    cluster = job["spec"]["rayClusterSpec"]
    found = []
    if job["apiVersion"] != "ray.io/v1" or cluster["rayVersion"] != version:
        found.append(f"not ray.io/v1 with Ray {version} of requirements.lock")
    if cluster.get("authOptions", {}).get("mode") != "token":
        found.append("token authentication is off")
    if not job["spec"].get("shutdownAfterJobFinishes"):
        found.append("the cluster outlives the job")
    if cluster["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        found.append("trials may run on the head")
    for group in cluster["workerGroupSpecs"]:
        if not 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            found.append(f"{group['groupName']}: replicas out of order, or none at first")
    for name, pod in pods(job).items():
        found += [f"{name}: {problem}" for problem in _pod_problems(pod["spec"], version, name == "submitter")]
    claims = {pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] for pod in _storing(job)}
    volume = manifest["PersistentVolumeClaim"]
    if claims != {volume["metadata"]["name"]} or volume["spec"]["accessModes"] != ["ReadWriteMany"]:
        found.append("not one volume that all pods can write")
    return found


def _storing(job: Config) -> list[Config]:
    return [pod for name, pod in pods(job).items() if name != "submitter"]


def _pod_problems(spec: Config, version: str, submitter: bool) -> Iterator[str]:
    person = spec.get("securityContext", {})
    if not (person.get("runAsNonRoot") and person.get("runAsUser")):
        yield "may run as root"
    for box in spec["containers"]:
        limits, requests = box["resources"]["limits"], box["resources"]["requests"]
        if not {"cpu", "memory"} <= limits.keys() & requests.keys():
            yield "CPUs or memory unbounded"
        gpu = "-gpu" if limits.get("nvidia.com/gpu") else ""
        if not box["image"].endswith(f":{version}-py311{gpu}"):
            yield f"image {box['image']}: tag is not {version}-py311{gpu} as requirements.lock"
        if box.get("securityContext", {}).get("allowPrivilegeEscalation") is not False:
            yield "may gain privileges"
        if submitter:
            continue
        env = {entry["name"]: entry.get("value", "") for entry in box.get("env", [])}
        if env.get("BISHOP_RAY_HOME") not in [mount["mountPath"] for mount in box["volumeMounts"]]:
            yield "BISHOP_RAY_HOME is not on the volume"
        if not env.get("MLFLOW_TRACKING_URI"):
            yield "no MLflow address"
        if box.get("workingDir") != CLONE:
            yield "jobs do not start in the clone"
        if "RAY_AUTH_TOKEN" in env:
            yield "a token in the file"


def test_the_manifest_holds_to_our_rules(manifest: dict[str, Config]) -> None:
    assert rayjob_problems(manifest, locked_ray()) == []


JOB = ("RayJob", "spec")
GROUP = (*JOB, "rayClusterSpec", "workerGroupSpecs", 0)
BOX = (*GROUP, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_at(*JOB, "rayClusterSpec", "rayVersion", value="2.59.0"), "requirements.lock"),
        (change_at(*JOB, "rayClusterSpec", "authOptions", value={}), "token"),
        (change_at(*JOB, "shutdownAfterJobFinishes", value=False), "outlives"),
        (change_at(*GROUP, "minReplicas", value=0), "replicas"),
        (change_at(*BOX, "image", value="bishop-ray:latest"), "cpu: image"),
        (change_at(*BOX, "resources", "limits", value={"cpu": 1}), "unbounded"),
        (change_at(*BOX, "env", value=[]), "BISHOP_RAY_HOME"),
        (change_at(*BOX, "workingDir", value="/"), "clone"),
        (change_at(*GROUP, "template", "spec", "securityContext", value={}), "root"),
        (change_at("PersistentVolumeClaim", "spec", "accessModes", value=["ReadWriteOnce"]), "volume"),
    ],
)
def test_a_slip_in_the_manifest_is_seen(
    change: Callable[[Config], None], message: str, manifest: dict[str, Config]
) -> None:
    manifest = copy.deepcopy(manifest)  # anchors share their objects: a change must stay where it is made
    change(manifest)
    assert any(message in problem for problem in rayjob_problems(manifest, locked_ray()))


def test_kuberay_accepts_the_manifest(manifest: dict[str, Config]) -> None:
    from jsonschema import Draft4Validator

    path = os.environ.get("BISHOP_KUBERAY_CRD", "")
    if not path:
        pytest.skip("needs BISHOP_KUBERAY_CRD: KubeRay's helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml")
    definition = yaml.load(Path(path).read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schema = next(v for v in definition["spec"]["versions"] if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    check = Draft4Validator(_strict(schema))
    problems = [f"{list(error.absolute_path)}: {error.message}" for error in check.iter_errors(manifest["RayJob"])]
    assert problems == []
    broken = copy.deepcopy(manifest["RayJob"])
    broken["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    broken["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "password"
    broken["spec"]["backoffLimit"] = "two"
    assert len(list(check.iter_errors(broken))) == 3, "the schema is strict"


def _strict(schema: Any) -> Any:
    """An openAPI schema in which unknown fields are errors, as for ``kubectl apply --validate=strict``."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    done = {key: _strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        done["properties"] = {name: _strict(part) for name, part in schema["properties"].items()}
        # apiVersion, kind and metadata aside, an object that lists its fields has no others.
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            done.setdefault("additionalProperties", False)
    return done


def test_the_command_of_the_manifest_is_one_of_ours(manifest: dict[str, Config]) -> None:
    python, script, *flags = shlex.split(manifest["RayJob"]["spec"]["entrypoint"])
    assert python == "python"
    assert (ROOT / script).is_file()
    assert cli.tune_parser().parse_args(flags).suite == "CR"
    assert f"ray job submit -- python {script} --suite CR" in (ROOT / "cluster.yaml").read_text("utf-8")


def instructions(name: str) -> list[tuple[str, str]]:
    """The Dockerfile's lines, continued ones joined."""
    text = (ROOT / "deploy" / name).read_text("utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [(word, rest.strip()) for word, _, rest in (li.partition(" ") for li in lines if li and li[0] != "#")]


def test_the_image_is_rays_own_with_the_lock_file_and_nobody_is_root() -> None:
    steps = instructions("Dockerfile")
    assert steps[0] == ("ARG", f"RAY_IMAGE=rayproject/ray:{locked_ray()}-py311")
    assert ("FROM", "${RAY_IMAGE}") in steps
    assert [rest for word, rest in steps if word == "USER"] == ["1000:100"]
    assert ("WORKDIR", CLONE) in steps
    runs = [rest for word, rest in steps if word == "RUN"]
    assert any("-r requirements.lock" in run for run in runs)
    assert runs[-1].endswith("--no-deps .")
    assert not any(re.search(r"TOKEN|PASSWORD|SECRET|KEY", rest) for word, rest in steps if word in ("ARG", "ENV"))
    assert any(word == "ENV" and "RAY_AUTH_MODE=token" in rest for word, rest in steps)


def test_comments_and_commands_name_the_locked_ray_too() -> None:
    for name in ("cluster.yaml", "deploy/Dockerfile", "deploy/rayjob.yaml"):
        text = (ROOT / name).read_text("utf-8")
        named = re.findall(r"[:=\s\"](\d+\.\d+\.\d+)(?=-py311|\")", text)
        assert set(named) == {locked_ray()}, name


def test_the_image_gets_what_it_copies_and_nothing_else() -> None:
    copied = {source for word, rest in instructions("Dockerfile") if word == "COPY" for source in rest.split()[1:-1]}
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert "*" in ignored
    assert all((ROOT / source).exists() for source in copied)
    assert {"bishop_ray", "search_spaces", "jobs", "requirements.lock", "pyproject.toml"} <= copied
