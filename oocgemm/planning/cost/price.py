"""What an operation costs, in seconds, and at which rate a link or a store delivers a block.

This is the only place that turns sizes into times. `oocgemm.planning.cost.clock` decides which operations
overlap.
"""

from collections.abc import Sequence
from functools import partial

from oocgemm.planning.cost.coding import decoding_rate
from oocgemm.planning.cost.machine import STRIP_OVERHEAD
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Shape

# Relative rates of copies between a device and pinned memory, by the bytes of a separate row: (least bytes,
# rate, rate from or to a wide array, the same while the GPU multiplies). Rows are separate unless a block
# consists of whole rows of the array. An array is wide if its rows have at least WIDE bytes; an array of half
# the width has the rates of rows four times as long. Measured on H100s, mean of both directions; the last
# column with kernels of five dtypes. An int8 array is wide at half of WIDE: beside int8 kernels, an H200
# copied rows of 8, 16 and 32 KiB of an array with rows of 64 KiB at 0.36, 0.58 and 0.85 of the rate.
ROW_RATES = (
    (128 << 10, 1.0, 1.0, 1.0),
    (64 << 10, 1.0, 1.0, 0.97),
    (32 << 10, 0.98, 1.0, 0.85),
    (24 << 10, 0.88, 0.98, 0.74),
    (20 << 10, 0.88, 0.96, 0.64),
    (16 << 10, 0.88, 0.88, 0.5),
    (8 << 10, 0.88, 0.67, 0.38),
    (2 << 10, 0.6, 0.61, 0.34),
    (1 << 10, 0.5, 0.5, 0.32),
)
WIDE = 128 << 10
# Bytes per second at which an H200 copies int8 panels into the layout that cuBLAS requires. The rate of the
# kernel includes one such copy per step, of a tile of PACKED_ROWS rows.
PACKING, PACKED_ROWS = 9e11, 8192
# An int8 product of this many rows takes twice as long per row as one of many rows. On the same GPU, tiles
# of 256, 1024 and 4000 rows, 8000 columns and 120000 products per element took 1.7, 2.9 and 6.4 ms.
NARROW_ROWS = 250
# If C is summed in float64 over the steps, another kernel adds the int32 sums of each step to C. That takes
# this many times as long as to sum C in int32.
INT32_SUMS = 10
# Fraction of the time of a Write to storage during which a CPU core is busy.
WRITE_CPU_SHARE = 0.25


