"""A storage folder that another node does not see is found before the first trial."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bishop_ray.errors import UserError
from bishop_ray.search.cluster import QUIET, _own_token, check_shared

pytestmark = pytest.mark.faults

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def hidden() -> Iterator[Path]:
    """A folder that the second node of the cluster, in a mount namespace of its own, has an empty one in place of."""
    import ray

    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))  # sockets lie below it, and paths may have 107 bytes
    (folder / "ray").mkdir()
    (folder / "hidden").mkdir()
    (folder / "seen").mkdir()
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    _own_token()
    ray.init(address="local", include_dashboard=False, num_cpus=1, _temp_dir=str(folder / "ray"), log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    start = f"{RAY} start --address={address} --num-cpus=1 --block --disable-usage-stats --object-store-memory={10**8}"
    script = f"mount -t tmpfs none {shlex.quote(str(folder / 'hidden'))} && exec {start}"
    node = subprocess.Popen(
        ["unshare", "-m", "bash", "-c", script],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        ends = time.monotonic() + 60
        while sum(n["Alive"] for n in ray.nodes()) < 2:
            assert node.poll() is None, "the second node did not start"
            assert time.monotonic() < ends
            time.sleep(0.2)
        yield folder
    finally:
        node.terminate()
        try:
            node.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_folder_that_a_node_does_not_see_is_refused(hidden: Path) -> None:
    with pytest.raises(UserError, match=r"--storage: .*hidden is not shared: node .* does not see what is written"):
        check_shared(hidden / "hidden")
    check_shared(hidden / "seen" / "new")
    assert not list((hidden / "seen" / "new").iterdir()), "the mark is taken away"
    (hidden / "file").touch()
    with pytest.raises(UserError, match="--storage: cannot write"):
        check_shared(hidden / "file")
