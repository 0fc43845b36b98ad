"""The request of one call: operands, destination of C, and options, before any array is opened."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import StrEnum
from math import isqrt, nan, prod, sqrt
from typing import Any, ClassVar, Literal

from oocgemm import stores
from oocgemm.errors import InputError, warn_of_data
from oocgemm.jobs import support
from oocgemm.jobs.journal import read
from oocgemm.jobs.option_groups import (
    Devices,
    GramOptions,
    GramPlanOptions,
    Options,
    PathLike,
    PlanOptions,
    Progress,
    Requests,
    Size,
    Transpose,
)
from oocgemm.jobs.options import check_choices
from oocgemm.jobs.steps import Epilogue, steps_of
from oocgemm.planning import GemmProblem, Layout, Op, Plan, TileShape
from oocgemm.planning.cover import Band
from oocgemm.planning.partition import Slicing
from oocgemm.planning.terms import ONE, Terms
from oocgemm.planning.tiling import Range, Shape
from oocgemm.planning.units import format_size
from oocgemm.stores import Array, Matrix
from oocgemm.stores.arrays import Rule
from oocgemm.stores.base import Folder
from oocgemm.stores.transform import Transform
from oocgemm.system import cache
from oocgemm.values import dataclass

# Maximum number of requests in flight. Each request has a thread.
MAX_REQUESTS = 1024
# The user is warned if a new C has at least MANY_FILES chunks of fewer than SMALL_CHUNK bytes each.
MANY_FILES, SMALL_CHUNK = 2000, 64 << 10


class PlaceKind(StrEnum):
    """The kind of place where C is stored."""

    NEW = "new"  # an ndarray that the run allocates
    ARRAY = "array"  # an array that the caller passed
    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True)
class Destination:
    """Where C is stored: the `path` or URL, or the `array`, that the caller passed as C."""

    kind: PlaceKind
    path: str = ""
    array: Any = None

    @classmethod
    def parse(cls, given: Any) -> "Destination":
        """Return the destination for C as passed. Raises `InputError` for a string that cannot be a path."""
        given = stores.located("C", given)
        if given is None:
            return cls(PlaceKind.NEW)
        if not stores.is_path(given):
            return cls(PlaceKind.ARRAY, array=given)
        if "://" in given:
            return cls(PlaceKind.REMOTE, given)
        return cls(PlaceKind.LOCAL, given)

    @property
    def source(self) -> Any:
        """The path, URL or array; None for a new ndarray."""
        return self.path or self.array

    @property
    def has_chunks(self) -> bool:
        """Whether C has chunks in local storage, which may be compressed."""
        return self.kind is PlaceKind.LOCAL and stores.store_of(self.path).has_chunks

    @property
    def journal_folder(self) -> Folder | None:
        """The folder for the journal of a run that writes C here; None if C can have no journal."""
        return stores.sidecar(self.source)

    def exists(self) -> bool:
        """Tell whether the caller passed an array, or anything exists at the path."""
        return self.kind is PlaceKind.ARRAY or (bool(self.path) and stores.exists(self.path))

    def is_path_in_use(self) -> bool:
        """Tell whether anything exists at the path. An array that the caller passed has no path."""
        return self.kind is not PlaceKind.ARRAY and self.exists()

    def check_new(self, problem: GemmProblem) -> None:
        """Raise `InputError` if C would be created in a format that cannot store its dtype."""
        if self.path:
            stores.store_of(self.path).check_dtype("C", self.path, problem.c_dtype)

    def check_place(self, wanted: Callable[[], int]) -> None:
        """Raise `InputError` if a new local C cannot be created, or if its disk has too few free bytes.

        `wanted` returns the minimum number of bytes that C needs. An existing C is checked when it is opened.
        """
        if self.kind is PlaceKind.LOCAL and not self.exists():
            stores.check_new("C", self.path, wanted())

    def check_apart(self, operand: Matrix) -> None:
        """Raise `InputError` if a new C would be created inside an operand."""
        if self.path:
            stores.check_apart("C", self.path, operand)

    def layout(self, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None) -> Layout:
        """Return the layout of a new C in storage. If `chunks` is None, the planner chooses the chunks."""
        return stores.new_layout(self.path or None, problem, chunks, compressor)

    def warn_of_new(self, shape: Shape, itemsize: int, chunks: Shape | None) -> None:
        """Issue a `DataWarning` if creating C makes folders, or very many files because of the `chunks`."""
        if self.kind is not PlaceKind.LOCAL:
            return
        stores.warn_of_folders("C", self.path)
        if chunks is not None:
            files = prod(-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True))
            size = prod(chunks) * itemsize
            if files >= MANY_FILES and size < SMALL_CHUNK:
                side = isqrt(SMALL_CHUNK // itemsize)
                warn_of_data(
                    f"C: chunks of {chunks[0]} x {chunks[1]} make {files} files of {format_size(size)}, "
                    f"which are slow to write and to read: pass larger chunks, such as {side}x{side}, or "
                    "drop chunks (--chunks)"
                )

    def file_systems(self) -> set[str]:
        """Return a set with the id of the file system of a new C; empty for memory and object stores.

        For a URL of zarr, the id is "elsewhere". Object stores have rates of their own.
        """
        if not self.path:
            return set()
        if self.kind is PlaceKind.REMOTE:
            return set() if stores.store_of(self.path).has_own_rates else {"elsewhere"}
        return {cache.file_system(self.path)}

    def is_same_path(self, path: str) -> bool:
        """Tell whether a local path is the path of C, after symbolic links are resolved."""
        return bool(self.path) and os.path.realpath(path) == os.path.realpath(self.path)

    def __str__(self) -> str:
        return self.path or "memory"


class Into:
    """What a run does with C. The values in this class are those for a C that is stored as it is.

    - `feature`: the feature that it uses and not every executor has (`support.HOLES`); "" for none.
    - `stores_c`: whether C is stored. If not, the result that is made from C is kept in memory.
    - `sliced`: whether C may be a sum of products over slices of k.
    - `sampled`: whether samples of the result are checked even if checksums cover C.
    - `in_place`: whether the product may be computed in place, in the memory of C.
    - `refuses_missing`: whether missing genotypes of .bed files are errors, if nothing replaces them.
    """

    feature: ClassVar[str] = ""
    stores_c: ClassVar[bool] = True
    sliced: ClassVar[bool] = False
    sampled: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    refuses_missing: ClassVar[bool] = True

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B in error messages."""
        return "A", "B"

    @property
    def uplo(self) -> str:
        """The triangle of a Gram matrix that is stored, or "full"; "" if C is not a Gram matrix."""
        return ""

    @property
    def cosine(self) -> bool:
        """Whether rows of op(A) are divided by their norms."""
        return False

    @property
    def factor(self) -> Array | None:
        """A matrix in memory that the product needs beside A and B; None if it needs none."""
        return None

    @property
    def spills(self) -> str | None:
        """The folder in which elements are kept that do not fit in memory; None if they must fit."""
        return None

    def rule(self, problem: GemmProblem, scales: Array | None) -> Rule | None:
        """Return which elements of C, scaled by `scales`, are collected in memory; None if none are."""
        return None


