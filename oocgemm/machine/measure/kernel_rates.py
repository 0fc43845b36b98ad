"""Measure the rates of products, for each dtype and precision."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from oocgemm.backends import Backend
from oocgemm.backends.base import known_dtypes, numpy_dtype
from oocgemm.errors import BackendError
from oocgemm.machine.measure.sampling import explained, numbers, per_second, typical
from oocgemm.machine.measure.sizes import Sizes
from oocgemm.machine.measure.workbench import Workbench, plan_of
from oocgemm.planning import RATES, KernelRate, MachineModel, Plan, TileShape, check_fit
from oocgemm.planning.units import format_size

_FREE_SHARE = 0.5  # maximum share of the free device memory that a measurement occupies


def kernel_rates(
    engine: Backend, machine: MachineModel, sizes: Sizes, say: Callable[[str], None]
) -> tuple[dict[str, KernelRate], float, dict[str, dict[str, float]]]:
    """Measure the rate of products for each dtype and precision.

    An emulated product needs a Prepare operation before it, which splits the operands. The rate of Prepare is
    measured for each dtype too.

    Returns:
        - the fitted rates of products, by their names in `RATES`;
        - the lowest of the rates of Prepare, in bytes of operands per second;
        - the measured flop/s, by name and then by extent along k.
    """
    some = numbers((64, 1024)).reshape(-1)
    fitted, prepare, samples = {}, [], {}
    for name, (dtype, compute) in RATES.items():
        if dtype not in known_dtypes():
            continue
        tile = _fitting(engine, machine, dtype, sizes, compute)
        with Workbench(engine, machine, dtype, tile, compute=compute) as bench:
            for operand in "AB":
                bench.fill(operand, some.astype(numpy_dtype(dtype)))
            fitted[name], rates = _kernel(bench, name, sizes, say)
            if bench.plan.problem.planes:
                split = bench.prepare(max(rates))
                prepare.append(split.bytes / typical(partial(bench.seconds, split), sizes.seconds))
            samples[name] = {str(depth): rate for depth, rate in rates.items()}
    return fitted, min(prepare), samples


def _kernel(
    bench: Workbench, name: str, sizes: Sizes, say: Callable[[str], None]
) -> tuple[KernelRate, dict[int, float]]:
    """Measure products of several extents along k (depths). Return the fitted rate, and flop/s by depth."""
    seen: dict[int, float] = {}

    def rate(depth: int) -> float:
        say(f"{name}, panels {depth} deep")
        if bench.plan.problem.planes:
            bench.intervals(bench.prepare(depth))
        if not seen:
            bench.intervals(bench.multiply(depth, first=True))  # initialise C, to which later products add
        operation = bench.multiply(depth)
        seen[depth] = per_second(operation.flops, typical(partial(bench.seconds, operation), sizes.seconds))
        return seen[depth]

    def depths() -> Iterator[int]:
        for depth in sizes.depths:
            if len(seen) >= 2 and bench.multiply(depth).flops > 4 * sizes.seconds * max(seen.values()):
                return  # a product of this depth would take too long, and two depths suffice for the fit
            yield depth

    def fit(rates: Mapping[int, float]) -> KernelRate:
        ideal = _of_infinite_tile(bench.plan, rates)
        found = KernelRate.fitted(ideal)
        check_fit(
            name, "FLOP", ideal, lambda r: found.peak / (1 + found.half_depth / r), "panels {} deep".format
        )
        return found

    return explained(rate, depths(), fit)


def _of_infinite_tile(plan: Plan, rates: Mapping[int, float]) -> dict[int, float]:
    """Convert measured flop/s to those that products with infinite m and n would have.

    `rates` and the result have the flop/s by extent along k. A `KernelRate` is fitted to the result. The
    machine model predicts lower flop/s for smaller m and n; this function inverts the reduction.
    """
    tile = plan.tile
    ideal = replace(plan.machine, kernels={plan.problem.rate: KernelRate(1.0, 0.0)})
    loss = ideal.multiply_seconds(plan.problem.rate, 1.0, tile.m, tile.n, tile.k)
    loss *= ideal.wave_quantization(plan.problem.rate, tile.m, tile.n)
    return {depth: rate * loss for depth, rate in rates.items()}


def _fitting(engine: Backend, machine: MachineModel, dtype: str, sizes: Sizes, compute: str) -> TileShape:
    """Return m, n and k of the product to time.

    m and n are `sizes.side`, or half of it for emulated products on the host, which take long. They are
    halved until the product fits into the share `_FREE_SHARE` of the free device memory. k is the last of
    `sizes.depths`.

    Raises:
        BackendError: the product does not fit even if m and n are below 64.
    """
    slow = machine.shares_cores and compute == "emulated"
    side, free = sizes.side // 2 if slow else sizes.side, engine.free_memory()
    while True:
        tile = TileShape(side, side, sizes.depths[-1])
        if plan_of(machine, dtype, tile, compute).footprint.device_total <= _FREE_SHARE * free:
            return tile
        if side < 64:
            raise BackendError(
                f"{format_size(free)} of free memory is too little to calibrate: a tile of {side} x {side} "
                "does not fit; end other programs"
            )
        side //= 2
