"""The data that is sent to workers and their child processes.

A task is a line of JSON. A file that all workers see has the other data that the product needs: the request
with its arrays, and the results of passes over the operands (`Given`).
"""

import importlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.jobs.request import Durability, Request, Where
from oocgemm.jobs.stats import Findings
from oocgemm.planning.tiling import Range, Tile
from oocgemm.stores import Array
from oocgemm.stores.base import named_dtype
from oocgemm.values import dataclass

# The package whose dataclasses may be sent.
_PACKAGE = "oocgemm"


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """The task to compute a part, for a child process.

    - `given`: the path of a file with the `Given` of the run.
    - `header`: the header of the coordinator's journal: identity, plan and version of the run.
    - `rows`, `cols`, `done`: the tile rows and tile columns of the part, and its tiles that are done already.
    - `library`: the library and device that must multiply (`survey.WorkerFacts.library`).
    - `folder`: the folder of the attempt.
    - `fence`, `epoch`, `attempt`: the coordinator's file and epoch, and the name of the attempt.
    """

    given: str
    header: Mapping[str, Any]
    rows: Range
    cols: Range
    done: tuple[Tile, ...]
    library: str
    folder: str
    fence: str
    epoch: str
    attempt: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"task": "part"}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "PartSpec":
        values = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        made = {"rows": tuple(data["rows"]), "cols": tuple(data["cols"])}
        return cls(**values | made | {"done": tuple((i, j) for i, j in data["done"])})


@dataclass(frozen=True)
class Given:
    """The data that every process of a run gets.

    `request` has absolute paths, and the memory budgets of one process. `findings` are the results of passes
    over its operands. `nonce` tells the files of several runs apart.
    """

    request: Request
    findings: Findings
    nonce: str = ""

    @classmethod
    def of(cls, request: Request, findings: Findings, nonce: str = "") -> "Given":
        """Return the data for workers: the request, without the options that only the coordinator uses."""
        where = Where(request.where.backend, request.where.kernel, request.where.device, workers=1)
        request = replace(
            request,
            where=where,
            durability=Durability(resume=True, trust_operands=request.durability.trust_operands),
            out_dtype=None if request.out_dtype is None else named_dtype(request.out_dtype),
            tile=None,
            chunks=None,
            compressor=None,
            timeline=None,
            progress=None,
            planned=None,
        )
        return cls(request, findings, nonce)

    def packed(self) -> bytes:
        return pack(self)

    @classmethod
    def unpacked(cls, path: str | Path) -> "Given":
        found: Given = unpack(path)
        return found


def pack(value: Any) -> bytes:
    """Encode a value as bytes, the content of a file that `unpack` reads.

    The value may contain plain data, arrays, enums, and dataclasses of this package.
    """
    arrays: list[Array] = []
    text = json.dumps(_plain(value, arrays)).encode()
    file = io.BytesIO()
    np.savez(file, np.frombuffer(text, np.uint8), *arrays)  # before NumPy 2.1, savez has no allow_pickle
    return file.getvalue()


def unpack(path: str | Path) -> Any:
    """Return the value that `pack` encoded, from a file. Lists in it have become tuples.

    Raises `OSError` or `ValueError` for another file.
    """
    with np.load(path, allow_pickle=False) as file:
        text, *arrays = (file[name] for name in file.files)
    return _rebuilt(json.loads(text.tobytes()), arrays)


def _plain(value: Any, arrays: list[Array]) -> Any:  # noqa: PLR0911  # one per kind of value
    """Return a value as plain data. Arrays are appended to `arrays`, and replaced by their indices there."""
    match value:
        case Enum():
            return {"class": _name(value), "value": value.value}
        case None | bool() | int() | float() | str():
            return value
        case complex():
            return {"real": value.real, "imaginary": value.imag}
        case np.ndarray() if value.dtype.hasobject is False:
            arrays.append(value)
            return {"array": len(arrays) - 1}
        case np.generic():
            return _plain(value.item(), arrays)
        case tuple() | list():
            return [_plain(one, arrays) for one in value]
        case Mapping():
            return {"items": [[_plain(one, arrays) for one in pair] for pair in value.items()]}
    if is_dataclass(value) and type(value).__module__.partition(".")[0] == _PACKAGE:
        kept = {one.name: _plain(getattr(value, one.name), arrays) for one in fields(value) if one.init}
        return {"class": _name(value), "fields": kept}
    return _plain(np.asarray(value), arrays)


def _name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _rebuilt(data: Any, arrays: list[Array]) -> Any:  # noqa: PLR0911  # one per kind of value
    """Return the value that `_plain` has described. Sequences become tuples."""
    if isinstance(data, list):
        return tuple(_rebuilt(one, arrays) for one in data)
    if not isinstance(data, dict):
        return data
    if "array" in data:
        return arrays[data["array"]]
    if "real" in data:
        return complex(data["real"], data["imaginary"])
    if "items" in data:
        return dict(_rebuilt(pair, arrays) for pair in data["items"])
    module, _, name = data["class"].partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{data['class']} is no class of {_PACKAGE}")
    made: type[Any] = getattr(importlib.import_module(module), name)
    if "value" in data:
        return made(data["value"])
    return made(**{field: _rebuilt(one, arrays) for field, one in data["fields"].items()})
