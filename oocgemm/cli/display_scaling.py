"""Print what is predicted for a product on several numbers of workers."""

from collections.abc import Sequence
from itertools import groupby

from oocgemm.cli.display import console
from oocgemm.cli.tables import print_table, table_of
from oocgemm.planning.parts.partition import Partition
from oocgemm.planning.units import format_time


def print_scaling(partitions: Sequence[Partition]) -> None:
    """Print a row per number of workers. Consecutive numbers share a row if the same parts are chosen."""
    out = console()
    table = table_of("workers", "used", "parts", "predicted", "speed-up", "bottleneck", "why no more")
    table.columns[-1].justify = "left"
    for _, alike in groupby(partitions, key=lambda p: (p.workers, p.grid, p.plan.tile)):
        first, *others = alike
        final = others[-1] if others else first
        counts = f"{first.available}-{final.available}" if others else str(first.available)
        table.add_row(
            counts,
            str(final.workers),
            "x".join(map(str, final.grid)),
            format_time(final.seconds),
            f"{final.speed_up:.2f}",
            final.bottleneck,
            final.why,
        )
    out.print()
    print_table(out, table)
    out.print(partitions[-1].reason)
