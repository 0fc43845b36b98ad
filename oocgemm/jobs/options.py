"""The options of all verbs, each written down once, and the types of what callers pass.

An option is a field of a `TypedDict`, annotated with its type and an `Option`. A verb's options are a class
that inherits the groups it takes, and is named for the verb. From them come

- the keyword arguments of the library's functions: their static types, the check of unknown names
  (`check_names`), and their documentation (`documented`),
- the options of the command line (`oocgemm.cli.parameters`),
- what a service may ask for (`options_of`).
"""

import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import numpy.typing as npt

from oocgemm import backends, stores
from oocgemm.engine.executor import Observer
from oocgemm.errors import InputError
from oocgemm.jobs import support
from oocgemm.jobs.steps import Epilogue
from oocgemm.planning import COMPUTES, Op, Plan, TileShape
from oocgemm.planning.cover import GRAMS
from oocgemm.stores.genetics import Chromosomes
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
DISTANCES = ("euclidean", "sqeuclidean", "cosine")
CONSTANT = ("nan", "drop", "raise")
GRM_METHODS = ("gcta", "vanraden")
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
            and resumes by itself, and takes operands as they are stored.
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


class _Transposes(TypedDict, total=False):
    trans_a: Annotated[Transpose, _transpose("A")]
    trans_b: Annotated[Transpose, _transpose("B")]


def _changes(operand: str) -> Option:
    return Option(
        f"Transform the elements of {operand} on load: missing codes, means, scales, casts. Means and scales "
        "are per index along k.",
        "If the operand is cast to float16 or bfloat16, C is float32 by default.",
        syntax="Values are separated by commas: missing=CODE, impute=mean|NUMBER|FILE|raise, "
        "target_sum=NUMBER, log1p, center=k|FILE, scale=k|hwe|FILE, cast=DTYPE, such as "
        "missing=-1,center=k,scale=k,cast=float16. FILE is a .npy file with one number for each index.",
        metavar="CHANGES",
        service=False,
    )


class _Transforms(TypedDict, total=False):
    transform_a: Annotated[Transform | None, _changes("A")]
    transform_b: Annotated[Transform | None, _changes("B")]


class _Transform(TypedDict, total=False):
    transform: Annotated[Transform | None, _changes("X")]


