"""Products whose k runs along the rows of X: the sums of those of slices of the rows, on several devices.

The slices depend on X alone. Their products are added in their order, in float64. So the bits of the result
do not depend on the number of devices.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from oocgemm import backends, stores
from oocgemm.jobs.prepare import budgets_of
from oocgemm.jobs.request import Chain, Destination, Request, Source, numbers_of, unknown_devices
from oocgemm.jobs.run import Plan, Result, plan_request, run_request, run_side_by_side
from oocgemm.planning.tiling import Range, ceil_div, round_up
from oocgemm.planning.units import parse_size
from oocgemm.stores import Array

# Number of slices of X if several devices multiply it, unless X has fewer rows of chunks.
SLICES = 8
# The width of a factor is a multiple of this, so that its rows are aligned on a GPU.
WIDTH = 8


class RowSlices:
    """An open X, and the options of its products.

    - `matrix`: X as it is stored.
    - `slices`: the rows of each slice; one for all rows without several devices.
    """

    def __init__(self, name: str, x: Any, options: Mapping[str, Any]) -> None:
        """Open X. Nothing is read. The `options` are those of `gemm`."""
        self._x, self._options = x, {key: options[key] for key in options if key != "devices"}
        self._devices = numbers_of(options.get("devices"))
        self._decodes = options.get("decode", True)
        self.matrix = stores.open_matrix(name, x, decode=self._decodes)
        self.slices = [(0, self.matrix.shape[0])] if self._devices is None else self._cuts()

    def _cuts(self) -> list[Range]:
        """Return slices of the rows of X that consist of whole chunks."""
        rows, chunk = self.matrix.shape[0], self.matrix.layout.read_chunk[0]
        chunks = ceil_div(rows, chunk)
        count = max(1, min(SLICES, chunks))
        cuts = [min(rows, number * chunks // count * chunk) for number in range(count + 1)]
        return list(pairwise(cuts))

    @property
    def sessions(self) -> int:
        """How many slices are multiplied at the same time."""
        return min(len(self.slices), self._count())

    def _count(self) -> int:
        if self._devices != "all":
            return len(self._devices or (0,))
        if self.backend == "host":
            return 1
        return backends.open_backend("cuda").device_count()

    @property
    def backend(self) -> str:
        """The backend that computes the products."""
        return backends.resolve(self._options.get("backend", "auto"))

    @property
    def is_tall(self) -> bool:
        """Whether X has at least as many rows as columns, so that X^T X is its smaller Gram matrix."""
        return self.matrix.shape[0] >= self.matrix.shape[1]

    def planned(self, whole: Request, *, running: bool) -> Plan:
        """Return the plan of the first slice. Only if X will be `running` through a device, it is opened."""
        if self._devices == "all" and self.backend != "host" and not running:
            raise unknown_devices()
        request = self._sliced(whole, planning=not running)[0][0]
        if running and self.backend != "host":
            given = request.budgets.device_memory, request.budgets.all_host_memory
            budgets = budgets_of(self.backend, self.engine().free_memory, *given)
            request = request.with_options(device_memory=budgets.device)
        return plan_request(request)

    def engine(self) -> backends.Backend:
        """Open the first device."""
        first = self._devices[0] if isinstance(self._devices, tuple) else self._options.get("device", 0)
        return backends.open_backend(self.backend, first)

    def decomposed(self, s: Array, width: int) -> tuple[Array, Array] | None:
        """Return eigenvalues and eigenvectors by the first device; None if the host must find them."""
        if self.backend == "host":
            return None
        engine, asked = (
            self.engine(),
            Request.of(None, None, Destination.parse(None), **self._options).budgets,
        )
        found = budgets_of(self.backend, engine.free_memory, asked.device_memory, asked.all_host_memory)
        return engine.decomposed(s, width, found.device)

    def run(self, request: Request) -> Result:
        """Run a product of all rows."""
        return run_request(request)

    def chained(self, x: Source, factor: Array, resident_bytes: int) -> Array:
        """Return X^T (X factor), in float64, by one read of X. The caller needs `resident_bytes` then."""
        width = round_up(factor.shape[1], WIDTH)
        wide = np.zeros((len(factor), width))
        wide[:, : factor.shape[1]] = factor
        chain = Chain(width, np.zeros(width), wide, resident_bytes)
        request = Request(a=x, b=x, c=Destination.parse(None), into=chain)
        return self.sum(request.with_options(**self._options))[0][:, : factor.shape[1]]

    def sum(self, whole: Request) -> tuple[Array, str]:
        """Return the sum of the products of all slices of X, in float64, and their tile shape."""
        requests, lanes = self._sliced(whole)
        if len(requests) == 1:
            result = self.run(requests[0])
            return np.asarray(result.out).astype(np.float64, copy=False), str(result.plan.tile)
        found, tiles = list[Array](), list[str]()

        def add(result: Result) -> None:
            if not tiles:
                found.append(np.zeros(result.out.shape))
            with np.errstate(all="ignore"):
                np.add(found[0], result.out, out=found[0])
            tiles.append(str(result.plan.tile))

        run_side_by_side(requests, lanes, add)
        return found[0], tiles[0]

    def _sliced(self, whole: Request, *, planning: bool = False) -> tuple[list[Request], int]:
        """Return the requests for the products of all slices of X, and how many run at the same time."""
        if self._devices is None:
            return [whole], 1
        if not (self.is_tall or isinstance(whole.into, Chain)):
            return [whole.with_options(devices=self._devices)], 1
        into, places = whole.into, self._places(planning=planning)
        if isinstance(into, Chain):
            into = replace(into, resident_bytes=into.resident_bytes // self.sessions)
        return [
            replace(
                whole.with_options(**places[number % len(places)]),
                a=_cut(whole.a, rows),
                b=_cut(whole.b, rows),
                into=into,
            )
            for number, rows in enumerate(self.slices)
        ], len(places)

    def _places(self, *, planning: bool) -> list[dict[str, Any]]:
        """Return the options of each session: its device and its memory. The sessions share the host memory.

        When a run is only planned, no device is opened.
        """
        names = ("device_memory", "host_memory", "memory")
        device, host, memory = (self._options.get(name) for name in names)
        count = self.sessions
        if planning and self.backend != "host":
            numbers, free = tuple(range(count)), None
        else:
            devices = backends.open_devices(self.backend, self._devices or (0,))
            numbers, free = devices.numbers, devices.free_memory
        shared: dict[str, Any] = {"memory": None, "host_memory": None, "device_memory": device}
        if memory is not None and self.backend == "host":
            shared["memory"] = parse_size(memory) // count
        else:
            found = budgets_of(self.backend, free, device, host if memory is None else memory)
            shared |= {"device_memory": found.device, "host_memory": found.host // count}
        return [shared | {"device": number} for number in numbers[:count]]


def _cut(x: Source, rows: Range) -> Source:
    """Return the operand with some of its rows. A transform may have a number per row."""
    change = x.transform
    if change is not None and not x.of_lines and isinstance(change.scale, np.ndarray):
        change = replace(change, scale=change.scale[slice(*rows)])
    return replace(x, rows=rows, transform=change)
