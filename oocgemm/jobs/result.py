"""What a run returns: the product, how it was planned, and what happened."""

from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import Plan
from oocgemm.planning.units import format_rate, format_time
from oocgemm.reports.advice import diagnosis_lines
from oocgemm.timeline import Recorder, Report, Timeline, report

REPORTED_SPAN_BYTES = 1000  # measured with 132,500 spans: 910


@dataclass(frozen=True)
class Result:
    """What a run leaves: the product, how it was planned, and what happened.

    `out` is the array that holds C: the given one, an ndarray, or the zarr array or memory map at its path. `log` is what
    was recorded; it becomes a timeline, and that a report, when one is asked for. ``np.asarray(result)`` is C as an
    ndarray.
    """

    out: Any
    plan: Plan
    log: Recorder

    @cached_property
    def timeline(self) -> Timeline:
        """Every operation of the run, some 500 bytes each."""
        return self.log.timeline()

    @cached_property
    def report(self) -> Report:
        """The figures of the run."""
        return report(self.timeline)

    @property
    def report_bytes(self) -> int:
        """About the memory that making the timeline and the report takes."""
        return REPORTED_SPAN_BYTES * self.log.spans

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return C as an ndarray. A C in memory is not copied unless `dtype` or `copy` ask for it; a zarr array is loaded.

        Raises:
            InputError: no array holds this C.
            ValueError: `copy` is False and a copy is needed.
        """
        if self.out is None:
            raise InputError("this result holds no array: open C at its path")
        return np.array(self.out, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<Result {', '.join(self._facts())}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show: C, T, the rate, and what bounded the run."""
        rows = [*self._facts(), *diagnosis_lines(self.report, self.timeline)]
        return f"<div><b>oocgemm.Result</b><br>{'<br>'.join(map(escape, rows))}</div>"

    def _facts(self) -> list[str]:
        """What can be said without the timeline: C and where it is, T and the rate."""
        problem, seconds = self.plan.problem, self.log.wall / 1e9
        where = type(self.out).__name__ if isinstance(self.out, np.ndarray | None) else repr(self.out)
        facts = [f"C {problem.m} x {problem.n} {problem.c_dtype} in {where}", f"T {format_time(seconds)}"]
        if self.plan.flops and seconds:
            facts.append(format_rate(self.plan.flops / seconds, "FLOP"))
        return facts
