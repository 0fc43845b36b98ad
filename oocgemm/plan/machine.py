"""What the planner believes of a machine: rates of the multiplication, of each link and of storage."""

from collections.abc import Mapping
from dataclasses import dataclass

from oocgemm.plan.tiling import Layout


@dataclass(frozen=True, slots=True)
class KernelRate:
    """Speed of the multiplication of one dtype: `peak` flop/s, halved at panels `half_depth` deep.

    C is read and written in device memory once a step, so thin panels are slower: peak / (1 + half_depth / r).
    """

    peak: float
    half_depth: float


@dataclass(frozen=True)
class MachineModel:
    """What the planner believes of a machine. Bytes, bytes per second, seconds, flop/s."""

    name: str
    kernels: Mapping[str, KernelRate]
    h2d: float
    d2h: float
    read: float
    read_scattered: float
    decode: float
    memory: float
    write: float
    copy_latency: float = 10e-6
    step_latency: float = 10e-6
    write_latency: float = 200e-6
    arena_seconds_per_byte: float = 0.03 / 2**30
    io_threads: int = 1
    shares_cores: bool = False
    unified: bool = False
    device_reserve: int = 0
    host_reserve: int = 0
    casts_panels: bool = False
    calibrated: bool = False

    def store_rate(self, layout: Layout, panel: tuple[int, int]) -> float:
        """Bytes per second at which panels of that shape are read from an array of that layout."""
        if layout.in_memory:
            return self.memory
        if layout.decode_bytes:
            return self.decode
        return self.read_scattered if layout.scatters(panel) else self.read


def default_model(backend: str, cores: int) -> MachineModel:
    """Uncalibrated figures: an H200 behind PCIe 5 for ``cuda``, AVX-512 cores for ``host``."""
    if backend == "cuda":
        return MachineModel(
            name="cuda defaults (H200, PCIe 5 x16)",
            kernels={
                "float16": KernelRate(600e12, 300),
                "float32": KernelRate(53e12, 180),
                "float64": KernelRate(59e12, 90),
                "complex64": KernelRate(50e12, 90),
                "complex128": KernelRate(55e12, 25),
            },
            h2d=55e9,
            d2h=55e9,
            read=min(40e9, 3.5e9 * cores),
            read_scattered=min(10e9, 1.5e9 * cores),
            decode=min(3e9, 1.2e9 * cores),
            memory=min(36e9, 4.5e9 * cores),
            step_latency=60e-6,
            write=1.6e9,
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
            "float32": KernelRate(2 * fp64, 20),
            "float64": KernelRate(fp64, 10),
            "complex64": KernelRate(2 * fp64, 10),
            "complex128": KernelRate(fp64, 5),
        },
        h2d=10e9,
        d2h=10e9,
        read=6e9,
        read_scattered=5e9,
        decode=1.2e9,
        memory=10e9,
        write=1.5e9,
        arena_seconds_per_byte=0.6 / 2**30,
        io_threads=max(1, cores // 4),
        shares_cores=True,
        unified=True,
        device_reserve=(8 << 20) * cores,  # packing buffers of the BLAS, as measured with OpenBLAS
        host_reserve=8 << 20,
        casts_panels=True,
    )
