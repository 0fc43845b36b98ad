"""A signal ends a run promptly, and leaves no thread or handler behind."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oocgemm.cli import process as interrupts
from oocgemm.cli.process import SIGNALS, Interrupted, stopping
from tests.support.command import own_threads


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the end of the process, and return a list of the messages and exit codes."""
    found: list[Any] = []
    monkeypatch.setattr(os, "_exit", found.append)
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    def state() -> tuple[Any, ...]:
        wakeup = signal.set_wakeup_fd(-1)
        return [signal.getsignal(number) for number in SIGNALS], wakeup, len(os.listdir("/proc/self/fd"))

    before = state()
    yield
    assert state() == before
    assert own_threads() == []


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_an_interrupt(said: list[Any], number: signal.Signals) -> None:
    with nothing_left(), pytest.raises(Interrupted) as raised, stopping(lambda: said.append("farewell")):
        send(number)
    assert (raised.value.code, said) == (128 + number, [])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_does_not_stop_is_killed(
    said: list[Any], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE", 0.05)
    with nothing_left(), stopping(lambda: said.append("farewell")):
        with pytest.raises(Interrupted):
            send(number)
        assert said == []
        deadline = time.monotonic() + 10
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == ["farewell", 128 + number]


def test_a_second_signal_ends_it_at_once(said: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE", 60.0)
    with nothing_left(), stopping(lambda: said.append("farewell")):
        for number in SIGNALS:
            with pytest.raises(Interrupted):
                send(number)
    assert said == ["farewell", 128 + signal.SIGTERM]


def test_without_a_signal_nothing_is_printed(said: list[Any]) -> None:
    with nothing_left(), stopping(lambda: said.append("farewell")):
        pass
    assert said == []
