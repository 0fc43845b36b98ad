"""Benchmark the kernel ladder against cuBLAS, and tune it: find the fastest rung and parameters by shape."""

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from math import prod
from typing import TYPE_CHECKING, Any

from oocgemm import backends
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import BackendError, InputError
from oocgemm.kernels import tuning
from oocgemm.kernels.registry import LADDER, names
from oocgemm.kernels.spec import Call, Kernel, Params
from oocgemm.kernels.tuning import CUBLAS, Measured, Tuning
from oocgemm.machine.measure import counters
from oocgemm.planning import COMPUTES, OPERANDS

if TYPE_CHECKING:
    from oocgemm.backends.cuda.measure import Product, Stopwatch

Contender = tuple[Kernel | None, Params]
Say = Callable[[str], None]
Shape = tuple[int, int, int]

# Precisions of the ladder's kernels. Emulated products have kernels of their own, which are not benchmarked
# here.
PRECISIONS = [compute for compute in COMPUTES if compute != "emulated"]
SQUARES = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ODD = ((1023, 1025, 1021), (4097, 4095, 4099))
THIN = ((16384, 16, 4096), (16, 16384, 4096), (4096, 1024, 16384), (1024, 16384, 4096))
# Steps of the engine, with beta = 1.
UPDATES = ((12288, 12288, 512), (12288, 12288, 1024), (12288, 12288, 2048))
SHAPES: tuple[Shape, ...] = (*((n, n, n) for n in SQUARES), *ODD, *THIN, *UPDATES)

_MAX_COUNTED = 2048**3  # m n k of the largest product that is preferred for hardware counters

# Flops per clock and multiprocessor of the fastest unit for each precision, by compute capability. Source:
# NVIDIA's architecture white papers.
_FLOPS_PER_CLOCK = {
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
    """Time all variants of the rungs of the ladder, and cuBLAS.

    Args:
        device: number of the CUDA device.
        dtypes: dtypes of A, B and C; by default those of float32 and float64 that have the precision.
        compute: precision.
        kernels: names of rungs; all by default.
        shapes: products (m, n, k). With a k that is short beside m and n, the product is timed as a step of
            the engine, with beta = 1.
        seconds: approximate time per variant and shape.
        limit: a variant is skipped if one product would take longer than this, in seconds, at its best rate
            so far.
        say: called with a description of each measurement before it starts.

    Returns:
        Plain data: the device, and a row per dtype, shape, rung and variant. A row holds flop/s, its ratio to
        the peak and to cuBLAS, the occupancy, and the access model. Some rows also have hardware counters,
        "ncu" (see `count`).

    Raises:
        InputError: there is no such rung or dtype.
        BackendError: no device is available.
    """
    _check_known("kernel", kernels, names())
    _check_known("dtype", dtypes, OPERANDS)
    dtypes = dtypes or [dtype for dtype in ("float32", "float64") if dtype in COMPUTES.get(compute, ())]
    for dtype in dtypes or ("float32",):
        _check_known(f"precision of {dtype}", [compute], [c for c in PRECISIONS if dtype in COMPUTES[c]])
    rows: list[dict[str, Any]] = []
    with _open_stopwatch(device) as watch:
        facts = watch.multiplier.kernels.device
        clock = watch.clocks.max()
        for dtype in dtypes:
            peak = _peak(facts.capability, facts.processors, clock, dtype if compute == "native" else compute)
            best: dict[Any, float] = {}
            for shape in shapes:
                say(f"{dtype}, {'x'.join(map(str, shape))}")
                product = _product(dtype, compute, shape)
                with watch.operands(product) as call:
                    fitting = [
                        c for c in _contenders(kernels, call) if _affordable(c, product.flops, best, limit)
                    ]
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
                                "seconds": [timing.seconds, timing.minimum, timing.maximum],
                                "samples": timing.samples,
                                "clock": timing.clock,
                            }
                            | _modelled(watch, contender, call, product)
                        )
        result = {
            "device": watch.name,
            "date": date.today().isoformat(),
            "max_clock": clock,
            "versions": backends.open_backend("cuda", device).describe(),
            "rows": rows,
        }
    say("hardware counters")
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
    """Time every rung and variant on one product per class of shapes. Save the result with `tuning.save`.

    Args:
        device: number of the CUDA device.
        dtypes: dtypes of A, B and C; by default all that NumPy has here.
        seconds: approximate time per variant and product.
        classes: the product of each class; `tuning.CLASSES` by default.
        say: called with a description of each measurement before it starts.

    Variants more than ten times slower than the best on a small product are not tried on the large ones.

    Raises:
        InputError: there is no such dtype.
        BackendError: no device is available.
    """
    _check_known("dtype", dtypes, OPERANDS)
    rungs: dict[str, dict[str, dict[str, Measured]]] = {}
    with _open_stopwatch(device) as watch:
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
    """Return all pairs of dtype and precision; by default of all dtypes that NumPy has here."""
    return [(d, c) for c in PRECISIONS for d in dtypes or known_dtypes() if d in COMPUTES[c]]


