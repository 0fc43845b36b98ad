"""Turn a request into a job: open the operands, check everything, and plan the run. Nothing is written.

On cuda, the plan also says which operands the device decodes, whether the device compresses C, and whether
the device finds the means and scales of a transform in one pass, with the product. That is possible if one
tile is the whole triangle of a Gram matrix: each panel is then uploaded once, with all rows of X. Otherwise a
pass over X before the product finds the means and scales (`oocgemm.jobs.stats`).

`budgets_of` chooses the budgets of the device and the host. The caller passes both budgets, or one bound on
all host memory, which is divided between them where the host computes. By default, a budget is a share of the
free memory.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from typing import Any, NamedTuple

from oocgemm import backends, stores
from oocgemm.backends import Backend
from oocgemm.backends.base import NOTHING, Finishing, numpy_dtype
from oocgemm.errors import BudgetError, InputError, NotFoundError, OutOfMemoryError, warn_of_data
from oocgemm.jobs.journal import read
from oocgemm.jobs.operands import open_operands, tile_of
from oocgemm.jobs.option_groups import Size
from oocgemm.jobs.request import Destination, PlaceKind, Request, requests_of, unknown_devices
from oocgemm.jobs.resume import (
    Earlier,
    check_complete,
    check_same,
    check_uplo,
    find_earlier,
    find_lost,
    identify,
)
from oocgemm.jobs.stats import Sweep, correction, cosine_scales, epilogue_numbers, factors, swept
from oocgemm.jobs.steps import digest_of, open_further
from oocgemm.jobs.transforming import as_read, check_constant, expanded, memory_of, readable
from oocgemm.machine.info import models, stored_on, take_probe
from oocgemm.planning import (
    Budgets,
    Coding,
    GemmProblem,
    Layout,
    Layouts,
    MachineModel,
    Plan,
    Setting,
    TileGrid,
    TileShape,
    divided,
    division_of,
    make_plan,
    resumed_plan,
    shared_plan,
    usable,
    with_decoding,
    with_encoding,
    within,
)
from oocgemm.planning.cost.machine import default_model
from oocgemm.planning.device_memory import measure_room, vector_bytes
from oocgemm.planning.elements import IN_PANEL
from oocgemm.planning.problem import Operand
from oocgemm.planning.setting import GRAM_STRIPS
from oocgemm.planning.tiling import ceil_div
from oocgemm.planning.units import format_size, parse_size
from oocgemm.stores import Array, Coded, Matrix
from oocgemm.stores.capabilities import raw_bytes
from oocgemm.stores.declared import check_unpacked, place_of
from oocgemm.stores.transformed import chain_of
from oocgemm.system.resources import RECENT, available_for, available_memory
from oocgemm.values import dataclass


def budgets_of(
    backend: str,
    free: Callable[[], int] | None,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    available: int | None = None,
) -> Budgets:
    """Return the budgets in bytes. A budget that is None becomes a share of the free memory.

    On cuda, they are 90% of the free device memory, and half of the available RAM. On the host backend, they
    are 37.5% and 12.5% of the available RAM. `free` returns the free device memory or, on the host backend,
    the available RAM. If it is None, the device budget must be given, else `InputError` is raised.
    `available` is the available RAM; None to query it.
    """
    on_host = backend == "host"
    if device_memory is not None:
        device = parse_size(device_memory)
    elif free is None:
        raise InputError(
            "planning for cuda does not query the device's memory: pass how much of it to use, such as "
            "device_memory='16GiB' (--device-memory 16GiB)"
        )
    else:
        device = _steady(free() * 3 // 8 if on_host else free() * 9 // 10)
    if host_memory is not None:
        return Budgets(device, parse_size(host_memory))
    available = available_memory(RECENT) if available is None else available
    return Budgets(device, _steady(available // (8 if on_host else 2)))


# The latest default budgets in bytes, of devices and of hosts, the latest first. Runs on several devices may
# take turns.
_latest: deque[int] = deque(maxlen=16)


def _steady(size: int) -> int:
    """Return one of the latest default budgets that is at most 4% smaller than `size`, and not larger.

    If there is none, return `size` rounded down to 6 significant bits. Free memory differs a little from call
    to call. With equal budgets, later calls find their plans in the cache.
    """
    for latest in tuple(_latest):  # several threads may call this
        if 0.96 * size <= latest <= size:
            return latest
    excess = max(0, size.bit_length() - 6)
    rounded = size >> excess << excess
    _latest.appendleft(rounded)
    return rounded


def within_budgets(
    request: Request,
    backend: str,
    free: Callable[[], int] | None,
    plan: Callable[[Budgets, float], Plan],
    devices: int = 1,
) -> Plan:
    """Return the result of `plan`, called with the budgets of a request or with their defaults.

    `plan` also takes the share of the usual effort of the search. `free` is as for `budgets_of`; with several
    devices, it returns how much each of them may allocate. Raises `InputError` if budgets exclude each other
    or are missing, and `BudgetError` if they are too small.
    """
    if backend == "host" and request.budgets.memory is not None:
        if request.budgets.device_memory is not None:
            raise InputError(
                "memory bounds both budgets of the host backend together: drop device_memory, or drop memory "
                "and pass both budgets"
            )
        sizes = {"memory": parse_size(request.budgets.memory)}
    else:
        given = request.budgets.device_memory, request.budgets.all_host_memory
        budgets = budgets_of(backend, free, *given)
        memory = 0 if request.budgets.memory is None else budgets.host
        sizes = replace(budgets, memory=memory).by_option(unified=False)
    try:
        found = within(sizes, lambda budgets: plan(budgets, 1.0), devices)
    except BudgetError as error:
        limits = {} if free is None else _available(sizes, backend, free, devices)
        raise usable(error, sizes, plan, devices, limits) from error
    if found.faster is None or free is None:
        return found
    limits, faster = _available({}, backend, free, devices), found.faster.budgets
    fits = all(size <= limits[name] for name, size in faster.by_option(unified=backend == "host").items())
    return found if fits else replace(found, faster=None)


def _available(
    sizes: Mapping[str, int], backend: str, free: Callable[[], int], devices: int
) -> dict[str, int]:
    """Return the largest value of each memory option that fits in free memory beside the given `sizes`."""
    host = available_memory(RECENT)
    if backend != "host":
        return {"device_memory": free(), "host_memory": host, "memory": host}
    return {
        "device_memory": (host - sizes.get("host_memory", 0)) // devices,
        "host_memory": host - devices * sizes.get("device_memory", 0),
        "memory": host,
    }


def check_memory(plan: Plan, request: Request) -> None:
    """Raise `OutOfMemoryError`, with budgets that fit, if a plan needs more than the available memory.

    Without this check the system might grant the memory, and kill a process when the run writes to the pages.
    """
    on_devices = plan.devices * plan.footprint.device_total
    needed = plan.footprint.host_total + (on_devices if plan.machine.unified else 0)
    free = available_for(needed)
    if needed <= free:
        return
    given = {"device": plan.budgets.device, "host": plan.budgets.host}
    # Suggest 7/8 of the available memory: other programs may allocate some before the next call.
    shares = (
        {"device": free * 3 // 4 // plan.devices, "host": free // 8}
        if plan.machine.unified
        else {"host": free * 7 // 8}
    )
    smaller = {f"{tier}_memory": share for tier, share in shares.items() if given[tier] > share}
    if request.budgets.memory is not None:
        smaller = {"memory": free * 7 // 8}
    sizes = {name: f"{max(1, share >> 20)}MiB" for name, share in smaller.items()}
    arguments = ", ".join(f"{name}='{size}'" for name, size in sizes.items())
    options = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
    raise OutOfMemoryError(
        f"the plan takes {format_size(needed)} of host memory, {format_size(free)} are available: pass "
        f"{arguments} ({options})"
    )


# The triangle and the numbers per index along k take at most this part of the device memory. Panels need the
# rest.
SHARE = 1 / 2


def codings(problem: GemmProblem, a: Matrix, b: Matrix) -> dict[str, Coding]:
    """Return how the chunks of A and B are compressed, by operand, if a GPU can decode them."""
    found = {}
    for operand, matrix in zip("AB", (a, b), strict=True):
        read = as_read(problem.a if operand == "A" else problem.b, matrix)
        coding = read.coding() if isinstance(read, Coded) else None
        if coding is not None:
            found[operand] = coding
    return found


def codec_of_c(c: Destination, existing: Matrix | None, dtype: str, compressor: str | None) -> str:
    """Return the codec in which a GPU could compress C, `existing` or new; "" if a GPU cannot."""
    if existing is not None:
        return existing.codec() if isinstance(existing, Coded) else ""
    return compressor or "" if c.has_chunks and dtype != "bfloat16" else ""


def encoding_if_possible(planned: Callable[[str], Plan], codec: str) -> Plan:
    """Return a plan in which a GPU compresses C, if there is such a plan; otherwise the host compresses C.

    `planned` makes a plan in which the GPU compresses C in a codec if that pays; with "", the host does.
    """
    if codec:
        with suppress(BudgetError):  # a plan without compression on the GPU may fit
            found = planned(codec)
            # A GPU cannot compress chunks of every shape, which may follow from the tile.
            if not found.layouts.codings.c or division_of(found.setting, found.tile) is not None:
                return found
    return planned("")


def measured(
    request: Request, problem: GemmProblem, x: Matrix, tile: TileShape | None, free: Callable[[], int] | None
) -> GemmProblem:
    """Return the problem, changed if the device will find the statistics that the steps of X need.

    `x` is op(X) if the problem is a Gram matrix, `tile` the tile that the user chose. `free` returns the free
    device memory in bytes; it is None if that is unknown.
    """
    chain = chain_of(x)
    stored = problem.b.shares and problem.sink.stores_c
    if not (stored and problem.depth and chain is not None and chain.is_measurable):
        return problem
    # An epilogue may need the norms of rows of X, which must be known before the product.
    known = problem.checked or any(step.derives for step in problem.epilogue)
    in_panels = replace(problem, a=problem.a.with_numbers_in_panels(), b=problem.b.with_numbers_in_panels())
    read_as_stored = problem.a.stored or chain.is_copy
    found = read_as_stored and not known and _decided(request, in_panels, tile, free)
    return in_panels if found else problem


def _decided(
    request: Request, problem: GemmProblem, tile: TileShape | None, free: Callable[[], int] | None
) -> bool:
    """Tell whether the device finds the numbers of the steps. `problem` is the product for that case."""
    if request.planned is not None:
        return request.planned.problem.finds_numbers
    folder = request.c.journal_folder if request.durability.resume else None
    record = read(folder) if folder is not None else None
    if record is not None:
        return IN_PANEL in record.header["identity"]["problem"]["elements_a"]
    several = request.where.devices is not None or request.where.is_distributed
    if several or (tile is not None and tile.m < problem.m):
        return False
    whole = TileShape(problem.m, problem.m, 1)
    grid = TileGrid.of(problem, whole, strip=ceil_div(problem.m, GRAM_STRIPS))
    of_k = measure_room(problem).end + vector_bytes(problem)
    budget = budgets_of("cuda", free, request.budgets.device_memory, request.budgets.all_host_memory).device
    room = SHARE * (budget - default_model("cuda", 1).device_reserve)
    return grid.elements((0, 0)) * problem.itemsizes["acc"] + of_k <= room


def as_planned(planned: Plan, problem: GemmProblem, machine: MachineModel, layouts: Layouts) -> Plan:
    """Return an earlier plan, with the present machine model and layouts.

    Raises `InputError` if the product or the layouts of its operands have changed since it was planned.
    """
    before = planned.layouts
    layouts = layouts.cached_as(before.a.page_cached, before.b.page_cached)
    now = replace(planned, machine=machine, layouts=layouts)

    def operands(found: Layouts) -> tuple[object, ...]:
        # `pinned` is not compared: the caller may have pinned or unpinned the memory since planning.
        a, b = (layout.changed(pinned=False) for layout in (found.a, found.b))
        return a, b, found.codings.a, found.codings.b

    if (problem, operands(layouts), now.chunks) != (
        *(planned.problem, operands(planned.layouts), planned.chunks),
    ):
        raise InputError(
            "A, B or C have other shapes, dtypes or chunks than at planning time: call oocgemm.plan again"
        )
    return now


@dataclass(frozen=True)
class Output:
    """What `prepare` found at C's destination.

    - `matrix`: C; None if the run creates C with `chunks` and `compressor`, or with defaults where they are
      None.
    - `earlier`: what an earlier run left at C; None if C can have no journal, as in memory.
    - `identity`: what the run computes: only a run of equal identity may resume it.
    - `noted`: further fields for the header of the journal.
    """

    matrix: Matrix | None
    chunks: tuple[int, int] | None
    compressor: str | None
    earlier: Earlier | None
    identity: dict[str, Any]
    noted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def resumed(self) -> Earlier | None:
        """The journal of the run to resume; None if the new run starts from the beginning."""
        return self.earlier if self.earlier is not None and self.earlier.resumed else None


class Operands(NamedTuple):
    """A and B, and the further matrix that the epilogue reads, if there is one."""

    a: Matrix
    b: Matrix
    d: Matrix | None


@dataclass(frozen=True)
class PreparedRun:
    """A request that is ready to run, with its open operands, its checked output and its plan.

    `d` is the further matrix that the epilogue reads. `finishing` has the correction of a product whose
    operands are centered, the scales of rows and columns of C, and the numbers of the epilogue.
    """

    request: Request
    a: Matrix
    b: Matrix
    output: Output
    plan: Plan
    d: Matrix | None = None
    finishing: Finishing = NOTHING

    @property
    def merges_rows(self) -> bool:
        """Whether several devices or processes find elements of the same rows of C, which are merged."""
        several = self.plan.devices > 1 or self.request.where.is_distributed
        return several and self.plan.problem.sink.per_row > 0 and not self.plan.problem.keeps_rows

    @property
    def has_numbers(self) -> bool:
        """Whether the run uses numbers that were computed from the elements of the operands."""
        return bool(self.request.epilogue) or any(x is not None for x in self.finishing[:2])

    @property
    def factor(self) -> Array | None:
        """Q of a chained product, or the V by which C is multiplied, in the accumulator's dtype; or None."""
        found = self.request.into.factor
        return None if found is None else found.astype(numpy_dtype(self.plan.problem.acc_dtype), copy=False)

    @property
    def read(self) -> dict[str, Matrix]:
        """The matrices that are read, by operand: as stored if the device transforms their elements."""
        problem = self.plan.problem
        found = {"A": as_read(problem.a, self.a), "B": as_read(problem.b, self.b)}
        return found if self.d is None else found | {"D": self.d}