@dataclass(frozen=True)
class AsIs(Into):
    """C is stored."""

    sliced: ClassVar[bool] = True


@dataclass(frozen=True)
class Between(Into):
    """C is stored. It has an element for each row (or column) of X and each row (or column) of Y."""

    @property
    def names(self) -> tuple[str, str]:
        return "X", "Y"


@dataclass(frozen=True)
class Selection(Into):
    """Which elements of a product are kept.

    - `topk`: how many of the largest elements of each row are kept; 0 if `threshold` decides.
    - `absolute`: whether magnitudes are compared with the threshold.
    - `cosine`: whether the product is that of the rows of E divided by their norms.
    - `excludes_self`: whether elements on the diagonal are left out.
    - `names`: the names of A and B in error messages.
    - `same`: whether op(B) is the transpose of op(A).
    - `band`: if it is not None, op(B) is the transpose of op(A), and only pairs in this band are kept, once
      each: right of the diagonal. The epilogue drops the other elements of its tiles.
    - `folder`: `spills`.
    """

    stores_c: ClassVar[bool] = False
    sampled: ClassVar[bool] = True
    in_place: ClassVar[bool] = False
    topk: int = 0
    threshold: float = 0.0
    absolute: bool = False
    cosine: bool = False
    excludes_self: bool = True
    names: tuple[str, str] = ("E", "E")
    same: bool = True
    band: Band | None = None
    folder: str | None = None

    @property
    def spills(self) -> str | None:
        return self.folder

    def margin(self, problem: GemmProblem) -> float:
        """Return by how much computed cosines may differ from exact ones; 0 if scores are no cosines.

        After the run, `oocgemm.jobs.verify` decides whether cosines this near to `threshold` reach it.
        """
        first = problem.epilogue[0].kind if problem.epilogue else ""
        cosine = self.cosine or first == "correlation"
        if not cosine or (self.absolute and self.threshold <= 0):  # all magnitudes reach 0
            return 0.0
        from oocgemm.integrity.rounding import OPERANDS

        wide = problem.exact or problem.acc_dtype == "float64"
        eps = 2.0**-52 if wide else 2.0**-23
        return (2 * sqrt(problem.k) + 4) * eps + 2 * OPERANDS[problem.compute]

    def least(self, problem: GemmProblem) -> float:
        """Return the smallest score that a run keeps."""
        return self.threshold - self.margin(problem)

    def rule(self, problem: GemmProblem, scales: Array | None) -> Rule | None:
        if self.topk:
            return None
        how = self.absolute, self.excludes_self, scales, problem.cover.halves, self.band is not None
        return Rule(self.least(problem), *how)


