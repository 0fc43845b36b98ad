"""Run a schedule with NumPy alone, in a random order that its waits allow.

Operations start and end as separate events, in random order. An operation may start when the operations that
it waits for have ended and, on a stream that runs in order, when its predecessor has ended. Buffers contain
NaN (poison) at first. The outputs of an operation are poisoned at its start and written at its end. Its
inputs must be equal at its start and at its end. A missing wait therefore shows as NaN in C, or as an input
that changes during an operation. Checksums of a strip are replaced by a tally, a number that shows which
steps were added to the strip.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from oocgemm.planning import Kind, Operation, Region, Schedule, Slot, Tier
from oocgemm.planning.schedule.operation import IN_ORDER
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.tiling import length
from tests.support.problems import Array
from tests.support.schedule_check import waits_of

POISON = np.nan


@dataclass
class Simulator:
    """Runs a schedule on op(A), op(B) and C, which are float64 matrices. C is updated in place.

    For a Gram matrix, nothing is mirrored: that is done when a strip is written.
    """

    schedule: Schedule
    a: Array
    b: Array
    c: Array

    def run(self, seed: int, drop_wait: int | None = None) -> None:
        """Run all operations in an order drawn from `seed`.

        `drop_wait` is the number of a wait to omit, to show that the simulator notices a missing wait.
        """
        pick = random.Random(seed)
        planned = waits_of(self.schedule)
        if drop_wait is not None:
            self._drop(planned, drop_wait)
        self._slots: dict[Slot, Array] = {}
        ended: set[int] = set()
        running: dict[int, list[Array]] = {}
        waiting = list(range(len(planned)))
        before = self._predecessors(planned)
        while waiting or running:
            ready = [
                i
                for i in waiting[:60]
                if ended.issuperset(planned[i][1]) and (before[i] is None or before[i] in ended)
            ]
            number = pick.choice([*ready, *running])
            operation = planned[number][0]
            if number in running:
                self._end(operation, running.pop(number))
                ended.add(number)
            else:
                waiting.remove(number)
                running[number] = self._start(operation)

    @staticmethod
    def _drop(planned: list[tuple[Operation, list[int]]], which: int) -> None:
        for _, waits in planned:
            if which < len(waits):
                del waits[which]
                return
            which -= len(waits)

    @staticmethod
    def _predecessors(planned: list[tuple[Operation, list[int]]]) -> list[int | None]:
        latest: dict[tuple[int, str], int] = {}
        found: list[int | None] = []
        for number, (operation, _) in enumerate(planned):
            in_order = operation.stream in IN_ORDER
            stream = operation.device, operation.stream
            found.append(latest.get(stream) if in_order else None)
            latest[stream] = number
        return found

    def _region(self, region: Region) -> Array:
        """Return the elements of a region, as a view of its buffer."""
        side = max(*self.a.shape, *self.b.shape) + 1
        slot = self._slots.setdefault(region.slot, np.full(side * side, POISON))
        return slot[region.start : region.stop]

    def _start(self, op: Operation) -> list[Array]:
        inputs = [self._region(region).copy() for region in (*op.reads, *self._tallies(op))]
        for region in op.writes:
            self._region(region)[...] = POISON
        return inputs

    def _end(self, op: Operation, inputs: list[Array]) -> None:
        inputs, tallies = inputs[: len(op.reads)], inputs[len(op.reads) :]
        own = {(w.slot, w.start, w.stop) for w in op.writes}
        for region, before in zip(op.reads, inputs, strict=True):
            if (region.slot, region.start, region.stop) not in own:
                np.testing.assert_array_equal(self._region(region), before, err_msg=f"changed during {op}")
        self._tally(op, tallies)
        (r0, r1), (c0, c1) = op.block
        match op.kind:
            case Kind.READ:
                source = {"A": self.a, "B": self.b, "C": self.c}[op.operand]
                self._region(op.writes[0])[...] = source[r0:r1, c0:c1].ravel()
            case Kind.DOWNLOAD if self.schedule.slots.streams("C"):
                rows, cols = length(op.strip), length(self.schedule.grid.span(op.tile, op.strip))
                strip = inputs[0].reshape(rows, cols)
                self.c[r0:r1, c0:c1] = strip[:, : r1 - r0].T if op.turned else strip
            case Kind.UPLOAD if not op.reads:
                source = {"A": self.a, "B": self.b, "C": self.c}[op.operand]
                self._region(op.writes[0])[...] = source[r0:r1, c0:c1].ravel()
            case Kind.UPLOAD | Kind.DOWNLOAD:
                self._region(op.writes[0])[...] = inputs[0]
            case Kind.WRITE:
                self.c[r0:r1, c0:c1] = inputs[0].reshape(r1 - r0, c1 - c0)
            case Kind.PREPARE:
                self._region(op.writes[0])[...] = _fingerprint(inputs)
            case Kind.MULTIPLY:
                self._multiply(op, inputs)
            case Kind.FINISH:
                problem = self.schedule.problem
                value = problem.alpha * inputs[0]
                if problem.reads_c:
                    value = value + problem.beta * inputs[1]
                self._region(op.writes[0])[...] = np.real(value)
            case _:
                raise AssertionError(op)

    def _tallies(self, op: Operation) -> list[Region]:
        """Return the regions of the tallies of the strips that an operation computes or downloads."""
        slots = [region.slot for region in (*op.writes, *op.reads) if region.slot.tier is Tier.DEVICE]
        accumulators = [slot.index for slot in slots if slot.operand == "C"]
        if op.kind is Kind.UPLOAD or not accumulators or self.schedule.problem.checked != "device":
            return []
        top, strip = self.schedule.grid.rows(op.tile[0])[0], self.schedule.slots.strip
        strips = (op.m[0] - top) // strip, -(-(op.m[1] - top) // strip)
        return [Region(Slot(Tier.DEVICE, "S", accumulators[0], op.device), *strips)]

    def _tally(self, op: Operation, before: list[Array]) -> None:
        grid, own = self.schedule.grid, 1 + op.tile[0] + op.tile[1] / 64
        for region, tally in zip(self._tallies(op), before, strict=True):
            current = self._region(region)
            if op.kind is Kind.MULTIPLY:
                current[...] = own * (1 + op.step) + (0 if op.first else tally)
                continue
            if region in op.writes:  # the region was poisoned when the operation started
                current[...] = tally
            steps = sum(1 + step for step in step_order(op.tile, grid.steps))
            assert (tally == own * steps).all(), f"{op} finds the checksums of another tile"
            np.testing.assert_array_equal(current, tally, err_msg=f"checksums changed during {op}")

    def _multiply(self, op: Operation, inputs: list[Array]) -> None:
        m, n, k = map(length, (op.m, op.n, op.k))
        alpha, beta = self.schedule.lowered.scalars[0 if op.first else 1]
        value: Any = np.zeros((m, n))
        if k:
            top, bottom = self.schedule.grid.rows(op.tile[0])
            if self.schedule.slots.planes:
                assert inputs[2] == _fingerprint(inputs[:2]), f"{op} finds residues of other panels"
            panel = inputs[0].reshape(bottom - top, k)[op.m[0] - top : op.m[1] - top]
            right = (
                inputs[1].reshape(k, n) if not self.schedule.grid.cover.name else self._right(op, inputs[1])
            )
            value = alpha * (panel @ right)
        if beta != 0:
            value = value + beta * inputs[-1].reshape(m, n)
        self._region(op.writes[0])[...] = np.real(value).ravel()

    def _right(self, op: Operation, panel: Array) -> Array:
        """Return the columns of op(B) that an operation needs, from the panel of op(A) in the other role."""
        left, right = self.schedule.grid.cols(op.tile[1])
        columns = panel.reshape(right - left, length(op.k)).T
        return np.asarray(columns[:, op.n[0] - left : op.n[1] - left])


def _fingerprint(panels: list[Array]) -> float:
    """Return a number that identifies two panels. It stands for their residues."""
    elements = np.concatenate(panels)
    return float(elements @ np.sqrt(np.arange(2, 2 + elements.size)))
