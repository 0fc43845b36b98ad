"""The machine model: rates of multiplications, links and storage, and properties of GPUs.

`default_model` returns rates that were measured on reference machines. A `Calibration`, which has a format in
JSON, replaces the rates that `oocgemm calibrate` measured on the user's machine. Here, lines are fitted to
measured rates. Rates that no link can reach, or that differ much from the line, are rejected.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from functools import lru_cache
from math import isfinite
from typing import Any

from oocgemm.planning.problem import COMPUTES, OPERANDS
from oocgemm.planning.tiling import ceil_div, round_up
from oocgemm.planning.units import format_rate, format_size
from oocgemm.values import dataclass

# Numbers of panels that are read at the same time: uncompressed panels, uncompressed panels whose digests the
# host computes after reading, and compressed panels.
STORE_WORKERS = 2
DIGESTING_WORKERS = 3
CODEC_WORKERS = 4
# Size of the chunks of a new C, in bytes, which the planner chooses.
NEW_CHUNK_BYTES = 8 << 20
# REMOTE_WORKERS panels are read at the same time if an operand is in an object store. A panel may have
# fewer chunks than requests in flight.
REMOTE_WORKERS = 8
# A rate in bytes per second so high that transfers take no time: the rate of reads and writes that the run
# does not need, because the device accesses the caller's array.
INSTANT = 1e15
# Maximum number of threads that copy between pageable arrays and pinned buffers. On hosts of H100s with 16
# cores, 12 threads were up to 10% slower than 8 for uploads, and 20% faster for downloads.
MAX_COPY_THREADS = 12
# Names of kernel rates, each with the dtype of A and B and the value of `compute` that it applies to.
RATES = {dtype: (dtype, "native") for dtype in OPERANDS} | {
    f"emulated {dtype}": (dtype, "emulated") for dtype in COMPUTES["emulated"]
}

# Seconds from the end of a copy to the start of the product that waits for it, if both are enqueued already.
START = 15e-6

# Maximum plausible rate of a link between host and device, in bytes per second. The fastest link known,
# NVLink-C2C, has 450e9 in one direction. A higher rate is a measurement error.
MAX_LINK = 500e9
# Maximum difference between a measured rate and the fitted rate, relative to the smaller of the two. With a
# larger difference, the fit is rejected.
MAX_RESIDUAL = 0.5

# Properties of GPUs, measured on an H200 with CUDA 13.

# Seconds per byte that the host takes to compute the digest of a panel after it has read the panel.
DIGEST_SECONDS_PER_BYTE = 2.5e-12
# Time to multiply a tile strip by strip (in blocks of rows), relative to the time to multiply it at once.
STRIP_OVERHEAD = 1.03
# Rows and columns of C that a thread block of cuBLAS's kernels computes, for large products. SMALL_BLOCK
# stands for all other dtypes.
BLOCKS = {"float32": (256, 128), "float64": (64, 128)}
SMALL_BLOCK = 64, 64
# Maximum factor by which a partly filled last wave of thread blocks slows a product down. To avoid a larger
# factor, cuBLAS chooses smaller blocks than those in `BLOCKS`.
MAX_WAVE_QUANTIZATION = 1.1
# Strips have a multiple of this many rows, so that cuBLAS computes them in whole blocks.
STRIP_BLOCK = 128
# `MachineModel.strip_rows` adds at most this many blocks of rows to a strip.
MAX_STRIP_BLOCKS = 32
# cuBLAS is 0.6% faster in float32 if rows of large tiles start at multiples of 128 bytes. Tile extents of at
# least `LARGE_EXTENT` are therefore multiples of `LARGE_UNIT`.
LARGE_UNIT, LARGE_EXTENT = 32, 8192


@dataclass(frozen=True, slots=True)
class KernelRate:
    """Speed of the multiplication of one dtype: peak / (1 + half_depth / k) flop/s at panel depth k.

    Each step reads and writes C in device memory once. Therefore thin panels are slower: at a depth of
    `half_depth` along k, the rate is half of `peak`.
    """

    peak: float
    half_depth: float

    @classmethod
    def fitted(cls, rates: Mapping[int, float]) -> "KernelRate":
        """Fit a speed to `rates`, which maps panel depths k to measured flop/s.

        In the fitted formula, 1 / rate is linear in 1 / k.

        >>> KernelRate.fitted({64: 50.0, 192: 75.0})
        KernelRate(peak=100.0, half_depth=64.0)
        """
        # The peak is at most 4 times the largest measured rate. Otherwise, noise could make it far too large.
        min_intercept = 0.25 / max(rates.values())
        inverse, slope = fit_line([(1 / k, 1 / rate) for k, rate in rates.items()], min_intercept)
        return cls(float(f"{1 / inverse:.6g}"), float(f"{slope / inverse:.6g}"))


@dataclass(frozen=True)
class MachineModel:
    """Rates and properties of a machine, in bytes, bytes per second, seconds and flop/s.

    Rates, in bytes per second:

    - `h2d`, `d2h`: copies from host to device, and from device to host.
    - `read`: reads of whole chunks. `read_scattered`: reads of half of each chunk's columns.
    - `decode`: output of the decoders. `write`: writes to storage.
    - `memory`: copies between arrays in host memory and slots or pinned buffers, by `copy_threads` threads.
    - `remote`: of all requests to one array in an object store together; `connection`: of one of them.
    - `prepare`: input of the kernels that split panels into residue planes, for emulated products, or that
      transform them. `select`: input of the kernel that selects the largest elements of rows of C.

    Times, in seconds:

    - `copy_latency`, `step_latency`, `write_latency`: overhead per copy, per step and per Write.
    - `decode_latency`: overhead per Read that decodes or transforms elements.
    - `request_latency`: from a request to an object store to the first byte of the answer.
    - `issue`: time under the GIL per operation.
    - `arena_seconds_per_byte`: page faults at the first use of host memory.

    Properties:

    - `kernels`: speeds of multiplications, by the names in `RATES`.
    - `half_width`: the tile extent, m or n, at which the kernel has half of its speed for large tiles.
    - `shares_cores`: reads, writes and multiplications use the same CPU cores.
    - `unified`: device and host memory are the same, so that nothing is uploaded or downloaded.
    - `device_reserve`, `host_reserve`: bytes that libraries take of the budgets.
    - `compiled`: compiled threads copy between arrays in host memory and pinned buffers, not Python's.
    - `casts_panels`: operands narrower than the accumulator are cast before they are multiplied.
    """

    name: str
    kernels: Mapping[str, KernelRate] = field(hash=False)
    h2d: float
    d2h: float
    read: float
    read_scattered: float
    decode: float
    memory: float
    write: float
    prepare: float = 600e9
    select: float = 2.4e12
    # From S3 within its region, a client read 24 GB at 0.37 GB/s with 10 requests in flight, and at 1.3 GB/s
    # with 100. The latency is assumed.
    remote: float = 1.3e9
    connection: float = 45e6
    request_latency: float = 50e-3
    half_width: float = 32
    copy_latency: float = 10e-6
    step_latency: float = 10e-6
    write_latency: float = 200e-6
    decode_latency: float = 0.0
    issue: float = 50e-6
    # Additional seconds to read a part of a line (a run of contiguous elements) instead of a whole line,
    # since each part takes a share of a system call. Measured on parts of 2 to 8 KiB, on two Zen 5 cores with
    # a virtual disk: 2 to 3 us from the page cache, and 4 us plus 0.8 us per KiB from the disk.
    segment: float = 4e-6
    arena_seconds_per_byte: float = 0.03 / 2**30
    io_threads: int = 1
    cores: int = 1
    multiprocessors: int = 1
    shares_cores: bool = False
    unified: bool = False
    device_reserve: int = 0
    host_reserve: int = 0
    casts_panels: bool = False
    compiled: bool = False
    calibrated: bool = False
    storage_calibrated: bool = False

    def enqueued(self) -> "MachineModel":
        """Return the model for runs in which one thread enqueues all operations on a GPU."""
        return replace(self, step_latency=min(self.step_latency, START))

    @property
    def codec_threads(self) -> int:
        """Number of threads that decode or encode: one per core, but one fewer if a GPU multiplies.

        On the H200's host, sixteen decoding threads on sixteen cores were 10 to 18% slower than fifteen,
        because threads that issue operations had to wait for a core and the GIL.
        """
        return self.cores if self.shares_cores else self.cores - 1

    @property
    def copy_threads(self) -> int:
        """Number of threads that copy between pageable arrays and pinned buffers, in each direction."""
        return self.copy_threads_of(1)

    def copy_threads_of(self, devices: int) -> int:
        """Return the number of threads that copy for each of several devices, in each direction."""
        return max(1, min(MAX_COPY_THREADS, self.cores * 3 // 4 // devices))

    def multiply_seconds(self, rate: str, flops: float, m: int, n: int, k: int) -> float:
        """Return the seconds of `flops` operations, done in products of m x k by k x n blocks.

        `rate` is the name of the kernel rate (`GemmProblem.rate`). The result assumes full waves: the caller
        multiplies it by `wave_quantization`.
        """
        if flops == 0:
            return 0.0
        kernel = self.kernels[rate]
        return (
            flops
            / kernel.peak
            * (1 + kernel.half_depth / k)
            * (1 + self.half_width / m)
            * (1 + self.half_width / n)
        )

    def wave_quantization(self, rate: str, m: int, n: int) -> float:
        """Return the factor by which a partly filled last wave of thread blocks slows an m x n tile down.

        A wave is one block on each multiprocessor. A partial wave takes as long as a full one: 22.75 waves
        take as long as 23.
        """
        if self.shares_cores:
            return 1.0
        rows, cols = BLOCKS.get(rate, SMALL_BLOCK)
        blocks = round_up(ceil_div(m, rows) * ceil_div(n, cols), self.multiprocessors)
        return min(MAX_WAVE_QUANTIZATION, blocks * rows * cols / (m * n))

    def strip_rows(self, wanted: int, width: int) -> int:
        """Choose the number of rows of a strip, the part of a tile of C that is downloaded at once.

        Among the numbers between `wanted` and 1.25 `wanted`, this is the one whose thread blocks best fill
        the last wave (one block on each multiprocessor of the GPU).
        """
        across, fewest = max(1, ceil_div(width, STRIP_BLOCK)), ceil_div(wanted, STRIP_BLOCK)
        counts = range(fewest, fewest + min(fewest // 4, MAX_STRIP_BLOCKS) + 1)
        return STRIP_BLOCK * max(
            counts, key=lambda count: count * across / round_up(count * across, self.multiprocessors)
        )


@lru_cache(16)
def default_model(backend: str, cores: int, compiled: bool = False) -> MachineModel:
    """Return the uncalibrated model of a backend: an H200 on PCIe 5 for "cuda", AVX-512 cores for "host".

    `compiled` is the field `MachineModel.compiled`.
    """
    if backend == "cuda":
        return MachineModel(
            name="cuda defaults (H200, PCIe 5 x16)",
            kernels={
                "float16": KernelRate(700e12, 300),
                "bfloat16": KernelRate(700e12, 300),
                # `half_depth` is large, because each step also adds its int32 sums to C in float64.
                "int8": KernelRate(1300e12, 4500),
                "float32": KernelRate(52.5e12, 70),
                "float64": KernelRate(55.8e12, 25),
                "complex64": KernelRate(55e12, 90),
                "complex128": KernelRate(52.8e12, 25),
                "emulated float32": KernelRate(226e12, 1300),
                "emulated float64": KernelRate(110e12, 1100),
            },
            h2d=55e9,
            d2h=55e9,
            # On the host of an H100, 12 compiled threads read 46 to 48 GB/s while the GPU copied.
            read=min(42e9, 3e9 * cores) if compiled else min(32e9, 2.5e9 * cores),
            read_scattered=min(10e9, 1.5e9 * cores),
            # Hosts of H200s with 16 and 32 cores decoded float64 from zstd at 0.34 GB/s per core.
            decode=min(12e9, max(1.2e9, 0.34e9 * cores)),
            memory=min(48e9, 6e9 * cores) if compiled else min(36e9, 4.2e9 * cores),
            step_latency=60e-6,
            issue=150e-6,
            write=1.6e9,
            cores=cores,
            multiprocessors=132,
            # An H100's host took 0.3 to 0.5 us per part of a line from the page cache. The default allows for
            # slower storage.
            segment=2e-6,
            # More than 8 I/O threads would only compete for memory bandwidth.
            io_threads=min(8, cores),
            # cuBLAS's handle, kernels and workspace took over 64 MiB on an H200.
            device_reserve=80 << 20,
            host_reserve=1 << 20,
            compiled=compiled,
        )
    fp64 = 55e9 * cores
    return MachineModel(
        name=f"host defaults ({cores} cores)",
        kernels={
            "float16": KernelRate(2 * fp64, 60),
            "bfloat16": KernelRate(2 * fp64, 60),
            "int8": KernelRate(fp64, 5),
            "float32": KernelRate(2 * fp64, 6),
            "float64": KernelRate(fp64, 3),
            "complex64": KernelRate(2 * fp64, 10),
            "complex128": KernelRate(fp64, 5),
            "emulated float32": KernelRate(fp64 / 10, 100),
            "emulated float64": KernelRate(fp64 / 20, 100),
        },
        h2d=10e9,
        d2h=10e9,
        read=12e9,
        read_scattered=6e9,
        decode=1.2e9,
        # On two Zen 5 cores, a run took 0.3 to 0.5 ms longer for each block that NumPy transforms.
        decode_latency=0.3e-3,
        memory=10e9,
        write=1.5e9,
        arena_seconds_per_byte=0.6 / 2**30,
        cores=cores,
        # With two threads, two blocks are read or written at a time: two cores wrote 4000 x 4000 float32 to a
        # disk at 0.70 GB/s, and at 0.55 GB/s with one thread.
        io_threads=min(cores, max(2, cores // 4)),
        shares_cores=True,
        unified=True,
        prepare=100e6,
        select=2e9 * cores,
        device_reserve=(8 << 20) * cores,  # the measured size of OpenBLAS's packing buffers
        host_reserve=8 << 20,
        casts_panels=True,
    )


_FIELDS = {field.name for field in fields(MachineModel)}
# Maps a name passed to `scaled` to all rates that its factor multiplies. Any other name stands for one rate.
_TOGETHER = {"read": ("read", "read_scattered")}


def scaled(model: MachineModel, factors: Mapping[str, float]) -> MachineModel:
    """Return the model with rates multiplied by `factors`, which maps the names of rates to their factors.

    The factor of "read" also applies to "read_scattered".
    """
    kernels, changed = dict(model.kernels), dict[str, float]()
    for name, factor in factors.items():
        if name in _FIELDS:
            changed |= {part: factor * getattr(model, part) for part in _TOGETHER.get(name, (name,))}
        else:
            kernels[name] = KernelRate(factor * kernels[name].peak, kernels[name].half_depth)
    return replace(model, kernels=kernels, **changed)  # type: ignore[arg-type]


def fit_line(points: Sequence[tuple[float, float]], min_intercept: float = 0.0) -> tuple[float, float]:
    """Fit a line to points of positive y by least squares of the relative errors; return (intercept, slope).

    The intercept is at least `min_intercept`, and the slope is at least 0.

    >>> [round(x, 9) for x in fit_line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])]
    [1.0, 2.0]
    >>> fit_line([(1.0, 3.0), (2.0, 3.0), (3.0, 3.0)])
    (3.0, 0.0)
    """
    # Dividing the equation of each point by its y turns relative errors into absolute ones.
    ones = [1 / y for _, y in points]
    xs = [x / y for x, y in points]
    s11, s1x, sxx = (
        sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((ones, ones), (ones, xs), (xs, xs))
    )
    determinant = s11 * sxx - s1x * s1x
    if determinant > 1e-12 * s11 * sxx:
        slope = (s11 * sum(xs) - s1x * sum(ones)) / determinant
        intercept = (sum(ones) - slope * s1x) / s11
        if slope >= 0 and intercept >= min_intercept:
            return intercept, slope
        if slope >= 0:
            return min_intercept, max(0.0, (sum(xs) - min_intercept * s1x) / sxx)
    return max(min_intercept, sum(ones) / s11), 0.0


def fit_link(link: str, rates: Mapping[int, float], limit: float | None = None) -> tuple[float, float]:
    """Fit a latency in seconds and a rate in bytes per second to copies; return (latency, rate).

    `rates` maps the bytes of a copy to its measured bytes per second.

    Raises `ValueError` if a rate exceeds `limit` (default `MAX_LINK`) or differs from the fit by more than
    `MAX_RESIDUAL`.

    >>> [float(f"{x:.3g}") for x in fit_link("d2h", {1_000_000: 25e9, 9_000_000: 45e9})]
    [2e-05, 50000000000.0]
    """
    for size, rate in rates.items():
        check_link(f"{link} of {format_size(size)}", rate, limit)
    latency, per_byte = fit_line([(size, size / rate) for size, rate in rates.items()])
    check_fit(link, "B", rates, lambda size: size / (latency + per_byte * size), format_size)
    # If all copies took the same time, they were too short for a fit. Return the largest measured rate.
    fitted = 1 / per_byte if per_byte else max(rates.values())
    check_link(f"the rate fitted to {link}", fitted, limit)
    return latency, fitted


def check_link(name: str, rate: float, limit: float | None = None) -> None:
    """Raise `ValueError` if a rate exceeds `limit` (default `MAX_LINK`) or is not positive."""
    if not 0 < rate <= (limit or MAX_LINK):
        link = "the link of this device" if limit else "any link"
        raise ValueError(
            f"{name} came to {format_rate(rate)}, which is impossible: {link} carries at most "
            f"{format_rate(limit or MAX_LINK)}"
        )


def check_fit(
    name: str,
    unit: str,
    rates: Mapping[int, float],
    fit: Callable[[int], float],
    at: Callable[[int], str] = str,
) -> None:
    """Raise `ValueError` if a measured rate differs from the fitted one by more than `MAX_RESIDUAL`.

    `rates` maps sizes to measured rates, and `fit` returns the fitted rate for a size. `at` formats a size
    for the message.
    """

    def residual(place: int) -> float:
        return max(fit(place) / rates[place], rates[place] / fit(place)) - 1

    worst = max(rates, key=residual)
    if residual(worst) > MAX_RESIDUAL:
        found = ", ".join(f"{at(place)}: {format_rate(rate, unit)}" for place, rate in rates.items())
        raise ValueError(
            f"no fit explains what was measured of {name} ({found}): the best fit expects "
            f"{format_rate(fit(worst), unit)} at {at(worst)}, which is {residual(worst):.0%} off; at "
            f"most {MAX_RESIDUAL:.0%} is accepted"
        )


# Name and version in the JSON of a calibration. Files with another name or version are rejected.
FORMAT = "oocgemm-calibration"
VERSION = 3
# The names that reports use for fields of `MachineModel` and `StoreRates`, in the order in which data flow.
LINKS = {
    "read_cold": "read, disk",
    "read": "read, page cache",
    "read_scattered": "read, parts of chunks",
    "decode": "decode, zstd",
    "memory": "read, memory",
    "h2d": "h2d",
    "prepare": "prepare, residues",
    "d2h": "d2h",
    "write": "write",
}


@dataclass(frozen=True, slots=True)
class StoreRates:
    """Measured bytes per second of one file system.

    `read` and `read_scattered` are rates from the page cache: of whole uncompressed chunks, and of half of
    the columns of each chunk. `read_cold` is the rate from the disk. `write` includes the flush to the disk.
    """

    read: float
    read_scattered: float
    read_cold: float
    write: float


@dataclass(frozen=True)
class Calibration:
    """Measured rates of a machine, and the samples that they were fitted to.

    `rates` has values for fields of `MachineModel`, by name; fields without a value keep their defaults.
    `stores` has the rates of file systems by id, in the order in which they were measured. `samples` has the
    measurements to which the rates were fitted.
    """

    machine: str
    backend: str
    device: str
    date: str
    multiprocessors: int
    kernels: Mapping[str, KernelRate]
    rates: Mapping[str, float]
    stores: Mapping[str, StoreRates] = field(default_factory=dict)
    samples: Mapping[str, Any] = field(default_factory=dict)

    def model(
        self, defaults: MachineModel, reads: Collection[str] = (), writes: Collection[str] = ()
    ) -> MachineModel:
        """Build the model of this machine for a run that uses the file systems with ids `reads` and `writes`.

        A file system that was never measured gets the rates of the one measured last, and the model's name
        says so.
        """
        name = f"{self.device}, calibrated on {self.date}"
        measured_rates: dict[str, Any] = dict(self.rates)
        if self.stores:
            latest = list(self.stores.values())[-1]
            sources = [self.stores.get(system, latest) for system in reads] or [latest]
            targets = [self.stores.get(system, latest) for system in writes] or [latest]
            measured_rates |= {
                "read": min(s.read for s in sources),
                "read_scattered": min(s.read_scattered for s in sources),
                "write": min(s.write for s in targets),
            }
        measured = all(system in self.stores for system in (*reads, *writes))
        if not measured:
            name += "; storage not calibrated: run oocgemm calibrate --path DIR"
        return replace(
            defaults,
            name=name,
            kernels={**defaults.kernels, **self.kernels},
            multiprocessors=self.multiprocessors,
            calibrated=True,
            storage_calibrated=measured,
            **measured_rates,
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return {"format": FORMAT, "version": VERSION} | asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Calibration":
        """Rebuild a calibration from the output of `to_dict` or of ``oocgemm calibrate --json``.

        Keys may have underscores instead of spaces, as in that JSON. Raises `ValueError` for other data.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("the content is not a calibration")
        if data.get("version") != VERSION:
            raise ValueError(f"it has version {data.get('version')!r}, this program reads version {VERSION}")
        try:
            texts = {name: str(data[name]) for name in ("machine", "backend", "device", "date")}
            kernels = {
                name.replace("_", " "): KernelRate(**_numbers(rate)) for name, rate in data["kernels"].items()
            }
            stores = {system: StoreRates(**_numbers(rate)) for system, rate in data["stores"].items()}
            rates, samples = _numbers(data["rates"]), dict(data["samples"])
            multiprocessors = max(1, int(data["multiprocessors"]))
            _check_links(texts["backend"], rates, samples)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is incomplete: {error}") from error
        known = {f.name for f in fields(MachineModel) if f.type is float}
        unknown = (rates.keys() - known) | (kernels.keys() - RATES.keys())
        if unknown or any(rate.peak <= 0 for rate in kernels.values()):
            raise ValueError(f"it has invalid rates: {', '.join(sorted(unknown)) or 'a peak of 0'}")
        return cls(
            **texts,
            multiprocessors=multiprocessors,
            kernels=kernels,
            rates=rates,
            stores=stores,
            samples=samples,
        )


