"""FastAPI app around a registered model.

``POST /predict`` takes rows. The order of its checks is that of their cost: token, type, length, then the body itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from bishop_ray.errors import UserError
from bishop_ray.predictor import Predictor, answers
from bishop_ray.serving import schemas
from bishop_ray.serving.schemas import RequestRefused, Rows, fault, make_frame, read_rows

Reply = dict[str, Any]


@dataclass(frozen=True)
class DeploymentSpec:
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


BODY_SECONDS = 30.0
"""How long a client may take to send a body."""
_SMALL = 1 << 16
"""Bytes of a body that is read on the spot; longer ones leave the event loop free for others."""
Ask = Callable[[Rows], Awaitable[Reply | Exception]]


def token_digest(token: str) -> str:
    """What of a token is kept."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


class AsciiJson(JSONResponse):
    """JSON that any text can be part of, half of a surrogate pair too."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def build_app(served: Served, ask: Ask, digest: str, max_body: int) -> FastAPI:
    """The application.

    Args:
        served: The model.
        ask: Gives the reply to the rows of one request.
        digest: `token_digest` of the token that clients must show.
        max_body: Bytes of a request's body.
    """
    app = FastAPI(
        title=f"{served.name}, version {served.version}",
        description="Predictions of one registered model. All but /health, /ready and /docs needs a bearer token.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        default_response_class=AsciiJson,
    )
    bearer = HTTPBearer(auto_error=False)

    async def check_token(request: Request, shown: Any = Depends(bearer)) -> None:
        """401 without the token; both digests have one length, whatever was shown."""
        given = "" if shown is None else token_digest(shown.credentials)
        if not hmac.compare_digest(given, digest):
            raise HTTPException(401, "expected the service's bearer token", {"WWW-Authenticate": "Bearer"})

    _add_errors(app)
    _add_open(app, served)
    _add_closed(app, served, Depends(check_token))
    _add_predict(app, served, ask, max_body, Depends(check_token))
    return app


def _add_errors(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        return AsciiJson({"detail": error.detail}, error.status)

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return AsciiJson({"detail": error.detail}, error.status_code, error.headers)

    app.add_exception_handler(RequestRefused, refused)
    app.add_exception_handler(HTTPException, failed)


def _add_open(app: FastAPI, served: Served) -> None:
    page = Path(__file__).with_name("docs.html").read_text("utf-8")

    @app.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", summary="Whether the model is loaded, and which")
    async def ready() -> dict[str, Any]:
        return {"status": "ready"} | served.title

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page)


def _add_closed(app: FastAPI, served: Served, token: Any) -> None:
    about = served.title | schemas.description(served.predictor)
    unknown = schemas.problems(s401="No token, or another one.")

    @app.get("/schema", summary="The model's columns, task and labels", dependencies=[token], responses=unknown)
    async def schema() -> dict[str, Any]:
        return about

    @app.get("/openapi.json", include_in_schema=False, dependencies=[token])
    async def openapi() -> Response:
        return AsciiJson(app.openapi())


def _add_predict(app: FastAPI, served: Served, ask: Ask, max_body: int, token: Any) -> None:
    schema = served.predictor.schema
    body = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schemas.request_schema(served.predictor)}},
        }
    }
    replies = schemas.problems(
        s400="No JSON in UTF-8.",
        s401="No token, or another one.",
        s408="The body did not arrive in time.",
        s413="The body is too large.",
        s415="Another type than application/json.",
        s422="Rows that do not fit the model: an entry per row and field.",
    )
    reply = schemas.reply_schema(served.predictor)
    replies[200] = {"description": "One prediction per row.", "content": {"application/json": {"schema": reply}}}

    @app.post("/predict", summary="Predictions of rows", dependencies=[token], responses=replies, openapi_extra=body)
    async def predict(request: Request) -> Response:
        _check_type(request)
        content = await _read_body(request, max_body)
        small = len(content) < _SMALL
        rows = read_rows(content, schema) if small else await asyncio.to_thread(read_rows, content, schema)
        found = await ask(rows)
        if isinstance(found, UserError):
            raise RequestRefused(422, [fault(["rows"], str(found), "value")])
        if isinstance(found, Exception):
            raise found
        return AsciiJson(found)


def _check_type(request: Request) -> None:
    kind, *parameters = [part.strip() for part in request.headers.get("content-type", "").lower().split(";")]
    known = all(part.replace('"', "") in ("", "charset=utf-8", "charset=utf8") for part in parameters)
    if kind != "application/json" or not known:
        raise RequestRefused(415, "content-type: expected application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise RequestRefused(415, "content-encoding: expected none")


async def _read_body(request: Request, limit: int) -> bytes:
    """The body.

    One that is too large is read on for as much again and thrown away: a client that is still sending would otherwise
    see a broken connection in place of the reply.
    """
    told = request.headers.get("content-length", "")
    too_large = RequestRefused(413, f"body: expected at most {limit} bytes")
    if told.isdigit() and int(told) > 2 * limit:
        raise too_large
    parts: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                length += len(part)
                if length > 2 * limit:
                    break
                if length <= limit:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError:
        raise RequestRefused(408, f"body: did not arrive within {BODY_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise RequestRefused(400, "body: the client went away") from None
    if length > limit:
        raise too_large
    return b"".join(parts)
