"""Ctrl-C and SIGTERM never leave a record half written, and never come out as another error."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from bishop_ray.search.journal import JOURNAL, LOCK, Journal, open_journal
from bishop_ray.signals import DeferredSignals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """What SIGTERM raises in these tests."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    def terminate(*_: object) -> None:
        raise Terminated

    before = {sign: signal.getsignal(sign) for sign in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


def send(sign: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), sign)


@pytest.mark.parametrize(("sign", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_what_comes_meanwhile_is_handled_at_the_end(sign: signal.Signals, error: type[BaseException]) -> None:
    done = []

    def held() -> None:
        with DeferredSignals():
            for _ in range(3):
                send(sign)
            done.append(True)

    with pytest.raises(error):
        held()
    assert done
    with pytest.raises(error):
        send(sign)


def test_the_second_one_does_not_wait() -> None:
    done = []

    def held() -> None:
        with DeferredSignals(patience=1):
            send()
            done.append(1)
            send()
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        held()
    assert done == [1]


def test_release_handles_once() -> None:
    with DeferredSignals(patience=1) as held:
        held.release()
        send()
        with pytest.raises(KeyboardInterrupt):
            held.release()
        held.release()


def test_an_inner_context_hands_over() -> None:
    done = []

    def held() -> None:
        with DeferredSignals(patience=1):
            with DeferredSignals():
                send()
                done.append("inner")
            done.append("outer")
            with DeferredSignals():
                send()
                done.append("inner again")
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        held()
    assert done == ["inner", "outer", "inner again"]


def test_threads_and_what_the_system_does_are_left_alone() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with DeferredSignals():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

    def inside() -> None:
        with DeferredSignals():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()


@pytest.mark.parametrize("step", ["rename", "unlink", "fsync", "write"])
def test_a_journal_is_whole_and_free_after_ctrl_c_at_each_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / JOURNAL
    study = optuna.create_study(storage=open_journal(path))
    trial = study.ask()
    before = path.read_bytes()
    if step == "write":
        original_open = Path.open

        def opened(self: Path, *args: object, **kwargs: object) -> object:
            if self == path:
                send()
            return original_open(self, *args, **kwargs)  # type: ignore[call-overload]

        monkeypatch.setattr(Path, "open", opened)
    else:
        original = getattr(os, step)

        def interrupted(*args: object) -> object:
            send()
            return original(*args)

        monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Journal(path).append_logs([{"op_code": 4, "worker_id": "x"}])
    monkeypatch.undo()
    after = path.read_bytes()
    assert after.startswith(before)
    assert after[len(before) :] == b'{"op_code":4,"worker_id":"x"}\n'
    assert not list(tmp_path.glob(f"{LOCK}*"))
    assert trial.number == 0
