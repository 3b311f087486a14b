"""Private parts of Optuna: the operations of its journal, trials that are taken up again."""

from __future__ import annotations

from optuna import Study
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import Trial

VERIFIED = "5.0.0"
"""The version that all of this was read and tried in; ``pyproject.toml`` allows its minor series alone."""
DETAILS = frozenset(
    {
        int(JournalOperation.SET_TRIAL_PARAM),
        int(JournalOperation.SET_TRIAL_INTERMEDIATE_VALUE),
        int(JournalOperation.SET_TRIAL_USER_ATTR),
        int(JournalOperation.SET_TRIAL_SYSTEM_ATTR),
    }
)
"""The ``op_code`` of journal entries that neither begin nor end a trial, nor belong to the study.

A backend is told entries, but not what they mean: that is in a private enumeration. Seen in Optuna 5.0.0.
"""


def take_up(study: Study, number: int) -> Trial:
    """A trial of the study that has not ended, to be drawn for, reported and told further.

    `Trial` wants the storage's own id of it, which `study.get_trials` has under a private name alone. Seen in Optuna
    5.0.0.
    """
    return Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