def prepare(
    request: Request, engine: Backend | None, *, running: bool, earlier: Earlier | None = None
) -> PreparedRun:
    """Open and check everything, plan, and return a run that is ready to start. Nothing is written.

    - `engine`: the backend that the job runs on; None to plan for cuda without a device.
    - `running`: whether the job will run. If not, C may exist, and journals are ignored.
    - `earlier`: the run of which the job computes a part, if another process coordinates it. Tiles outside of
      the part are among the finished tiles of that run.

    Raises `InputError` if operands, destination or options cannot be used, and `BudgetError`.
    """
    a, b, problem = open_operands(request, "cuda" if engine is None else engine.name)
    d = open_further(problem, request.epilogue, decode=request.decode)
    problem = expanded(problem, a, b, "cuda" if engine is None else engine.name)
    tile, scales = tile_of(request.tile, problem), None
    if engine is None or engine.name == "cuda":
        problem = measured(request, problem, a, tile, None if engine is None else engine.free_memory)
    if engine is not None and running:
        if earlier is None:
            check_complete(*(x for x in (a, b, d) if x is not None))
            _warn_of_triangles(*{id(x): x for x in (a, b)}.values())
            request.c.check_place(partial(_bytes_of_c, request, problem))
        if problem.depth and not problem.finds_numbers:  # otherwise nothing is read before the run
            memory, sweep, same = memory_of(request), sweep_of(request, engine), b is a
            a = readable(a, memory, sweep)
            b = a if same else readable(b, memory, sweep)
        if request.a.standardize == "scale" and 0 not in a.shape and earlier is None:
            check_constant(a, int(problem.trans_a.swaps), request.a.constant)
            if b is not a:
                check_constant(b, int(not problem.trans_b.swaps), request.b.constant)
        if request.into.cosine:
            if request.a.standardize:
                scales = factors(a)
            else:
                a, scales = cosine_scales(problem, a, memory_of(request))
                problem = expanded(problem, a, a, engine.name) if problem.a.stored else problem
            b = a  # rows of E are compared with each other
        read = Operands(a, b, d)
        if earlier is None:
            output = _find_output(request, problem, read, tile, engine)
        else:
            output = _output_of_part(request, problem, read, engine, earlier)
    else:
        matrix = _existing(request.c, problem, None, overwrite=True)
        output = Output(matrix, request.chunks, request.compressor, None, {})
    _check_output(request.c, output, *(x for x in (a, b, d) if x is not None))
    plan = _plan(request, problem, Operands(a, b, d), output, tile, engine)
    if running and engine is not None and earlier is None and take_probe(engine, plan):
        plan = _plan(request, problem, Operands(a, b, d), output, tile, engine)
    if running and output.matrix is None and output.resumed is None:
        chosen = plan.chunks if request.chunks else None
        request.c.warn_of_new(problem.stored_shape, problem.itemsizes["C"], chosen)
    # Samples are checked even if no tile is left to compute.
    if not running or not (plan.steps or problem.checks_sums):
        return PreparedRun(request, a, b, output, plan, d)
    memory = memory_of(request)
    sweep = None if engine is None else sweep_of(request, engine)
    numbers = epilogue_numbers(problem, request.epilogue, a, b, memory, sweep)
    finishing = Finishing(correction(problem, a, b, memory), scales, numbers)
    return PreparedRun(request, a, b, output, plan, d, finishing)


