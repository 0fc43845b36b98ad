"""Turns paths and options of the user into what the service takes."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oocgemm.errors import InputError

# "root:path" and URLs are sent unchanged. "./x:y" is a local path.
_REMOTE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*:")
_TRANSPOSES = {False: "N", True: "T"}


def is_local(path: object) -> bool:
    """Return whether a path is one of this machine.

    >>> is_local("out/C.zarr"), is_local("./a:b.zarr"), is_local("data:A.zarr"), is_local("s3://x/A.zarr")
    (True, True, False, False)
    """
    return not (isinstance(path, str) and _REMOTE.match(path))


def operand(name: str, path: object, roots: Sequence[Mapping[str, Any]] | None) -> str:
    """Return an operand as the service takes it, such as ``data:dir/A.zarr``.

    Args:
        name: ``a``, ``b`` or ``c``.
        path: ``root:path``, or a path of this machine.
        roots: the roots of the service: each has ``name``, ``folder`` and ``writable``. None if the service
            may be on another machine.

    Raises:
        InputError: it is no path, or it is beneath no root.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(
            f"{name} is a {type(path).__name__}, and a job takes paths: store the array, such as in "
            f"{name.upper()}.zarr, and pass its path"
        )
    if not is_local(path):
        return str(path)
    text = os.fsdecode(path)
    if roots is None:
        raise InputError(
            f"{name} is the local path {text}, which a server at a URL does not know: name the root and the "
            "path beneath it, such as data:dir/A.zarr"
        )
    real = os.path.realpath(text)
    found = [
        (bool(root["writable"]) and name == "c", len(folder), str(root["name"]), folder)
        for root in roots
        if real.startswith((folder := os.path.realpath(str(root["folder"]))).rstrip("/") + "/")
    ]
    if not found:
        listed = ", ".join(f"{root['name']} ({root['folder']})" for root in roots) or "none"
        raise InputError(
            f"{name}, {text}, is beneath no folder of the service: its folders are {listed}. Move the array "
            "there, or add --root to oocgemm serve"
        )
    _, _, root_name, folder = max(found)
    return f"{root_name}:{os.path.relpath(real, folder)}"


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `oocgemm.gemm` as plain data. Options that are None are left out.

    >>> plain_options({"alpha": 1 + 2j, "trans_a": True, "chunks": (8, 8), "tile": None})
    {'alpha': '(1+2j)', 'trans_a': 'T', 'chunks': [8, 8]}

    Raises:
        InputError: a value is of a type that a job cannot have.
    """
    return {name: _plain(name, value) for name, value in options.items() if value is not None}


def _plain(name: str, value: Any) -> Any:
    if name in ("alpha", "beta"):
        return _number(name, value)
    if name in ("trans_a", "trans_b"):
        return _TRANSPOSES[value] if isinstance(value, bool) else str(value)
    if name == "out_dtype" and not isinstance(value, str):
        return str(getattr(value, "name", None) or getattr(value, "__name__", value))
    if name == "tile":
        return str(value)
    if name == "chunks":
        return [int(extent) for extent in value]
    if hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    if isinstance(value, str | int | float):
        return value
    raise InputError(f"option {name} is a {type(value).__name__}, which a job cannot have: leave it out")


def _number(name: str, value: Any) -> float | str:
    """Return a scalar as JSON can hold it: as text if it is complex, infinite or nan."""
    try:
        number = complex(value)
    except (TypeError, ValueError):
        raise InputError(f"option {name} must be a number, such as 1.5 or 1+2j, not {value!r}") from None
    if number.imag:
        return str(number)
    real = number.real
    return real if abs(real) < float("inf") else str(real)
