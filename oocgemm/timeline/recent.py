"""What a run that is still going has done in the last seconds."""

from collections.abc import Sequence

from oocgemm.timeline.exposed import shares_between
from oocgemm.timeline.series import utilisation
from oocgemm.timeline.spans import Span
from oocgemm.timeline.verdict import verdict

# `recent_activity` describes the last WINDOW_NS nanoseconds. It needs the last MAX_RECENT operations.
WINDOW_NS, MAX_RECENT = 5_000_000_000, 1000


def recent_activity(
    recent: Sequence[Span], *, multiplied: bool, finish: str = "accumulator"
) -> tuple[dict[str, float], str]:
    """Return for each lane the share of the last seconds in which it was busy, and what limited the run.

    The second result is a text such as ``compute-bound, 73.4%; largest stall: write 8.4%``; "" if that is
    unknown.

    Args:
        recent: the last operations to end, at most `MAX_RECENT`, the one that ended first before the others.
        multiplied: whether all multiplications have ended. Until then, one may be running, which is not yet
            in `recent` and would look like a stall. So what limited the run is computed only up to the end
            of the last Multiply in `recent`.
        finish: the cause of exposed time while a Finish ran (`oocgemm.timeline.exposed.finish_cause`).
    """
    # If `recent` is full, it lacks older operations. The time before `known` is left out, since the lanes of
    # those operations would look idle.
    known = recent[0].end if len(recent) == MAX_RECENT else 0
    until = max(span.end for span in recent)
    since = max(0, until - WINDOW_NS, known)
    busy = utilisation([span for span in recent if span.end > since], since, until)
    if not multiplied:
        until = max((span.end for span in recent if span.kind == "multiply"), default=0)
    since = max(0, until - WINDOW_NS, known)
    if until <= since:
        return busy, ""
    found = verdict(shares_between(recent, since, until, finish))
    return busy, "; ".join(filter(None, (found.headline, found.beside)))
