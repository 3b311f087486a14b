"""Studies of several datasets, one after the other, within one budget."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bishop_ray.config import Skipped, StudyConfig, StudyResult
from bishop_ray.errors import UserError
from bishop_ray.search.callback import Progress
from bishop_ray.search.dataset import Loaded
from bishop_ray.search.search import ModelSkipped, StudyFailed, run_automl, run_study
from bishop_ray.search.study import study_folder


@dataclass(frozen=True)
class Failure:
    """A study that ended without a result, and why."""

    dataset: str
    model: str
    reason: str


def _keep_traceback(config: StudyConfig) -> Path:
    path = study_folder(config) / "error.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(traceback.format_exc(), "utf-8")
    return path


Listener = Callable[[StudyConfig, Progress], None]


def run_studies(
    groups: Sequence[Sequence[StudyConfig]],
    slots: Mapping[str, int],
    listener: Listener,
    deadline: float = 0.0,
    first: Loaded | None = None,
) -> tuple[list[StudyResult], list[Failure], list[Skipped]]:
    """Runs every study and returns results, failures and skipped models in order.

    Args:
        groups: Per dataset: one study, or one per model of a search over several.
        slots: Trials at a time by kind of slot, for searches over several models.
        listener: Called whenever something happened.
        deadline: Unix time by which everything must have ended, 0 for none; each dataset gets an equal share of what
            is left when it starts.
        first: The first study's data, when already loaded.

    Raises:
        UserError: There is one dataset only and its input is bad.
    """
    results: list[StudyResult] = []
    failures: list[Failure] = []
    skipped: list[Skipped] = []
    for position, group in enumerate(groups):
        left, config = len(groups) - position, group[0]
        models = ", ".join(c.model for c in group)
        share = time.time() + (deadline - time.time()) / left if deadline else 0.0
        ready = first if position == 0 else None
        try:
            if len(group) == 1:
                results.append(run_study(config, partial(listener, config), share, ready))
            else:
                found, others = run_automl(group, slots, listener, share, ready)
                results += found
                skipped += others
        except ModelSkipped as error:
            if len(groups) == 1:
                raise
            skipped.append(Skipped(config.ref.key, config.model, str(error)))
        except (UserError, StudyFailed) as error:
            if len(groups) == 1 and isinstance(error, UserError):
                raise
            failures.append(Failure(config.ref.key, models, str(error)))
        except Exception as error:  # whatever it is, the other studies go on
            if len(groups) == 1:
                raise
            where = _keep_traceback(config)
            lines = str(error).strip().splitlines() or [""]
            failures.append(Failure(config.ref.key, models, f"{type(error).__name__}: {lines[-1]} (see {where})"))
    return results, failures, skipped
