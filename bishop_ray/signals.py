"""Ctrl-C and SIGTERM: held back where they would leave something half done, restored for jobs and estimators.

Python raises `KeyboardInterrupt` between any two steps of any code. Inside a library's `finally` or `except` it comes
out as another error, and a record may be left half written: https://docs.python.org/3/library/signal.html
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """Signals that come inside this context are handled at its end, or at `release`.

    Contexts nest: what an inner one held goes to the outer one. Outside the main thread, where Python handles no
    signals, nothing is done.

    Args:
        patience: How many signals are held; further ones are handled at once. None holds all of them.
    """

    def __init__(self, patience: int | None = None) -> None:
        self._patience = patience
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for sign in _SIGNALS:
                before = signal.getsignal(sign)
                if callable(before):  # what the system does by itself stays as it is
                    self._before[sign] = before
                    signal.signal(sign, self._keep)
        return self

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
        if self._patience is not None and len(self._came) > self._patience:
            self.release()

    def release(self) -> None:
        """Handles what came meanwhile, as it would have been without this context: once, however often it came.

        Raises:
            KeyboardInterrupt: Whatever the handlers raise that were there before.
        """
        came, self._came = self._came, []
        for number, frame in came[-1:]:
            self._before[signal.Signals(number)](number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sign, before in self._before.items():
            signal.signal(sign, before)
        self.release()


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


def catch_signals() -> None:
    """Makes SIGTERM end a command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    # One way out for Ctrl-C and SIGTERM: runs are closed and slots given back on the way.
    raise KeyboardInterrupt
