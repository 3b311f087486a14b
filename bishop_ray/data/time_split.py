"""Where to cut rows that are ordered by time: the earliest train, the latest test, equal times on one side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def by_time(time: NDArray[np.float64], sizes: Sequence[int]) -> list[Rows] | None:
    """Positions of the rows of train, validation and test; None where there are fewer than three different times.

    Rows of one time stay together. So the parts have the sizes asked for only where no time spans a border; otherwise
    the border moves to the nearest end of a time.

    Args:
        time: (R,) finite.
        sizes: Rows of train, validation and test.
    """
    order = np.argsort(time, kind="stable").astype(np.int64)
    ends = np.flatnonzero(np.diff(time[order])) + 1  # a part may end before these positions
    if len(ends) < 2:
        return None
    wanted = sizes[0], sizes[0] + sizes[1]
    first, second = (int(np.argmin(np.abs(ends - border))) for border in wanted)
    if first == second:  # one time spans a whole part: the second-best end for one of the borders
        pairs = [(a, b) for a, b in ((first - 1, first), (first, first + 1)) if a >= 0 and b < len(ends)]
        first, second = min(pairs, key=lambda pair: sum(abs(ends[i] - w) for i, w in zip(pair, wanted, strict=True)))
    return list(np.split(order, [ends[first], ends[second]]))