class _Steps(TypedDict, total=False):
    epilogue: Annotated[
        Epilogue,
        Option(
            "Steps that change each element of C before it is stored, in their order: `Scale`, `RankOne`, "
            "`Add`, `Divide`, `Correlation`, `Gaussian`, `Cast`.",
            "None by default. (`reduce` computes sums, largest elements and more from C without storing it.)",
            (),
            cli=False,
            service=False,
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
    _Scalars, _Transposes, _Transforms, _Steps, _Engine, _Precision, _Result, _Memory, _Tile, _Storage,
    _Access, _Devices, total=False,
):  # fmt: skip
    """Options that decide what is computed, and how. `oocgemm.gemm` describes each."""


class RunOptions(_Device, _Durability, _Log, _Watch, _Workers, total=False):
    """Options of one run of a plan. `oocgemm.gemm` describes each."""


class Options(PlanOptions, RunOptions, total=False):
    """All options of `oocgemm.gemm`."""


class GramPlanOptions(
    _Scalars, _Transform, _Steps, _Engine, _Precision, _Result, _Memory, _Tile, _Storage, _Access, _Devices,
    total=False,
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


class CorrelationOptions(_Transform, DenseOptions, total=False):
    """Options of `oocgemm.corr` and `cov`. `oocgemm.gemm` describes each."""


class SimilarityOptions(_Transform, SelectionOptions, total=False):
    """Options of `oocgemm.similarity` and `ld_scores`. `oocgemm.gemm` describes each."""


class PairOptions(_Transforms, SelectionOptions, total=False):
    """Options of `oocgemm.reduce` and `kernel_matmul`. `oocgemm.gemm` describes each."""


class PcaOptions(_Engine, _Memory, _Access, _Devices, _Device, _Watch, total=False):
    """Options of `oocgemm.pca`. `oocgemm.gemm` describes each."""


# Below are the options that belong to one verb. A class that is named for a verb has all options of this verb
# except `dry_run`. The function of a verb takes its own options as parameters, and shared options as
# `**options`. The classes give the types for calls with and without `dry_run`.


class _DryRun(TypedDict, total=False):
    dry_run: Annotated[
        bool,
        Option(
            "Plan only: show how the result would be computed. Nothing is computed or written.",
            "The result is a `Plan`, or several for products in sequence. No GPU is used; the cuda backend "
            "requires {device_memory}.",
            False,
            service=False,
        ),
    ]


GemmArguments = Options


class _Axis(TypedDict, total=False):
    axis: Annotated[
        int,
        Option(
            "Axis of X that survives. 0: the result is about the rows of X, as X X^T. 1: about its columns, "
            "as X^T X.",
            default=0,
            least=0,
            most=1,
        ),
    ]


class _Uplo(TypedDict, total=False):
    uplo: Annotated[
        str | None,
        Option(
            "Triangle of the result to store, with the diagonal: lower or upper. full stores both, which are "
            "exact mirror images.",
            "Elements outside of a triangle are 0 in an array that the run creates, and stay as they are in "
            "an existing one. `Result.uplo` and an attribute of a zarr array record the triangle.",
            shown="full; lower in a .grm.bin file; with {resume}, that of the run",
            choices=GRAMS,
        ),
    ]


class GramArguments(_Uplo, _Axis, GramOptions, total=False):
    """All options of `oocgemm.gram`."""


class _Second(TypedDict, total=False):
    y: Annotated[
        Operand | None,
        Option(
            "Compare with the rows of this operand, such as Y.zarr, in place of those of the first one.",
            "It has as many columns. Where `axis` is 1, columns are compared with columns. A transform "
            "applies to both operands.",
            metavar="PATH",
            service=False,
        ),
    ]


class _Similar(TypedDict, total=False):
    topk: Annotated[
        int | None,
        Option(
            "Find this many rows for each row, such as 50.",
            "At most 2048 on cuda. Rows of equal scores are in ascending order of their numbers. Rounding, "
            "which depends on tiles, may make the scores of equally similar rows differ. NaN ranks last.",
            metavar="N",
        ),
    ]
    threshold: Annotated[
        float | None,
        Option(
            "Find all pairs of rows whose similarity is at least this number, such as 0.8.",
            "Cosines near this number are computed again in float64, and compared exactly. For the metric "
            "dot, the number is rounded to the dtype of the scores. NaN is left out.",
            metavar="NUMBER",
        ),
    ]


class _Compared(TypedDict, total=False):
    metric: Annotated[
        str,
        Option(
            "cosine: inner products of rows divided by their norms, at least -1 and at most 1; cosines "
            "with a zero row are 0. dot: inner products.",
            default=METRICS[0],
            choices=METRICS,
        ),
    ]
    exclude_self: Annotated[
        bool,
        Option(
            "Leave out the similarity of a row to itself.",
            "With {y}, no row is left out.",
            True,
            flags=(("--include-self", "Also compare each row with itself."),),
        ),
    ]


class ComparisonOptions(_Second, _Compared, SimilarityOptions, total=False):
    """Options of `oocgemm.similarity` except `topk` and `threshold`."""


class SimilarityArguments(_Similar, ComparisonOptions, total=False):
    """All options of `oocgemm.similarity`."""


class _Metric(TypedDict, total=False):
    metric: Annotated[
        str,
        Option(
            "The distance of two rows. euclidean: the length of x - y. sqeuclidean: its square. cosine: 1 "
            "minus the cosine of their angle; 1 for a zero row.",
            default=DISTANCES[0],
            choices=DISTANCES,
        ),
    ]


class DistancesArguments(_Second, _Metric, CorrelationOptions, total=False):
    """All options of `oocgemm.distances`."""


class NeighborsArguments(_Second, _Metric, SimilarityOptions, total=False):
    """All options of `oocgemm.neighbors`."""

    topk: Annotated[
        int | None,
        Option("Find this many nearest rows for each row, such as 10.", "At most 2040 on cuda.", metavar="N"),
    ]
    radius: Annotated[
        float | None,
        Option("Find all rows at a distance of at most this number, such as 0.5.", metavar="NUMBER"),
    ]
    exclude_self: Annotated[
        bool,
        Option(
            "Do not count a row as its own neighbor.",
            "With {y}, no row is left out.",
            True,
            flags=(("--include-self", "Also compare each row with itself."),),
        ),
    ]


class _Correlated(TypedDict, total=False):
    topk: Annotated[
        int | None,
        Option("Store only the N largest coefficients of each row.", "As `similarity` does.", metavar="N"),
    ]
    threshold: Annotated[
        float | None,
        Option("Store only coefficients of at least this magnitude, such as 0.5.", metavar="NUMBER"),
    ]


class _Constant(TypedDict, total=False):
    constant: Annotated[
        str,
        Option(
            "Rows of equal elements, which have no coefficients. nan: store NaN in their place. drop: leave "
            "these rows out. raise: stop.",
            "With nan, as for NumPy, {topk} ranks them last and {threshold} leaves them out. With drop, the "
            "result is that of the other rows of X, and `Result.kept` has their numbers. In both "
            "cases, a `DataWarning` counts the rows.",
            CONSTANT[0],
            choices=CONSTANT,
        ),
    ]


class CoefficientOptions(_Second, _Constant, CorrelationOptions, total=False):
    """Options of `oocgemm.corr` except `topk`, `threshold` and `axis`."""


class CorrArguments(_Axis, _Correlated, CoefficientOptions, total=False):
    """All options of `oocgemm.corr`."""


class CovArguments(_Second, _Axis, CorrelationOptions, total=False):
    """All options of `oocgemm.cov`."""

    ddof: Annotated[
        int,
        Option("Divide sums of products by the number of elements of a row minus N.", default=1, metavar="N"),
    ]


class GrmArguments(_Uplo, _Axis, DenseOptions, total=False):
    """All options of `oocgemm.grm`."""

    method: Annotated[
        str,
        Option(
            "gcta: the mean over variants of products of standardized genotypes. vanraden: the sum of "
            "products of centered genotypes, divided by the sum of 2 p (1 - p).",
            "They are the algorithms 0 and 1 of GCTA's --make-grm-alg.",
            GRM_METHODS[0],
            choices=GRM_METHODS,
        ),
    ]
    missing: Annotated[
        float | None,
        Option(
            "Code of missing genotypes, such as -9 or nan.",
            "NaN counts as missing too. None: no genotype is missing.",
            -1,
            metavar="CODE",
        ),
    ]
    cast: Annotated[
        str | None,
        Option(
            "dtype in which genotypes are multiplied.",
            "A GPU is fastest with float16 and bfloat16; the matrix is then float32.",
            shown="float32 for int8, and so for .bed files; else as for `Transform`",
            choices=GRM_CASTS,
        ),
    ]
    pairwise: Annotated[
        bool,
        Option(
            "Divide by the number of variants that both individuals have, as GCTA does. It takes a second "
            "product. The numbers are stored beside the result.",
            "With vanraden, also divide by the mean of 2 p (1 - p) over all variants. The second product is "
            "exact. The numbers are in x.grm.N.bin for x.grm.bin, in x.counts.zarr for x.zarr. A pair "
            "without a common variant is 0.",
            False,
        ),
    ]
    chromosomes: Annotated[
        Chromosomes | None,
        Option(
            "Chromosomes of a .bed file whose variants are used, such as 1-22,X or all.",
            "The .bim file names them. A number, such as 21, is a name too. For other operands, pass None or "
            '"all".',
            shown="autosomes, which are 1-22; all if the .bim file names none",
            metavar="NAMES",
        ),
    ]


class PcaArguments(_Transform, PcaOptions, total=False):
    """All options of `oocgemm.pca`."""

    center: Annotated[
        bool,
        Option(
            "Subtract the mean of each column. False gives a truncated SVD of X.",
            default=True,
            flags=(("--no-center", "Do not subtract the mean of each column: find a truncated SVD of X."),),
        ),
    ]
    method: Annotated[
        str,
        Option(
            "exact: eigenvectors of a Gram matrix, X^T X or the smaller X X^T, which one read of X computes. "
            "randomized: a block method that reads X once per iteration. auto: the one that is predicted to "
            "be faster.",
            "The exact method needs five matrices of d x d (or n x n) in float64 in host memory. With auto, "
            "it is used only if they fit. With more columns than rows, it reads X twice. Before that, X is "
            "read once for the means of its columns, unless they are cached, as for files. Singular values "
            "that rounding errors of the Gram matrix may change by more than 1e-5 of the largest one are "
            "refined by further iterations.",
            PCA_METHODS[0],
            choices=PCA_METHODS,
        ),
    ]
    iterations: Annotated[
        int,
        Option(
            "Maximum number of times that X is read. More iterations give more accurate components.",
            "The more slowly singular values decay, the more iterations the randomized method needs. The "
            "read for a Gram matrix is an iteration too, of every {method}.",
            6,
            metavar="N",
        ),
    ]
    tol: Annotated[
        float,
        Option(
            "Stop when the residual of each component is below this share of the gap to its neighbours. 0: "
            "read X as often as {iterations} says.",
            "`PCA.errors` has these shares. The error of a singular value is about the square of its "
            "share. With 0, there is no warning, and the {method} auto is the randomized one. The exact "
            "method reaches any other tolerance by its first iteration, unless components must be refined.",
            0.01,
            metavar="X",
        ),
    ]
    oversampling: Annotated[
        int,
        Option(
            "Minimum number of further directions that are kept. With more, fewer iterations suffice.",
            default=10,
            metavar="N",
        ),
    ]
    seed: Annotated[
        int,
        Option(
            "Seed of the random start, of both methods.",
            "With the same seed, budgets and backend, results are equal in every bit.",
            0,
            metavar="N",
        ),
    ]
    scores: Annotated[
        bool,
        Option("Also store the scores, X projected on the components. X is read once more.", default=False),
    ]
    resume: Annotated[
        bool,
        Option(
            "Continue a run of the same command that was interrupted or killed.",
            "That run wrote to `out`. If there is nothing to continue, start a run.",
            False,
            service=False,
        ),
    ]


class KernelMatmulArguments(PairOptions, total=False):
    """All options of `oocgemm.kernel_matmul`."""

    gamma: Annotated[
        float,
        Option("A positive number. 1 / (2 s^2) gives the kernel of the standard deviation s.", cli=False),
    ]


class ReduceArguments(_Steps, _Transposes, PairOptions, total=False):
    """All options of `oocgemm.reduce`."""


class LdScoresArguments(SimilarityOptions, total=False):
    """All options of `oocgemm.ld_scores`."""

    window: Annotated[
        int | None,
        Option(
            "Sum over the variants within this many variants on both sides, such as 1000.",
            metavar="N",
        ),
    ]
    axis: Annotated[
        int,
        Option("Axis of X with the variants. 0: its rows. 1: its columns.", default=1, least=0, most=1),
    ]
    adjusted: Annotated[
        bool,
        Option(
            "Subtract the expected square of the correlation of independent variants, as LDSC does.",
            "With n individuals, r^2 - (1 - r^2) / (n - 2) is summed instead of r^2.",
            True,
            flags=(("--not-adjusted", "Sum the squares of correlations as they are."),),
        ),
    ]
    constant: Annotated[
        str,
        Option(
            "Variants with equal genotypes only, which have no correlations. raise: stop. drop: leave them "
            "out, and do not count them in windows.",
            "The scores of variants that are left out are NaN, and a `DataWarning` counts them.",
            "raise",
            choices=("raise", "drop"),
        ),
    ]


# The options of each verb: the class that is named for it.
VERBS: Mapping[str, type] = {
    verb: globals()[verb.title().replace("_", "") + "Arguments"] for verb in support.VERBS
}
PLAN_OPTIONS, OPTIONS = (frozenset(each.__annotations__) for each in (PlanOptions, Options))
SELECTION_OPTIONS = frozenset(SelectionOptions.__annotations__) | {"transform"}


def _annotations(verb: str | type) -> dict[str, Any]:
    """Return the annotated types of all options of a verb, or of one of the classes above."""
    if isinstance(verb, type):
        return verb.__annotations__
    return VERBS[verb].__annotations__ | _DryRun.__annotations__


def options_of(verb: str | type) -> dict[str, Option]:
    """Return the options of a verb, or of one of the classes above, by name; options of `gemm` last."""
    found, last = _annotations(verb), [*Options.__annotations__, "dry_run"]
    names = sorted(found, key=lambda name: name in last and 1 + (name == "dry_run"))
    return {name: get_args(found[name])[1] for name in names}


def types_of(verb: str | type, name: str) -> frozenset[Any]:
    """Return the types of the values of an option, without None."""
    kind = get_args(_annotations(verb)[name])[0]
    alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return frozenset(alternatives) - {type(None)}


def check_choices(verb: str, **given: Any) -> None:
    """Raise `InputError` for a value that is neither the default nor a choice of an option of a verb."""
    options = options_of(verb)
    for name, value in given.items():
        choices = options[name].choices
        if value not in (options[name].default, *choices):
            raise InputError(f"{name} = {value!r}: choose one of {', '.join(choices)}")


def check_names(function: str, options: Iterable[str], known: type | Iterable[str]) -> None:
    """Raise `TypeError` for an unknown option, as Python does for an unknown parameter.

    `known` is a class of options, or their names. Raises `CombinationError` for an option that chooses an
    executor which cannot run the function.
    """
    names = known.__annotations__ if isinstance(known, type) else known
    for name in options:
        if name not in names:
            support.check_option(function, name)
            raise TypeError(
                f"{function}() got an unexpected option {name!r}: it takes {', '.join(sorted(names))}"
            )


def documented(verb: str, shared: type | None = None) -> Callable[[F], F]:
    """Return a decorator that replaces the line ``{options}`` of a docstring by the options of a verb.

    Options that are also in `shared` are only named, in one entry that refers to `gemm`.
    """

    def describe(function: F) -> F:
        if function.__doc__:  # python -OO removes it
            function.__doc__ = function.__doc__.replace("        {options}\n", _entries(verb, shared))
        return function

    return describe


def _entries(verb: str, shared: type | None) -> str:
    known, lines = () if shared is None else tuple(shared.__annotations__), list[str]()
    for name, option in options_of(verb).items():
        if name in known:
            continue
        shown = option.shown or ("" if option.default in (None, False, ()) else repr(option.default))
        first = option.help if option.help[1:2].isupper() else option.help[0].lower() + option.help[1:]
        choices = ", ".join(f'"{choice}"' for choice in option.choices)
        texts = (
            first,
            f"Choices: {choices}." if choices else "",
            option.more,
            f"Default: {shown}." if shown else "",
        )
        lines.append(f"{name}: {rendered(' '.join(filter(None, texts)), '`{}`'.format)}")
    if known:
        lines.append(f"options: those of `gemm` that are listed here: {', '.join(known)}.")
    return "".join(
        textwrap.fill(
            line, 110, initial_indent=" " * 8, subsequent_indent=" " * 12, break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
        for line in lines
    )  # fmt: skip


def rendered(text: str, name: Callable[[str], str]) -> str:
    """Return a text of an `Option`, in which `name` formats the names of other options."""
    parts = Formatter().parse(text)
    return "".join(plain + ("" if field is None else name(field)) for plain, field, _, _ in parts)
