"""The result of a run: the product, its plan and its timeline."""

from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import InputError
from oocgemm.planning import Plan
from oocgemm.planning.units import format_rate, format_time
from oocgemm.reports.advice import diagnosis_lines
from oocgemm.stores import Matrix
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
    plan: Plan
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
