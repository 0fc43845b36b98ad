"""Keep some spans of a run in memory, from which rates are learned when the run has ended."""

from collections import defaultdict, deque
from functools import partial

from oocgemm.timeline.spans import Span

# Maximum number of spans that are kept of each kind.
MAX_SPANS = 400


class Sample:
    """The last spans of each kind, in bounded memory. Not thread-safe."""

    def __init__(self) -> None:
        self._kinds: defaultdict[str, deque[Span]] = defaultdict(partial(deque, maxlen=MAX_SPANS))

    def add(self, span: Span) -> None:
        """Add a span."""
        self._kinds[span.kind].append(span)

    def spans(self, *, together: bool = False) -> list[Span]:
        """Return the kept spans.

        If `together`, return only those since the time from which on all spans of all kinds were kept.
        """
        full = [kind[0].start for kind in self._kinds.values() if len(kind) == MAX_SPANS]
        since = max(full, default=0) if together else 0
        return [span for kind in self._kinds.values() for span in kind if span.start >= since]

    def clear(self) -> None:
        """Drop the kept spans."""
        self._kinds.clear()
