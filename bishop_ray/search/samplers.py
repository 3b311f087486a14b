"""Optuna's samplers, made so that a study which was killed anywhere suggests what the undisturbed one would have.

https://optuna.readthedocs.io/en/stable/reference/samplers/index.html
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from bishop_ray.config import StudyConfig
from bishop_ray.errors import UnknownName

SAMPLERS = ("tpe", "random", "gp")
_SEEDS = 2**32  # more is no seed of NumPy


class ByName(RandomSampler):
    """Random values that depend on seed and parameter only, not on what else was drawn before.

    A process may die between two parameters of a trial: the next one draws only those that are missing.

    Args:
        seed: Of the trial.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._seed = seed

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """A value of one parameter."""
        own = RandomSampler(seed=_seed_of(self._seed, name))
        return own.sample_independent(study, trial, name, distribution)


class Tpe(TPESampler):
    """TPE of all parameters together; where one is drawn alone, it depends on nothing else, as in `ByName`.

    Args:
        seed: Of the trial.
        startup: Trials at random before it models anything.
    """

    def __init__(self, seed: int, startup: int) -> None:
        super().__init__(seed=seed, multivariate=True, n_startup_trials=startup)
        self._seed, self._startup = seed, startup

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """A value of a parameter that is not modelled with the others: at the start, or if a trial went without it."""
        own = TPESampler(
            seed=_seed_of(self._seed, name),
            multivariate=True,
            n_startup_trials=self._startup,
        )
        return own.sample_independent(study, trial, name, distribution)


def _seed_of(seed: int, name: str) -> int:
    return (seed + zlib.crc32(name.encode())) % _SEEDS


def sampler_factory(config: StudyConfig, startup: int = 0) -> Callable[[int], BaseSampler]:
    """Makes the sampler of the n-th trial, seeded by study seed and n.

    Args:
        config: The study.
        startup: Trials at random before the sampler models anything; 0 for what suits ``config.trials``.

    Raises:
        UnknownName: No such sampler.
    """
    if config.sampler not in SAMPLERS:
        raise UnknownName("sampler", config.sampler, SAMPLERS)
    # A tenth of the budget at random, 4 to 10 trials: TPE's default of 10 would make a small search a random one.
    startup = startup or min(10, max(4, config.trials // 10))

    def make(number: int) -> BaseSampler:
        seed = (config.seed * 100_003 + number) % _SEEDS
        if config.sampler == "random":
            return ByName(seed)
        if config.sampler == "gp":
            return GPSampler(seed=seed, n_startup_trials=startup, independent_sampler=ByName(seed))
        return Tpe(seed, startup)

    return make
