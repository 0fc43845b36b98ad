"""Random changes of documents and files, and commands that must end well in spite of them.

There are a few thousand cases, the same ones each time. Each has a time limit.
"""

import copy
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from oocgemm.cli.process import EXIT_BUDGET, EXIT_FAILED, EXIT_USAGE
from tests.support.command import Finished, command, own_threads
from tests.support.suite import examples

BOUND = 30  # time limit of a case, in seconds
A, B = np.arange(42.0).reshape(7, 6) % 5, np.arange(30.0).reshape(6, 5) % 7
C = np.ones((7, 5))


def fuzz(cases: int) -> Callable[[Any], Any]:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=examples(cases),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=checks,
    )


class Hang(BaseException):
    """A case that did not end within its time limit."""


@contextmanager
def bounded(seconds: int = BOUND) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ended(*arguments: str | Path) -> Finished:
    """Run a command, which must succeed or print one line and end with the exit code of an error."""
    with bounded():
        done = command(*arguments)
    if done.code != 0:
        assert done.code in (EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET), done
        lines = [line for line in done.err.splitlines() if not line.startswith(("Note: ", "Warning: "))]
        assert len(lines) == 1, done
        assert lines[0].startswith("Error: "), done
        assert len(lines[0]) > len("Error: ???"), done
    assert "Traceback" not in done.err
    assert own_threads() == []
    return done


def delete_results(here: Path) -> None:
    """Delete the files that a run may have written."""
    for name in ("new", "new.npy.oocgemm", "deep", "C.ZARR"):
        shutil.rmtree(here / name, ignore_errors=True)
    (here / "new.npy").unlink(missing_ok=True)


# Values to put into metadata where they do not belong. No value describes a matrix that is so large that
# multiplying it would take long.
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 1.5, 1e308, float("nan"), 2**31, 2**53, 2**63, 2**64, 10**30, "", "x", "NaN", "0x7ff"),  # noqa: E501
    *("C", "F", "K", "float32", "float64", "<f8", ">f8", "<f4", "|b1", "<U3", "|O", "complex64", "bfloat16", "string", "int8"),  # noqa: E501
    *([], {}, [[]], [1], [7, 6], [4, 3], [0, 0], [1, 1, 1], [-4, 3], [2**40, 2**40], [7, 2**62], ["a", None], {"name": "x"}, {"id": "x"}),  # noqa: E501
    *("default", "v2", "regular", "bytes", "zstd", "gzip", "blosc", "crc32c", "transpose", "sharding_indexed", "little", "big", "middle"),  # noqa: E501
    *({"name": "bytes"}, {"name": "gzip", "configuration": {"level": 99}}, {"name": "transpose", "configuration": {"order": [1, 1]}}),  # noqa: E501
    *({"id": "zstd"}, {"id": "blosc", "cname": "x"}, {"name": "blosc", "configuration": {}}, {"id": "pickle"}, {"id": "vlen-utf8"}),  # noqa: E501
]  # fmt: skip


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON document, as (the list or object that contains it, its index or key)."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [place for key in keys for place in ((value, key), *_nodes(value[key]))]


def mutated(data: st.DataObject, document: Any) -> Any:
    """Return a document of which a few parts are deleted, swapped or replaced."""
    document = {"": copy.deepcopy(document)}
    for _ in range(data.draw(st.integers(1, 3))):
        places = _nodes(document)[1:] or _nodes(document)
        parent, key = data.draw(st.sampled_from(places))
        match data.draw(st.integers(0, 5)):
            case 0:
                del parent[key]
            case 1:
                other, there = data.draw(st.sampled_from(places))
                parent[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(parent[key])
            case 2:
                parent[key] = [copy.deepcopy(parent[key])] * data.draw(st.integers(1, 3))
            case _:
                parent[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        if "" not in document:
            return None
    return document[""]


def garbled(data: st.DataObject, content: bytes) -> bytes:
    """Return bytes of which some are deleted, changed or repeated."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        stop = min(len(content), start + data.draw(st.sampled_from([0, 1, 2, 4, 8, 100])))
        match data.draw(st.integers(0, 5)):
            case 0:
                content = content[:start]
            case 1:
                content = content[:start] + content[stop:]
            case 2:
                content = content[:stop] + content[start:]
            case 3:
                content = content[:start] + bytes(stop - start) + content[stop:]
            case 4:
                content = content[:start] + b"\xff" * (stop - start) + content[stop:]
            case 5:
                content = content[:start] + data.draw(st.binary(max_size=8)) + content[stop:]
    return content


@contextmanager
def folder_of_operands(folder: Path) -> Iterator[Path]:
    """Create operands in a folder, and make it the working directory during the block."""
    for name, values in (("a", A), ("b", B), ("c", C)):
        np.save(folder / f"{name}.npy", values)
        zarr.create_array(folder / name, data=values, chunks=(4, 3), compressors=None)
    with pytest.MonkeyPatch.context() as change:
        change.chdir(folder)
        change.delenv("OOCGEMM_DEBUG", raising=False)
        yield folder
