"""Options that several commands share."""

from typing import Any

import click

from oocgemm import backends, stores
from oocgemm.cli.basics import JSON
from oocgemm.cli.parameters import Changes, Chunks, Scalar
from oocgemm.planning import COMPUTES
from oocgemm.planning.problem import GRAMS

DEVICE = click.option(
    "--device",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of the CUDA device.",
)
DEVICES = click.option(
    "--devices",
    metavar="all|N,N,..",
    help="Use several CUDA devices of one kind: all of them, or those with these numbers, such as 0,1. "
    "--device-memory is then for each device, --host-memory for all together.",
)
_SCALARS = (
    click.option(
        "--alpha",
        type=Scalar(),
        default=1.0,
        help="Factor of op(A) op(B), such as 0.5 or 1+2j.  [default: 1]",
    ),
    click.option(
        "--beta",
        type=Scalar(),
        default=0.0,
        help="Factor of the old C. If it is not 0, C must exist.  [default: 0]",
    ),
)
_TRANSPOSES = (
    click.option("--transpose-a", is_flag=True, help="Use the transpose of A."),
    click.option("--transpose-b", is_flag=True, help="Use the transpose of B."),
    click.option("--adjoint-a", is_flag=True, help="Use the conjugate transpose of A."),
    click.option("--adjoint-b", is_flag=True, help="Use the conjugate transpose of B."),
)
_COMPUTE = (
    click.option(
        "--compute",
        type=click.Choice(list(COMPUTES)),
        default="native",
        show_default=True,
        help="native: the precision of the operands. tf32, bf16: float32 operands on cuda, which may be "
        "rounded to that precision. emulated: float64 or float32 operands, computed from exact int8 "
        "products, as accurate as native.",
    ),
)
_TRANSFORM = (
    "Transform the elements of {} on load, by values separated by commas: missing=CODE, "
    "impute=mean|0|FILE|raise, log1p, center=k|FILE, scale=k|hwe|FILE, cast=DTYPE. Means and scales are per "
    "index along k; FILE is a .npy file with one number for each. Such as missing=-1,center=k,scale=k,"
    "cast=float16."
)
TRANSFORM = click.option("--transform", type=Changes(), metavar="CHANGES", help=_TRANSFORM.format("X"))
TRANSFORMS = (
    click.option("--transform-a", type=Changes(), metavar="CHANGES", help=_TRANSFORM.format("A")),
    click.option("--transform-b", type=Changes(), metavar="CHANGES", help="The same for B."),
)
NO_DECODE = click.option(
    "--no-decode",
    "decode",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Take the numbers of operands as they are stored, whatever their attributes declare: that they are "
    "packed (scale_factor), or stand for missing elements (_FillValue). So for -1 in a .bed file.",
)
PRODUCT = (*_SCALARS, *_TRANSPOSES, *_COMPUTE, NO_DECODE)
_KERNEL = click.option(
    "--kernel",
    type=click.Choice(list(dict.fromkeys(k for kernels in backends.KERNELS.values() for k in kernels))),
    default="auto",
    show_default=True,
    help="blas on the host backend; cublas or a kernel of this package on cuda. auto uses the fastest "
    "kernel that `oocgemm tune` has measured, or cublas if it has measured none.",
)
_ARITHMETIC = (
    _KERNEL,
    click.option(
        "--out-dtype",
        metavar="DTYPE",
        help="dtype of C, such as float32. float16 and bfloat16 operands also allow float32; int8 operands "
        "allow int32, int64, float32 and float64.  [default: dtype of the operands; int32 for int8]",
    ),
)
_BUDGETS = (
    click.option(
        "--memory",
        metavar="SIZE",
        help="Upper bound on host memory, such as 4GiB, in place of --host-memory. With the host backend it "
        "also replaces --device-memory: 3/4 are for blocks of A, B and C, the rest is for reading and "
        "writing.",
    ),
    click.option(
        "--device-memory",
        metavar="SIZE",
        help="Upper bound on device memory, such as 2GiB. With the host backend: upper bound on RAM for "
        "blocks of A, B and C.  [default: 90% of free device memory; host backend: 37.5% of available RAM]",
    ),
    click.option(
        "--host-memory",
        metavar="SIZE",
        help="Upper bound on host memory for buffers between storage and device, such as 8GiB. With the host "
        "backend: upper bound on RAM for reading and writing.  [default: 50% of available RAM; host backend: "
        "12.5%]",
    ),
)
_TILE = click.option(
    "--tile",
    metavar="MxNxK",
    help="Compute C in tiles of M x N elements, and multiply blocks of K columns of op(A) and K rows of "
    "op(B) at a time, such as 4096x4096x512.  [default: chosen by the planner]",
)
_STORAGE = (
    _TILE,
    click.option(
        "--chunks",
        type=Chunks(),
        metavar="RxC",
        help="Rows and columns per chunk of a new zarr array, such as 1024x1024.  [default: chunks of about "
        "8 MiB]",
    ),
    click.option(
        "--compressor",
        type=click.Choice(stores.COMPRESSORS),
        help="Compressor of a new zarr array, such as zstd.  [default: none]",
    ),
)
_BACKEND = click.option(
    "--backend",
    type=click.Choice(backends.NAMES),
    default="auto",
    show_default=True,
    help="auto uses cuda if a device is available, else host.",
)
_REQUESTS = click.option(
    "--requests",
    metavar="N|A=N,B=N",
    help="Requests in flight to each array in an object store, such as 128, or A=128,B=16.  [default: 64]",
)
_SETTING = (_BACKEND, *_ARITHMETIC, *_BUDGETS, *_STORAGE, _REQUESTS, JSON)
PROBLEM = (*PRODUCT, *_SETTING)
# Options of a Gram matrix, which has no transposes.
GRAM = (*_SCALARS, *_COMPUTE, NO_DECODE, *_SETTING)
TIMELINE = click.option(
    "--timeline",
    type=click.Path(dir_okay=False),
    help="Log every operation to this file, such as run.jsonl, for `oocgemm report`.",
)
QUIET = click.option("--quiet", is_flag=True, help="Print only errors and warnings about the data.")
VERIFY = click.option(
    "--verify",
    is_flag=True,
    help="Compare each tile of the product with checksums of the operands before it is used or written, and "
    "compute it again if they differ. Of a result that is not the product itself, check samples too.",
)
# Options of products of which only some elements are kept.
SELECTION = (
    *(_BACKEND, _KERNEL, *_COMPUTE, NO_DECODE, *_BUDGETS, _TILE, _REQUESTS),
    *(JSON, VERIFY, DEVICE, TIMELINE, QUIET),
)
PCA = (_BACKEND, _KERNEL, NO_DECODE, *_BUDGETS, _REQUESTS, JSON, VERIFY, DEVICE, QUIET)
AXIS = click.option(
    "--axis",
    type=click.IntRange(0, 1),
    default=0,
    show_default=True,
    help="Axis of X that survives. 0: inner products of the rows, X X^T. 1: of the columns, X^T X.",
)
UPLO = click.option(
    "--uplo",
    type=click.Choice(GRAMS),
    help="Triangle of C to store, with the diagonal: lower or upper. full stores both, which are exact "
    "mirror images.  [default: full; lower in a .grm.bin file; with --resume, that of the run]",
)
OVERWRITE = click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the contents of an existing C, which must have the same shape and dtype.",
)
_RESUME = (
    click.option(
        "--resume",
        is_flag=True,
        help="Continue an unfinished run of the same command. Finished tiles are kept; budgets may differ.",
    ),
    click.option(
        "--trust-operands",
        is_flag=True,
        help="With --resume: continue even if files of operands have changed, for example after a repair. "
        "Finished tiles are not computed again.",
    ),
)
RUN = (TIMELINE, *_RESUME, QUIET)
# Options of correlations and covariances, which have neither scalars nor transforms.
STATISTICS = (*SELECTION[:-4], *_STORAGE[1:], DEVICE, VERIFY, OVERWRITE, *RUN)
# Options of a job. The service chooses the backend, and it always resumes.
JOB = (
    *PRODUCT,
    *_ARITHMETIC,
    click.option(
        "--memory",
        metavar="SIZE",
        help="Upper bound on host memory, such as 4GiB, in place of --host-memory. If the service computes "
        "on the CPU, it also replaces --device-memory.",
    ),
    click.option(
        "--device-memory",
        metavar="SIZE",
        help="Upper bound on device memory, such as 2GiB. If the service computes on the CPU: upper bound on "
        "RAM for blocks of A, B and C.  [default: chosen by the service]",
    ),
    click.option(
        "--host-memory",
        metavar="SIZE",
        help="Upper bound on host memory for buffers between storage and device, such as 8GiB.  [default: "
        "chosen by the service]",
    ),
    *_STORAGE,
    VERIFY,
    OVERWRITE,
    click.option(
        "--trust-operands",
        is_flag=True,
        help="Continue an unfinished C even if files of A or B have changed, for example after a repair.",
    ),
)

WORKERS = (
    click.option(
        "--workers",
        metavar="N",
        type=click.IntRange(min=1),
        help="Compute with N processes on this machine, such as 4. They share the memory budgets.",
    ),
    click.option(
        "--scheduler",
        metavar="ADDRESS",
        help="Compute with the workers of the dask scheduler at this address, such as tcp://10.0.0.5:8786.",
    ),
    click.option(
        "--scheduler-file",
        metavar="FILE",
        type=click.Path(),
        help="Compute with the workers of the dask scheduler that wrote this file.",
    ),
)


def transposes(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the flags --transpose-a, --adjoint-a and those of b by the options trans_a and trans_b.

    Raises `click.UsageError` if one operand has both flags, transpose and adjoint.
    """
    for side in "ab":
        transpose, adjoint = options.pop(f"transpose_{side}"), options.pop(f"adjoint_{side}")
        if transpose and adjoint:
            raise click.UsageError(
                f"--transpose-{side} and --adjoint-{side} exclude each other: drop one of them"
            )
        options[f"trans_{side}"] = "C" if adjoint else "T" if transpose else "N"
    return options
