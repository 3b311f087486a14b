"""The HTTP face of a service around a real predictor: replies, errors per field, limits; never a fault of ours."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from fakes import UNSEEN, make_table
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from predictor_fakes import make_predictor

from bishop_ray.cli import serve
from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.predictor import Predictor
from bishop_ray.serving.app import Reply, Served, build_app, token_digest
from bishop_ray.serving.deployment import RequestBatcher
from bishop_ray.serving.schemas import MAX_FAULTS, MAX_ROWS, Rows

TOKEN = "a token of the tests"
LIMIT = 200_000
NAME = "wines \U0001f377"
MOMENT = "when, \u00e9\U0001f600"


def odd_table(task: TaskType) -> RawDataset:
    """A table with a date column whose name is not plain."""
    raw = make_table(task, rows=60, with_missing=True)
    days = pd.Series(pd.date_range("2024-01-01", periods=60, freq="D"), name=MOMENT)
    return RawDataset(raw.name, raw.frame.assign(**{MOMENT: days}), raw.target, raw.task, raw.categorical)


def client_of(predictor: Predictor, limit: int = LIMIT) -> TestClient:
    served = Served(predictor, NAME, 3)

    async def ask(rows: Rows) -> Reply | Exception:
        return (await asyncio.to_thread(served.reply, [rows]))[0]

    app = build_app(served, ask, token_digest(TOKEN), limit)
    return TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}, raise_server_exceptions=True)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor(odd_table(TaskType.BINARY))


@pytest.fixture(scope="module")
def client(predictor: Predictor) -> Iterator[TestClient]:
    with client_of(predictor) as made:
        yield made


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", date_format="iso"))
    return plain


ROW = rows_of(odd_table(TaskType.BINARY).frame)[1]


@pytest.mark.parametrize("task", list(TaskType))
def test_replies_are_the_predictors_own(task: TaskType) -> None:
    made = make_predictor(odd_table(task))
    frame = odd_table(task).frame.head(20)
    frame.loc[3, "cat_0"] = UNSEEN
    with client_of(made) as client:
        reply = client.post("/predict", json={"rows": [row | {"extra": [1]} for row in rows_of(frame)]})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert (found["model"], found["version"]) == (NAME, 3)
    if task.is_classification:
        expected = made.predict_proba(frame)
        assert found["predictions"] == made.predict(frame).tolist()
        assert [list(row) for row in found["probabilities"]] == [list(expected.columns)] * 20
        np.testing.assert_allclose(pd.DataFrame(found["probabilities"]), expected, rtol=1e-6)
    else:
        np.testing.assert_allclose(found["predictions"], made.predict(frame), rtol=1e-6)
        assert found["probabilities"] is None


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"num_0": "12"}, "num_0", "expected a number or null; found '12'"),
        ({"num_0": True}, "num_0", "expected a number or null; found true"),
        ({"num_0": [1]}, "num_0", "expected a number or null; found a list"),
        ({"num_0": 10**400}, "num_0", "found a number beyond float64"),
        ({"cat_0": {"a": 1}}, "cat_0", "expected a text, number, boolean or null; found an object"),
        (
            {MOMENT: "yesterday"},
            MOMENT,
            "expected a date or time such as 2024-01-31T12:30:00Z, or null; found 'yesterday'",
        ),
        ({MOMENT: True}, MOMENT, "found true"),
        ({MOMENT: "01/02/2024"}, MOMENT, "found '01/02/2024'"),
        ({MOMENT: "now"}, MOMENT, "found 'now'"),
        ({MOMENT: 5}, MOMENT, "found 5"),
        ({MOMENT: "2024-13-01"}, MOMENT, "found '2024-13-01'"),
        ({"num_1": None}, "", ""),
        ({"cat_0": "9" * 5000 + ".0", "cat_1": -0.0}, "", ""),
        ({"cat_0": None, MOMENT: None, "cat_1": "\ud800", "num_0": -0.0}, "", ""),
        ({"cat_0": 1.5, "cat_1": False, "num_0": 10**300, MOMENT: "2024-02-03T04:05:06Z"}, "", ""),
    ],
)
def test_an_error_per_field(client: TestClient, change: dict[str, Any], field: str, words: str) -> None:
    reply = client.post("/predict", content=json.dumps({"rows": [ROW, ROW | change]}), headers=AS_JSON)
    if not field:
        assert reply.status_code == 200, reply.text
        return
    assert reply.status_code == 422
    (entry,) = reply.json()["detail"]
    assert entry["loc"] == ["body", "rows", 1, field]
    assert words in entry["msg"]


def test_one_moment_in_many_writings(client: TestClient, predictor: Predictor) -> None:
    """Case 18: what training reads as a date is one in JSON too; no zone means UTC."""
    same = ["2054-02-03", "2054-02-03T00:00:00Z", "03.02.2054", "Feb 3, 2054", "2054-02-03 01:00+01:00", "20540203"]
    missing = [None, "", "NaT"]
    reply = client.post("/predict", json={"rows": [ROW | {MOMENT: value} for value in same + missing]})
    assert reply.status_code == 200, reply.text
    found = [row["yes"] for row in reply.json()["probabilities"]]
    frame = pd.DataFrame([ROW, ROW])
    frame[MOMENT] = pd.to_datetime(["2054-02-03", None])
    known, unknown = predictor.predict_proba(frame)["yes"]
    np.testing.assert_allclose(found, [known] * len(same) + [unknown] * len(missing), rtol=1e-5)
    assert abs(known - unknown) > 1e-4


def test_the_same_value_reads_the_same_whatever_its_type() -> None:
    """Case 1: levels "1", "2", 3 and True, asked for as text, int, float and boolean; numbers as ints and floats."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"n": rng.integers(0, 9, 80), "flag": rng.random(80) < 0.5})
    frame["code"] = pd.Series(rng.integers(1, 4, 80).astype(str)).astype("category")
    frame["big"] = pd.Series(2**53 + rng.integers(0, 3, 80)).astype("category")
    frame["y"] = np.where(frame["flag"] ^ (frame["code"] == "2") ^ (frame["big"] == 2**53 + 1), "p", "q")
    made = make_predictor(make_raw("t", frame, "y"))
    row = {"n": 4, "flag": True, "code": 2, "big": 2**53 + 1}
    others = [{"n": 4.0}, {"code": 2.0}, {"code": "2"}, {"code": "2.0"}, {"flag": "True"}, {"big": str(2**53 + 1)}]
    with client_of(made) as client:
        reply = client.post("/predict", json={"rows": [row, *(row | other for other in others)]})
        wrong = client.post("/predict", json={"rows": [row | {"n": False}]})
    assert reply.status_code == 200, reply.text
    expected = made.predict_proba(pd.DataFrame([row]))["p"].item()
    unlike = made.predict_proba(pd.DataFrame([row | {"big": 2**53}]))["p"].item()
    np.testing.assert_allclose([row["p"] for row in reply.json()["probabilities"]], expected, rtol=1e-5)
    assert abs(expected - unlike) > 1e-5
    assert wrong.status_code == 422