class Prices:
    """The seconds of single operations of a product on a machine.

    Blocks are given by their operand ("A", "B" or "C") and their numbers of rows and columns in op(A), op(B)
    or C.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        problem, layouts = setting.problem, setting.layouts
        m, n, k = problem.m, problem.n, problem.depth
        self._whole: dict[str, Shape] = {"A": (m, k), "B": (k, n), "C": (m, n)}
        self._sizes = problem.itemsizes
        self._routes = setting.routes
        # The part of a Write in which it keeps a CPU core busy. In the rest, the core waits for the disk.
        self.write_cpu_share = 1.0 if layouts.c.in_memory else WRITE_CPU_SHARE
        # The part of the copies during which the GPU multiplies, if each element is copied once.
        machine, sizes = setting.machine, self._sizes
        multiplying = self.product(problem.flops, max(1, m), max(1, n), max(1, k))
        up = k * (m * sizes["A"] + n * sizes["B"]) / machine.h2d
        copying = max(up, m * n * sizes["C"] / machine.d2h)
        # Whether BLAS, on the host, computes only one triangle of a square on C's diagonal.
        self.halves = machine.shares_cores and problem.halves_diagonal
        self._busy = min(1.0, multiplying / copying) if copying else 1.0
        self._rates: dict[tuple[str, str, int, int], float] = {}
        self._multiply: dict[tuple[int, int, int, int], float] = {}

    def bytes(self, operand: str, rows: int, cols: int) -> int:
        """Return the bytes of a block."""
        return rows * cols * self._sizes[operand]

    def rate(self, link: str, operand: str, rows: int, cols: int) -> float:
        """Return the bytes per second at which `link` ("read", "h2d", "d2h" or "write") moves a block."""
        key = link, operand, rows, cols
        if key not in self._rates:
            of = {"read": self._read_rate, "write": self._write_rate}.get(link)
            self._rates[key] = (
                of(operand, (rows, cols)) if of else self._copy_rate(link, operand, (rows, cols))
            )
        return self._rates[key]

    def read(self, operand: str, rows: int, cols: int) -> float:
        """Return the seconds of a Read, without page faults."""
        seconds = self.bytes(operand, rows, cols) / self.rate("read", operand, rows, cols)
        decodes = self._routes[operand].layout.decode_bytes > 0
        return seconds + self.setting.machine.decode_latency * decodes

    def faults(self, operand: str, rows: int, cols: int) -> float:
        """Return the seconds of page faults of the first Read into a slot."""
        if self._routes[operand].layout.in_place:
            return 0.0
        return self.bytes(operand, rows, cols) * self.setting.machine.arena_seconds_per_byte

    def accumulator_faults(self, rows: int, n: int) -> float:
        """Return the seconds of page faults of the first Multiply into `rows` rows of an accumulator."""
        machine = self.setting.machine
        faults = machine.unified and not self._routes["C"].layout.in_place
        return rows * n * self._sizes["acc"] * machine.arena_seconds_per_byte if faults else 0.0

    def upload(self, operand: str, rows: int, cols: int) -> float:
        """Return the seconds of an Upload."""
        seconds = self.bytes(operand, rows, cols) / self.rate("h2d", operand, rows, cols)
        return seconds + self.setting.machine.copy_latency

    def finish(self, rows: int, cols: int) -> float:
        """Return the seconds of a Finish. Only a Finish that selects or reduces elements takes long."""
        problem, machine = self.setting.problem, self.setting.machine
        searched = problem.sink.searched(rows * cols, twice=problem.cover.halves) * self._sizes["acc"]
        return machine.step_latency + searched / machine.select

    def download(self, rows: int, cols: int) -> float:
        """Return the seconds of a Download of a strip of C.

        If elements are selected, only the last strip of a row of tiles is downloaded. The result is then the
        mean over all of its strips.
        """
        seconds = self._stored_bytes(rows, cols) / self.rate("d2h", "C", rows, cols)
        return seconds + self.setting.machine.copy_latency

    def write(self, rows: int, cols: int) -> float:
        """Return the seconds of a Write of a strip of C."""
        seconds = self._stored_bytes(rows, cols) / self.rate("write", "C", rows, cols)
        return seconds + self.setting.machine.write_latency

    def staged(self, operand: str, rows: int, cols: int) -> float:
        """Return the seconds for which the host copies a block between a pageable array and pinned memory."""
        size = self._stored_bytes(rows, cols) if operand == "C" else self.bytes(operand, rows, cols)
        return self._routes[operand].staged(self.setting.machine, size, (rows, cols))

    def product(self, flops: float, m: int, n: int, k: int) -> float:
        """Return the seconds of `flops` operations, in products of m x k by k x n blocks in full waves."""
        problem = self.setting.problem
        depth = INT32_SUMS * k if problem.exact and problem.acc_dtype == "int32" else k
        return self.setting.machine.multiply_seconds(problem.rate, flops, m, n, depth)

    def multiply(self, rows: int, of_rows: int, n: int, k: int) -> float:
        """Return the seconds of a Multiply of `rows` x k by k x n elements. Its tile has `of_rows` rows."""
        key = rows, of_rows, n, k
        if key not in self._multiply:
            self._multiply[key] = self._multiply_seconds(*key)
        return self._multiply[key]

    def mirror(self, rows: int, cols: int) -> float:
        """Return the seconds in which the transpose of a block of C is written."""
        if self._routes["C"].layout.in_place:
            return self.bytes("C", rows, cols) / self.setting.machine.memory
        return self.write(rows, cols)

    def _multiply_seconds(self, rows: int, of_rows: int, n: int, k: int) -> float:
        problem, machine = self.setting.problem, self.setting.machine
        if not k:
            return machine.step_latency
        # A strip takes only the small STRIP_OVERHEAD, because `MachineModel.strip_rows` has chosen its number
        # of rows so that it fills the GPU's waves.
        m, factor = rows, 1.0
        if not machine.unified:
            m = of_rows
            strip = rows < of_rows
            factor = STRIP_OVERHEAD if strip else machine.wave_quantization(problem.rate, m, n)
        flops = problem.step_flops(rows, n, k)
        seconds = factor * self.product(flops, m, n, k)
        if problem.exact and not machine.unified:
            seconds *= 1 + NARROW_ROWS / rows
            # Each Multiply copies panels that are not contiguous along k (`cuda.multiplier`).
            packed = rows * k * problem.trans_a.swaps + k * n * (not problem.trans_b.swaps)
            seconds += max(0.0, 1 - rows / PACKED_ROWS) * packed / PACKING
        return seconds + machine.step_latency

    def prepare(self, m: int, n: int, k: int) -> float:
        """Return the seconds of a Prepare, which splits or transforms the panels of a step."""
        machine = self.setting.machine
        return self.setting.problem.prepared_bytes(m, n, k) / machine.prepare + machine.step_latency

    def _stored_bytes(self, rows: int, cols: int) -> float:
        problem = self.setting.problem
        stored = problem.sink.count(rows, rows * cols) * self._sizes["C"]
        return stored * cols / max(1, problem.n) if problem.sink.per_row else stored

    def _read_rate(self, operand: str, block: Shape) -> float:
        return self._routes[operand].read_rate(self.setting.machine, self._whole[operand], block)

    def _write_rate(self, operand: str, strip: Shape) -> float:
        return self._routes[operand].write_rate(self.setting.machine, strip)

    def _copy_rate(self, link: str, operand: str, block: Shape) -> float:
        machine, whole, route = self.setting.machine, self._whole[operand], self._routes[operand]
        of_link = machine.h2d if link == "h2d" else machine.d2h
        rate = route.copy_rate(of_link, machine, whole, block, partial(decoding_rate, self.setting))
        axis = route.layout.contiguous
        if not (route.streams and route.layout.is_direct(block)) or block[axis] == whole[axis]:
            return rate
        row, line = (float(extent[axis] * self._sizes[operand]) for extent in (block, whole))
        share, *_ = _row_rates(row)
        wide = WIDE / 2 if self.setting.problem.exact else WIDE
        _, idle, busy = _row_rates(row * max(1.0, wide / line) ** 2)
        return rate * min(share, 1 / ((1 - self._busy) / idle + self._busy / busy))


def _row_rates(row: float) -> Sequence[float]:
    """Return the rates of `ROW_RATES` for rows of this many bytes."""
    for least, *rates in ROW_RATES:
        if row >= least:
            return rates
    least, *rates = ROW_RATES[-1]
    return [rate * row / least for rate in rates]
