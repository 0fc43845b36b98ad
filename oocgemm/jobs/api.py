"""The functions of the library: matmul, gemm and plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar, Unpack

from oocgemm import backends
from oocgemm.engine.short import is_brief
from oocgemm.errors import InputError
from oocgemm.jobs.imputing import check_known, how_to_replace
from oocgemm.jobs.options import (
    GramOptions,
    GramPlanOptions,
    Operand,
    Options,
    Output,
    PlanOptions,
    Progress,
)
from oocgemm.jobs.plan import Plan
from oocgemm.jobs.prepare import prepare
from oocgemm.jobs.repeat import find
from oocgemm.jobs.request import (
    GRAM_OPTIONS,
    GRAM_PLAN_OPTIONS,
    PLAN_OPTIONS,
    RUN_OPTIONS,
    Request,
    check_names,
    parse,
    parse_gram,
)
from oocgemm.jobs.result import Result
from oocgemm.jobs.run import PreparedJob, run_again
from oocgemm.jobs.transforms import memory_of
from oocgemm.kernels.registry import check_plan
from oocgemm.system.threads import Cancel, shielded, shielded_here

T = TypeVar("T")


def matmul(a: Operand, b: Operand, /, *, out: Output = None, **options: Unpack[Options]) -> Any:
    """Return ``a @ b`` for matrices of any size, as `numpy.matmul` does.

    Args:
        a: m x k, an operand as for `gemm`.
        b: k x n, of a's dtype.
        out: where the product is stored: an array of the product's shape and dtype, which is overwritten, or
            a path at which nothing exists. By default a new ndarray.
        options: as for `gemm`.

    Returns:
        The array that holds the product: `out`, or the array at that path opened for reading, or a new
            ndarray.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.matmul([[1.0, 2.0]], [[3.0], [4.0]], backend="host")
    array([[11.]])
    """
    check_names("matmul", options, PLAN_OPTIONS | RUN_OPTIONS)
    return run_request(parse(a, b, out, options)).out


def gemm(
    a: Operand | None = None,
    b: Operand | None = None,
    c: Output = None,
    *,
    plan: Plan | None = None,
    **options: Unpack[Options],
) -> Result:
    """Compute ``C = alpha op(A) @ op(B) + beta C`` in bounded memory.

    Args:
        a, b: two-dimensional operands of one dtype: float16, float32, float64, complex64, complex128, int8,
            or ml_dtypes' bfloat16. Each is a path or URL of a zarr array, the path of a .npy file, the
            address of an HDF5 dataset (``file.h5::/name``), the path of a PLINK .bed file, an ndarray, a
            memory map, a zarr array, or a lazy array (dask, h5py, xarray, tensorstore, or any object with
            shape, dtype and slicing), which is read chunk by chunk. op(A) is m x k, op(B) is k x n.
        c: where C is stored, and read from if beta != 0: an m x n array, a path or a URL. If nothing exists
            at the path, C is created there: as a .npy file if the path ends in .npy, else as a zarr array. By
            default a new ndarray.
        plan: a plan from `oocgemm.plan` to run. It contains the operands and the options from `alpha` to
            `devices`. Pass with it only options that are listed below from `device` on.
        alpha, beta: scalars, 1 and 0 by default. They must be real for real operands. For an integer C they
            must be integers of magnitude below 2^53. With beta = 0, C is never read; with alpha = 0, A and B
            are never read.
        trans_a, trans_b: "N" or False (default), "T" or True for the transpose, "C" for the conjugate
            transpose.
        transform_a, transform_b: a `Transform` of the elements of A or of B on load: missing codes, means,
            scales, casts. The operand may then also be int32 or int64. If it is cast to float16 or bfloat16,
            `out_dtype` is float32 by default.
        epilogue: steps that change each element of C before it is stored, in their order: `Scale`,
            `RankOne`, `Add`, `Divide`, `Correlation`, `Gaussian`, `Cast`. None by default. (`reduce`
            computes sums, largest elements and more from C without storing it.)
        backend: "cuda", "host", or "auto" (default): cuda if a device is available.
        kernel: on cuda "cublas" or a kernel of `oocgemm.kernels.registry`, on the host "blas". "auto"
            (default) is the fastest kernel that `oocgemm tune` has measured, or cuBLAS where it has measured
            none.
        compute: "native" (default) computes in the operands' precision, or a wider one. "tf32" and "bf16",
            for float32 operands on cuda, may round operands to 11 or 8 significant bits and sum in float32.
            "emulated", for float64 and float32 operands, computes from exact products of int8 matrices, and
            is as accurate as native.
        out_dtype: dtype of C. float16 and bfloat16 operands give their own dtype (default) or float32; int8
            operands give int32 (default), int64, float32 or float64. Other operands give their own dtype.
        memory: upper bound on host memory, in bytes or as "4GiB". On cuda it is another name of
            `host_memory`. On the host backend it replaces `device_memory` too: three quarters are for blocks
            of A, B and C, one quarter is for buffers for reading and writing. A share grows if the smallest
            plan requires more.
        device_memory: upper bound on device memory, 90% of the free memory by default. On the host backend it
            bounds the RAM for blocks of A, B and C, 37.5% of the available RAM by default.
        host_memory: upper bound on host memory for buffers between storage and device, half of the available
            RAM by default. On the host backend it bounds buffers for reading and writing, 12.5% of the
            available RAM by default.
        tile: "MxNxK": C is computed in tiles of M x N elements, and each step multiplies an M x K block of
            op(A) by a K x N block of op(B). By default the planner chooses these extents.
        chunks: chunk extents (rows, columns) of a new zarr array. By default, chunks have about 8 MiB, and
            their extents divide those of a tile.
        compressor: of a new zarr array: "none" (default), "zstd", "blosc-lz4", "blosc-zstd" or "gzip".
        requests: number of requests in flight to each array in an object store, 64 by default. Pass one
            number for all operands, or numbers by operand, such as {"A": 128} or "A=128,B=16". Fewer are used
            if their buffers would take more than a quarter of the host memory.
        verify: before a tile of C is written, compare it with checksums of the operands, and compute it again
            if they differ (`oocgemm.integrity.checksums.check`). If an epilogue changes C, the product is
            compared before that, and samples of C are checked after the run (`oocgemm.integrity.samples`).
        decode: respect what an operand declares about its elements (default). Packed arrays (netCDF's
            `scale_factor`, `add_offset`, `_Unsigned`) are refused. A missing element (`_FillValue`,
            `missing_value`, -1 in a .bed file) is an error, unless a transform has its code as `missing`.
            False takes the numbers as they are stored.
        devices: several CUDA devices of one kind, which compute tiles of C at the same time: their numbers,
            such as [0, 1] or "0,1", or "all". `device_memory` then bounds the memory of each device,
            `host_memory` that for all together. By default only `device` is used.
        device: number of the CUDA device, 0 by default.
        overwrite: replace the contents of an array that exists at the path `c`. The array must have C's shape
            and dtype.
        resume: continue the unfinished run that wrote to `c`, a local path. The plan of that run is used. All
            arguments except the budgets must be those of that run. If nothing exists at `c`, start a run; if
            the run is complete, do nothing.
        trust_operands: with `resume`, accept files of A or B that have changed since the run began. Finished
            tiles are not computed again.
        timeline: path of a log of every operation, for `oocgemm report`. It is written during the run.
        progress: True shows the progress on stderr, as a bar on a terminal, elsewhere as a line every ten
            seconds. A callable receives the plan, and returns a function that is called with the `Span` of
            every finished operation.
        workers: compute with this many processes on this machine. The memory budgets are divided among them.
            A, B and C must be at paths. `oocgemm.distributed` describes how such a run works.
        client: a dask.distributed `Client`: compute with all workers of its cluster. They must see A, B and C
            at the same paths as this process.
        executor: a `concurrent.futures.Executor`: compute with its workers, as with a client. `workers` is
            then the number of tasks at a time, by default that of the executor's workers.

    Returns:
        A `Result`.

    Raises:
        InputError: operands, destination or options cannot be used. Nothing was written. `NotFoundError` for
            a path at which nothing exists.
        BudgetError: a budget is too small for any plan. The message and `least` name a size that suffices.
        BackendError: a device, kernel or library is missing. `OutOfMemoryError`: the memory that the budgets
            allow is not available. Nothing was written.
        ExecutionError: the run failed, for example because a sum of int8 products overflows C. If C is at a
            local path and at least one tile is complete, C remains, with a journal to `resume` from.
            Otherwise a C that the run created is removed.
    """
    if plan is None:
        check_names("gemm", options, PLAN_OPTIONS | RUN_OPTIONS)
        return run_request(parse(a, b, c, options))
    given = [name for name, value in (("a", a), ("b", b), ("c", c)) if value is not None]
    given += [name for name in options if name in PLAN_OPTIONS]
    if given:
        raise InputError(
            f"plan already contains {', '.join(given)}: drop them here, or pass them to oocgemm.plan instead"
        )
    check_names("gemm", options, RUN_OPTIONS)
    return run_request(replace(plan.request, planned=plan, **dict[str, Any](options)))


def plan(a: Operand, b: Operand, c: Output = None, **options: Unpack[PlanOptions]) -> Plan:
    """Return the plan by which `gemm` would compute a product. No device is used, and nothing is written.

    Args:
        a, b, c: as for `gemm`. C may exist.
        options: the options of `gemm` from `alpha` to `devices`, in the order of its documentation. The cuda
            backend requires `device_memory`, since the free memory of a device is not queried.

    Returns:
        A `Plan`. Its `run` method computes the product.

    Raises:
        InputError, BudgetError: as `gemm` does.
    """
    check_names("plan", options, PLAN_OPTIONS)
    return plan_request(parse(a, b, c, options))


def gram(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    uplo: str | None = None,
    **options: Unpack[GramOptions],
) -> Result:
    """Compute ``C = alpha X X^H + beta C``, a Gram matrix, at about half the work of `gemm` (SYRK, HERK).

    C is symmetric, so that only one triangle is computed. Each block of X is loaded once where `gemm` loads
    it as a block of A and as one of B. The exact results, the files and `resume` are those of `gemm`.

    Args:
        x: a two-dimensional operand as for `gemm`.
        out: where C is stored, as `c` of `gemm`: an array, a path or a URL. By default a new ndarray. With
            beta != 0, only the triangle that `uplo` names is read, with "full" the lower one.
        axis: the axis of X that survives. 0 (default): C is n x n for an n x k X, and holds the inner
            products of the rows of X, ``X @ X.conj().T``. 1: C is k x k, and holds those of the columns,
            ``X.conj().T @ X``.
        uplo: "full" (default): both triangles of C are stored, which are exact mirror images. "lower" or
            "upper": only this triangle is stored, with the diagonal. Elements outside of it are 0 in an array
            that the run creates, and stay as they are in an existing one. `Result.uplo` and an attribute of
            a zarr array record it. The default is "lower" for a .grm.bin file, and that of the run with
            `resume`.
        options: those of `gemm`, except trans_a, trans_b, devices, workers, client and executor. alpha and
            beta must be real, also for complex X. `transform` is the `Transform` of X, in place of
            transform_a and transform_b.

    Returns:
        A `Result`.

    Raises:
        InputError, BudgetError, BackendError, ExecutionError: as `gemm` does.

    >>> import oocgemm
    >>> oocgemm.gram([[1.0, 2.0], [3.0, 4.0]], backend="host").out
    array([[ 5., 11.],
           [11., 25.]])
    """
    check_names("gram", options, GRAM_OPTIONS)
    return run_request(parse_gram(x, out, axis, uplo, options))


def plan_gram(
    x: Operand,
    out: Output = None,
    *,
    axis: int = 0,
    uplo: str | None = None,
    **options: Unpack[GramPlanOptions],
) -> Plan:
    """Return the plan by which `gram` would compute a Gram matrix, as `plan` does for `gemm`.

    Args:
        x, out, axis, uplo: as for `gram`.
        options: those of `gram` that decide what is computed, and how.

    Returns:
        A `Plan`. Its `run` method computes C.

    Raises:
        InputError, BudgetError: as `gram` does.
    """
    check_names("plan_gram", options, GRAM_PLAN_OPTIONS)
    return plan_request(parse_gram(x, out, axis, uplo, options))


def plan_request(request: Request) -> Plan:
    """Plan a request without a device."""
    name = backends.resolve(request.backend)
    if request.backend == "auto" and name == "host":
        backends.fall_back(backends.missing_for_cuda())
    backends.check_kernel(name, request.kernel)
    request = replace(request, backend=name)
    engine: backends.Backend | None = None
    if name == "host":
        given = request.devices
        engine = (
            backends.open_backend(name, request.device)
            if given is None
            else backends.open_devices(name, given)
        )
    planned = prepare(request, engine, running=False).plan
    if engine is None:
        check_plan(request.kernel, planned)
    else:
        engine.check(planned, request.kernel)
    return Plan.of(planned, request)


def run_request(request: Request) -> Result:
    """Run a request, and return its result."""
    if request.gram and (request.is_distributed or request.devices is not None):
        raise InputError(
            "a Gram matrix is computed by one device: drop workers, client, executor and devices"
        )
    _check_genotypes(request)
    if request.is_distributed:
        from oocgemm.distributed.run import run_distributed

        return _run(request, partial(run_distributed, request))
    if (recent := find(request)) is not None:
        again = partial(run_again, request, recent, perf_counter_ns())
        if (result := _run(request, again, brief=is_brief(recent.plan))) is not None:
            return result
    job = PreparedJob(request)
    return _run(request, job.run, brief=is_brief(job.plan))


def _check_genotypes(request: Request) -> None:
    """Raise `InputError` if a product would multiply the codes of missing genotypes in a .bed file."""
    if not request.decode or request.impute or request.chain is not None or request.known is not None:
        return
    names = ["X"] if request.gram else ["A", "B"]
    for name, operand, transform in zip(
        names, (request.a, request.b), (request.transform_a, request.transform_b), strict=False
    ):
        remedy = how_to_replace("" if request.gram else name)
        if request.selection is not None or request.reduction is not None:
            remedy = "store a copy in which they are replaced"
        check_known(name, operand, transform, partial(memory_of, request), remedy)


def _run(request: Request, run: Callable[[Progress | None, Cancel], T], *, brief: bool = False) -> T:
    """Call `run` with the progress callback of a request, where no signal interrupts it."""
    shield = shielded_here if brief else shielded
    with _display(request.progress) as progress:
        return shield(partial(run, progress))


def _display(progress: Progress | bool | None) -> AbstractContextManager[Progress | None]:
    """Return a context manager for a run's progress callback: the built-in display if `progress` is True."""
    if progress is True:
        from oocgemm.reports.progress import progress_display  # imports rich, which is slow

        return progress_display(True)
    return nullcontext(progress or None)
