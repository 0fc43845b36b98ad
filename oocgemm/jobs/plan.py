"""The plan that `oocgemm.plan` returns. It describes how a product will be run, and can run it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Unpack

from oocgemm import planning
from oocgemm.errors import InputError
from oocgemm.jobs.options import RunOptions, check_names
from oocgemm.jobs.request import Request
from oocgemm.jobs.result import Result
from oocgemm.planning.parts.partition import Partition, scaling
from oocgemm.planning.units import counted, format_size, format_time, parse_rate


@dataclass(frozen=True, repr=False)
class Plan(planning.Plan):
    """A planned product. `run` executes it; `str` describes it.

    `tile`, `footprint`, `traffic`, `prediction` and the other figures are those of `oocgemm.planning.Plan`.
    """

    request: Request = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, plan: planning.Plan, request: Request) -> "Plan":
        """Combine a plan and the request that it was made for into a plan that can run."""
        decided = {part.name: getattr(plan, part.name) for part in fields(planning.Plan)}
        return cls(**decided, request=request)

    def run(self, **options: Unpack[RunOptions]) -> Result:
        """Run the plan, as ``oocgemm.gemm(plan=self, **options)`` does."""
        from oocgemm.jobs.api import gemm  # not at the top, since `oocgemm.jobs.api` imports this module

        check_names("run", options, RunOptions)
        return gemm(plan=self, **options)

    def scaling(
        self, workers: int | Iterable[int], storage_read: float | str | None = None
    ) -> tuple[Partition, ...]:
        """Predict the product on several workers, each with the machine model and the budgets of this plan.

        Nothing is run. If the plan was made with a given tile, parts consist of such tiles. Otherwise, tiles
        may have other extents, so that there are enough for all workers.

        Args:
            workers: number of workers that there are, or several numbers.
            storage_read: what the storage delivers to all workers together, in bytes per second, such as
                ``100e9`` or ``"100GB/s"``; by default, what one worker reads.

        Returns:
            For each number of workers, a `Partition`: how many of them are worth using, the parts that they
            compute, and the predicted seconds.

        Raises:
            InputError: a number of workers is not from 1 to 1024, the rate is not positive, or an operand is
                in memory, where other processes cannot access it.
        """
        layouts = {"A": self.layouts.a, "B": self.layouts.b, "C": self.layouts.c}
        for operand, layout in layouts.items():
            if layout.in_memory:
                raise InputError(
                    f"{operand} is in the memory of this process, and other workers cannot access it: pass "
                    "the path of an array"
                )
        counts = [workers] if isinstance(workers, int) else list(workers)
        rate = None if storage_read is None else parse_rate(storage_read)
        return scaling(self, counts, rate, keep_tile=self.request.tile is not None)

    def __repr__(self) -> str:
        return f"<Plan {next(self._lines())}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of `str(plan)`: product, tiles, memory, traffic, predicted time, and any note."""
        problem, tile, prediction = self.problem, self.tile, self.prediction
        same = problem.b.shares
        right = f"its adjoint, {problem.cover.name}" if same else f"op(B) {problem.k} x {problem.n}"
        left = f"op({'X' if same else 'A'}) {problem.m} x {problem.k}"
        if problem.b.updated:
            left, right = f"X^T {problem.m} x {problem.k}", f"(X Q + 1 row) {problem.k} x {problem.n}"
        yield f"C {problem.m} x {problem.n} {problem.c_dtype} = {left} @ {right} {problem.described_dtype}"
        down, across = self.grid.shape
        tiles, steps = f"{down} x {across} tiles", counted(self.steps, "step")
        yield f"tile {tile.m} x {tile.n}, panels {tile.k} deep: {tiles}, {steps}"
        tiers = {"device": self.footprint.device_total, "host": self.footprint.host_total}
        budgets = {"device": self.budgets.device, "host": self.budgets.host}
        used = (f"{tier} {format_size(tiers[tier])} of {format_size(budgets[tier])}" for tier in tiers)
        each = f" (device: on each of {self.devices} devices)" if self.devices > 1 else ""
        yield f"memory: {', '.join(used)}{each}"
        moved = (
            f"{link} {format_size(size)} (at least {format_size(self.least[link])})"
            for link, size in self.traffic.items()
            if size
        )
        yield f"traffic: {', '.join(moved) or 'none'}"
        if self.decoded:
            yield f"decoded by the GPU: {self.decoded}"
        if coding := self.layouts.codings.c:
            yield f"compressed by the GPU: C ({coding.codec})"
        rates = "calibrated" if self.machine.calibrated else "run `oocgemm calibrate` for better estimates"
        yield f"predicted: {format_time(prediction.total)}, {prediction.bottleneck}-bound ({rates})"
        if self.note:
            yield f"note: {self.note}"
