"""Requests that arrive while the model computes are answered by its next call, together.

``ray.serve.batch`` does not do this: it fills a batch before the call that is under way has ended, so that without a
wait its batches are single requests, and with one a lone request waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    """One call at a time, in a thread, for all that wait for it.

    Args:
        answer: Answers several requests in their order; what it raises, each of them gets as its answer.
        most: Requests of one call.
    """

    def __init__(self, answer: Callable[[Sequence[Q]], Sequence[A | Exception]], most: int) -> None:
        self._answer, self._most = answer, most
        self._waiting: deque[tuple[Q, asyncio.Future[A | Exception]]] = deque()
        self._work: asyncio.Task[None] | None = None

    async def ask(self, request: Q) -> A | Exception:
        """The answer to one request; at once where nothing is under way. One event loop's coroutines may call this."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[A | Exception] = loop.create_future()
        self._waiting.append((request, future))
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._until_none_waits())
        return await future

    async def _until_none_waits(self) -> None:
        while self._waiting:
            count = min(self._most, len(self._waiting))
            part = [self._waiting.popleft() for _ in range(count)]
            part = [(request, future) for request, future in part if not future.done()]  # whoever asked has gone away
            if not part:
                continue
            answers: Sequence[A | Exception]
            try:
                answers = await asyncio.to_thread(self._answer, [request for request, _ in part])
            except Exception as error:
                answers = [error] * len(part)
            for (_, future), answer in zip(part, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
