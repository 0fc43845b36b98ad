"""Measures the ladder of kernels beside cuBLAS, and tunes it: which rung and parameters are fastest for what."""

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import pairwise
from math import log2, prod
from typing import TYPE_CHECKING, Any

from oocgemm import backends
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import BackendError, InputError
from oocgemm.kernels import tuning
from oocgemm.kernels.registry import LADDER, names
from oocgemm.kernels.spec import Call, Kernel, Params
from oocgemm.kernels.tuning import CUBLAS, Measured, Tuning
from oocgemm.machine import counters
from oocgemm.planning import COMPUTES, OPERANDS

if TYPE_CHECKING:
    from oocgemm.backends.cuda.measure import Product, Stopwatch

Contender = tuple[Kernel | None, Params]
Say = Callable[[str], None]
Shape = tuple[int, int, int]

# What kernels compute in: emulated products are none of theirs.
PRECISIONS = [compute for compute in COMPUTES if compute != "emulated"]
SQUARES = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ODD = ((1023, 1025, 1021), (4097, 4095, 4099))
THIN = ((16384, 16, 4096), (16, 16384, 4096), (4096, 1024, 16384), (1024, 16384, 4096))
UPDATES = ((12288, 12288, 512), (12288, 12288, 1024), (12288, 12288, 2048))  # the engine's steps: beta = 1
SHAPES: tuple[Shape, ...] = (*((n, n, n) for n in SQUARES), *ODD, *THIN, *UPDATES)

_COUNTED = 2048**3  # multiplications of the largest product that ncu counts

# Flops a clock and multiprocessor at the fastest unit for each precision, from the vendor's architecture papers.
_FLOPS_A_CLOCK = {
    (8, 0): {
        "float64": 128,
        "float32": 128,
        "tf32": 1024,
        "bf16": 2048,
        "float16": 2048,
        "bfloat16": 2048,
        "int8": 4096,
    },
    (9, 0): {
        "float64": 256,
        "float32": 256,
        "tf32": 2048,
        "bf16": 4096,
        "float16": 4096,
        "bfloat16": 4096,
        "int8": 8192,
    },
}


def bench_kernels(
    *,
    device: int = 0,
    dtypes: Sequence[str] = (),
    compute: str = "native",
    kernels: Sequence[str] = (),
    shapes: Sequence[Shape] = SHAPES,
    seconds: float = 0.05,
    limit: float = 1.0,
    say: Say = lambda doing: None,
) -> dict[str, Any]:
    """Time rungs of the ladder, all their variants, beside cuBLAS.

    Args:
        device: number of the CUDA device.
        dtypes, compute, kernels, shapes: what is measured; float32 and float64 where no dtype is named, as far as they
            have that precision, and every rung where none is. A shape whose k is short beside m and
            n is measured as the engine's update, with beta = 1.
        seconds: for each variant and shape, about.
        limit: a variant that would take longer than this for one product, by its best rate so far, is left out.
        say: called with what is being measured.

    Returns:
        Plain data: the device, and a row for each dtype, shape, rung and variant: flop/s, its share of the peak and of
        cuBLAS, occupancy, and what the access model says; of the rows that ncu counted also "ncu" (see `count`).

    Raises:
        InputError: an unknown rung or dtype. BackendError: no device answers.
    """
    _known("kernel", kernels, names())
    _known("dtype", dtypes, OPERANDS)
    dtypes = dtypes or [dtype for dtype in ("float32", "float64") if dtype in COMPUTES.get(compute, ())]
    for dtype in dtypes or ("float32",):
        _known(f"precision of {dtype}", [compute], [c for c in PRECISIONS if dtype in COMPUTES[c]])
    rows: list[dict[str, Any]] = []
    with _stopwatch(device) as watch:
        facts = watch.multiplier.kernels.device
        clock = watch.clocks.max()
        for dtype in dtypes:
            peak = _peak(facts.capability, facts.processors, clock, dtype if compute == "native" else compute)
            best: dict[Any, float] = {}
            for shape in shapes:
                say(f"{dtype}, {'x'.join(map(str, shape))}")
                product = _product(dtype, compute, shape)
                with watch.operands(product) as call:
                    fitting = [c for c in _contenders(kernels, call) if _worth(c, product.flops, best, limit)]
                    timed = watch.compare(fitting, call, seconds)
                    reference = product.flops / timed[0].seconds
                    for contender, timing in zip(fitting, timed, strict=True):
                        rate = product.flops / timing.seconds
                        best[_key(contender)] = max(rate, best.get(_key(contender), 0.0))
                        rows.append(
                            {
                                "dtype": tuning.measured_as(dtype, compute),
                                "shape": shape,
                                "beta": product.beta,
                                "kernel": contender[0].name if contender[0] else CUBLAS,
                                "params": dict(contender[1]),
                                "flops": rate,
                                "of_peak": rate / peak if peak else None,
                                "of_cublas": rate / reference,
                                "seconds": [timing.seconds, timing.least, timing.most],
                                "samples": timing.samples,
                                "clock": timing.clock,
                            }
                            | _counted(watch, contender, call, product)
                        )
        result = {
            "device": watch.name,
            "date": date.today().isoformat(),
            "max_clock": clock,
            "versions": backends.open_backend("cuda", device).describe(),
            "rows": rows,
        }
    say("counting by ncu")
    count(result, device)
    return result


