"""Prepare a product on a GPU that is like a recent one, without opening and planning everything again.

For a small product, that would take longer than the product. If A, B and C are arrays in memory, what
`prepare` returns depends on their shapes, strides and dtypes, on which of them are pinned, on the options,
and on what changes slowly: the free memory, and the files with the rates of the machine. So a preparation is
used again, for at most `RECENT` seconds.
"""

from dataclasses import dataclass, fields
from operator import attrgetter
from time import monotonic
from typing import Any

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.jobs.prepare import Output, PreparedRun
from oocgemm.jobs.request import Request, Source
from oocgemm.planning import Plan
from oocgemm.stores import Matrix, is_plain

# For how many seconds a preparation is used, and for how many products one is kept.
RECENT, MAX_KEPT = 0.5, 16

_NOT_OPTIONS = ("a", "b", "c", "progress", "timeline")
_of_operands = (f"{side}.{field.name}" for side in "ab" for field in fields(Source) if field.name != "given")
_options = attrgetter(
    *(field.name for field in fields(Request) if field.name not in _NOT_OPTIONS), *_of_operands
)


@dataclass(frozen=True)
class Recent:
    """What was prepared at the time `at`. Its matrices have no arrays: it keeps none alive."""

    at: float
    engine: Backend
    plan: Plan
    a: Matrix
    b: Matrix
    c: Matrix | None

    def job(self, request: Request) -> PreparedRun | None:
        """Return the job of a request for which this was found; None if it must be prepared anew."""
        given, layouts = request.c.array, self.plan.layouts
        first, second = request.a.given, request.b.given
        if self.c is not None and any(stores.overlap(given, x) for x in (first, second)):
            return None
        a, b = stores.like(self.a, first), stores.like(self.b, second)
        c = None if self.c is None else stores.like(self.c, given)
        for x, layout in ((a, layouts.a), (b, layouts.b), (c, layouts.c)):
            if x is None or not layout.contiguous_rows:
                continue
            if self.engine.is_pinned(*stores.span(x)) != layout.pinned:
                return None
        return PreparedRun(request, a, b, Output(c, None, None, None, {}), self.plan)


_recent: dict[object, Recent] = {}


def find(request: Request) -> Recent | None:
    """Return what was prepared recently for a request like this one; None if nothing was."""
    key = _key(request)
    found = None if key is None else _recent.get(key)
    return None if found is None or monotonic() - found.at > RECENT else found


def remember(job: PreparedRun, engine: Backend) -> None:
    """Keep what was prepared for later products like this one, unless they must be prepared anew."""
    request, a, b, c = job.request, job.a, job.b, job.output.matrix
    if any(x is not None and stores.in_memory(x) is None for x in (a, b, c)):
        return
    as_given = stores.in_memory(a) is request.a.given and stores.in_memory(b) is request.b.given
    # A correction and scales are computed from the elements of the operands.
    if as_given and not request.gram and job.plan.steps and not job.has_numbers:
        key = _key(request) if engine.name == "cuda" else None
        if key is not None:
            if len(_recent) >= MAX_KEPT:
                _recent.clear()
            kept = stores.like(a, None), stores.like(b, None), None if c is None else stores.like(c, None)
            _recent[key] = Recent(monotonic(), engine, job.plan, *kept)


def forget() -> None:
    """Forget what was prepared."""
    _recent.clear()


def _key(request: Request) -> object:
    """Return what a preparation depends on, besides pinning and what changes slowly; None if on more."""
    arrays = request.a.given, request.b.given, request.c.array
    if request.c.path or not all(x is None or is_plain(x) for x in arrays):
        return None
    key = _options(request), *map(_form, arrays)
    try:
        hash(key)
    except TypeError:  # an option cannot be hashed
        return None
    return key


def _form(x: Any) -> object:
    """Return what the layout of an array depends on."""
    if x is None:
        return None
    return x.shape, x.strides, x.dtype, x.flags.num, x.ctypes.data % (x.itemsize or 1)
