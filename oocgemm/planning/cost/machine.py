"""What the planner believes of a machine: rates of the multiplication, of each link and of storage.

There are defaults, and there is what `oocgemm calibrate` has measured, which takes their place where it is known.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite, prod
from typing import Any

from oocgemm.planning.cost.fits import check_link, fit_line, fit_link
from oocgemm.planning.problem import COMPUTES, OPERANDS
from oocgemm.planning.tiling import Layout, Range, ceil_div

# Panels that are read at a time: two keep the threads busy from the end of one into the next, a third while digests of what has
# been read are taken; those of compressed chunks have fewer parts, of more work each.
STORE_WORKERS = 2
DIGESTING_WORKERS = 3
CODEC_WORKERS = 4
# Of panels that are not read, since they are copied from where they lie.
AT_ONCE = 1e15
# How fast rows of 8 to 16 KiB that lie apart are copied to a device beside a multiplication, over those of panels in one piece.
NARROW = 0.6
# What has a kernel rate: products of a dtype, and how they are computed.
RATES = {dtype: (dtype, "native") for dtype in OPERANDS} | {
    f"emulated {dtype}": (dtype, "emulated") for dtype in COMPUTES["emulated"]
}
# Of a calibration as JSON.
FORMAT = "oocgemm-calibration"
VERSION = 3


@dataclass(frozen=True, slots=True)
class KernelRate:
    """Speed of the multiplication of one dtype: `peak` flop/s, halved at panels `half_depth` deep.

    C is read and written in device memory once a step, so thin panels are slower: peak / (1 + half_depth / r).
    """

    peak: float
    half_depth: float

    @classmethod
    def fitted(cls, rates: Mapping[int, float]) -> "KernelRate":
        """The one that comes nearest to measured flop/s by panel depth: 1 / rate is a line in 1 / r.

        >>> KernelRate.fitted({64: 50.0, 192: 75.0})
        KernelRate(peak=100.0, half_depth=64.0)
        """
        # A peak far above all that was seen would be an accident of noise.
        least = 0.25 / max(rates.values())
        inverse, slope = fit_line([(1 / r, 1 / rate) for r, rate in rates.items()], least)
        return cls(float(f"{1 / inverse:.6g}"), float(f"{slope / inverse:.6g}"))


@dataclass(frozen=True)
class MachineModel:
    """What the planner believes of a machine. Bytes, bytes per second, seconds, flop/s.

    Narrow tiles are slower than wide ones: at an extent of `half_width` by half.
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
    pin: float = 0.0  # memory of others, where it lies; 0 where nothing need be locked
    prepare: float = 600e9  # bytes of raw panels into planes of residues
    half_width: float = 32
    copy_latency: float = 10e-6
    step_latency: float = 10e-6
    write_latency: float = 200e-6
    issue: float = 50e-6  # the interpreter is busy with each operation
    # A segment of a line that panels cut: a part of a system call and, on a cold cache, a request to the disk. Measured with
    # `oocgemm.stores.lines` on segments of 2 to 8 KiB that lie 320 KB apart, two Zen 5 cores and a virtual disk: 2 to 3 us
    # from the page cache; from the disk 4 us and 0.8 us per KiB of processor time. The cost of bytes that no cache holds is not in it.
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
    calibrated: bool = False
    storage_calibrated: bool = False

    def upload_rate(self, layout: Layout, panel: Range, thin: Range | None = None) -> float:
        """Bytes per second at which panels of that shape are copied to the device, or `thin` ones among them."""
        narrow = (
            layout.allows_zero_copy(panel) and (thin or panel)[layout.contiguous] < layout.zero_copy_width
        )
        return NARROW * self.h2d if narrow else self.h2d

    def store_rate(self, layout: Layout, panel: Range) -> float:
        """Bytes per second at which panels of that shape are read from an array of that layout."""
        if layout.in_memory:
            if not self.pin or not layout.allows_zero_copy(panel):
                return self.memory
            return AT_ONCE if layout.is_direct(panel) else self.pin
        if layout.decode_bytes:
            chunks = prod(
                ceil_div(extent, chunk) for extent, chunk in zip(panel, layout.read_chunk, strict=True)
            )
            return self.decode * min(1.0, CODEC_WORKERS * max(1, chunks) / self.cores)
        # `read_scattered` is that of panels that take half of each line. Short gaps are read over, others are passed by.
        over = (layout.line_overread(panel) - 1) * max(0.0, 1 / self.read_scattered - 1 / self.read)
        return 1 / (1 / self.read + min(over, self.segment / layout.segment_bytes(panel)))

    def cut_price(self, layout: Layout, panel: Range) -> float:
        """How many times as long as whole lines panels of that shape take to read, for each byte: 1 where none are cut."""
        if layout.in_memory or layout.decode_bytes:
            return 1.0
        return max(1.0, self.read / self.store_rate(layout, panel))