def tune(
    *,
    device: int = 0,
    dtypes: Sequence[str] = (),
    seconds: float = 0.1,
    classes: dict[str, Shape] | None = None,
    say: Say = lambda doing: None,
) -> Tuning:
    """Time every rung and variant on a product of each class of shapes. The result is not kept: `tuning.save` does that.

    Args:
        device: number of the CUDA device.
        dtypes: what is measured; all that NumPy has here where none is named.
        seconds: for each variant and product, about.
        classes: the products; `tuning.CLASSES` where none are given.
        say: called with what is being measured.

    What is more than ten times as slow as the best on a small product is not tried on the large one.

    Raises:
        InputError: an unknown dtype. BackendError: no device answers.
    """
    _known("dtype", dtypes, OPERANDS)
    rungs: dict[str, dict[str, dict[str, Measured]]] = {}
    with _stopwatch(device) as watch:
        for dtype, compute in pairs(dtypes):
            small = _product(dtype, compute, (1024, 1024, 1024))
            with watch.operands(small) as call:
                contenders = _contenders((), call)
                timed = watch.compare(contenders, call, seconds / 10)
                first = {_key(c): t.seconds for c, t in zip(contenders, timed, strict=True)}
            for name, shape in (classes or tuning.CLASSES).items():
                say(f"{tuning.measured_as(dtype, compute)}, {name}")
                product = _product(dtype, compute, shape)
                with watch.operands(product) as call:
                    slowest = 10 * min(first.values())
                    fitting = [c for c in _contenders((), call) if first.get(_key(c), slowest) <= slowest]
                    found: dict[str, Measured] = {}
                    timed = watch.compare(fitting, call, seconds)
                    for (kernel, params), timing in zip(fitting, timed, strict=True):
                        rung, rate = kernel.name if kernel else CUBLAS, product.flops / timing.seconds
                        if rung not in found or rate > found[rung].rate:
                            found[rung] = Measured(rate, dict(params))
                rungs.setdefault(tuning.measured_as(dtype, compute), {})[name] = found
        return Tuning(watch.name, date.today().isoformat(), rungs)


def pairs(dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """What kernels are tuned for: dtypes, all that NumPy has here where none is named, by the precisions they have."""
    return [(d, c) for c in PRECISIONS for d in dtypes or known_dtypes() if d in COMPUTES[c]]


def _stopwatch(device: int) -> "Stopwatch":
    missing = backends.missing_for_cuda()
    if missing:
        raise BackendError(f"kernels are timed on an NVIDIA GPU: {missing}")
    backends.open_backend("cuda", device)  # says what else is missing
    from oocgemm.backends.cuda.measure import Stopwatch

    return Stopwatch(device)


def _product(dtype: str, compute: str, shape: Shape) -> "Product":
    from oocgemm.backends.cuda.measure import Product

    beta = 1.0 if tuning.shape_class(*shape) == "update" else 0.0
    return Product(*shape, dtype, beta=beta, compute=compute)


def _known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"there is no {what} {name!r}: choose among {', '.join(known)}")


def _contenders(kernels: Sequence[str], call: Call) -> list[Contender]:
    """cuBLAS, and every variant of the rungs named that does not refuse the call."""
    found: list[Contender] = [(None, {})]
    for kernel in LADDER:
        if not kernels or kernel.name in kernels:
            found += [(kernel, params) for params in kernel.variants if kernel.refusal(call, params) is None]
    return found


def _key(contender: Contender) -> tuple[object, ...]:
    kernel, params = contender
    return (kernel.source if kernel else CUBLAS, *params.values())


def _worth(contender: Contender, flops: int, best: dict[Any, float], limit: float) -> bool:
    """Whether a product would be done in time; cuBLAS is always measured."""
    rate = best.get(_key(contender))
    return contender[0] is None or rate is None or flops / rate <= limit


def _peak(capability: tuple[int, int], processors: int, clock: int | None, dtype: str) -> float | None:
    """Flop/s of a dtype at the highest clock, None where the architecture is not in the table."""
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    a_clock = _FLOPS_A_CLOCK.get(capability, {}).get(real)
    return a_clock * processors * clock * 1e6 if a_clock and clock else None


