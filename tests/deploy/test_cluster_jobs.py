"""Jobs on three nodes through Ray's job API, as cluster.yaml has them: followed, stopped, failed, refused."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from cluster_nodes import BIN, WORKERS, Nodes, answer, three_nodes, until
from fault_tools import TABLE

pytestmark = pytest.mark.faults

TUNE = "python jobs/tune.py"
SHORT = f"{TUNE} --dataset breast_cancer --trials 2 --max-epochs 1 --eval-seeds 1"
LONG = f"{TUNE} --dataset breast_cancer --seed 1 --trials 500 --max-epochs 30 --eval-seeds 1"
WRONG = f"{TUNE} --dataset breast_cancre --trials 2"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with three_nodes() as running:
        yield running


WAIT_FOR_CPUS = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
    time.sleep(0.1)
print("free", ray.cluster_resources()["CPU"])
"""


def test_the_line_of_the_readme_runs_from_another_folder_and_its_log_is_followed(nodes: Nodes) -> None:
    done = nodes.ray("job", "submit", "--", *shlex.split(SHORT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "registered model: breast_cancer (version 1" in done.stdout
    assert "succeeded" in done.stdout
    assert nodes.trials("breast_cancer-bishop-s0") == ["COMPLETE", "COMPLETE"]
    assert nodes.runs() == ["FINISHED"] * 3, "the study and its trials"


def test_a_stopped_job_leaves_no_run_open_and_no_cpu_taken(nodes: Nodes) -> None:
    before = len(nodes.runs())
    job = nodes.submit(LONG)
    until(lambda: nodes.runs().count("RUNNING") >= 2 or nodes.state(job) == "FAILED", 90, "a trial")
    assert nodes.state(job) == "RUNNING", nodes.log(job)
    stopped = nodes.ray("job", "stop", job, at_home=False)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert nodes.state(job) == "STOPPED"
    ended = time.monotonic()
    wait = [sys.executable, "-c", WAIT_FOR_CPUS, nodes.head]
    free = subprocess.run(wait, env=nodes.environment, capture_output=True, text=True, timeout=30)
    assert free.stdout.split() == ["free", f"{float(WORKERS)}"], free.stderr
    assert time.monotonic() - ended < 10
    runs = nodes.runs()
    assert len(runs) > before
    assert "RUNNING" not in runs, nodes.log(job)
    assert "Traceback" not in nodes.log(job)


def test_a_mistake_ends_as_failed_with_its_one_line(nodes: Nodes) -> None:
    job = nodes.submit(WRONG)
    until(lambda: nodes.state(job) in ("FAILED", "SUCCEEDED", "STOPPED"), 60, "the end")
    assert nodes.state(job) == "FAILED"
    lines = [line for line in nodes.log(job).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert "breast_cancre" in errors[0]
    assert "Traceback" not in "\n".join(lines)


def test_without_the_token_nothing_is_answered(nodes: Nodes) -> None:
    for path, body in (("/api/jobs/", None), ("/api/jobs/", {"entrypoint": "true"}), ("/nodes?view=summary", None)):
        assert answer(nodes.api + path, body=body)[0] == 401
        assert answer(nodes.api + path, "0" * 64, body)[0] == 403
    bare = {name: value for name, value in nodes.environment.items() if not name.startswith("RAY_AUTH")}
    bare["HOME"] = str(nodes.folder)
    command = [str(BIN / "ray"), "job", "list", "--address", nodes.api]
    assert subprocess.run(command, env=bare, capture_output=True, timeout=60).returncode != 0
    assert nodes.ray("job", "list").returncode == 0


def test_a_node_killed_half_way_loses_no_trial(nodes: Nodes) -> None:
    """The last one: a node is gone afterwards."""
    before = len(nodes.runs())
    job = nodes.submit(f"{TUNE} --dataset breast_cancer --seed 2 --trials 6 --max-epochs 6 --eval-seeds 1")
    until(lambda: "started" in nodes.log(job), 90, "a trial")
    until(lambda: sum(nodes.reports("breast_cancer-bishop-s2").values()) >= 3, 120, "reports")
    nodes.kill("worker1")
    until(lambda: nodes.state(job) in ("FAILED", "SUCCEEDED", "STOPPED"), 300, "the end")
    log = nodes.log(job)
    assert nodes.state(job) == "SUCCEEDED", log
    assert "lost its process or node and goes on from its checkpoint" in log, log
    states = Counter(nodes.trials("breast_cancer-bishop-s2"))
    runs = Counter(nodes.runs()[: -before or None])
    TABLE.append(
        {
            "fault": "a node of three killed (SIGKILL), 2 slots", "asked": 6, "finished": states["COMPLETE"],
            "early-stopped": states["PRUNED"], "failed": states["FAIL"], "lost": 6 - states.total(), "duplicated": 0,
            "MLflow runs": ", ".join(f"{count} {status}" for status, count in sorted(runs.items())),
        }
    )  # fmt: skip
    assert states["COMPLETE"] + states["PRUNED"] == states.total() == 6
    assert runs.total() == 7
    assert "RUNNING" not in runs
