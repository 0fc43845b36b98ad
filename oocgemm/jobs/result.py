"""What the verbs return: plans, results of runs, and elements that were selected from a product."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from html import escape
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from oocgemm import planning
from oocgemm.errors import InputError
from oocgemm.jobs import support
from oocgemm.jobs.options import PathLike, RunOptions, check_names
from oocgemm.jobs.request import Request
from oocgemm.planning.parts.partition import Partition, scaling
from oocgemm.planning.units import counted, format_rate, format_size, format_time, parse_rate
from oocgemm.reports.advice import diagnosis_lines
from oocgemm.stores import Matrix
from oocgemm.stores.zarr_matrix import save_arrays
from oocgemm.timeline import Recorder, Report, Timeline, report

# Estimated memory of a timeline and its report, in bytes per span. A span is the record of one operation. For
# a run with 132,500 spans, 910 bytes per span were measured.
REPORTED_SPAN_BYTES = 1000


@dataclass(frozen=True)
class Result:
    """The result of a run. ``np.asarray(result)`` is C as an ndarray.

    Attributes:
        c: C as a `Matrix`. Every run sets it; None is for a `Result` that is made without a run.
        plan: the plan that ran.
        log: the compressed record of the run, from which `timeline` and `report` are made on first access.
        kept: the numbers of the rows of X that C has, if `corr` has left out some; None for all.
    """

    c: Matrix | None
    plan: planning.Plan
    log: Recorder
    kept: NDArray[np.int64] | None = None

    @cached_property
    def out(self) -> Any:
        """The array that holds C: the one passed in, a new ndarray, or the zarr array or memory map at C's
        path. The first access to a zarr array imports zarr and opens the array."""
        return getattr(self.c, "array", None)

    @property
    def uplo(self) -> str:
        """What the run has written: "full" for all of C, or the triangle "lower" or "upper" of it."""
        return self.plan.problem.triangle or "full"

    @cached_property
    def timeline(self) -> Timeline:
        """The times of every operation of the run. It takes about 500 bytes of memory per operation."""
        return self.log.timeline()

    @cached_property
    def report(self) -> Report:
        """The figures of the run, such as T, the share of T in which the kernel runs, and the traffic."""
        return report(self.timeline)

    @property
    def report_bytes(self) -> int:
        """Estimated memory that `timeline` and `report` take, in bytes."""
        return REPORTED_SPAN_BYTES * self.log.spans

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return C as an ndarray. A zarr array is loaded; an ndarray is copied only if required.

        Raises:
            InputError: C is not available as an array.
            ValueError: `copy` is False and a copy is needed.
        """
        if self.out is None:
            raise InputError("this result has no array: open C at its path")
        return np.array(self.out, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<Result {', '.join(self._facts())}>"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: C, the wall time T, the rate, and what limited its speed."""
        rows = [*self._facts(), *diagnosis_lines(self.report, self.timeline)]
        return f"<div><b>oocgemm.Result</b><br>{'<br>'.join(map(escape, rows))}</div>"

    def _facts(self) -> list[str]:
        """Return the facts that need no timeline: C and its location, the wall time T and the rate."""
        problem, seconds = self.plan.problem, self.log.wall / 1e9
        where = type(self.out).__name__ if isinstance(self.out, np.ndarray | None) else repr(self.out)
        facts = [f"C {problem.m} x {problem.n} {problem.c_dtype} in {where}", f"T {format_time(seconds)}"]
        if self.plan.flops and seconds:
            facts.append(format_rate(self.plan.flops / seconds, "FLOP"))
        return facts


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The rows that are most similar to each of n rows, the most similar first.

    As a result of `reduce`, it has the largest elements of each row of C: `indices` are the numbers
    of their columns, and `scores` are their values.

    Attributes:
        indices: n x topk numbers of rows, int64.
        scores: n x topk similarities to them, float32 or float64.
        run: the plan and the timeline of the run. It has no C.
    """

    indices: NDArray[np.int64]
    scores: NDArray[np.floating]
    run: Result

    def save(self, path: PathLike) -> None:
        """Write `indices` and `scores` to a new zarr group at a local path, as arrays of these names.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        save_arrays(os.fspath(path), {"indices": self.indices, "scores": self.scores} | _kept(self.run))


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of n rows that are similar, as a sparse n x n matrix in CSR format.

    ``scipy.sparse.csr_array((p.scores, p.indices, p.indptr), shape=(n, n))`` is this matrix. As a result of
    `reduce`, it has the elements of C that were found, and the shape of C.

    Attributes:
        indptr: n + 1 numbers: the pairs of row i are numbers indptr[i] to indptr[i + 1] - 1.
        indices: the other row of each pair, int64, in ascending order for each row.
        scores: the similarity of each pair, float32 or float64.
        run: the plan and the timeline of the run. It has no C.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    scores: NDArray[np.floating]
    run: Result

    @property
    def rows(self) -> NDArray[np.int64]:
        """The first row of each pair, as in COO format."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def save(self, path: PathLike) -> None:
        """Write `indptr`, `indices` and `scores` to a new zarr group at a local path.

        Raises:
            InputError: something exists at the path, or nothing can be written there.
        """
        arrays = {"indptr": self.indptr, "indices": self.indices, "scores": self.scores}
        save_arrays(os.fspath(path), arrays | _kept(self.run))


def _kept(run: Result) -> dict[str, NDArray[np.int64]]:
    """Return the numbers of the rows that are numbered in a result, if rows were left out."""
    return {} if run.kept is None else {"kept": run.kept}


@dataclass(frozen=True, repr=False)
class Plan(planning.Plan):
    """A planned product. `run` executes it; `str` describes it.

    `tile`, `footprint`, `traffic`, `prediction` and the other figures are those of `oocgemm.planning.Plan`.
    """

    request: Request = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, plan: planning.Plan, request: Request) -> "Plan":
        """Combine a plan and the request that it was made for into a plan that can run."""
        decided = {part.name: getattr(plan, part.name) for part in fields(planning.Plan)}
        return cls(**decided, request=request)

    def run(self, **options: Unpack[RunOptions]) -> Result:
        """Run the plan, as ``oocgemm.gemm(plan=self, **options)`` does."""
        from oocgemm.jobs.run import run_request  # not at the top, since that module imports this one

        check_names("run", options, RunOptions)
        return run_request(self.request.with_options(planned=self, **options))

    def scaling(
        self, workers: int | Iterable[int], storage_read: float | str | None = None
    ) -> tuple[Partition, ...]:
        """Predict the product on several workers, each with the machine model and the budgets of this plan.

        Nothing is run. If the plan was made with a given tile, parts consist of such tiles. Otherwise, tiles
        may have other extents, so that there are enough for all workers.

        Args:
            workers: number of workers that there are, or several numbers.
            storage_read: what the storage delivers to all workers together, in bytes per second, such as
                ``100e9`` or ``"100GB/s"``; by default, what one worker reads.

        Returns:
            For each number of workers, a `Partition`: how many of them are worth using, the parts that they
            compute, and the predicted seconds.

        Raises:
            InputError: a number of workers is not from 1 to 1024, the rate is not positive, or an operand is
                in memory, where other processes cannot access it.
        """
        layouts = {"A": self.layouts.a, "B": self.layouts.b, "C": self.layouts.c}
        for operand, layout in layouts.items():
            if layout.in_memory:
                raise support.refusal(support.WORKERS, "planned in memory", name=operand)
        counts = [workers] if isinstance(workers, int) else list(workers)
        rate = None if storage_read is None else parse_rate(storage_read)
        keep_tile = self.request.tile is not None
        return scaling(self, counts, rate, keep_tile=keep_tile, whole_k=not self.request.divides_k)

    def __repr__(self) -> str:
        return f"<Plan {next(self._lines())}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of `str(plan)`: product, tiles, memory, traffic, predicted time, and any note."""
        problem, tile, prediction = self.problem, self.tile, self.prediction
        factors = " @ ".join(problem.factors)
        yield f"C {problem.m} x {problem.n} {problem.c_dtype} = {factors} {problem.described_dtype}"
        down, across = self.grid.shape
        tiles, steps = f"{down} x {across} tiles", counted(self.steps, "step")
        yield f"tile {tile.m} x {tile.n}, panels {tile.k} deep: {tiles}, {steps}"
        tiers = {"device": self.footprint.device_total, "host": self.footprint.host_total}
        budgets = {"device": self.budgets.device, "host": self.budgets.host}
        used = (f"{tier} {format_size(tiers[tier])} of {format_size(budgets[tier])}" for tier in tiers)
        each = f" (device: on each of {self.devices} devices)" if self.devices > 1 else ""
        yield f"memory: {', '.join(used)}{each}"
        moved = (
            f"{link} {format_size(size)} (at least {format_size(self.least[link])})"
            for link, size in self.traffic.items()
            if size
        )
        yield f"traffic: {', '.join(moved) or 'none'}"
        if self.decoded:
            yield f"decoded by the GPU: {self.decoded}"
        if coding := self.layouts.codings.c:
            yield f"compressed by the GPU: C ({coding.codec})"
        rates = "calibrated" if self.machine.calibrated else "run `oocgemm calibrate` for better estimates"
        yield f"predicted: {format_time(prediction.total)}, {prediction.bottleneck}-bound ({rates})"
        if self.note:
            yield f"note: {self.note}"