def _counted(watch: "Stopwatch", contender: Contender, call: Call, product: "Product") -> dict[str, Any]:
    """Occupancy as the driver computes it, and the access model."""
    kernel, params = contender
    if kernel is None:
        return {}
    found: dict[str, Any] = {
        "registers": watch.multiplier.kernels.registers(kernel, call, params),
        "occupancy": watch.multiplier.kernels.occupancy(kernel, call, params),
    }
    if kernel.model is not None:
        access = kernel.model(call, params)
        found |= {
            "load_sectors": access.load_sectors,
            "store_sectors": access.store_sectors,
            "intensity": product.flops / (32 * (access.load_sectors + access.store_sectors)),
            "bank_conflicts": access.bank_conflicts,
        }
    return found


def count(result: dict[str, Any], device: int) -> None:
    """Have ncu count one launch of each rung, with its fastest parameters for the largest product that is not above 2048^3.

    Puts what `counters.counted` finds into these rows as "ncu", or into the result as "not_counted" why there is nothing.
    """
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for row in best_rows(result):
        best = chosen.setdefault((row["dtype"], row["kernel"]), row)
        if _suits(row) > _suits(best):
            chosen[row["dtype"], row["kernel"]] = row
    ours = {dtype for dtype, kernel in chosen if kernel != CUBLAS}
    rows = [row for (dtype, _), row in chosen.items() if dtype in ours]
    if not rows:
        return
    asked = [{name: row[name] for name in ("dtype", "shape", "beta", "kernel", "params")} for row in rows]
    try:
        for row, found in zip(rows, counters.counted(asked, device), strict=True):
            row["ncu"] = found
    except BackendError as error:
        result["not_counted"] = str(error)


def _suits(row: dict[str, Any]) -> tuple[bool, int]:
    """Products that are counted, in order: ncu takes its time, as it launches a kernel several times."""
    size = prod(row["shape"])
    return (True, size) if size <= _COUNTED else (False, -size)


# What stands beside what: the access model and the driver's occupancy, and what ncu counted.
AGAINST = (
    "loads: model / ncu",
    "stores: model / ncu",
    "from L2",
    "conflicts",
    "occupancy: possible / achieved",
)
BY_NCU = (
    "Counted by ncu in one launch. Conflicts are extra cycles an access to shared memory: in the model the worst access's, by "
    "ncu the mean. What cp.async and the copy engine bring past the registers need not be among the loads; the sectors from L2 "
    "hold it, and leave out what the L1 cache had."
)


def against(row: dict[str, Any]) -> Iterator[str]:
    """What the model says of a row and what ncu counted, for the columns of `AGAINST`."""
    counted = row["ncu"]
    for name in ("load_sectors", "store_sectors", "sectors_from_l2", "bank_conflicts", "occupancy"):
        found = (counted[name],) if name == "sectors_from_l2" else (row.get(name), counted[name])
        yield " / ".join("-" if number is None else f"{number:.3g}" for number in found)


def best_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each dtype, shape and rung the fastest variant, in the order measured."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["rows"]:
        key = row["dtype"], tuple(row["shape"]), row["kernel"]
        if key not in found or row["flops"] > found[key]["flops"]:
            found[key] = row
    return list(found.values())


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
    """An SVG picture of flop/s over the side of square products, a panel a dtype and a line a rung, both axes by powers."""
    rows = [row for row in best_rows(result) if len(set(row["shape"])) == 1]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    if not rows:
        raise InputError("there is nothing to draw: the picture shows square products, and none was measured")
    parts = list(_panels(rows, dtypes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{400 * len(dtypes)}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panels(rows: Sequence[dict[str, Any]], dtypes: Sequence[str]) -> Iterator[str]:
    left, right, height = 60, 560, 320
    sides = sorted({row["shape"][0] for row in rows})
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lowest, highest = log2(sides[0]), max(log2(sides[-1]), log2(sides[0]) + 1)
    for number, dtype in enumerate(dtypes):
        mine = [row for row in rows if row["dtype"] == dtype]
        top = 400 * number + 40
        # Five powers of ten below the best and up to it.
        ceiling = log2(max(row["flops"] for row in mine) * 1.2)
        floor = ceiling - 5 * log2(10)

        def place(
            side: int, flops: float, top: int = top, floor: float = floor, ceiling: float = ceiling
        ) -> str:
            x = left + (log2(side) - lowest) / (highest - lowest) * (right - left)
            y = top + height * (1 - (max(log2(flops), floor) - floor) / (ceiling - floor))
            return f"{x:.1f},{y:.1f}"

        yield f'<text x="{left}" y="{top - 14}" font-weight="bold">{dtype}, flop/s of square products</text>'
        yield f'<rect x="{left}" y="{top}" width="{right - left}" height="{height}" fill="none" stroke="#999"/>'
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
            yield f'<line x1="{right + 12}" x2="{right + 34}" y1="{line - 4}" y2="{line - 4}" stroke="{colour}" stroke-width="2"/>'
            yield f'<text x="{right + 40}" y="{line}">{kernel}</text>'
