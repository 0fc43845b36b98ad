"""What is sent to workers and their child processes: plain data, never arrays."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oocgemm.jobs.operands import op_of
from oocgemm.jobs.request import Destination, Request
from oocgemm.planning.parts.slicing import Slicing
from oocgemm.planning.serialize import recorded_scalar
from oocgemm.planning.tiling import Range, Tile

# Fields of a request that every process of a run shares and that are plain data.
_SHARED = ("backend", "kernel", "compute", "verify", "device", "trust_operands", "requests", "decode")


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """A part, for a child process.

    - `request`: the product, as `shared_request` returns it, with the memory budgets of the child process.
    - `header`: the header of the master journal: identity, plan and version of the run.
    - `rows`, `cols`, `done`: the tile rows and tile columns of the part, and its tiles that are done already.
    - `library`: the library and device that must multiply (`survey.WorkerFacts.library`).
    - `folder`: the folder of the attempt.
    - `fence`, `epoch`, `attempt`: the coordinator's file and epoch, and the name of the attempt.
    """

    request: Mapping[str, Any]
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
        """Return the part as plain data."""
        return asdict(self) | {"task": "part"}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "PartSpec":
        """Rebuild a part from plain data."""
        values = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        made = {"rows": tuple(data["rows"]), "cols": tuple(data["cols"])}
        return cls(**values | made | {"done": tuple((i, j) for i, j in data["done"])})


def shared_request(
    request: Request, out_dtype: str, device_memory: int | None = None, host_memory: int | None = None
) -> dict[str, Any]:
    """Return the request of a product as plain data, for processes on other machines.

    Args:
        request: has A, B and C as absolute paths, or A and B as URLs.
        out_dtype: dtype of C.
        device_memory, host_memory: budgets of one process, in bytes.
    """
    return {
        **{"a": request.a.given, "b": request.b.given, "c": request.c.path},
        **{name: request.option(name) for name in _SHARED},
        "alpha": _plain(request.alpha),
        "beta": _plain(request.beta),
        "trans_a": str(op_of("trans_a", request.a.op)),
        "trans_b": str(op_of("trans_b", request.b.op)),
        "out_dtype": out_dtype,
        "device_memory": device_memory,
        "host_memory": host_memory,
        "slicing": None if request.slicing is None else asdict(request.slicing),
    }


def request_of(data: Mapping[str, Any]) -> Request:
    """Rebuild the request from the result of `shared_request`."""
    scalars = {name: recorded_scalar(data[name]) for name in ("alpha", "beta")}
    slicing = data["slicing"]
    if slicing is not None:
        slicing = Slicing(tuple((start, stop) for start, stop in slicing["ranges"]), slicing["rows"])
    return Request.of(**{**data, **scalars, "c": Destination.parse(data["c"]), "slicing": slicing})


def _plain(value: complex) -> list[str]:
    number = complex(value)
    return [repr(number.real), repr(number.imag)]
