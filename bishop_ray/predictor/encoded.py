"""A frame as models read it, with the places of the user's columns in it. Letters: R rows, S orders of rows, K outputs.

A column is encoded row by row and alone, so exchanging rows of what it became is the same as encoding exchanged rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.preprocess import Preprocessor

Orders = NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """R rows by one preprocessor.

    Attributes:
        x_num: (R, N).
        x_cat: (R, C).
        num: Positions in x_num by column: of points in time several, of some numbers the missing indicator too.
        cat: Position in x_cat by column.
    """

    x_num: NDArray[np.float32]
    x_cat: NDArray[np.int64]
    num: dict[str, list[int]]
    cat: dict[str, list[int]]

    def moves(self, columns: Iterable[str], order: NDArray[np.int64]) -> bool:
        """Whether any input is another one after those columns' values were taken from the rows of `order` (R,)."""
        for column in columns:
            num, cat = self.x_num[:, self.num.get(column, [])], self.x_cat[:, self.cat.get(column, [])]
            if not np.array_equal(num, num[order], equal_nan=True) or not np.array_equal(cat, cat[order]):
                return True
        return False

    def shuffled(self, columns: Iterable[str], orders: Orders) -> Encoded:
        """S * R rows: for each order (S, R) all rows once, those columns' values taken from the rows it names.

        The columns of one order move together; columns that this preprocessor does not use change nothing.
        """
        copies = len(orders)
        x_num, x_cat = np.tile(self.x_num, (copies, 1)), np.tile(self.x_cat, (copies, 1))
        rows = orders.reshape(-1)
        for column in columns:
            for place in self.num.get(column, ()):
                x_num[:, place] = self.x_num[rows, place]
            for place in self.cat.get(column, ()):
                x_cat[:, place] = self.x_cat[rows, place]
        return Encoded(x_num, x_cat, self.num, self.cat)


def encode(preprocessor: Preprocessor, frame: pd.DataFrame) -> Encoded:
    """The frame's R rows.

    Raises:
        BadTable: As `Preprocessor.transform_features`.
    """
    x_num, x_cat = preprocessor.transform_features(frame)
    num: dict[str, list[int]] = {}
    indicators = [column for column in preprocessor.numbers if column.indicator]
    for place, column in enumerate((*preprocessor.numbers, *indicators)):
        num.setdefault(column.name, []).append(place)
    cat = {column.name: [place] for place, column in enumerate(preprocessor.categories)}
    return Encoded(x_num, x_cat, num, cat)