def _check_links(backend: str, rates: Mapping[str, float], samples: Mapping[str, Any]) -> None:
    """Raise `ValueError` for impossible rates of links, or for rates that do not fit the measured samples."""
    for link in ("h2d", "d2h"):
        # The host backend copies within memory, so that no limit of a link applies.
        if backend != "host" and link in rates:
            check_link(link, rates[link], samples.get("link_limit"))
        copies = samples.get("copies", {}).get(link)
        if copies:
            fit_link(link, {int(size): rate for size, rate in copies.items()}, samples.get("link_limit"))


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Convert rates and costs to floats. Raises `ValueError` for negative values, and for a rate of 0."""
    may_be_0 = ("half_depth", "copy_latency", "arena_seconds_per_byte")
    for name, value in data.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or value < 0 or (value == 0 and name not in may_be_0):
            raise ValueError(f"{name} = {value!r} is not a positive finite number")
    return {name: float(value) for name, value in data.items()}


def link_rates(machine: MachineModel, store: StoreRates | None) -> dict[str, float]:
    """Return the rates of `LINKS` that apply to a machine, in bytes per second.

    "read_cold", the rate of reads from the disk, is included only if `store` is given.
    """
    found = {name: getattr(machine, name) for name in LINKS if hasattr(machine, name)}
    if store is not None:
        found["read_cold"] = store.read_cold
    return {
        name: found[name]
        for name in LINKS
        if name in found and not (machine.unified and name in ("h2d", "d2h"))
    }


def calibrated_rates(found: Calibration) -> dict[str, float]:
    """Return the rates of `LINKS` in a calibration, with those of the file system measured last."""
    return link_rates(found.model(default_model(found.backend, 1)), list(found.stores.values())[-1])
