"""Export a report to files: an HTML page, pictures, a trace."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from oocgemm.errors import InputError
from oocgemm.reports.page import page
from oocgemm.reports.svg import svg
from oocgemm.reports.trace import write_trace
from oocgemm.timeline import Timeline

PNG_WIDTH = 2700


def check_outputs(outputs: Mapping[str, str | None]) -> None:
    """Raise `InputError` if one of the files cannot be written. Call this before a timeline is read."""
    for kind, path in outputs.items():
        if path is not None:
            check_writable(f"--{kind}", path)


def export(
    logs: Sequence[str], timelines: Sequence[Timeline], outputs: dict[str, str | None]
) -> list[tuple[str, str]]:
    """Write the requested files. Return a list with a description and the path of each.

    `logs` has the paths of the logs, and `timelines` the timelines read from them. `outputs` maps ``html``,
    ``svg``, ``png`` and ``trace`` to the path to write, or to None. Only ``html`` takes several timelines.

    Raises `InputError` if a path cannot be written or is one of `logs`, if another output than ``html`` is
    requested for several timelines, or if a PNG is requested without resvg-py.
    """
    wanted = {kind: path for kind, path in outputs.items() if path is not None}
    for kind, path in wanted.items():
        if any(os.path.realpath(path) == os.path.realpath(log) for log in logs):
            raise InputError(
                f"--{kind} {path} would overwrite the timeline of this report: give another path"
            )
        if kind != "html" and len(logs) > 1:
            raise InputError(
                f"--{kind} takes one timeline, but {len(logs)} were given; only --html takes several"
            )
    makers: dict[str, Callable[[TextIO], object]] = {
        "html": lambda file: file.write(page(list(zip(logs, timelines, strict=True)))),
        "svg": lambda file: file.write(svg(timelines[0], logs[0])),
        "trace": lambda file: write_trace(file, timelines[0]),
    }
    for kind, path in wanted.items():
        with writing(f"--{kind}", path):
            if kind == "png":
                Path(path).write_bytes(_png(svg(timelines[0], logs[0])))
            else:
                with open(path, "w", encoding="utf-8") as file:
                    makers[kind](file)
    names = {"html": "Page", "svg": "Picture", "png": "Picture", "trace": "Trace for ui.perfetto.dev"}
    return [(names[kind], path) for kind, path in wanted.items()]


@contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Turn an `OSError` into an `InputError` that names the command-line option and the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {option} {path}: {error.strerror}") from error


def check_writable(option: str, path: str) -> None:
    """Raise `InputError` if no file can be created in the folder of `path`.

    Call this before a long computation, so that the command fails early and not when it writes the result.
    """
    with writing(option, path):
        folder = os.path.dirname(os.path.abspath(path))
        tempfile.TemporaryFile(dir=folder).close()


def _png(picture: str) -> bytes:
    try:
        import resvg_py
    except ImportError as error:
        raise InputError("--png needs resvg-py: pip install 'oocgemm[png]', or use --svg") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=picture, width=PNG_WIDTH))
