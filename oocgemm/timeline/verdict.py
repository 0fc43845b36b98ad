"""The verdict on a run: the cause with the largest share of T.

One list of causes covers all of T. ``compute`` is the time in which any Multiply ran. The other causes are
stalls: they divide the exposed time (`oocgemm.timeline.metrics.exposed_intervals`). The shares of T add up to
1. The text report, the HTML page, the JSON, the progress display and the documents all take the verdict from
this module, so that it always agrees with the table of causes.
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
    "issue": "no operation that the kernel waited for was running",
    "start-up": "before the first multiplication, no operation was running",
    "tail": "after the last multiplication",
}


@dataclass(frozen=True)
class Verdict:
    """The cause with the largest share of T (`bound`), and the largest stall.

    `bound` is ``nothing`` if the run has no Multiply. `stall` is empty if the run has no stall.
    """

    bound: str
    share: float
    stall: str
    stall_share: float
    compute_share: float

    @property
    def headline(self) -> str:
        """Return the bound and its share.

        >>> verdict({"compute": 0.734, "write": 0.084}).headline
        'compute-bound, 73.4%'
        """
        return f"{self.bound}-bound, {format_percent(self.share)}" if self.share else "nothing was multiplied"

    @property
    def beside(self) -> str:
        """Return the share to compare the bound with: the largest stall, or compute.

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
        """Return the fields as plain data."""
        return asdict(self)


def shares(compute: float, exposed: Mapping[str, float], wall: float) -> dict[str, float]:
    """Return the share of T of each cause, the largest first.

    `compute`, `wall` and the values of `exposed` are in the same unit of time. ``compute`` is always in the
    result. The result is empty if `wall` is 0.

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
    """Return the verdict for these shares of T.

    Compute wins a tie. Pass no shares for a run without a Multiply.
    """
    compute = shares.get(COMPUTE, 0.0)
    stalls = {cause: share for cause, share in shares.items() if cause != COMPUTE}
    stall = max(stalls, key=lambda cause: stalls[cause], default="")
    longest = stalls.get(stall, 0.0)
    if not shares:
        return Verdict("nothing", 0.0, "", 0.0, 0.0)
    bound, share = (COMPUTE, compute) if compute >= longest else (stall, longest)
    return Verdict(bound, share, stall, longest, compute)
