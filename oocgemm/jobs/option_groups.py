"""What an option is, the options that several verbs share, and the types of what callers pass.

An option is a field of a `TypedDict`, annotated with its type and an `Option`. A group is a class of options
that belong together. The options of each verb are in `oocgemm.jobs.options`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
)

import numpy.typing as npt

from oocgemm import backends, stores
from oocgemm.engine.executor import Observer
from oocgemm.jobs.steps import Epilogue
from oocgemm.planning import COMPUTES, Op, Plan, TileShape
from oocgemm.stores.transform import Transform

F = TypeVar("F", bound=Callable[..., Any])


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
Operand = npt.ArrayLike | LazyArray | os.PathLike[str] | stores.Composite  # a str is a path or a URL
Output = WritableArray | PathLike | None
Size = int | str  # bytes, or a number with a unit
Transpose = Op | Literal["N", "T", "C"] | bool
Progress = Callable[[Plan], Observer]
Requests = int | str | Mapping[str, int]  # 64, "64", "A=128,B=16" or {"A": 128}
Devices = str | Sequence[int]  # "all", "0,1" or [0, 1]

# The values of some options.
METRICS = ("cosine", "dot")
DISTANCES = ("euclidean", "sqeuclidean", "cosine", "jaccard", "hamming")
BIT_ORDERS = ("big", "little")
METHODS = ("pearson", "spearman")
CONSTANT = ("nan", "drop", "raise")
GRM_METHODS = ("gcta", "vanraden")
IBS_MEASURES = ("similarity", "ibs0", "ibs1", "ibs2")
PCA_METHODS = ("auto", "exact", "randomized")
GRM_CASTS = ("float32", "float64", "float16", "bfloat16")


class Field(NamedTuple):
    """How the form of the service shows an option.

    - `label`, `help`: the name of the option and what it does, in a few words.
    - `place`: the text in the empty field, if it is not the default.
    - `choices`: values and their texts; "" is the value that stands for the default.
    """

    label: str
    help: str = ""
    place: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    group: str = "more"


class Option(NamedTuple):
    """The description of an option, and its form on the command line.

    In texts, ``{name}`` is the option of this name: \\`name\\` in the library, --name on the command line.

    Attributes:
        help: what the option does, for the help of the command line and for the library.
        more: further sentences for the library.
        syntax: further sentences for the command line.
        default: the value without the option.
        shown: the default in words, if the value does not say it.
        metavar: the word that stands for the value in the help of the command line.
        choices: the values that it takes, if they can be listed.
        least, most: the range of the numbers that it takes.
        flags: options of the command line that take no value, with their help. Without flags, the command
            line has --name, which takes no value if its type is bool.
        cli: whether the command line has the option.
        service: whether a job of a service may have the option. A service chooses backend and devices, plans
            and resumes by itself. A job has operands (`support.Verb.parameters`) beside its options.
        form: its field in the form of the service; None if the form has none.
    """

    help: str
    more: str = ""
    default: Any = None
    shown: str = ""
    syntax: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    flags: tuple[tuple[str, str], ...] = ()
    cli: bool = True
    service: bool = True
    form: Field | None = None


def _choices(values: Iterable[str], default: str) -> tuple[tuple[str, str], ...]:
    return tuple(("" if value == default else value, value) for value in values)


class _Scalars(TypedDict, total=False):
    alpha: Annotated[
        complex,
        Option(
            "Factor of op(A) op(B), such as 0.5 or 1+2j.",
            "It must be real for real operands. For an integer C it must be an integer of magnitude below "
            "2^53. With 0, A and B are never read.",
            1.0,
            shown="1",
            form=Field("alpha", "Factor of A × B, such as 0.5 or 1+2j."),
        ),
    ]
    beta: Annotated[
        complex,
        Option(
            "Factor of the old C. If it is not 0, C must exist.",
            "For real operands and an integer C, as {alpha}. With 0, C is never read.",
            0.0,
            shown="0",
            form=Field("beta", "Factor of the old C, which must exist."),
        ),
    ]


def _transpose(operand: str) -> Option:
    side = operand.lower()
    return Option(
        f'"N" or False for {operand} itself, "T" or True for its transpose, "C" for its conjugate transpose.',
        default="N",
        flags=(
            (f"--transpose-{side}", f"Use the transpose of {operand}."),
            (f"--adjoint-{side}", f"Use the conjugate transpose of {operand}."),
        ),
        form=Field(
            f"Use {operand}",
            choices=(("", "as stored"), ("T", "transposed"), ("C", "conjugate transposed")),
            group=side,
        ),
    )


class TransposeOptions(TypedDict, total=False):
    trans_a: Annotated[Transpose, _transpose("A")]
    trans_b: Annotated[Transpose, _transpose("B")]


def _changes(operand: str) -> Option:
    return Option(
        f"Transform the elements of {operand} on load: missing codes, means, scales, casts. Means and scales "
        "are per index along k.",
        "If the operand is cast to float16 or bfloat16, C is float32 by default.",
        syntax="Values are separated by commas: missing=CODE, impute=mean|NUMBER|FILE|raise, "
        "target_sum=NUMBER, log1p, center=k|FILE, scale=k|hwe|FILE, clip=LOW:HIGH, cast=DTYPE, such as "
        "missing=-1,center=k,scale=k,cast=float16. FILE is a .npy file with one number for each index.",
        metavar="CHANGES",
    )


class PairTransformOptions(TypedDict, total=False):
    transform_a: Annotated[Transform | None, _changes("A")]
    transform_b: Annotated[Transform | None, _changes("B")]


class TransformOptions(TypedDict, total=False):
    transform: Annotated[Transform | None, _changes("X")]


class MissingOptions(TypedDict, total=False):
    missing: Annotated[
        float | None,
        Option(
            "Code of missing elements, such as -9 or nan.",
            "{impute} says what replaces them. They may also be given in a transform.",
            shown="with {impute}, what the operand declares (_FillValue, missing_value, -1 in a .bed "
            "file), else nan",
            metavar="CODE",
            service=False,
        ),
    ]
    impute: Annotated[
        float | str | None,
        Option(
            "What replaces missing elements: mean, a number, or raise to refuse them. mean is that of the "
            "other elements of the variable.",
            "Variables are the rows or columns whose coefficients are computed (`corr`, `cov`, "
            "`ld_scores`), and elsewhere the columns of the rows that are compared. For a .bed file, they "
            "are the variants. With a transform, the mean is that after `log1p`.",
            shown="mean if {missing} is given",
            metavar="mean|NUMBER|raise",
            service=False,
        ),
    ]


class StepOptions(TypedDict, total=False):
    epilogue: Annotated[
        Epilogue,
        Option(
            "Steps that change each element of C before it is stored, in their order: `Scale`, `RankOne`, "
            "`Add`, `Divide`, `Correlation`, `Gaussian`, `Cast`.",
            "None by default. (`reduce` computes sums, largest elements and more from C without storing it.)",
            (),
            cli=False,
        ),
    ]


class _Engine(TypedDict, total=False):
    backend: Annotated[
        str,
        Option(
            "What computes: cuda, host, or auto, which is cuda if a device is available, else host.",
            default="auto",
            choices=backends.NAMES,
            service=False,
        ),
    ]
    kernel: Annotated[
        str,
        Option(
            "blas on the host backend; cublas or a kernel of this package on cuda. auto uses the fastest "
            "kernel that `oocgemm tune` has measured, or cublas if it has measured none.",
            default="auto",
            choices=tuple(dict.fromkeys(kernel for each in backends.KERNELS.values() for kernel in each)),
            form=Field("Kernel", "Empty: the fastest that is known."),
        ),
    ]


class _Precision(TypedDict, total=False):
    compute: Annotated[
        str,
        Option(
            "native: the precision of the operands, or a wider one. tf32, bf16: float32 operands on cuda, "
            "which may be rounded to that precision. emulated: float64 or float32 operands, computed from "
            "exact int8 products, as accurate as native.",
            "(tf32 has 11 significant bits, bf16 has 8. Sums are in float32.)",
            "native",
            choices=tuple(COMPUTES),
            form=Field("Compute", "Precision of the products.", choices=_choices(COMPUTES, "native")),
        ),
    ]


class _Result(TypedDict, total=False):
    out_dtype: Annotated[
        npt.DTypeLike | None,
        Option(
            "dtype of C, such as float32. float16 and bfloat16 operands also allow float32; int8 operands "
            "allow int32, int64, float32 and float64.",
            shown="dtype of the operands; int32 for int8",
            metavar="DTYPE",
            form=Field("dtype of C", "Such as float32.", "that of the operands"),
        ),
    ]


class _Memory(TypedDict, total=False):
    memory: Annotated[
        Size | None,
        Option(
            "Upper bound on host memory, such as 4GiB, in place of {host_memory}. With the host backend it "
            "also replaces {device_memory}: 3/4 are for blocks of A, B and C, the rest is for reading and "
            "writing.",
            "In bytes, or a text with a unit. A share grows if the smallest plan requires more.",
            metavar="SIZE",
        ),
    ]
    device_memory: Annotated[
        Size | None,
        Option(
            "Upper bound on device memory, such as 2GiB. With the host backend: upper bound on RAM for "
            "blocks of A, B and C.",
            shown="90% of free device memory; host backend: 37.5% of available RAM",
            metavar="SIZE",
            form=Field(
                "Device memory", "Upper bound, such as 8GiB.", "chosen by the service", group="budgets"
            ),
        ),
    ]
    host_memory: Annotated[
        Size | None,
        Option(
            "Upper bound on host memory for buffers between storage and device, such as 8GiB. With the host "
            "backend: upper bound on RAM for reading and writing.",
            shown="50% of available RAM; host backend: 12.5%",
            metavar="SIZE",
            form=Field(
                "Host memory",
                "Upper bound for buffers, such as 16GiB.",
                "chosen by the service",
                group="budgets",
            ),
        ),
    ]


class _Tile(TypedDict, total=False):
    tile: Annotated[
        TileShape | str | None,
        Option(
            "Compute C in tiles of M x N elements, and multiply blocks of K columns of op(A) and K rows of "
            "op(B) at a time, such as 4096x4096x512.",
            shown="chosen by the planner",
            metavar="MxNxK",
            form=Field("Tile", "MxNxK, such as 4096x4096x512."),
        ),
    ]


class _Storage(TypedDict, total=False):
    chunks: Annotated[
        tuple[int, int] | None,
        Option(
            "Rows and columns per chunk of a new zarr array, such as 1024x1024.",
            "A tuple of both.",
            shown="chunks of about 8 MiB, whose extents divide those of a tile",
            metavar="RxC",
            form=Field("Chunks of C", "RxC of a new zarr array, as 1024x1024.", "about 8 MiB each"),
        ),
    ]
    compressor: Annotated[
        str | None,
        Option(
            "Compressor of a new zarr array, such as zstd.",
            shown="none",
            choices=stores.COMPRESSORS,
            form=Field(
                "Compressor of C", "Of a new zarr array.", choices=_choices(stores.COMPRESSORS, "none")
            ),
        ),
    ]


class _Access(TypedDict, total=False):
    requests: Annotated[
        Requests | None,
        Option(
            "Requests in flight to each array in an object store, such as 128, or A=128,B=16.",
            'Or {{"A": 128}}. Fewer are used if their buffers would take more than a quarter '
            "of the host memory.",
            shown="64",
            metavar="N|A=N,B=N",
            service=False,
        ),
    ]
    verify: Annotated[
        bool,
        Option(
            "Compare each tile of the product with checksums of the operands before it is used or written, "
            "and compute it again if they differ. If the result is not the product itself, also check "
            "samples of the result.",
            "`oocgemm.integrity.tile_checks` and `oocgemm.integrity.samples` describe how.",
            False,
            form=Field("Verify", "each tile by checksums of A and B"),
        ),
    ]
    decode: Annotated[
        bool,
        Option(
            "Respect what an operand declares about its elements.",
            "Packed arrays (netCDF's `scale_factor`, `add_offset`, `_Unsigned`) are unpacked. A missing "
            "element (`_FillValue`, `missing_value`, -1 in a .bed file) is an error, unless a transform has "
            "its code as `missing`. False takes the numbers as they are stored.",
            True,
            flags=(
                (
                    "--no-decode",
                    "Take the numbers of operands as they are stored, whatever their attributes declare: "
                    "that they are packed (scale_factor), or stand for missing elements (_FillValue). Then "
                    "-1 in a .bed file is a number too.",
                ),
            ),
        ),
    ]


class _Devices(TypedDict, total=False):
    devices: Annotated[
        Devices | None,
        Option(
            "Use several CUDA devices of one kind: all of them, or those with these numbers, such as 0,1. "
            "{device_memory} is then for each device, {host_memory} for all together.",
            "Also a sequence, such as [0, 1]. By default only {device} is used.",
            metavar="all|N,N,..",
            service=False,
        ),
    ]


class _Device(TypedDict, total=False):
    device: Annotated[
        int, Option("Number of the CUDA device.", default=0, metavar="N", least=0, service=False)
    ]


class _Durability(TypedDict, total=False):
    overwrite: Annotated[
        bool,
        Option(
            "Replace the contents of an existing C, which must have the same shape and dtype.",
            default=False,
            form=Field("Replace C", "if it exists", group="c"),
        ),
    ]
    resume: Annotated[
        bool,
        Option(
            "Continue an unfinished run of the same command. Finished tiles are kept; budgets may differ.",
            "The plan of that run is used. All arguments except the budgets must be those of that run. If "
            "there is no C, start a run; if C is complete, do nothing.",
            False,
            service=False,
        ),
    ]
    trust_operands: Annotated[
        bool,
        Option(
            "Continue an unfinished C even if files of operands have changed, for example after a repair. "
            "Finished tiles are not computed again.",
            "Only with {resume}.",
            False,
            form=Field("Trust operands", "even if files of A or B have changed"),
        ),
    ]


class _Log(TypedDict, total=False):
    timeline: Annotated[
        PathLike | None,
        Option(
            "Log every operation to this file, such as run.jsonl, for `oocgemm report`.",
            "It is written during the run.",
            service=False,
        ),
    ]


class _Watch(TypedDict, total=False):
    progress: Annotated[
        Progress | bool | None,
        Option(
            "Show the progress on stderr with True, as a bar on a terminal, elsewhere as a line every ten "
            "seconds. A callable receives the plan, and returns a function that is called with the `Span` of "
            "every finished operation.",
            cli=False,
            service=False,
        ),
    ]


class _Workers(TypedDict, total=False):
    workers: Annotated[
        int | None,
        Option(
            "Compute with N processes on this machine, such as 4. They share the memory budgets.",
            "A, B and C must be at paths. `oocgemm.distributed` describes how such a run works.",
            metavar="N",
            least=1,
            service=False,
        ),
    ]
    client: Annotated[
        Any,
        Option(
            "A dask.distributed `Client`: compute with all workers of its cluster. They must see A, B and C "
            "at the same paths as this process.",
            cli=False,
            service=False,
        ),
    ]
    executor: Annotated[
        Any,
        Option(
            "A `concurrent.futures.Executor`: compute with its workers, as with a client. {workers} is then "
            "the number of tasks at a time, by default the number of the executor's workers.",
            cli=False,
            service=False,
        ),
    ]


class PlanOptions(
    _Scalars, TransposeOptions, PairTransformOptions, StepOptions, _Engine, _Precision, _Result, _Memory,
    _Tile, _Storage, _Access, _Devices, total=False,
):  # fmt: skip
    """Options that decide what is computed, and how. `oocgemm.gemm` describes each."""


class RunOptions(_Device, _Durability, _Log, _Watch, _Workers, total=False):
    """Options of one run of a plan. `oocgemm.gemm` describes each."""


class Options(PlanOptions, RunOptions, total=False):
    """All options of `oocgemm.gemm`."""


class GramPlanOptions(
    _Scalars, TransformOptions, StepOptions, _Engine, _Precision, _Result, _Memory, _Tile, _Storage, _Access,
    _Devices, total=False,
):  # fmt: skip
    """Options of the plan of a Gram matrix. `oocgemm.gemm` describes each."""


class GramOptions(GramPlanOptions, _Device, _Durability, _Log, _Watch, _Workers, total=False):
    """Options of `oocgemm.gram`. `oocgemm.gemm` describes each."""


class SelectionOptions(
    _Engine, _Precision, _Memory, _Tile, _Access, _Devices, _Device, _Log, _Watch, _Workers, total=False
):  # fmt: skip
    """Options of verbs whose result is kept in memory. `oocgemm.gemm` describes each."""


class DenseOptions(SelectionOptions, _Storage, _Durability, total=False):
    """Options of `oocgemm.grm`. `oocgemm.gemm` describes each."""


class CorrelationOptions(TransformOptions, MissingOptions, DenseOptions, total=False):
    """Options of `oocgemm.corr` and `cov`. `oocgemm.gemm` describes each."""


class SimilarityOptions(TransformOptions, MissingOptions, SelectionOptions, total=False):
    """Options of `oocgemm.similarity` and `ld_scores`. `oocgemm.gemm` describes each."""


class PairOptions(PairTransformOptions, SelectionOptions, total=False):
    """Options of `oocgemm.reduce` and `kernel_matmul`. `oocgemm.gemm` describes each."""


class PcaOptions(_Engine, _Memory, _Access, _Devices, _Device, _Watch, total=False):
    """Options of `oocgemm.pca`. `oocgemm.gemm` describes each."""
