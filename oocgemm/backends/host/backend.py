"""The host backend: NumPy's BLAS multiplies, each stream is a thread, and "device memory" is ordinary memory.

It runs the same schedules as a GPU, with the same waits between operations. Tests therefore need no GPU. The
host backend is also useful by itself: it multiplies arrays on disk within a hard memory budget.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from oocgemm.backends.base import (
    Array,
    Checksums,
    DoneToken,
    ElementNumbers,
    Finishing,
    Found,
    HostBlock,
    Pageable,
    Pinned,
    Session,
    Stream,
    SumsOfStrips,
    Swept,
    Token,
    device_offsets,
    numpy_dtype,
)
from oocgemm.backends.host.blas import blas_name, gemm, syrk
from oocgemm.backends.host.finish import KEEPERS, Keeper, expand, finish, run_chain
from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Kind, Op, Operation, Plan, Region, Slot
from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.device_memory import map_offsets
from oocgemm.planning.emulation import describe_steps, plane_offsets
from oocgemm.planning.tiling import Range, length
from oocgemm.system.resources import RECENT, allocate, available_memory

if TYPE_CHECKING:
    from oocgemm.backends.host.residues import Prepared


class HostSession:
    """Runs the operations of one plan on the CPU, each in the thread that submits it."""

    checksums: Checksums | None = None
    strip_sums: SumsOfStrips | None = None
    host_arena: Array | None = None
    asynchronous: Collection[Kind] = ()
    repeats = False
    begins_at_once = False

    def __init__(self, plan: Plan, beside: "Sequence[HostSession]" = ()) -> None:
        self._problem, self._lowered = plan.problem, plan.lowered
        self._dtypes = {x: numpy_dtype(panel.dtype) for x, panel in plan.lowered.panels.items()}
        self._accumulator = numpy_dtype(plan.lowered.accumulator)
        self._ops = plan.problem.trans_a, plan.problem.trans_b
        self._swaps_a, self._swaps_b = (plan.lowered.panels[x].swaps for x in "AB")
        self._widens = plan.problem.a_dtype != plan.problem.acc_dtype
        self._halves_diagonal = plan.problem.halves_diagonal
        self._maps_panels = plan.problem.terms.changes
        self._map_offsets, _ = map_offsets(plan.problem, *extents(plan.problem, plan.tile))
        self._each: list[HostSession] = beside[0]._each if beside else []  # all sessions of the run
        self._each.append(self)
        self._offsets, size = device_offsets(plan, len(beside))
        self._prepared: dict[Slot, Prepared] = {}
        self._steps: Counter[int] = Counter()
        self._in_place: Mapping[str, Array] = {}
        self._finishing = Finishing()
        self._factor: Array | None = None
        self._keeper: Keeper | None = None
        work = plan.footprint.device["work"]
        self._arena = allocate(size + work)
        # Multiply and Finish share the workspace. They never run at the same time, because one thread runs
        # both.
        self._work = self._arena[size : size + work]

    @contextmanager
    def worker(self, stream: Stream) -> Iterator[None]:
        yield

    def keeps(self, operation: Operation) -> bool:
        return False

    def begin(self, operation: Operation, host: Pageable, after: Sequence[Token]) -> Callable[[], DoneToken]:
        token = self.submit(operation, host, after)
        return lambda: token

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> DoneToken:
        # There is nothing to wait for: a token in `after` exists only when its operation has ended.
        start = perf_counter_ns()
        if isinstance(host, Pageable):
            rows, cols = host.shape
            device = self.view(operation, (*operation.writes, *operation.reads)[0])
            host.move((0, rows), (0, cols), device)
            return DoneToken((start, perf_counter_ns()))
        assert not isinstance(host, Found)  # the store of a sparse C searches it
        host = [host.array] if isinstance(host, Pinned) else host
        if operation.peer:
            source = operation.reads[0]
            host = [self._each[source.slot.device].view(operation, source)]
        match operation.kind:
            case Kind.UPLOAD:
                np.concatenate(host, axis=1, out=self.view(operation, operation.writes[0]), casting="no")
            case Kind.DOWNLOAD:
                strip, left = self._rows(operation, operation.reads[0]), 0
                for group in host:
                    np.copyto(group, strip[:, left : (left := left + group.shape[1])], casting="no")
            case Kind.PREPARE:
                self._prepare(operation)
            case Kind.MULTIPLY:
                self._multiply(operation)
            case Kind.FINISH:
                self._finish(operation)
            case _:
                raise AssertionError(f"{operation} is not for a device")
        return DoneToken((start, perf_counter_ns()))

    def use_in_place(self, arrays: Mapping[str, Array]) -> None:
        self._in_place = arrays

    def use_numbers(self, elements: ElementNumbers, finishing: Finishing) -> None:
        assert not elements  # operands are transformed when they are read
        self._finishing = finishing

    def use_factor(self, factor: Array) -> None:
        self._factor = factor

    def kernels_used(self) -> list[str]:
        return ["blas", *describe_steps(self._steps)]

    def device_bytes(self) -> int:
        return self._arena.nbytes

    def close(self, failed: bool = False) -> None:
        del self._arena, self._work
        self._in_place, self._factor, self._keeper = {}, None, None

    def pin(self, host: Sequence[Array]) -> None:
        pass

    def view(self, operation: Operation, region: Region) -> Array:
        if region.slot.operand in ("C", "D"):
            return self._rows(operation, region)
        return self._panel(region, operation.operand, *operation.stored)

    def _rows(self, op: Operation, region: Region) -> Array:
        """Return the rows of C that an operation covers, as a view of a device slot or of the caller's array.

        A slot of the operand "C" contains a tile in the accumulator's dtype. A slot of the operand "D"
        contains a strip, cast to C's dtype.
        """
        (top, bottom), (left, right) = op.m, op.n
        if "C" in self._in_place:
            return self._in_place["C"][top:bottom, left:right]
        dtype = self._accumulator if region.slot.operand == "C" else self._dtypes["C"]
        start = self._offsets[region.slot] + region.start * dtype.itemsize
        return self._view(start, (bottom - top, right - left), dtype)

    def _sums(self, op: Operation, region: Region) -> Array:
        """Return the sums of the rows of C that an operation covers: rows x terms x columns."""
        count = self._problem.terms.count
        if count == 1:
            return self._rows(op, region)[:, None]
        start = self._offsets[region.slot] + region.start * self._problem.itemsizes["acc"]
        return self._view(start, (length(op.m), count, length(op.n)), self._accumulator)

    def _view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.ndarray(shape, dtype, self._arena, offset)

    def _multiply(self, op: Operation) -> None:
        alpha, beta = self._lowered.scalars[0 if op.first else 1]
        sums = self._sums(op, op.writes[0])
        if op.k[0] == op.k[1]:
            for c in sums.swapaxes(0, 1):
                empty = np.empty((len(c), 0), c.dtype)
                gemm(*self._ops, alpha, empty, empty, beta, c)
            return
        maps = self._maps(op, op.reads[2] if self._maps_panels else None)
        for (i, j), c in zip(self._problem.terms.pairs, sums.swapaxes(0, 1), strict=True):
            self._product(op, maps["A"][i], maps["B"][j], (alpha, beta), c)

    def _product(self, op: Operation, a: Array, b: Array, scalars: tuple[complex, complex], c: Array) -> None:
        """Add the product of two panels to sums of C."""
        problem, lowered, (alpha, beta) = self._problem, self._lowered, scalars
        (top, _), (left, _) = op.whole
        # The rows of op(A)'s panel that this Multiply covers: all of them, or those of one strip of the tile.
        rows = slice(op.m[0] - top, op.m[1] - top)
        a = a[:, rows] if self._swaps_a else a[rows]
        # The columns of op(B)'s panel: all of them, except in a tile on the diagonal of a Gram matrix.
        cols = slice(op.n[0] - left, op.n[1] - left)
        b = b[cols] if self._swaps_b else b[:, cols]
        if self._prepared:
            prepared = self._prepared[op.reads[2].slot]
            if prepared.number:
                from oocgemm.backends.host.residues import multiply

                multiply(prepared, rows, alpha.real, beta.real, c, self._work, cols.start)
                return
        elif self._widens:
            a, b = self._in_accumulator_dtype(a, b)
        if lowered.changes_b:
            assert self._factor is not None
            adjoint = Op.N if self._swaps_a else Op.T  # not Op.C: such products are real
            columns = problem.b.changed_columns
            gemm(adjoint, Op.N, 1.0, a, self._factor[:, :columns], 1.0, b[:, :columns])
        if self._halves_diagonal and op.tile[0] == op.tile[1]:
            upper = problem.cover.upper
            m = len(c)
            square = slice(0, m) if upper else slice(c.shape[1] - m, None)
            rest = slice(m, None) if upper else slice(0, c.shape[1] - m)
            syrk(self._ops[0], alpha.real, a, beta.real, c[:, square], upper=upper)
            b, c = b[rest] if self._swaps_b else b[:, rest], c[:, rest]
        gemm(*self._ops, alpha, a, b, beta, c)

    def _panels(self, op: Operation) -> tuple[Array, Array]:
        """Return the two panels that an operation multiplies, in the orientation of the stored operands.

        The panel of op(A) always has all rows of the tile, and the panel of op(B) all of its columns, even if
        the operation covers only a strip of the tile.
        """
        rows, cols = op.whole
        a, b = (
            (op.k, rows) if self._swaps_a else (rows, op.k),
            (cols, op.k) if self._swaps_b else (op.k, cols),
        )
        return self._panel(op.reads[0], "A", *a), self._panel(op.reads[1], self._lowered.right, *b)

    def _panel(self, region: Region, operand: str, rows: Range, cols: Range) -> Array:
        """Return a panel, given as ranges of the stored operand, in its slot or in the caller's array."""
        (top, bottom), (left, right) = rows, cols
        if operand in self._in_place:
            return self._in_place[operand][top:bottom, left:right]
        return self._view(self._offsets[region.slot], (bottom - top, right - left), self._dtypes[operand])

    def _maps(self, op: Operation, prepared: Region | None) -> dict[str, list[Array]]:
        """Return the maps of an operation's two panels by role. `prepared` is the region that they are in."""
        panels = dict(zip("AB", self._panels(op), strict=True))
        if prepared is None:
            return {role: [panel] for role, panel in panels.items()}
        start, terms = self._offsets[prepared.slot], self._problem.terms
        found = {
            role: [
                panel if at < 0 else self._view(start + at, panel.shape, self._dtypes["A"])
                for at in self._map_offsets[role]
            ]
            for role, panel in panels.items()
        }
        if op.reads[0] == op.reads[1]:  # one panel has both roles
            known = dict(zip(terms.a, found["A"], strict=True))
            found["B"] = [known.get(*each) for each in zip(terms.b, found["B"], strict=True)]
        return found

    def _make_maps(self, op: Operation) -> None:
        made = set[int]()
        panels, maps = self._panels(op), self._maps(op, op.writes[0])
        for role, panel in zip("AB", panels, strict=True):
            for steps, to in zip(self._problem.terms.of(role), maps[role], strict=True):
                if to is not panel and to.ctypes.data not in made and steps:
                    made.add(to.ctypes.data)
                    expand(steps, panel, to)

    def _prepare(self, op: Operation) -> None:
        if self._maps_panels:
            self._make_maps(op)
            return
        problem, slot = self._problem, op.writes[0].slot
        m, n, k = map(length, (op.m, op.n, op.k))
        a, b = self._panels(op)
        size = plane_offsets(problem.planes, m, n, k).end
        space = self._arena[self._offsets[slot] :][:size]
        a, b = a.T if self._swaps_a else a, b.T if self._swaps_b else b
        from oocgemm.backends.host.residues import prepare

        self._prepared[slot] = prepare(a, b, space, problem.a_dtype)
        self._steps[self._prepared[slot].number] += 1

    def _in_accumulator_dtype(self, a: Array, b: Array) -> tuple[Array, Array]:
        space = self._work.view(self._accumulator)
        wide_a = space[: a.size].reshape(a.shape)
        wide_b = space[a.size : a.size + b.size].reshape(b.shape)
        np.copyto(wide_a, a)
        np.copyto(wide_b, b)
        return wide_a, wide_b

    def _finish(self, op: Operation) -> None:
        sums, problem = self._sums(op, op.reads[0]), self._problem
        accumulator = sums[:, 0]
        if problem.sink.per_row:
            if problem.terms.count > 1:  # C is written over the sums, in the same rows
                accumulator = sums.reshape(-1)[: accumulator.size].reshape(accumulator.shape)
            if problem.epilogue and not problem.sink.ranks_distances:
                self._run_chain(op, sums, (1.0, 0.0), accumulator)
            if self._keeper is None:
                slot, dtype = op.writes[0].slot, self._dtypes["C"]
                kept = self._view(self._offsets[slot], (problem.m, problem.sink.per_row), dtype)
                self._keeper = KEEPERS[type(problem.sink)](problem, kept, self._finishing, self._factor)
            self._keeper.keep(op, accumulator)
            return
        finished = self._rows(op, op.writes[0])
        alpha, beta = problem.applied_alpha.real, problem.beta.real
        if problem.epilogue:
            self._run_chain(op, sums, (alpha, beta), finished)
            return
        finish(accumulator, alpha, beta, finished, self._work)
        if self._finishing.correction is not None:
            rows, cols = self._finishing.correction
            finished -= rows[slice(*op.m), None]
            finished -= cols[slice(*op.n)]

    def _run_chain(self, op: Operation, sums: Array, scalars: tuple[float, float], result: Array) -> None:
        """Apply the epilogue to a strip of C."""
        numbers = [
            (None if u is None else u[slice(*op.m)], None if v is None else v[slice(*op.n)])
            for u, v in self._finishing.numbers
        ]
        reads = self._problem.reads_c
        sums = sums if self._problem.terms.count > 1 else sums[:, 0]
        run_chain(self._problem.epilogue, numbers, sums, scalars, result, reads=reads)


class HostBackend:
    """Opens sessions that multiply with NumPy's BLAS in ordinary memory. Implements `Backend`."""

    name = "host"

    def device_count(self) -> int:
        return 1

    def free_memory(self) -> int:
        return available_memory(RECENT)

    def multiprocessors(self) -> int:
        return 1

    def is_pinned(self, address: int, size: int) -> bool:
        return False

    def link_limit(self) -> float | None:
        return None

    def describe(self) -> dict[str, str]:
        return {
            "device": f"{len(os.sched_getaffinity(0))} cores",
            "numpy": np.__version__,
            "blas": blas_name(),
        }

    def check(self, plan: Plan, kernel: str) -> None:
        compute = plan.problem.compute
        if compute not in ("native", "emulated"):
            raise InputError(
                f"the host backend computes in native precision, not {compute}: drop --compute, or pass "
                "--backend cuda"
            )

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        return "blas"

    def moments(self, given: Swept, axis: int, host: int, device: int) -> Array | None:
        return None

    def decomposed(self, s: Array, width: int, device: int) -> tuple[Array, Array] | None:
        return None

    def open(self, plan: Plan, kernel: str, beside: Sequence[Session] = ()) -> HostSession:
        return HostSession(plan, cast(Sequence[HostSession], beside))
