"""What bounds a run: the cause with the largest share of T.

There is one list of causes. ``compute`` is the time in which any Multiply ran; the others are the causes of exposed time
(`oocgemm.timeline.metrics.exposed_intervals`), the stalls. Their shares of T add up to 1. The text report, the page,
the JSON, the live display and the docs take the verdict from here, so it always agrees with the table of causes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from oocgemm.planning.units import format_percent

COMPUTE = "compute"
CAUSES = {
    COMPUTE: "multiplying",
    "read": "waiting for reads",
    "decode": "waiting for chunks to be decoded",
    "h2d": "waiting for copies to the device",
    "prepare": "waiting for panels to be prepared",
    "accumulator": "waiting for a tile to be copied off the device",
    "encode": "waiting for C to be encoded",
    "write": "waiting for C to be written",
    "issue": "nothing that the kernel waited for was running",
    "start-up": "nothing was running before the first multiplication",
    "tail": "after the last multiplication",
}


@dataclass(frozen=True)
class Verdict:
    """The cause with the largest share of T, and the largest stall. `bound` is ``nothing`` where nothing was multiplied;
    `stall` is empty where there is none."""

    bound: str
    share: float
    stall: str
    stall_share: float
    compute_share: float

    @property
    def headline(self) -> str:
        """The bound and its share.

        >>> verdict({"compute": 0.734, "write": 0.084}).headline
        'compute-bound, 73.4%'
        """
        return f"{self.bound}-bound, {format_percent(self.share)}" if self.share else "nothing was multiplied"

    @property
    def beside(self) -> str:
        """What the bound is compared with: the largest stall, or compute.

        >>> verdict({"compute": 0.734, "write": 0.084}).beside
        'largest stall: write 8.4%'
        >>> verdict({"compute": 0.02, "read": 0.98}).beside
        'compute 2.0%'
        """
        if not self.stall:
            return ""
        if self.bound == COMPUTE:
            return f"largest stall: {self.stall} {format_percent(self.stall_share)}"
        return f"{COMPUTE} {format_percent(self.compute_share)}"

    def to_dict(self) -> dict[str, str | float]:
        return asdict(self)


def shares(compute: float, exposed: Mapping[str, float], wall: float) -> dict[str, float]:
    """Shares of T by cause, the largest first; compute is always there. Empty for a run that took no time.

    >>> shares(6.0, {"read": 1.0, "tail": 3.0}, 10.0)
    {'compute': 0.6, 'tail': 0.3, 'read': 0.1}
    """
    if not wall:
        return {}
    found = {COMPUTE: compute / wall} | {
        cause: seconds / wall for cause, seconds in exposed.items() if seconds
    }
    return dict(sorted(found.items(), key=lambda part: -part[1]))


def verdict(shares: Mapping[str, float]) -> Verdict:
    """The verdict on a run of such shares of T, compute winning a tie. There are none where nothing was multiplied."""
    compute = shares.get(COMPUTE, 0.0)
    stalls = {cause: share for cause, share in shares.items() if cause != COMPUTE}
    stall = max(stalls, key=lambda cause: stalls[cause], default="")
    longest = stalls.get(stall, 0.0)
    if not shares:
        return Verdict("nothing", 0.0, "", 0.0, 0.0)
    bound, share = (COMPUTE, compute) if compute >= longest else (stall, longest)
    return Verdict(bound, share, stall, longest, compute)
