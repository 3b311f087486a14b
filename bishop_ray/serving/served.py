"""The model behind a service: its records, and answers to several requests from one call of the model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bishop_ray.predictor import Predictor, answers
from bishop_ray.serving.payload import Rows, make_frame

Reply = dict[str, Any]


@dataclass(frozen=True)
class Deployed:
    """What a replica is told: which model, and how it answers.

    Attributes:
        name: Registered name.
        version: Its number.
        uri: MLflow address.
        token_digest: SHA-256 of the bearer token, in hexadecimal: the token itself is sent nowhere.
        max_body: Bytes of a request's body.
    """

    name: str
    version: int
    uri: str = field(repr=False)
    token_digest: str = field(repr=False)
    max_body: int


@dataclass(frozen=True)
class Served:
    """A model under its name and version."""

    predictor: Predictor
    name: str
    version: int
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def reply(self, requests: Sequence[Rows]) -> list[Reply | Exception]:
        """The reply to each request, in their order, from one call of the model; an error where there is none.

        A request that the model cannot answer does not spoil the others: then each one is asked about alone. That
        holds for a `UserError` and for faults of the model's own.
        """
        try:
            return list(self._together(requests))
        except Exception as error:
            if len(requests) == 1:
                return [error]
        return [reply for request in requests for reply in self.reply([request])]

    def _together(self, requests: Sequence[Rows]) -> list[Reply]:
        frame = make_frame([row for rows in requests for row in rows], self.predictor.schema)
        with self._one_at_a_time:
            found = answers(self.predictor, frame)
        predictions = found.predictions.tolist()
        chances: list[Any] = [None] * len(predictions)
        if found.probabilities is not None:
            chances = [dict(zip(found.labels, row, strict=True)) for row in found.probabilities.tolist()]
        replies, start = [], 0
        for rows in requests:
            end = start + len(rows)
            part = chances[start:end] if found.probabilities is not None else None
            replies.append({"predictions": predictions[start:end], "probabilities": part} | self.title)
            start = end
        return replies

    @property
    def title(self) -> Reply:
        """Name and version, as replies have them."""
        return {"model": self.name, "version": self.version}