def _output_of_part(
    request: Request, problem: GemmProblem, read: Operands, engine: Backend, earlier: Earlier
) -> Output:
    """Return the `Output` of a process that computes a part of C for another one. Open C if it is stored.

    Raises `InputError` if the operands, C or the arithmetic differ from those in the header of its journal.
    """
    c = None
    if request.into.stores_c:
        c = stores.open_matrix("C", request.c.source, writable=True, folder=earlier.folder)
    identity = _identity(request, problem, read, c, engine)
    check_same(earlier, identity, c, None, None, None, trust_operands=request.durability.trust_operands)
    return Output(c, None, None, earlier, identity)


def _identity(
    request: Request, problem: GemmProblem, read: Operands, c: Matrix | None, engine: Backend
) -> dict[str, Any]:
    arithmetic = {"backend": engine.name, "kernel": engine.arithmetic(problem, request.where.kernel)}
    return identify(problem, read.a, read.b, c, arithmetic, read.d, digest_of(request.epilogue))


def sweep_of(request: Request, engine: Backend) -> Sweep | None:
    """Return a function that makes a pass over an operand on the device; None if the host makes passes."""
    if engine.name != "cuda":
        return None
    given = request.budgets.device_memory, request.budgets.all_host_memory
    return partial(swept, engine, budgets_of(engine.name, engine.free_memory, *given))


