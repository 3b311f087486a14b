"""Ctrl-C during a training: it ends after the epoch at hand, with the best one so far."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether the user asked for the end."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stopped_by_ctrl_c() -> Iterator[Stop]:
    """The first Ctrl-C sets the mark, the second one raises KeyboardInterrupt.

    Only the main thread is ever told of one; elsewhere nothing is changed, nor where Ctrl-C means something else.
    """
    stop = Stop()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            signal.default_int_handler(number, frame)
        stop.asked = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