def test_labels_that_look_like_numbers_stay_text() -> None:
    raw = make_table(TaskType.BINARY, rows=40)
    made = make_predictor(make_raw("t", raw.frame.assign(y=np.where(raw.target == "yes", "1.0", "2.0")), "y"))
    with client_of(made) as client:
        found = client.post("/predict", json={"rows": rows_of(raw.frame.head(3))}).json()
    assert set(found["predictions"]) <= {"1.0", "2.0"}
    assert list(found["probabilities"][0]) == ["1.0", "2.0"]


def test_a_missing_column_is_named_per_row_and_faults_are_bounded(client: TestClient) -> None:
    short = {name: value for name, value in ROW.items() if name != "num_2"}
    reply = client.post("/predict", json={"rows": [ROW, short]})
    assert reply.status_code == 422
    assert [entry["loc"] for entry in reply.json()["detail"]] == [["body", "rows", 1, "num_2"]]
    many = client.post("/predict", json={"rows": [{}] * 5000})
    assert (many.status_code, len(many.json()["detail"])) == (422, MAX_FAULTS)


AS_JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "expected JSON"),
        (b"{", 400, "expected JSON"),
        (b'{"rows": [{"num_0": NaN}]}', 400, "write null for a missing value"),
        (b'{"rows": [{"num_0": -Infinity}]}', 400, "-Infinity"),
        (b'{"rows": [{"num_0": ' + b"9" * 5000 + b"}]}", 400, "expected JSON"),
        (b'{"rows": [{"a": 1, "a": 2}]}', 400, "comes twice"),
        (b"[" * 100_000, 400, "nested without end"),
        (b'{"a":' * 20_000, 400, "nested without end"),
        (b'{"rows": ["\xff"]}', 400, "UTF-8"),
        ('{"rows": []}'.encode("utf-16"), 400, "UTF-8"),
        (b"null", 422, "expected an object"),
        (b"[]", 422, "expected an object"),
        (b"{}", 422, "missing"),
        (b'{"rows": []}', 422, f"expected 1 to {MAX_ROWS} rows; found 0"),
        (b'{"rows": {"num_0": 1}}', 422, "expected a list"),
        (b'{"rows": [1, null, []]}', 422, "expected an object; found 1"),
        (b'{"rows": [{}], "row": 1}', 422, "no field beside rows"),
        (b'{"rows": [' + b",".join([b"0"] * (MAX_ROWS + 1)) + b"]}", 422, f"found {MAX_ROWS + 1}"),
        (b'{"rows": "' + b"x" * LIMIT + b'"}', 413, f"at most {LIMIT} bytes"),
        (b" " * (3 * LIMIT), 413, f"at most {LIMIT} bytes"),
    ],
    ids=lambda value: f"{len(value)} bytes of {value[:12]!r}" if isinstance(value, bytes) else None,
)
def test_bad_bodies_are_the_clients_fault(client: TestClient, body: bytes, status: int, words: str) -> None:
    reply = client.post("/predict", content=body, headers=AS_JSON)
    assert reply.status_code == status, reply.text
    assert words in json.dumps(reply.json(), ensure_ascii=False)