def _warn_of_triangles(*operands: Matrix) -> None:
    """Warn of each operand that is marked as a result of `gram` with only one triangle."""
    for x in operands:
        if (uplo := x.describe().get("uplo")) in ("lower", "upper"):
            warn_of_data(
                f"{place_of(x)} stores only its {uplo} triangle, and is multiplied as it is stored: to "
                "multiply all of it, compute it with uplo='full' (--uplo full)"
            )


def _bytes_of_c(request: Request, problem: GemmProblem) -> int:
    """Return the minimum number of bytes that a new C takes on its disk."""
    if request.compressor not in (None, "none"):
        return 0
    m, n, itemsize = problem.m, problem.n, problem.itemsizes["C"]
    if problem.cover.stored_triangle:
        return m * (m + 1) // 2 * itemsize
    if request.chunks is None:
        return m * n * itemsize
    rows, cols = request.c.layout(problem, request.chunks, request.compressor).writing.chunk
    return raw_bytes((m, n), (min(rows, m), min(cols, n)), itemsize)


def _find_output(
    request: Request, problem: GemmProblem, read: Operands, tile: TileShape | None, engine: Backend
) -> Output:
    """Return the `Output` of a run: C, opened if it exists, and the journal of an earlier run there.

    Raises `InputError` if C may not be written, or if the run to resume computes something else.
    """
    c, chunks, compressor = request.c, request.chunks, request.compressor
    earlier = find_earlier(
        c, resume=request.durability.resume, overwrite=request.durability.overwrite, reads_c=problem.updates_c
    )
    existing = _existing(c, problem, earlier, overwrite=request.durability.overwrite)
    if existing is not None and request.decode:
        check_unpacked(existing)
    resumed = earlier if earlier is not None and earlier.resumed else None
    identity: dict[str, Any] = {}
    if earlier is not None or request.where.is_distributed:
        identity = _identity(request, problem, read, existing, engine)
    if resumed is not None:
        trust = request.durability.trust_operands
        check_same(resumed, identity, existing, tile, chunks, compressor, trust_operands=trust)
        if existing is not None and not resumed.complete:
            earlier = resumed = find_lost(resumed, existing, problem)
        chunks, compressor = (None, None) if existing is not None else _as_begun(c, resumed)
    elif existing is not None and problem.updates_c:
        check_complete(existing)
        check_uplo(existing, problem)
    return Output(existing, chunks, compressor, earlier, identity)


