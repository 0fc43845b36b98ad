"""The verdict on a run: the cause that accounts for the largest share of its wall time T.

Each instant of T is attributed to one cause, so that the shares of all causes add up to 1. The cause is
``compute`` if at least one Multiply ran at that instant. All other causes are called stalls:
`oocgemm.timeline.exposed.exposed_intervals` determines them.
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
    "accumulator": "waiting for a tile to be finished or copied off the device",
    "select": "waiting for elements of a tile to be selected or reduced",
    "encode": "waiting for C to be encoded",
    "write": "waiting for C to be written",
    "issue": "no operation that the kernel waited for was running",
    "start-up": "before the first multiplication, no operation was running",
    "tail": "after the last multiplication",
    "samples": "computing samples of the result again, to check it",
    "part-wait": "the worker had no part to compute",
    "reduce": "adding the partial products of a k-split",
}


@dataclass(frozen=True)
class Verdict:
    """What limits the speed of a run.

    `bound` is the cause with the largest share of T, such as ``compute`` or ``read``. `share` is its
    share. If the run has no Multiply, `bound` is ``nothing``.

    `stall` is the cause other than ``compute`` with the largest share, `stall_share`. If the kernel never
    waited, `stall` is empty.
    """

    bound: str
    share: float
    stall: str
    stall_share: float
    compute_share: float

    @property
    def headline(self) -> str:
        """Return a text that names the cause with the largest share of T, and this share.

        >>> verdict({"compute": 0.734, "write": 0.084}).headline
        'compute-bound, 73.4%'
        """
        return f"{self.bound}-bound, {format_percent(self.share)}" if self.share else "nothing was multiplied"

    @property
    def beside(self) -> str:
        """Return the text that follows `headline`; "" if the kernel never waited.

        For a compute-bound run, it gives the share of the largest stall; for any other run, that of compute.

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
        """Return the fields as a dictionary that JSON can represent."""
        return asdict(self)


def shares(compute: float, exposed: Mapping[str, float], wall: float) -> dict[str, float]:
    """Return each cause's share of the wall time, the largest first.

    `compute` is the time in which any Multiply ran, `exposed` the time of each other cause, and `wall` the
    wall time, all in the same unit. If `wall` is 0, the result is empty.

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
    """Return the verdict on a run whose causes have these shares of its wall time.

    If compute and the largest stall have equal shares, the run counts as compute-bound. For a run without a
    Multiply, pass an empty mapping.
    """
    compute = shares.get(COMPUTE, 0.0)
    stalls = {cause: share for cause, share in shares.items() if cause != COMPUTE}
    stall = max(stalls, key=lambda cause: stalls[cause], default="")
    longest = stalls.get(stall, 0.0)
    if not shares:
        return Verdict("nothing", 0.0, "", 0.0, 0.0)
    bound, share = (COMPUTE, compute) if compute >= longest else (stall, longest)
    return Verdict(bound, share, stall, longest, compute)
