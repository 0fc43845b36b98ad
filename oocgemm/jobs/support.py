"""Features that executors lack, each with a reason. No other code refuses a feature on an executor.

A request *uses* features, such as an epilogue (`Request.uses`, `VERBS`). An *executor* computes
it: one device (the host or a GPU), several devices, worker processes, or a job of the service. `HOLES` lists
the features that an executor lacks. All else must work: docs/reference/support.md is generated from this
table and from the options of verbs, and tests run its cells.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from oocgemm.errors import CombinationError

ONE, SEVERAL, WORKERS, SERVICE = "one device", "several devices", "workers", "service"
EXECUTORS = (ONE, SEVERAL, WORKERS, SERVICE)


class Hole(NamedTuple):
    """A feature that executors lack. `reason` is the message of the error, a template of `str.format`."""

    executors: tuple[str, ...]
    feature: str
    reason: str


HOLES = (
    Hole(
        (WORKERS,),
        "devices",
        "devices and workers cannot be combined: drop devices, and start one worker per GPU with "
        "CUDA_VISIBLE_DEVICES set",
    ),
    Hole(
        (WORKERS,),
        "passes",
        "the reads of X are coordinated by one process: drop workers, client and executor",
    ),
    Hole(
        (WORKERS,),
        "operand in memory",
        "{name} is a {kind}, which other processes cannot read: store it in a zarr array or a .npy file that "
        "all workers see, and pass its path",
    ),
    Hole(
        (WORKERS,),
        "planned in memory",
        "{name} is in the memory of this process, and other workers cannot access it: pass the path of an "
        "array",
    ),
    Hole(
        (WORKERS,),
        "C elsewhere",
        "C would be in {where}, where the finished tiles of several workers cannot be recorded: pass a local "
        "path that all workers see",
    ),
    Hole(
        (ONE, SEVERAL),
        "slices of k",
        "the run at {c} divides k into {count} slices, which are computed by workers: continue it with "
        "--workers 1 --resume (workers=1, resume=True)",
    ),
    Hole(
        (ONE, SEVERAL, WORKERS, SERVICE),
        "resume without a path",
        "a run can be resumed only if C is at a local path or in an object store, where a journal is kept: "
        "drop --resume",
    ),
    Hole(
        (ONE, SEVERAL, WORKERS),
        "option of gemm",
        "{function} does not take the option {name}, which gemm does: drop it; the result is kept in memory, "
        "and not resumed",
    ),
    Hole(
        (ONE, SEVERAL, WORKERS, SERVICE),
        "verify of terms",
        "verify checks one product, and the result is made of several: drop verify (--verify)",
    ),
    Hole(
        (SERVICE,),
        "URL",
        "{name} is a URL, and jobs take no URLs: pass the path of an array",
    ),
    Hole(
        (SERVICE,),
        "resume",
        "a job that is interrupted goes on by itself: drop resume",
    ),
    Hole(
        (SERVICE,),
        "option",
        "unknown option {name}: a job takes {known}",
    ),
)

# Why verbs lack an option, on any executor.
NO_OPTION = {
    "transform": "the verb has no transform: pass missing and cast of grm, or store a transformed copy",
    "resume": "the result is kept in memory, and not resumed",
    "verify": "the verb has no checksums",
}
# The options that choose an executor.
OPTIONS: Mapping[str, str] = {
    "devices": SEVERAL,
    **dict.fromkeys(("workers", "client", "executor"), WORKERS),
}


# What the parameters of verbs take: a matrix, a matrix that may be left out, an array in memory, an integer,
# one or more numbers, a reduction (`oocgemm.verbs.reduce`), and the place of the result.
OPERAND, OPTIONAL, ARRAY, COUNT = "operand", "optional", "array", "count"
NUMBERS, REDUCTION, OUT = "numbers", "reduction", "out"


class Verb(NamedTuple):
    """Facts about a verb, beside its function and its options (`oocgemm.jobs.options`).

    - `uses`: the features that the verb uses, beside those of its options.
    - `checked`: the features that it uses with `verify`, beside those.
    - `command`: the summary of the command ``oocgemm VERB X OUT``, which calls the function for X and saves
      the result at OUT (`oocgemm.cli.statistics`); "" if the verb has no such command.
    - `parameters`: what each parameter takes, except options, in their order. A verb without a place of the
      result returns it in memory.
    - `selects`: the options with which a verb returns its result in memory, although it takes a place.
    """

    uses: frozenset[str] = frozenset()
    checked: frozenset[str] = frozenset()
    command: str = ""
    parameters: Mapping[str, str] = {"x": OPERAND, "out": OUT}
    selects: frozenset[str] = frozenset()


_COMPARED = {"x": OPERAND, "y": OPTIONAL}

VERBS: Mapping[str, Verb] = {
    "gemm": Verb(parameters={"a": OPERAND, "b": OPERAND, "c": OUT}),
    "gram": Verb(),
    "corr": Verb(parameters=_COMPARED | {"out": OUT}, selects=frozenset({"topk", "threshold"})),
    "cov": Verb(parameters=_COMPARED | {"out": OUT}),
    "similarity": Verb(parameters={"e": OPERAND, "y": OPTIONAL}),
    "neighbors": Verb(parameters=_COMPARED),
    "distances": Verb(parameters=_COMPARED | {"out": OUT}),
    "grm": Verb(),
    "king": Verb(checked=frozenset({"verify of terms"}), selects=frozenset({"threshold"})),
    "ibs": Verb(checked=frozenset({"verify of terms"}), selects=frozenset({"threshold"})),
    "pca": Verb(frozenset({"passes"}), parameters={"x": OPERAND, "k": COUNT, "out": OUT}),
    "svd": Verb(frozenset({"passes"}), parameters={"x": OPERAND, "k": COUNT}),
    "lstsq": Verb(frozenset({"passes"}), parameters={"x": OPERAND, "y": OPERAND}),
    "ridge": Verb(frozenset({"passes"}), parameters={"x": OPERAND, "y": OPERAND, "alpha": NUMBERS}),
    "kernel_matmul": Verb(parameters={"x": OPERAND, "v": ARRAY, "y": OPTIONAL}),
    "reduce": Verb(parameters={"a": OPERAND, "b": OPTIONAL, "to": REDUCTION}),
    "ld": Verb(parameters={"x": OPERAND}),
    "ld_scores": Verb(
        parameters={"x": OPERAND},
        command="Compute LD scores of the variants in X, and save them at OUT, a new .npy file.\n\n"
        "X has genotypes 0, 1 and 2 of individuals (rows) at variants (columns).\n\n"
        "Example: oocgemm ld-scores data.bed scores.npy --window 1000",
    ),
}


def hole(executor: str, uses: Collection[str]) -> Hole | None:
    """Return the first hole of an executor among the features of a product; None if there is none."""
    return next((one for one in HOLES if executor in one.executors and one.feature in uses), None)


def check(executor: str, uses: Collection[str]) -> None:
    """Raise `CombinationError` if an executor lacks a feature."""
    found = hole(executor, uses)
    if found is not None:
        raise CombinationError(found.reason)


def refusal(executor: str, feature: str, **facts: object) -> CombinationError:
    """Return the error for a feature that an executor lacks. `facts` fill in the template of its reason."""
    found = hole(executor, {feature})
    assert found is not None, f"{executor} has no hole {feature}"
    return CombinationError(found.reason.format(**facts))


def check_option(verb: str, name: str) -> None:
    """Raise `CombinationError` for an option that chooses an executor on which a verb cannot run."""
    if name in OPTIONS:
        check(OPTIONS[name], VERBS.get(verb.removeprefix("plan_"), Verb()).uses)