def _existing(
    c: Destination, problem: GemmProblem, earlier: Earlier | None, *, overwrite: bool
) -> Matrix | None:
    """Open C; return None if it must be created. Raises `InputError` if C cannot store the product."""
    if earlier is not None and earlier.recreates:
        c.check_new(problem)
        return None
    resumed = earlier is not None and earlier.resumed
    if not resumed and not c.exists():
        if problem.updates_c and c.kind is PlaceKind.NEW:
            raise InputError(f"beta = {problem.beta} needs an existing C, and none is given: pass it as c")
        if problem.updates_c:
            raise NotFoundError(
                f"beta = {problem.beta} needs an existing C, and there is nothing at {c.path}: pass the path "
                "of the old C, or drop beta"
            )
        c.check_new(problem)
        return None
    folder = earlier.folder if earlier is not None and resumed else None
    matrix = stores.open_matrix("C", c.source, writable=True, folder=folder)
    wanted = problem.stored_shape, numpy_dtype(problem.c_dtype)
    if (matrix.shape, matrix.dtype) != wanted:
        raise InputError(
            f"C exists with shape {matrix.shape} and dtype {matrix.dtype}, the product has shape {wanted[0]} "
            f"and dtype {wanted[1]}: give another path or array"
        )
    if c.path and not overwrite and not problem.updates_c and not resumed:
        raise InputError(
            f"C exists at {c.path}: pass overwrite=True (--overwrite) to replace its contents, or give "
            "another path"
        )
    return matrix