def _open_stopwatch(device: int) -> "Stopwatch":
    missing = backends.missing_for_cuda()
    if missing:
        raise BackendError(f"timing kernels needs an NVIDIA GPU: {missing}")
    backends.open_backend("cuda", device)  # raises if anything else is missing
    from oocgemm.backends.cuda.measure import Stopwatch

    return Stopwatch(device)


def _product(dtype: str, compute: str, shape: Shape) -> "Product":
    from oocgemm.backends.cuda.measure import Product

    beta = 1.0 if tuning.shape_class(*shape) == "update" else 0.0
    return Product(*shape, dtype, beta=beta, compute=compute)


def _check_known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"there is no {what} {name!r}: choose among {', '.join(known)}")


def _contenders(kernels: Sequence[str], call: Call) -> list[Contender]:
    """Return cuBLAS, and all variants of the named rungs that support the call."""
    found: list[Contender] = [(None, {})]
    for kernel in LADDER:
        if not kernels or kernel.name in kernels:
            found += [(kernel, params) for params in kernel.variants if kernel.refusal(call, params) is None]
    return found


def _key(contender: Contender) -> tuple[object, ...]:
    kernel, params = contender
    return (kernel.source if kernel else CUBLAS, *params.values())


def _affordable(contender: Contender, flops: int, best: dict[Any, float], limit: float) -> bool:
    """Return whether one product takes at most `limit` seconds at the best rate so far.

    Always true for cuBLAS.
    """
    rate = best.get(_key(contender))
    return contender[0] is None or rate is None or flops / rate <= limit


def _peak(capability: tuple[int, int], processors: int, clock: int | None, dtype: str) -> float | None:
    """Return the peak flop/s of a dtype at clock `clock` in MHz, None for an unknown architecture."""
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    per_clock = _FLOPS_PER_CLOCK.get(capability, {}).get(real)
    return per_clock * processors * clock * 1e6 if per_clock and clock else None


def _modelled(watch: "Stopwatch", contender: Contender, call: Call, product: "Product") -> dict[str, Any]:
    """Return the occupancy as the driver computes it, and the predictions of the access model."""
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
    """Add hardware counters of one launch per rung to a benchmark's result.

    Of each rung the largest product up to 2048^3 is chosen, with its fastest parameters. Its row gets the
    counters of `counters.read_counters` as "ncu". If they cannot be read, the result gets the reason as
    "not_counted".
    """
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for row in best_rows(result):
        best = chosen.setdefault((row["dtype"], row["kernel"]), row)
        if _preference(row) > _preference(best):
            chosen[row["dtype"], row["kernel"]] = row
    ours = {dtype for dtype, kernel in chosen if kernel != CUBLAS}
    rows = [row for (dtype, _), row in chosen.items() if dtype in ours]
    if not rows:
        return
    launches = [{name: row[name] for name in ("dtype", "shape", "beta", "kernel", "params")} for row in rows]
    try:
        for row, found in zip(rows, counters.read_counters(launches, device), strict=True):
            row["ncu"] = found
    except BackendError as error:
        result["not_counted"] = str(error)


def _preference(row: dict[str, Any]) -> tuple[bool, int]:
    """Order rows for counting. ncu launches a kernel several times, so products above the limit come last."""
    size = prod(row["shape"])
    return (True, size) if size <= _MAX_COUNTED else (False, -size)


# Columns that compare the access model and the driver's occupancy with the hardware counters.
AGAINST = (
    "loads: model / ncu",
    "stores: model / ncu",
    "from L2",
    "conflicts",
    "occupancy: possible / achieved",
)
BY_NCU = (
    "Counters of one launch, by ncu; loads and stores in sectors of 32 bytes. Conflicts are extra cycles per "
    "access to shared memory: the model gives the worst access, ncu the mean. Loads may exclude what "
    "cp.async and TMA copy to shared memory; the sectors from L2 include it, but exclude hits of the L1 "
    "cache."
)


def against(row: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a row for the columns of `AGAINST`."""
    counted = row["ncu"]
    for name in ("load_sectors", "store_sectors", "sectors_from_l2", "bank_conflicts", "occupancy"):
        found = (counted[name],) if name == "sectors_from_l2" else (row.get(name), counted[name])
        yield " / ".join("-" if number is None else f"{number:.3g}" for number in found)


def best_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the row of the fastest variant of each dtype, shape and rung, in the order measured."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["rows"]:
        key = row["dtype"], tuple(row["shape"]), row["kernel"]
        if key not in found or row["flops"] > found[key]["flops"]:
            found[key] = row
    return list(found.values())
