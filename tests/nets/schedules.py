"""Small schedules of every kind, and digests of all that they say.

A case is a product, its candidate and the tiles that are computed. A digest covers every operation with its
regions, the waits that are derived, the bytes of each buffer, and the loads. The file `schedules.json` keeps
the candidates and the digests. It keeps candidates so that digests do not depend on the planner's search.

usage: python -m tests.nets.schedules    writes the file anew, which is right only after an intended change
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oocgemm.errors import BudgetError
from oocgemm.planning import (
    Budgets,
    Candidate,
    Chunked,
    GemmProblem,
    InMemory,
    Layouts,
    Op,
    Setting,
    Slot,
    Slots,
    TileGrid,
    TileSet,
    TileShape,
    Traversal,
    Writing,
    default_model,
    make_plan,
)
from oocgemm.planning.cost.footprint import footprint
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.plan import schedule_of
from oocgemm.planning.schedule.operation import Program
from oocgemm.planning.sinks import Step
from tests.support.products import changed, product_of

KEPT = Path(__file__).with_suffix(".json")
DERIVED = "lane", "stream", "stored", "whole", "parts"
BUDGETS = Budgets(2 << 30, 2 << 30)
FILES = Layouts(Chunked((5, 7)), Chunked((7, 4)), Chunked(writing=Writing(free=True)))
CODED = Layouts(
    Chunked((5, 7), partial_reads=False, decode_bytes=280),
    Chunked((7, 4), partial_reads=False, decode_bytes=224),
    Chunked(writing=Writing((5, 4), encodes=True, encode_bytes=160)),
)
MEMORY = Layouts(*(InMemory(zero_copy_width=64, pinned=True),) * 3)
PAGEABLE = Layouts(*(InMemory(),) * 3)
LAYOUTS = {"files": FILES, "coded": CODED, "pinned": MEMORY, "pageable": PAGEABLE}


@dataclass(frozen=True)
class Case:
    """A product on a machine, and which of its tiles are computed by how many devices."""

    problem: GemmProblem
    backend: str
    layouts: Layouts
    tile: TileShape
    devices: int = 1
    part: str = "whole"


def product(m: int, n: int, k: int, dtype: str = "float64", **how: Any) -> GemmProblem:
    """Describe a product whose operands, accumulator and C have one dtype unless `how` says otherwise."""
    names = {"a_dtype": dtype, "b_dtype": dtype, "acc_dtype": dtype, "c_dtype": dtype} | how
    return product_of(m, n, k, **names)


def steps(axis: str, *kinds: str) -> str:
    """Return the text of steps with numbers along an axis, by default those of a transform."""
    given = kinds or ("impute", "center", "scale")
    return ", ".join(str(ElementStep(kind, axis, constants=(0.0,))) for kind in given)


def products() -> Iterator[tuple[str, GemmProblem]]:
    """Yield named products: every sink, every arithmetic, and the element steps that a device applies."""
    half: dict[str, Any] = {"acc_dtype": "float32"}
    byte: dict[str, Any] = {"acc_dtype": "float64"}
    for m, n, k in ((23, 17, 31), (8, 40, 5), (12, 12, 12), (1, 9, 30), (7, 5, 0)):
        yield f"plain {m}x{n}x{k}", product(m, n, k)
    plain = 23, 17, 31
    yield "alpha and beta", product(*plain, alpha=2.0, beta=3.0)
    yield "alpha 0", product(*plain, alpha=0.0, beta=3.0)
    yield "transposed", product(*plain, trans_a=Op.T, trans_b=Op.C)
    yield "complex", product(*plain, "complex64", alpha=1j)
    yield "half", product(*plain, "float16", **half)
    yield "half with beta", product(*plain, "bfloat16", beta=2.0, **half)
    yield "bytes", product(*plain, "int8", c_dtype="int32", **byte)
    yield "scaled bytes", product(*plain, "int8", c_dtype="float64", alpha=3.0, beta=1.0, **byte)
    yield (
        "centered bytes",
        product(*plain, "int8", c_dtype="float64", elements_a=steps("cols", "correct"), **byte),
    )
    yield "emulated", product(*plain, compute="emulated")
    yield "emulated with beta", product(*plain, "float32", compute="emulated", beta=1.0)
    for tier in ("host", "device"):
        yield f"checked on the {tier}", product(*plain, checked=tier)
    yield "transformed A", product(*plain, "float32", stored_a="int8", elements_a=steps("cols"))
    yield (
        "transformed A and B",
        product(
            *plain,
            "float32",
            stored_a="int8",
            stored_b="float32",
            elements_a=steps("cols"),
            elements_b=steps("rows"),
        ),
    )
    chains = {
        "scale": (Step("scale", rows=True, cols=True, value=2.0),),
        "add": (Step("add", value=0.5),),
        "gaussian": (Step("gaussian", rows=True, cols=True, value=0.1), Step("scale", rows=True)),
    }
    for name, chain in chains.items():
        yield f"epilogue {name}", product(*plain, "float32", epilogue=chain)
    for uplo in ("lower", "upper", "full"):
        square = product(23, 23, 31, trans_b=Op.T, gram=uplo)
        yield f"gram {uplo}", square
        yield f"gram {uplo} with beta", changed(square, beta=2.0)
        yield f"gram {uplo} transformed", changed(square, stored_a="int8", elements_a=steps("cols"))
        yield f"gram {uplo} checked", changed(square, checked="device")
        yield f"gram {uplo} half", product(23, 23, 31, "float16", trans_b=Op.T, gram=uplo, **half)
    pairs: dict[str, Any] = {"trans_b": Op.T, "scaled": True, "excludes_self": True}
    for dtype, found in (("float32", "void64"), ("float64", "void128")):
        yield f"topk {dtype}", product(*plain, dtype, c_dtype=found, topk=3)
        yield f"topk gram {dtype}", product(23, 23, 31, dtype, c_dtype=found, topk=3, gram="lower", **pairs)
        kept: dict[str, Any] = {"c_dtype": found, "sparse": True, "threshold": 0.5}
        yield f"threshold {dtype}", product(*plain, dtype, **kept)
        yield f"threshold gram {dtype}", product(23, 23, 31, dtype, gram="lower", **pairs, **kept)
    for kind in ("sum", "sumsq", "max"):
        yield f"reduce {kind}", product(*plain, "float32", c_dtype="float64", reduction=kind)
    yield "applied", product(*plain, applied=3)
    yield "applied with an epilogue", product(*plain, "float32", applied=2, epilogue=chains["scale"])
    yield "chained", product(23, 17, 31, "float32", chained=4)


def cases() -> Iterator[tuple[str, Case]]:
    """Yield named cases: all products on both backends, some with other arrays, devices and parts."""
    tiles = TileShape(10, 8, 7), TileShape(23, 40, 12)
    for name, problem in products():
        square = problem.cover.square
        whole = problem.b.one_tile or problem.sink.vector_elements > 0
        for backend in ("host", "cuda"):
            for number, tile in enumerate(tiles):
                used = TileShape(*(2 * (max(problem.m, problem.n),)), tile.k) if whole else tile
                used = TileShape(used.m, used.m, used.k) if square else used
                used = used.within(problem)
                layouts = FILES if number == 0 else MEMORY if backend == "cuda" else PAGEABLE
                yield f"{name}, {backend}, {used}", Case(problem, backend, layouts, used)
        tile = TileShape(10, 10 if square else 8, 7).within(problem)
        if not whole:
            yield f"{name}, cuda, remainder", Case(problem, "cuda", FILES, tile, part="remainder")
        if not (square or whole or not problem.sink.stores_c):
            for devices in (2, 3):
                yield f"{name}, {devices} devices", Case(problem, "cuda", FILES, tile, devices)
            yield f"{name}, cuda, rectangle", Case(problem, "cuda", CODED, tile, part="rectangle")


def candidate_of(case: Case) -> Candidate | None:
    """Return the candidate that the planner chooses for a case now, or None if it has none.

    Whole products have the slots that the planner chooses. Others have the fewest: panels are evicted.
    """
    problem, machine = case.problem, default_model(case.backend, 4)
    try:
        plan = make_plan(problem, BUDGETS, machine, case.layouts, case.tile)
    except BudgetError:
        return None
    slots = plan.slots
    if case.part != "whole":
        together = max(2, slots.last_steps)
        fewer = {
            "a": together if slots.b else 2 * together,
            "b": together,
            "host_a": 2,
            "host_b": 2,
            "host_c": 2,
        }
        slots = replace(slots, **{name: min(getattr(slots, name), count) for name, count in fewer.items()})
    return replace(plan.candidate, slots=slots, ends=case.devices)


def tiles_of(case: Case, candidate: Candidate) -> TileSet | None:
    """Return the tiles that are computed: None for all, a rectangle, or what is left of all."""
    if case.part == "whole":
        return None
    grid = TileGrid.of(case.problem, candidate.tile, strip=candidate.slots.strip)
    every = TileSet.of(grid)
    if case.part == "remainder":
        return every.remaining(list(every)[::2])
    down, across = grid.shape
    return every.part((down // 2, down), (0, max(1, across // 2)))


def digest(case: Case, candidate: Candidate) -> dict[str, Any]:
    """Return a digest of all operations and waits of a case, and its bytes on device and host."""
    machine = default_model(case.backend, 4)
    setting = Setting(case.problem, machine, case.layouts, BUDGETS, case.devices)
    schedule = schedule_of(setting, candidate, tiles_of(case, candidate))
    hashed, count = hashlib.sha256(), 0
    for operation, waits in Program(schedule):
        hashed.update(f"{described(operation._asdict())} {sorted(waits)}\n".encode())
        count += 1
    used, loads = footprint(setting, candidate), schedule.loads()
    return {
        "operations": count,
        "digest": hashed.hexdigest()[:16],
        "device": {name: size for name, size in used.device.items() if size},
        "host": {name: size for name, size in used.host.items() if size},
        "loads": [int(x) for x in (loads.a_up, loads.b_up, loads.a_read, loads.b_read)],
    }


def described(fields: Mapping[str, Any]) -> str:
    """Describe an operation by its fields, with slots as text.

    New fields that are unset do not count, and those that follow from the other ones do not, either.
    """

    def text(value: Any) -> str:
        if isinstance(value, tuple) and not isinstance(value, Slot):
            return "(" + ",".join(map(text, value)) + ")"
        return str(value)

    kept = {name: value for name, value in fields.items() if name not in DERIVED}
    return " ".join(f"{name}={text(value)}" for name, value in kept.items() if value not in (False, 0, ()))


def stored(candidate: Candidate) -> dict[str, Any]:
    """Convert a candidate to plain data."""
    return asdict(candidate)


def restored(data: Mapping[str, Any]) -> Candidate:
    """Return a candidate from plain data."""
    return Candidate(
        TileShape(**data["tile"]),
        Slots(**data["slots"]),
        Traversal(**data["traversal"]),
        data["io_threads"],
        ends=data["ends"],
    )


def main() -> None:
    """Write the candidates and digests of all cases."""
    kept = {}
    for name, case in cases():
        candidate = candidate_of(case)
        if candidate is not None:
            kept[name] = {"candidate": stored(candidate)} | digest(case, candidate)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in kept.items())
    KEPT.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
