"""Draw the result of a kernel benchmark as a chart: flop/s of square products."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log2
from typing import Any

from oocgemm.errors import InputError
from oocgemm.machine.measure.bench import best_rows

_COLOURS = (
    "#000000",
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
    "#bbbbbb",
    "#ee8866",
    "#44bb99",
)


def chart(result: dict[str, Any]) -> str:
    """Return a chart of flop/s against the side of square products, as the text of an SVG file.

    There is one plot per dtype and one line per kernel. Both axes are logarithmic. `result` is the return
    value of `bench.bench_kernels`.

    Raises:
        InputError: no square product was measured.
    """
    rows = [row for row in best_rows(result) if len(set(row["shape"])) == 1]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    if not rows:
        raise InputError(
            "nothing to draw: the chart shows square products, but none was measured; add one with --size"
        )
    parts = list(_panels(rows, dtypes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{400 * len(dtypes)}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panels(rows: Sequence[dict[str, Any]], dtypes: Sequence[str]) -> Iterator[str]:
    left, right, height = 60, 560, 320
    sides = sorted({row["shape"][0] for row in rows})
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lowest, highest = log2(sides[0]), max(log2(sides[-1]), log2(sides[0]) + 1)
    for number, dtype in enumerate(dtypes):
        mine = [row for row in rows if row["dtype"] == dtype]
        top = 400 * number + 40
        # The vertical axis ends 20% above the highest rate, and begins at 1e-5 times its end.
        ceiling = log2(max(row["flops"] for row in mine) * 1.2)
        floor = ceiling - 5 * log2(10)

        def place(
            side: int, flops: float, top: int = top, floor: float = floor, ceiling: float = ceiling
        ) -> str:
            x = left + (log2(side) - lowest) / (highest - lowest) * (right - left)
            y = top + height * (1 - (max(log2(flops), floor) - floor) / (ceiling - floor))
            return f"{x:.1f},{y:.1f}"

        yield f'<text x="{left}" y="{top - 14}" font-weight="bold">{dtype}, flop/s of square products</text>'
        frame = f'width="{right - left}" height="{height}" fill="none" stroke="#999"'
        yield f'<rect x="{left}" y="{top}" {frame}/>'
        for side in sides:
            x, _ = place(side, 2**floor).split(",")
            yield f'<text x="{x}" y="{top + height + 16}" text-anchor="middle">{side}</text>'
        for power in range(8, 16):
            if floor <= log2(10**power) <= ceiling:
                _, y = place(sides[0], 10**power).split(",")
                yield f'<text x="{left - 6}" y="{y}" text-anchor="end">1e{power}</text>'
                yield f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        for index, kernel in enumerate(kernels):
            points = sorted((row["shape"][0], row["flops"]) for row in mine if row["kernel"] == kernel)
            colour = _COLOURS[index % len(_COLOURS)]
            for (side, flops), (next_side, next_flops) in pairwise(points):
                (x1, y1), (x2, y2) = place(side, flops).split(","), place(next_side, next_flops).split(",")
                yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="2"/>'
            line = top + 14 + 18 * index
            yield (
                f'<line x1="{right + 12}" x2="{right + 34}" y1="{line - 4}" y2="{line - 4}" '
                f'stroke="{colour}" stroke-width="2"/>'
            )
            yield f'<text x="{right + 40}" y="{line}">{kernel}</text>'