def _as_begun(c: Destination, earlier: Earlier) -> tuple[tuple[int, int] | None, str | None]:
    """Return the earlier run's chunks and compressor, for a C that must be created again."""
    if c.kind is PlaceKind.LOCAL and not c.has_chunks:
        return None, None
    rows, cols = map(int, earlier.header["given"]["chunks"].split("x"))
    return (rows, cols), earlier.header["given"]["compressor"]


def _check_output(c: Destination, output: Output, *operands: Matrix) -> None:
    """Raise `InputError` if C overlaps an operand, or if C exists and chunks or a compressor are given."""
    for operand in operands:
        if output.matrix is None:
            c.check_apart(operand)
        elif stores.same_place(output.matrix, operand):
            raise InputError(
                f"C is the same array as {operand.name} or overlaps it, and would be overwritten while it is "
                "read: give another path or array for C"
            )
    if output.compressor is not None:
        stores.check_compressor(output.compressor)
    if output.matrix is not None and (output.chunks or output.compressor):
        raise InputError("C exists: drop --chunks and --compressor, which are for a new array")


def _plan(
    request: Request,
    problem: GemmProblem,
    read: Operands,
    output: Output,
    tile: TileShape | None,
    engine: Backend | None,
) -> Plan:
    """Return the plan of the earlier run, or that in the request, or else a new plan within the budgets."""
    (a, b, d), existing, c = read, output.matrix, request.c
    backend, devices = "cuda" if engine is None else engine.name, _count(request, engine)
    device = None if engine is None else backends.identity(engine)
    loaded = a, b, existing if problem.updates_c else d
    writes = c.file_systems() if existing is None else stored_on(existing)
    machine = divided(models(backend, device, stored_on(*loaded), writes).best, _sessions(request, engine))
    # With checksums, panels and strips pass through slots, where they are summed.
    in_place = machine.unified and not problem.checked
    pairs = (problem.a, a), (problem.b, b)
    of_a, of_b = (_operand_layout(*pair, engine, in_place=in_place) for pair in pairs)
    if existing is None:
        of_c, pinned = c.layout(problem, output.chunks, output.compressor), False
    else:
        of_c, pinned = existing.layout, _is_pinned(existing, engine)
    created = existing is None if output.resumed is None else output.resumed.header["created"]
    # The other triangle of a Gram matrix is written in place, after the one that is computed.
    mirrored = problem.cover.mirrored and problem.halves_diagonal
    in_c = of_c.in_place and in_place and request.into.in_place and (mirrored or not problem.b.shares)
    of_c = of_c.changed(
        writing=replace(of_c.writing, existing=not created),
        in_place=in_c and not problem.finishes,
        # Strips that are transposed pass through the ring. So do strips of C if
        # strips of D are loaded.
        pinned=pinned and not (problem.cover.mirrored or problem.sink.merges),
    )
    layouts = Layouts(of_a.oriented(problem.trans_a), of_b.oriented(problem.trans_b), of_c)

    found = codings(problem, a, b) if backend == "cuda" else {}
    codec = codec_of_c(c, existing, problem.c_dtype, output.compressor) if backend == "cuda" else ""

    def tuned(budgets: Budgets, codec: str) -> Layouts:
        asked = layouts.with_requests(requests_of(request.requests), budgets.host, reads_c=problem.reads_c)
        coded = with_encoding(Setting(problem, machine, asked, budgets, devices), codec)
        return with_decoding(Setting(problem, machine, coded, budgets, devices), found)

    def planned(budgets: Budgets, effort: float, codec: str) -> Plan:
        to, given = tuned(budgets, codec), (problem, budgets, machine)
        if output.resumed is not None:
            earlier = output.resumed
            return resumed_plan(*given, to, earlier.candidate, earlier.done, devices)
        if devices == 1:
            return make_plan(*given, to, tile, effort)
        return shared_plan(*given, to, tile, devices)

    def plan(budgets: Budgets, effort: float = 1.0) -> Plan:
        return encoding_if_possible(partial(planned, budgets, effort), codec)

    if request.planned is None:
        free = None if engine is None else engine.free_memory
        return within_budgets(request, backend, free, plan, devices)
    if output.resumed is not None:
        return plan(request.planned.budgets)
    to = tuned(request.planned.budgets, codec if request.planned.layouts.codings.c else "")
    return as_planned(request.planned, problem, machine, to)


def _is_pinned(matrix: Matrix, engine: Backend | None) -> bool:
    if engine is None or not matrix.layout.contiguous_rows:
        return False
    return engine.is_pinned(*stores.span(matrix))


def _operand_layout(operand: Operand, matrix: Matrix, engine: Backend | None, *, in_place: bool) -> Layout:
    read = as_read(operand, matrix)
    return read.layout.changed(
        in_place=read.layout.in_place and in_place,
        pinned=_is_pinned(read, engine),
        # The numbers of a transform are in host memory, also if a device transforms the elements.
        resident_bytes=matrix.layout.resident_bytes,
    )


def _count(request: Request, engine: Backend | None) -> int:
    if isinstance(engine, backends.Devices):
        return len(engine.numbers)
    if request.where.devices == "all":
        raise unknown_devices()
    return len(request.where.devices or (0,))


def _sessions(request: Request, engine: Backend | None) -> int:
    """Return how many sessions of a run share one GPU: more than 1 if a device is given several times."""
    numbers = engine.numbers if isinstance(engine, backends.Devices) else request.where.devices
    return max(Counter(numbers).values()) if isinstance(numbers, tuple) else 1
