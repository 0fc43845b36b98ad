"""Child processes of workers that stay for another task, so that tests share them."""

import os
from collections.abc import Callable, Iterator

import pytest

import oocgemm

# Python runs this when a child process starts. The number of seconds is filled in.
STAY = """
import sys
if "oocgemm.distributed.child" in sys.orig_argv:
    from oocgemm.distributed import processes
    processes.STAYING, processes.IDLE = ("host",), {seconds}
"""
Stay = Callable[[float], None]


@pytest.fixture
def stay(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stay]:
    """Yield a function that lets child processes wait for other tasks, for some seconds.

    Those with a GPU do so outside of tests too. Here, it also spares tests the start of a process per part.
    """
    code = tmp_path_factory.mktemp("code")

    def let(seconds: float) -> None:
        (code / "sitecustomize.py").write_text(STAY.format(seconds=seconds))
        monkeypatch.setenv("PYTHONPATH", str(code), prepend=os.pathsep)

    yield let
    oocgemm.release()
