"""Whether all nodes of a cluster see the same storage folder: checked before the first trial, not found by the last."""

from __future__ import annotations

import secrets
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from bishop_ray.errors import UserError

SECONDS = 30.0
"""How long a node may take to answer; one that is busy is taken for good."""


def check_shared(storage: Path) -> None:
    """Leaves a file in `storage` and looks for it from every other node.

    Raises:
        UserError: A node does not see it, or the folder cannot be written; names node and folder.
    """
    here = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others.pop(here, None)
    if not others:
        return
    mark = storage / f".seen-{secrets.token_hex(8)}"
    try:
        storage.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UserError(f"--storage: cannot write {storage}: {error.strerror or error}") from None
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(_is_file)
        asked = {look.options(scheduling_strategy=On(node, soft=False)).remote(str(mark)): node for node in others}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS)
        for call in answered:
            if not ray.get(call):
                raise UserError(
                    f"--storage: {storage} is not shared: node {others[asked[call]]} does not see what is written "
                    "here; expected a folder that every node mounts at this path"
                )
    finally:
        mark.unlink(missing_ok=True)


def _is_file(path: str) -> bool:
    return Path(path).is_file()
