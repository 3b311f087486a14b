"""Command-line flags, made from the records of options. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from bishop_ray.errors import UserError
from bishop_ray.search import options
from bishop_ray.search.options import DATA, PLACE, RECORDS, ROWS, DataOptions, SearchOptions, flag

T = TypeVar("T")
_FIELDS = {option.name: option for record in (DataOptions, SearchOptions) for option in fields(record)}


def argument_type(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` as a ``type=`` of argparse: its words become the parser's error."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


positive_int = argument_type(options.positive_int)
positive_float = argument_type(options.positive_float)
non_negative_float = argument_type(options.non_negative_float)
non_negative_int = argument_type(options.non_negative_int)


def add_flag(group: argparse._ActionsContainer, name: str, *spellings: str, **changes: Any) -> None:
    """Adds the flag of a field of `DataOptions` or `SearchOptions`.

    Args:
        group: Gets the flag.
        name: Of the field.
        spellings: The flag's, where they are not the field's own.
        changes: Arguments of ``add_argument`` that replace what the field says.
    """
    option = _FIELDS[name]
    about, default = option.metadata, option.default
    given: dict[str, Any] = {"dest": name, "default": default, "help": about["help"]}
    if isinstance(default, bool):
        given["action"] = "store_false" if default else "store_true"
    elif about["choices"]:
        given["choices"] = about["choices"]
    else:
        given["metavar"] = about["metavar"]
        given |= {"type": argument_type(about["read"])} if about["read"] else {}
        given |= {"nargs": "+"} if "tuple" in str(option.type) else {}
    group.add_argument(*(spellings or (flag(name, default),)), **given | changes)


def add_group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """A group of flags: all fields that name it as theirs."""
    group = parser.add_argument_group(title)
    for name, option in _FIELDS.items():
        if option.metadata["group"] == title:
            add_flag(group, name)
    return group


def training_flags(group: argparse._ActionsContainer) -> None:
    """What every training obeys, whichever job it belongs to."""
    for name, option in _FIELDS.items():
        if option.metadata["training"]:
            add_flag(group, name)


def data_flags(parser: argparse.ArgumentParser) -> None:
    """Which dataset, how it is split, what its columns say of the rows."""
    add_group(parser, DATA)
    add_group(parser, ROWS)


def place_flags(parser: argparse.ArgumentParser) -> None:
    """Where trainings run, and where records are kept."""
    add_group(parser, PLACE)
    records = add_group(parser, RECORDS)
    records.add_argument("--output", default="", metavar="FILE.csv", help="also write the leaderboard here")


def read(record: type[T], args: argparse.Namespace, **changes: Any) -> T:
    """The record that the parsed flags make; fields without a flag have their defaults, or those of `changes`."""
    given = {option.name: getattr(args, option.name) for option in fields(record) if hasattr(args, option.name)}  # type: ignore[arg-type]
    return record(**given | changes)