def test_numbers_that_overflow_in_json_are_refused(client: TestClient) -> None:
    body = json.dumps({"rows": [ROW | {"num_0": 0.125}]}).replace("0.125", "1e999")
    reply = client.post("/predict", content=body, headers=AS_JSON)
    assert reply.status_code == 422
    assert "beyond float64" in reply.text


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
)
def test_other_types_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/predict", content=json.dumps({"rows": [ROW]}).encode(), headers=headers).status_code == 415


def test_a_body_without_a_length_is_limited_too(client: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    assert client.post("/predict", content=endless(), headers=AS_JSON).status_code == 413


@pytest.mark.parametrize("shown", ["", f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", "Bearer \u00ff", TOKEN])
@pytest.mark.parametrize("path", ["/predict", "/schema", "/openapi.json"])
def test_all_but_health_needs_the_token(client: TestClient, shown: str, path: str) -> None:
    way = "POST" if path == "/predict" else "GET"
    reply = client.request(way, path, headers={"Authorization": shown.encode("latin-1")} | AS_JSON, content=b"x")
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in reply.text


def test_open_paths_and_schema(client: TestClient, predictor: Predictor) -> None:
    nobody = {"Authorization": ""}
    assert client.get("/health", headers=nobody).json() == {"status": "ok"}
    assert client.get("/ready", headers=nobody).json() == {"status": "ready", "model": NAME, "version": 3}
    page = client.get("/docs", headers=nobody)
    assert page.status_code == 200
    assert "https://" not in page.text, "the page needs no other host"
    assert client.get("/nothing").status_code == 404
    assert client.get("/predict").status_code == 405
    schema = client.get("/schema").json()
    assert [(c["name"], c["kind"]) for c in schema["columns"]] == list(predictor.schema)
    assert schema["labels"] == ["no", "yes"]
    api = client.get("/openapi.json").json()
    body = api["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    row = body["properties"]["rows"]["items"]
    assert list(row["properties"]) == row["required"] == [name for name, _ in predictor.schema]
    assert row["properties"]["num_0"]["type"] == ["number", "null"]
    assert {"200", "400", "401", "408", "413", "415", "422"} <= set(api["paths"]["/predict"]["post"]["responses"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_values_are_a_fault_of_ours(client: TestClient, data: st.DataObject) -> None:
    dates = st.text("0123456789-:T.Z+ apmWQ/", max_size=14)
    row = {name: data.draw(JSON | dates) for name in ROW}
    reply = client.post("/predict", content=json.dumps({"rows": [row]}), headers=AS_JSON)
    assert reply.status_code in (200, 400, 422), reply.text


def test_requests_of_a_batch_do_not_spoil_each_other(predictor: Predictor) -> None:
    served = Served(predictor, NAME, 3)
    alone = served.reply([[ROW]])[0]
    other = ROW | {"num_0": 3.5}
    bad = ROW | {MOMENT: "never"}  # not reached over HTTP, where it is refused before
    both = served.reply([[ROW], [other, ROW]])
    assert isinstance(alone, dict)
    assert [len(reply["predictions"]) for reply in both if isinstance(reply, dict)] == [1, 2]
    np.testing.assert_allclose(both[0]["probabilities"][0]["yes"], alone["probabilities"][0]["yes"], rtol=1e-5)
    spoiled = served.reply([[ROW], [bad], [other]])
    assert [isinstance(reply, UserError) for reply in spoiled] == [False, True, False]
    assert spoiled[0] == alone


def test_a_fault_of_the_model_is_the_fault_of_one_request(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(predictor, NAME, 3)
    right = Predictor.output

    def output(self: Predictor, frame: pd.DataFrame) -> Any:
        if (frame["num_0"] == 666).any():
            raise RuntimeError("no such number")
        return right(self, frame)

    monkeypatch.setattr(Predictor, "output", output)
    found = served.reply([[ROW], [ROW | {"num_0": 666}], [ROW, ROW]])
    assert [type(reply) for reply in found] == [dict, RuntimeError, dict]


def test_a_model_that_is_not_finite_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_predictor(odd_table(TaskType.REGRESSION))
    monkeypatch.setattr(Predictor, "output", lambda self, frame: np.full((len(frame), 1), math.nan))
    with client_of(made) as client:
        reply = client.post("/predict", json={"rows": [ROW]})
    assert reply.status_code == 422
    assert "no finite prediction" in reply.text


@pytest.mark.parametrize("token", ["short", "sixteen letters with spaces", "\u00e9" * 20])
def test_a_poor_token_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str) -> None:
    from bishop_ray.serving.service import ServeOptions, serve_model

    monkeypatch.setenv("BISHOP_SERVE_TOKEN", token)
    with pytest.raises(UserError, match="BISHOP_SERVE_TOKEN: expected at least 16 printable ASCII") as caught:
        serve_model(ServeOptions("x", uri=f"sqlite:///{tmp_path}/none.db"), print)
    assert token not in str(caught.value)
    assert "BISHOP_SERVE_TOKEN" not in os.environ


@pytest.mark.parametrize(("host", "port"), [("0.0.0.0", None), ("", 8001), ("127.0.0.1", 9)])
def test_a_service_that_runs_does_not_move(host: str, port: int | None) -> None:
    from bishop_ray.serving.service import ServeOptions, check_same

    check_same(ServeOptions("x"), "127.0.0.1", 8000)
    check_same(ServeOptions("x", host="127.0.0.1", port=8000), "127.0.0.1", 8000)
    with pytest.raises(UserError, match=r"--host, --port: .*http://127.0.0.1:8000 already; stop it to move it"):
        check_same(ServeOptions("x", host=host, port=port), "127.0.0.1", 8000)


def test_a_token_made_in_the_place_of_a_lost_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from bishop_ray.search.cluster import Cluster
    from bishop_ray.serving import service
    from bishop_ray.serving.app import DeploymentSpec

    place = {"host": "127.0.0.1", "port": 8000, "address": "127.0.0.1:1", "access": {}}
    sent: list[DeploymentSpec] = []
    monkeypatch.setattr(service, "read_note", lambda note: place)
    monkeypatch.setattr(service, "enter", lambda access: None)
    monkeypatch.setattr(service, "connect", lambda address: Cluster(2.0, 0.0))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("bishop_ray.serving.deployment.running", lambda name: None)  # its replica died
    monkeypatch.setattr("bishop_ray.serving.deployment.deploy", lambda new, replicas, cpus: sent.append(new))
    lines: list[str] = []
    service._replace(service.ServeOptions("x"), DeploymentSpec("x", 2, "", "", 1000), tmp_path, lines.append)
    words = " ".join(lines).split()
    assert sent[0].token_digest in map(token_digest, words)


def test_a_service_too_busy_to_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from bishop_ray.serving import deployment

    handle = Mock()
    handle.deployed.remote.return_value.result.side_effect = TimeoutError
    monkeypatch.setattr(deployment, "healthy", lambda name: True)
    monkeypatch.setattr("ray.serve.get_app_handle", lambda name: handle)
    with pytest.raises(SourceUnavailable, match="the service of x runs, but does not say its version: TimeoutError"):
        deployment.running("x")


@pytest.mark.parametrize("content", ["{", "[]", '{"address": "x", "host": "h", "port": "no", "access": {}}', "{}"])
def test_a_damaged_note_is_one_line(tmp_path: Path, content: str) -> None:
    from bishop_ray.serving.service import read_note

    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"x.json: expected where the running service is; found a damaged file"):
        read_note(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "NAME"),
        (["x", "--port", "99999"], "--port: expected a port up to 65535"),
        (["x", "--alias", "a", "--version", "1"], "not allowed with"),
        (["x", "--max-body", "0"], "--max-body: expected a number > 0"),
        (["x", "--token", "t"], "--token"),
    ],
)
def test_bad_flags(flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        serve.serve_parser().parse_args(flags)


def test_what_waits_is_answered_together() -> None:
    sizes: list[int] = []

    def answer(requests: Sequence[int]) -> list[int | Exception]:
        sizes.append(len(requests))
        time.sleep(0.05)
        if 13 in requests:
            raise ValueError("thirteen")
        return [2 * request for request in requests]

    async def many() -> list[int | Exception]:
        together: RequestBatcher[int, int] = RequestBatcher(answer, 8)
        first = asyncio.create_task(together.ask(0))
        await asyncio.sleep(0.01)  # it is under way: these wait
        gone = asyncio.create_task(together.ask(99))
        rest = [asyncio.create_task(together.ask(n)) for n in range(1, 12)]
        await asyncio.sleep(0.01)
        gone.cancel()
        found = await asyncio.gather(first, *rest)
        return [*found, await together.ask(13), await together.ask(7)]

    *found, error, last = asyncio.run(many())
    assert found == [2 * n for n in range(12)]
    assert (str(error), last) == ("thirteen", 14)
    assert sizes == [1, 7, 4, 1, 1]