def default_model(backend: str, cores: int) -> MachineModel:
    """Uncalibrated figures: an H200 behind PCIe 5 for ``cuda``, AVX-512 cores for ``host``."""
    if backend == "cuda":
        return MachineModel(
            name="cuda defaults (H200, PCIe 5 x16)",
            kernels={
                "float16": KernelRate(576e12, 300),
                "bfloat16": KernelRate(576e12, 300),
                "int8": KernelRate(1056e12, 4500),  # sums in float64: each step's are read and added
                "float32": KernelRate(52.5e12, 70),
                "float64": KernelRate(55.8e12, 25),
                "complex64": KernelRate(48e12, 90),
                "complex128": KernelRate(52.8e12, 25),
                "emulated float32": KernelRate(226e12, 1300),
                "emulated float64": KernelRate(110e12, 1100),
            },
            h2d=55e9,
            d2h=55e9,
            read=min(32e9, 2.5e9 * cores),
            read_scattered=min(10e9, 1.5e9 * cores),
            decode=min(3e9, 1.2e9 * cores),
            memory=min(33e9, 4.2e9 * cores),
            pin=50e9,
            step_latency=60e-6,
            issue=150e-6,
            write=1.6e9,
            cores=cores,
            multiprocessors=132,
            segment=2e-6,  # several threads: 0.3 to 0.5 us from the page cache, beside an H100
            io_threads=min(8, cores),  # more of them are slower: memory is the limit then
            device_reserve=80
            << 20,  # cuBLAS: its handle, kernels and workspace; more than 64 MiB seen on an H200
            host_reserve=1 << 20,
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
        memory=10e9,
        write=1.5e9,
        arena_seconds_per_byte=0.6 / 2**30,
        cores=cores,
        io_threads=max(1, cores // 4),
        shares_cores=True,
        unified=True,
        prepare=100e6,
        device_reserve=(8 << 20) * cores,  # packing buffers of the BLAS, as measured with OpenBLAS
        host_reserve=8 << 20,
        casts_panels=True,
    )


@dataclass(frozen=True, slots=True)
class StoreRates:
    """Bytes per second of one file system: raw chunks read whole, in parts of their rows, and from the disk itself,
    and written. `read` and `read_scattered` are those of files that the page cache holds."""

    read: float
    read_scattered: float
    read_cold: float
    write: float


@dataclass(frozen=True)
class Calibration:
    """What was measured of a machine, and what it was fitted from.

    `rates` are fields of `MachineModel` by name; `stores` the rates of file systems by an id of theirs, the latest
    measured last; `samples` are for people. What is not measured stays as the program's defaults have it.
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
        """The model of this machine for a run that reads from and writes to these file systems. One that was never
        measured is taken for one like that measured last, and the model says so."""
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
            name += "; not so the storage: oocgemm calibrate --path DIR"
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
        """Plain data, for JSON."""
        return {"format": FORMAT, "version": VERSION} | asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Calibration":
        """Read what `to_dict` gave, or what `oocgemm calibrate --json` printed, whose keys hold no spaces. Raises `ValueError`
        for anything else."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("it is no calibration")
        if data.get("version") != VERSION:
            raise ValueError(f"it has version {data.get('version')!r}, this program reads {VERSION}")
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
            raise ValueError(f"it is not whole: {error}") from error
        known = {f.name for f in fields(MachineModel) if f.type is float}
        unknown = (rates.keys() - known) | (kernels.keys() - RATES.keys())
        if unknown or any(rate.peak <= 0 for rate in kernels.values()):
            raise ValueError(f"it has rates that cannot be: {', '.join(sorted(unknown)) or 'a peak of 0'}")
        return cls(
            **texts,
            multiprocessors=multiprocessors,
            kernels=kernels,
            rates=rates,
            stores=stores,
            samples=samples,
        )


def _check_links(backend: str, rates: Mapping[str, float], samples: Mapping[str, Any]) -> None:
    """Raise `ValueError` for rates of links that cannot be, or that their own samples do not bear out."""
    for link in ("h2d", "d2h"):
        if backend != "host" and link in rates:  # of the host it is that of its memory
            check_link(link, rates[link], samples.get("link_limit"))
        copies = samples.get("copies", {}).get(link)
        if copies:
            fit_link(link, {int(size): rate for size, rate in copies.items()}, samples.get("link_limit"))


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers by name; none is negative, and only costs may be 0."""
    may_be_0 = ("half_depth", "copy_latency", "arena_seconds_per_byte")
    for name, value in data.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or value < 0 or (value == 0 and name not in may_be_0):
            raise ValueError(f"{name} = {value!r} is no rate")
    return {name: float(value) for name, value in data.items()}