@dataclass(frozen=True, eq=False)
class Chain(Into):
    """The two products ``X^T (X Q + 1 row)`` that are computed by one read of X (`planning.problem.Updated`).

    - `columns`: the number of columns of Q.
    - `row`: the row that is added to each row of X Q. If it is longer than a row of Q, the result has further
      columns.
    - `factor`: an array as wide as `row`, whose first `columns` columns are Q. None if the products are only
      planned.
    - `resident_bytes`: host memory that the caller needs during the run.
    """

    feature: ClassVar[str] = "passes"
    stores_c: ClassVar[bool] = False
    sampled: ClassVar[bool] = True
    refuses_missing: ClassVar[bool] = False
    columns: int
    row: Array
    factor: Array | None = None
    resident_bytes: int = 0

    @property
    def names(self) -> tuple[str, str]:
        """The operand is X."""
        return "X", "X"


@dataclass(frozen=True, eq=False)
class Reduction(Into):
    """What is stored in place of C: a reduction of its rows, or its product with V.

    - `names`, `same`: as for `Selection`.
    - `kind`: one of `oocgemm.planning.sinks.REDUCTIONS`; "" for the product with V.
    - `factor`: V, in the accumulator's dtype. It has a row for each column of C.
    - `band`: if it is not None, op(B) is the transpose of op(A), and only the elements in this band are
      reduced. The epilogue sets the other elements of its tiles to 0.
    """

    stores_c: ClassVar[bool] = False
    names: tuple[str, str] = ("A", "A")
    same: bool = True
    kind: str = ""
    factor: Array | None = None
    band: Band | None = None


@dataclass(frozen=True, eq=False)
class Known:
    """X is replaced by a matrix with 1 where a genotype is known, and 0 elsewhere (`KnownMatrix`).

    `code` stands for missing genotypes; None if there are none. All elements of variants that are not `used`
    are 0.
    """

    code: float | None
    used: Array


@dataclass(frozen=True)
class Gram(Into):
    """C is the product of op(X) and its conjugate transpose. `uplo` is the stored triangle, or "full"."""

    uplo: str = "full"

    @property
    def names(self) -> tuple[str, str]:
        """The operand is X."""
        return "X", "X"


@dataclass(frozen=True)
class Missing:
    """The options `missing` and `impute`: which elements are missing, and what replaces them.

    `code` is None for the code that the operand declares, and `impute` for means.
    """

    code: float | None
    impute: float | str | None

    @classmethod
    def of(cls, code: float | None, impute: float | str | None) -> "Missing | None":
        """Return what the options say; None if neither is given. Raises `InputError` for other values."""
        if code is impute is None:
            return None
        if isinstance(impute, str) and impute not in ("mean", "raise"):
            try:
                impute = float(impute)  # of the command line
            except ValueError:
                raise InputError(f"impute = {impute!r}: pass 'mean', a number or 'raise'") from None
        found = Transform(missing=nan if code is None else code, impute="mean" if impute is None else impute)
        return cls(None if code is None else found.missing, None if impute is None else found.impute)


@dataclass(frozen=True)
class Source:
    """An operand of a call.

    - `given`: what the caller passed, with paths and URLs as text.
    - `op`: whether the matrix, its transpose or its conjugate transpose is multiplied.
    - `transform`: the transform of the elements.
    - `of_lines`: whether the transform has one center and one scale per row of op(A), not per index along k.
      So it is for X of a `Chain`.
    - `rows`: the rows of the stored matrix that are multiplied, which begin at a border of chunks; None for
      all. Only for X of a `Chain` or a `Gram`.
    - `impute`: whether missing genotypes in a .bed file are replaced by means.
    - `missing`: what replaces missing elements; None if `transform` alone says it.
    - `standardize`: how rows of op(A) are standardized: "center" or "scale", or "shift" to subtract the means
      of what is not NaN; "" if they are not.
    - `absent`: the code of missing elements, which become NaN. If it is NaN, those that the operand declares
      do; None: missing elements are errors.
    - `constant`: if rows are scaled, what happens to rows of equal elements.
    - `kept`: the numbers of the rows that are used; None for all.
    - `known`: if it is set, X is replaced by 1 for known genotypes and 0 elsewhere (`Known`).
    """

    given: Any
    op: Transpose = Op.N
    transform: Transform | None = None
    of_lines: bool = False
    rows: Range | None = None
    impute: bool = False
    missing: Missing | None = None
    standardize: str = ""
    absent: float | None = None
    constant: str = "nan"
    kept: Array | None = None
    known: Known | None = None


