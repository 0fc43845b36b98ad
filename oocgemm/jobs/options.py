"""Types of what callers pass: operands, destinations of C, and options."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

import numpy.typing as npt

from oocgemm.engine.executor import Observer
from oocgemm.jobs.epilogue import Epilogue
from oocgemm.planning import Op, Plan, TileShape
from oocgemm.stores.transform import Transform


class LazyArray(Protocol):
    """An array that is read by slicing, such as one of zarr, h5py, dask, xarray or tensorstore."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class WritableArray(LazyArray, Protocol):
    """An array that is also written by slicing: an ndarray, a memory map or a zarr array."""

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


PathLike = str | os.PathLike[str]
Operand = npt.ArrayLike | LazyArray | os.PathLike[str]  # a str is a path or a URL
Output = WritableArray | PathLike | None
Size = int | str  # bytes, or a number with a unit
Transpose = Op | Literal["N", "T", "C"] | bool
Progress = Callable[[Plan], Observer]


Requests = int | str | Mapping[str, int]  # 64, "64", "A=128,B=16" or {"A": 128}
Devices = str | Sequence[int]  # "all", "0,1" or [0, 1]


class PlanOptions(TypedDict, total=False):
    """Options that decide what is computed, and how. `oocgemm.gemm` describes each."""

    alpha: complex
    beta: complex
    trans_a: Transpose
    trans_b: Transpose
    transform_a: Transform | None
    transform_b: Transform | None
    epilogue: Epilogue
    backend: str
    kernel: str
    compute: str
    out_dtype: npt.DTypeLike | None
    memory: Size | None
    device_memory: Size | None
    host_memory: Size | None
    tile: TileShape | str | None
    chunks: tuple[int, int] | None
    compressor: str | None
    requests: Requests | None
    verify: bool
    decode: bool
    devices: Devices | None


class GramPlanOptions(TypedDict, total=False):
    """Options of a Gram matrix. `oocgemm.gemm` describes each, and `oocgemm.gram` its `transform`."""

    alpha: complex
    beta: complex
    transform: Transform | None
    epilogue: Epilogue
    backend: str
    kernel: str
    compute: str
    out_dtype: npt.DTypeLike | None
    memory: Size | None
    device_memory: Size | None
    host_memory: Size | None
    tile: TileShape | str | None
    chunks: tuple[int, int] | None
    compressor: str | None
    requests: Requests | None
    verify: bool
    decode: bool


class GramOptions(GramPlanOptions, total=False):
    """Options of `oocgemm.gram`. `oocgemm.gemm` describes each."""

    device: int
    overwrite: bool
    resume: bool
    trust_operands: bool
    timeline: PathLike | None
    progress: "Progress | bool | None"


class SelectionOptions(TypedDict, total=False):
    """Options of `oocgemm.similarity`. `oocgemm.gemm` describes each."""

    backend: str
    kernel: str
    compute: str
    memory: Size | None
    device_memory: Size | None
    host_memory: Size | None
    tile: TileShape | str | None
    requests: Requests | None
    verify: bool
    decode: bool
    device: int
    timeline: PathLike | None
    progress: "Progress | bool | None"


class PcaOptions(TypedDict, total=False):
    """Options of `oocgemm.pca`. `oocgemm.gemm` describes each."""

    backend: str
    kernel: str
    memory: Size | None
    device_memory: Size | None
    host_memory: Size | None
    requests: Requests | None
    verify: bool
    decode: bool
    device: int
    progress: "Progress | bool | None"


class DenseOptions(SelectionOptions, total=False):
    """Options of `oocgemm.corr` and `oocgemm.cov`. `oocgemm.gemm` describes each."""

    chunks: tuple[int, int] | None
    compressor: str | None
    overwrite: bool
    resume: bool
    trust_operands: bool


class RunOptions(TypedDict, total=False):
    """Options of one run of a plan. `oocgemm.gemm` describes each."""

    device: int
    overwrite: bool
    resume: bool
    trust_operands: bool
    timeline: PathLike | None
    progress: Progress | bool | None
    workers: int | None
    client: Any
    executor: Any


class Options(PlanOptions, RunOptions, total=False):
    """All options of `oocgemm.gemm`."""
