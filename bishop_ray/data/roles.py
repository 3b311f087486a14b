"""Columns that say something of rows, not of what is predicted: weights, groups, time. Only names here, no rows."""

from __future__ import annotations

from dataclasses import dataclass

from bishop_ray.errors import UserError

ROLES = "roles"
"""Name of the tag that a study's run has in MLflow, if its rows have roles."""


@dataclass(frozen=True)
class Roles:
    """What the rows of a table are to be trained with and split by; all of it is optional.

    Attributes:
        weights: Column of row weights: they count in the training loss, never in a score.
        groups: Column of groups that stay together in a split.
        time: Column by which the split is ordered: the latest rows are the test rows.
        balance: Every class weighs the same in training (classification only).
    """

    weights: str = ""
    groups: str = ""
    time: str = ""
    balance: bool = False

    def __post_init__(self) -> None:
        if self.groups and self.time:
            raise UserError(
                f"--groups and --time exclude each other, a split is by one of them; found --groups {self.groups!r} "
                f"and --time {self.time!r}"
            )
        for flag, name in (("--groups", self.groups), ("--time", self.time)):
            if name and name == self.weights:
                raise UserError(f"--weights and {flag}: expected two columns; found {name!r} twice")

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return self != NO_ROLES

    @property
    def weighted(self) -> bool:
        """Whether the training rows weigh differently."""
        return bool(self.weights) or self.balance

    def columns(self) -> dict[str, str]:
        """Flag -> name of every column that is named."""
        every = {"--weights": self.weights, "--groups": self.groups, "--time": self.time}
        return {flag: name for flag, name in every.items() if name}

    def facts(self) -> dict[str, str]:
        """All four in words, as a study compares them."""
        columns = {"weights": self.weights, "groups": self.groups, "time": self.time}
        return {key: repr(name) if name else "none" for key, name in columns.items()} | {
            "balance": "yes" if self.balance else "no"
        }

    def told(self) -> dict[str, str]:
        """Those of `facts` that were asked for: nothing, if none was."""
        before = NO_ROLES.facts()
        return {key: value for key, value in self.facts().items() if value != before[key]}

    def tag(self) -> dict[str, str]:
        """The tag `ROLES` of a study's run in MLflow; nothing, if nothing was asked for."""
        return {ROLES: str(self)} if self else {}

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.told().items()) or "none"


NO_ROLES = Roles()