@dataclass(frozen=True)
class Memory:
    """The upper bounds on memory that a caller has passed."""

    memory: Size | None = None
    device_memory: Size | None = None
    host_memory: Size | None = None

    def __post_init__(self) -> None:
        if self.memory is not None and self.host_memory is not None:
            raise InputError("memory and host_memory both bound host memory: drop one of them")

    @property
    def all_host_memory(self) -> Size | None:
        """The upper bound on host memory, under either of its names; None if there is none."""
        return self.host_memory if self.memory is None else self.memory


@dataclass(frozen=True)
class Where:
    """Where the product is computed. `devices` are several device numbers; None for `device` alone."""

    backend: str = "auto"
    kernel: str = "auto"
    device: int = 0
    devices: tuple[int, ...] | Literal["all"] | None = None
    workers: int | None = None
    client: Any = None
    executor: Any = None

    @property
    def placement(self) -> str:
        """The executor that computes the product: one of `support.EXECUTORS`."""
        if self.is_distributed:
            return support.WORKERS
        return support.ONE if self.devices is None else support.SEVERAL

    def __post_init__(self) -> None:
        if self.devices is not None and self.device:
            raise InputError(f"device = {self.device} and devices both name devices: drop device")

    @property
    def is_distributed(self) -> bool:
        """Whether other processes compute the product."""
        return self.workers is not None or self.client is not None or self.executor is not None


