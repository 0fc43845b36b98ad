"""Open the operands of a request, and describe their product."""

from dataclasses import replace

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.distances import centered
from oocgemm.jobs.epilogue import Cast, check_mirrored, is_symmetric, with_epilogue
from oocgemm.jobs.imputing import opened
from oocgemm.jobs.problem import gram_problem, op_of, problem_of
from oocgemm.jobs.request import Chain, Reduction, Request, Selection
from oocgemm.jobs.standardizing import standardized
from oocgemm.jobs.transforms import by_rows, transformed
from oocgemm.planning import GemmProblem, Op, integers
from oocgemm.planning.cover import Triangle
from oocgemm.planning.problem import Updated, same
from oocgemm.planning.sinks import SELECTED, Applied, AtLeast, Largest, Reduced
from oocgemm.planning.units import counted
from oocgemm.stores import Matrix
from oocgemm.stores.transformed import KnownMatrix, TransformedMatrix
from oocgemm.stores.view import ConstantRows, SlicedMatrix

# Largest number of ones whose sum is exact in float32.
_MAX_EXACT = 1 << 24
# dtypes of scores, by the dtype of E, if they are not the default dtypes of C.
_SCORES = {"float16": "float32", "bfloat16": "float32", "int8": "float64"}


def open_operands(request: Request, backend: str) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open A and B, and describe their product on a backend. Raises `InputError` if they do not fit."""
    if request.gram:
        return _open_gram(request, backend)
    if request.selection is not None:
        return _open_selection(request, request.selection, backend)
    if request.chain is not None:
        return _open_chain(request, request.chain)
    if request.reduction is not None:
        return _open_reduced(request, request.reduction, backend)
    a, b = stores.open_pair(("A", request.a.given), ("B", request.b.given), decode=request.decode)
    a, trans_a = by_rows(a, request.a.transform, op_of("trans_a", request.a.op), left=True)
    b, trans_b = by_rows(b, request.b.transform, op_of("trans_b", request.b.op), left=False)
    if request.slicing is not None:
        a = SlicedMatrix(a, request.slicing, transposed=trans_a.swaps)
        b = SlicedMatrix(b, request.slicing, transposed=trans_b.swaps)
    scalars = request.alpha, request.beta
    problem = problem_of(a, b, *scalars, trans_a, trans_b, request.compute, request.out_dtype)
    problem = _accumulated(problem, backend)
    problem = with_epilogue(problem, request.epilogue, casts=request.out_dtype is None)
    problem, a, b = centered(problem, a, b, request)
    return a, b, _checked(request, problem, checksum_tier(backend, problem))


def _open_gram(request: Request, backend: str) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open the operand of a Gram matrix, which is returned as A and as B, and describe the product."""
    x, trans = opened("X", request), op_of("trans_a", request.a.op)
    if request.a.standardize:
        x = standardized(x, request.a.standardize, int(trans.swaps), request.a.kept)
    if request.a.known is not None:
        known = request.a.known
        # Tensor cores multiply int8 fastest, and CPUs float32, in which such sums are exact.
        narrow = backend == "cuda" or len(known.used) > _MAX_EXACT
        dtype = "int8" if narrow else str(request.out_dtype)
        x = KnownMatrix(x, int(not trans.swaps), known.code, known.used, dtype)
    if x.dtype.kind != "c":
        x, trans = by_rows(x, request.a.transform, trans, left=True)
        other = Op.N if trans.swaps else Op.T
    else:
        x = transformed(x, request.a.transform, trans, left=True)
        trans, other = (Op.C, Op.N) if trans.swaps else (Op.N, Op.C)
    scalars = request.alpha, request.beta
    problem = gram_problem(x, request.gram, *scalars, trans, other, request.compute, request.out_dtype)
    problem = _accumulated(problem, backend)
    problem = with_epilogue(problem, request.epilogue, casts=request.out_dtype is None)
    if request.gram == "full":
        check_mirrored(request.epilogue)
    problem, x, _ = centered(problem, x, x, request)
    return x, x, _checked(request, problem, checksum_tier(backend, problem))


def _open_selection(
    request: Request, selection: Selection, backend: str
) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open A and B, and describe the selection of elements of their product."""
    a, b, problem = _open_pair(request, selection.names, same=selection.same)
    if selection.topk and not selection.same:
        _check_most(selection.topk, problem.n)
    if not problem.epilogue:
        problem = _accumulated(problem, backend)
    if selection.same and is_symmetric(request.epilogue):
        problem = replace(problem, b=same(problem.b), cover=Triangle())
    if selection.topk or backend == "cuda":
        of_each = SELECTED[problem.acc_dtype], problem.epilogue, selection.cosine, selection.excludes_self
        least = selection.least(problem)
        sink = (
            Largest(*of_each, selection.topk)
            if selection.topk
            else AtLeast(*of_each, least, selection.absolute)
        )
        problem = replace(problem, sink=sink)
    # The host backend searches tiles of C when it writes them (`oocgemm.stores.sparse`).
    return a, b, _checked(request, problem, "host")


def _open_pair(request: Request, names: tuple[str, str], *, same: bool) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open A and B, whose product is not stored, and describe it. If they are the `same`, B is A^T."""
    name = "X" if request.a.standardize else names[0]
    trans = op_of("trans_a", request.a.op)
    if same:
        a = b = opened(name, request)
    else:
        a, b = stores.open_pair((name, request.a.given), (names[1], request.b.given), decode=request.decode)
    if a.dtype.kind == "c":
        raise InputError(
            f"{name} is of dtype {a.dtype}, and complex numbers have no order: pass a real {name}"
        )
    selection = request.selection
    if same and selection is not None and selection.topk:
        rows = a.shape[int(trans.swaps)] if request.a.kept is None else len(request.a.kept)
        _check_topk(name, selection, rows)
    if request.a.standardize:
        a = standardized(a, request.a.standardize, int(trans.swaps), request.a.kept)
    a, trans = by_rows(a, None, trans, left=True)
    if same:
        b, other = a, Op.N if trans.swaps else Op.T
    else:
        other = op_of("trans_b", request.b.op)
        b, other = by_rows(b, None, other, left=False)
    score = _SCORES.get(a.dtype.name)
    problem = problem_of(a, b, 1, 0, trans, other, request.compute, score)
    problem = with_epilogue(problem, request.epilogue, casts=False)
    if problem.sink.merges or any(isinstance(step, Cast) for step in request.epilogue):
        raise InputError("Add, Divide and Cast need a C that is stored: drop them")
    problem, a, b = centered(problem, a, b, request)
    return a, b, _wide(problem) if problem.measures_distances else problem


