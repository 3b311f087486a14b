"""The units of a standardised target; without pandas, so that training alone can use it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Units(float):
    """Units of the target per unit of its standardised form, as a number, which knows the target's mean as well.

    Most metrics look at differences only, for which a scale is enough; some count from zero.
    """

    center: float

    def __new__(cls, scale: float, center: float) -> Units:
        """The number `scale`, with the mean `center`, both in the target's own units."""
        made = super().__new__(cls, scale)
        made.center = float(center)
        return made

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return float(self), self.center

    def decode(self, coded: NDArray[np.float64]) -> NDArray[np.float64]:
        """(R,) standardised values, once rounded to float32, in the target's own units.

        What cannot be told from zero is zero: a target of counts must not turn negative by rounding.
        """
        values = coded * float(self) + self.center
        noise = np.finfo(np.float32).eps * abs(self.center)
        return np.where(np.abs(values) <= noise, 0.0, values)
