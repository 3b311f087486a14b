"""A Ray of one machine that no other machine can reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """A Ray that is started within listens on 127.0.0.1 only, all of its processes.

    By itself it listens on every interface, guarded by its token alone, and replaces a loopback address that it is
    given by the machine's own (`ray._private.services.resolve_ip_for_localhost`). It stays on loopback where it holds
    clusters to be impossible, as on macOS and Windows: that is what this tells it, in this process and for the start.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