def _wide(problem: GemmProblem) -> GemmProblem:
    """Return the problem with a C of the accumulator's dtype."""
    return replace(problem, sink=replace(problem.sink, dtype=problem.acc_dtype))


def _open_chain(request: Request, chain: Chain) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open X, make the matrix that is added to X Q, and describe ``X^T (X Q + 1 row)``."""
    x = stores.open_matrix("X", request.a.given, decode=request.decode)
    count = x.shape[0]
    # The numbers of the transform are per column of X, which is not the axis that `problem_of` sums over.
    x, trans = by_rows(x, request.a.transform, Op.T, left=False)
    if chain.vectors is not None and isinstance(x, TransformedMatrix):
        x = x.with_vectors(chain.vectors)
    added = ConstantRows("the row", chain.row.astype(x.dtype), count, chain.resident_bytes)
    problem = problem_of(x, added, 1, 0, trans, Op.N)
    b = Updated(problem.b.dtype, problem.b.op, problem.b.stored, chain.columns)
    return x, added, replace(problem, b=b)


def _open_reduced(request: Request, reduction: Reduction, backend: str) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open A and B, and describe the reduction of the rows of their product, or its product with V."""
    a, b, problem = _open_pair(request, reduction.names, same=reduction.same)
    if reduction.kind:
        if reduction.kind == "max" and not problem.n:
            raise InputError("C has no elements, so that none is the largest: pass a larger A and B")
        problem = problem if problem.epilogue else _accumulated(problem, backend)
        problem = replace(problem, sink=Reduced("float64", problem.epilogue, reduction.kind))
        return a, b, _checked(request, problem, "host")
    assert reduction.factor is not None
    rows, columns = reduction.factor.shape
    if rows != problem.n:
        raise InputError(f"V has {rows} rows, and C has {problem.n} columns: pass a row of V for each")
    problem = replace(problem, sink=Applied(problem.acc_dtype, problem.epilogue, columns))
    return a, b, _checked(request, problem, "host")


def _check_most(topk: int, most: int) -> None:
    """Raise `InputError` if a row of C has fewer elements than are to be found."""
    if most < 1:
        raise InputError("C has no columns, so that no element is the largest: pass a B with columns")
    if topk > most:
        raise InputError(f"topk = {topk}, but C has {most} columns: pass a topk from 1 to {most}")


def _check_topk(name: str, selection: Selection, rows: int) -> None:
    """Raise `InputError` if a row cannot be compared with as many rows as are to be found."""
    most, besides = rows - selection.excludes_self, " besides itself" if selection.excludes_self else ""
    if most < 1:
        raise InputError(f"{name} has {counted(rows, 'row')}, and none to compare it with: pass more rows")
    if not 1 <= selection.topk <= most:
        raise InputError(
            f"topk = {selection.topk}, but a row of {name} can be compared with {most} rows{besides}: pass a "
            f"topk from 1 to {most}"
        )


def _accumulated(problem: GemmProblem, backend: str) -> GemmProblem:
    """Return the problem with the dtype of its sums: int32 for int8 on a GPU, if none can overflow."""
    if problem.exact and backend == "cuda" and problem.depth <= integers.MAX_INT32_DEPTH:
        return problem.with_sums("int32")
    return problem


def _checked(request: Request, problem: GemmProblem, tier: str) -> GemmProblem:
    """Return the problem with its checksums, which `tier` computes, if the request asks for them."""
    if not request.verify:
        return problem
    if problem.updates_c and (problem.epilogue or problem.centered):
        remedy = "pass a copy of it as D of a step Add(D, value=beta), with beta = 0, or drop verify"
        if problem.centered:  # no step can follow the centers
            remedy = "drop verify, and check C afterwards with oocgemm verify --c-before a copy of the old C"
        raise InputError(
            f"beta = {problem.beta}, and verify computes elements of C again, but the run overwrites the old "
            f"C: {remedy}"
        )
    return problem.checked_on(tier)


def checksum_tier(backend: str, problem: GemmProblem) -> str:
    """Return where the checksums of panels are computed: "device" or "host".

    On cuda it is the device, whose memory is faster. It is the host in three cases. The device has no
    checksum kernels for integers, nor for panels that serve in both roles. Nor does it check the accumulator
    before an epilogue changes it (`GemmProblem.checks_sums`) against checksums of its own.
    """
    host = problem.exact or problem.b.shares or problem.epilogue
    return "device" if backend == "cuda" and not host else "host"