@dataclass(frozen=True)
class Durability:
    """Whether a run may overwrite an existing C, resume an unfinished run, and accept changed operands."""

    overwrite: bool = False
    resume: bool = False
    trust_operands: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one call asks for. `oocgemm.gemm` describes the options, and `with_options` takes their names.

    - `a`, `b`: the operands. In a Gram matrix, B is the same operand as A. It also may be if C is not stored.
    - `into`: what becomes of C. `epilogue` changes C before that.
    - `decode`: if False, stored numbers are taken as they are, whatever an operand declares.
    - `planned`: the plan to run. If it is None, the run is planned when it starts.
    - `terms`: the terms whose sums the first step of the epilogue combines (`oocgemm.planning.terms`).
    - `slicing`: the product is that of the stacked slices of k of A and B (`oocgemm.planning.partition`).
    """

    a: Source
    b: Source
    c: Destination
    into: Into = AsIs()
    alpha: complex = 1.0
    beta: complex = 0.0
    epilogue: Epilogue = ()
    compute: str = "native"
    out_dtype: Any = None
    decode: bool = True
    terms: Terms = ONE
    slicing: Slicing | None = None
    budgets: Memory = Memory()
    where: Where = Where()
    durability: Durability = Durability()
    tile: TileShape | str | None = None
    chunks: tuple[int, int] | None = None
    compressor: str | None = None
    requests: Requests | None = None
    verify: bool = False
    timeline: PathLike | None = None
    progress: Progress | bool | None = None
    planned: Plan | None = None

    def __post_init__(self) -> None:
        requests_of(self.requests)
        support.check(self.where.placement, self.uses)

    @property
    def uses(self) -> frozenset[str]:
        """The features of the product that not every executor has (`support.HOLES`)."""
        used = {
            "devices": self.where.devices is not None,
            "epilogue": bool(self.epilogue),
            "transform": self.a.transform is not None or self.b.transform is not None,
        }
        used |= {self.into.feature: bool(self.into.feature)}
        return frozenset(name for name, is_used in used.items() if is_used)

    @property
    def divides_k(self) -> bool:
        """Whether workers may compute slices of k, which are then added as they are."""
        return self.into.sliced and not self.uses

    @classmethod
    def of(cls, a: Any, b: Any, c: Destination, **options: Any) -> "Request":
        """Return a request for operands, with options by their names in `oocgemm.gemm`, and other fields."""
        return cls(a=Source(a), b=Source(b), c=c).with_options(**options)

    def with_options(self, **options: Any) -> "Request":
        """Return the request with other options, by their names in `oocgemm.gemm`, or other fields."""
        if "devices" in options:
            devices = options["devices"] = numbers_of(options["devices"])
            if devices is not None and devices != "all" and len(devices) == 1 and not options.get("device"):
                options |= {"device": devices[0], "devices": None}
        missing = Missing.of(options.pop("missing", None), options.pop("impute", None))
        changed: dict[str, dict[str, Any]] = {}
        for name in options.keys() & PLACES.keys():
            part, field = PLACES[name]
            changed.setdefault(part, {})[field] = options.pop(name)
        parts = {part: replace(getattr(self, part), **values) for part, values in changed.items()}
        found = replace(self, **parts, **options)
        return found if missing is None else found.with_operands(missing=missing)

    def with_operands(self, **changes: Any) -> "Request":
        """Return the request with other fields of both operands."""
        return replace(self, a=replace(self.a, **changes), b=replace(self.b, **changes))


# For each option that is kept inside a field of `Request`: the name of this field, and the name inside it.
PLACES = {
    part.name: (name, part.name)
    for name, kind in (("budgets", Memory), ("where", Where), ("durability", Durability))
    for part in fields(kind)
}
PLACES |= {f"trans_{side}": (side, "op") for side in "ab"}
PLACES |= {f"transform_{side}": (side, "transform") for side in "ab"}


def parse(a: Any, b: Any, c: Any, options: Options | PlanOptions) -> Request:
    """Return the request of a call. Raises `InputError` for a string that cannot be a path."""
    a, b = stores.located("A", a), stores.located("B", b)
    given: dict[str, Any] = dict(options)
    given["epilogue"] = steps_of(given.get("epilogue"))
    return Request.of(a, b, Destination.parse(c), **given)


def parse_gram(
    x: Any, out: Any, axis: int, uplo: str | None, options: GramOptions | GramPlanOptions
) -> Request:
    """Return the request of a Gram matrix. Raises `InputError` for a wrong `axis` or `uplo`."""
    if isinstance(axis, bool) or axis not in (0, 1):
        raise InputError(f"axis = {axis!r}: pass 0 for X X^T, which has the rows of X, or 1 for X^T X")
    check_choices("gram", uplo=uplo)
    x, c, given = stores.located("X", x), Destination.parse(out), dict[str, Any](options)
    gram = (
        uplo
        or (given.get("resume") and _uplo_begun(c))
        or (stores.store_of(c.path).default_uplo if c.path else "full")
    )
    source = Source(x, Op.T if axis == 1 else Op.N, given.pop("transform", None))
    given["epilogue"] = steps_of(given.get("epilogue"))
    return Request(a=source, b=source, c=c, into=Gram(gram)).with_options(**given)


def _uplo_begun(c: Destination) -> str:
    """Return which triangle the journal of a run at C names; "" if it names none."""
    record = None if c.journal_folder is None else read(c.journal_folder)
    return "" if record is None else record.uplo


def unknown_devices() -> InputError:
    """Return the error for planning on all devices: planning opens no device to count them."""
    return InputError(
        "planning for cuda opens no device, so it is unknown how many there are: pass their numbers, such as "
        "devices=[0, 1] (--devices 0,1)"
    )


def numbers_of(devices: Devices | None) -> tuple[int, ...] | Literal["all"] | None:
    """Return the numbers in the option `devices`: "all", text such as "0,1", or a sequence of numbers."""
    if devices is None or devices == "all":
        return None if devices is None else "all"
    parts = devices.split(",") if isinstance(devices, str) else list(map(str, devices))
    if not parts or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"devices = {devices!r} names no devices: write all, or numbers such as 0,1")
    return tuple(map(int, parts))


def requests_of(given: Requests | None) -> dict[str, int]:
    """Parse the option `requests`: return the number of requests in flight, by operand.

    Raises `InputError` for a wrong value.

    >>> requests_of("A=128,B=16"), requests_of(64), requests_of(None)
    ({'A': 128, 'B': 16}, {'A': 64, 'B': 64, 'C': 64}, {})
    """
    if given is None:
        return {}
    text = ",".join(f"{k}={v}" for k, v in given.items()) if isinstance(given, Mapping) else str(given)
    text = text if "=" in text else ",".join(f"{name}={text}" for name in "ABC")
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(k in ("A", "B", "C") and v.isdecimal() and 0 < int(v) <= MAX_REQUESTS for k, _, v in pairs):
        raise InputError(
            f"requests = {given!r}: pass a number from 1 to {MAX_REQUESTS}, such as 64, or numbers per "
            'operand, such as "A=128,B=16"'
        )
    return {name: int(value) for name, _, value in pairs}
