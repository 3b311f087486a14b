"""Keeps secrets of this process out of what Ray writes down."""

from __future__ import annotations

import re


def keep_out_of_logs() -> None:
    """Tells Ray Tune not to hand credentials of a cloud to trials as settings, which every node logs in plain text.

    Tune copies them from this process's environment (`ray.tune.execution.class_cache`). Trials need no copy: a Ray of
    its own inherits the environment, and the nodes of a cluster have roles or credentials of their own.
    """
    from ray.tune.execution import class_cache

    names = class_cache.ENV_VARS_TO_PROPAGATE
    class_cache.ENV_VARS_TO_PROPAGATE = {name for name in names if not re.search("KEY|TOKEN|SECRET|PASSWORD", name)}
