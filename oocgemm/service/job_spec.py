"""The arguments of a job as JSON, for every verb, from the table of options.

A *spec* is a JSON object: the ``verb``, which is ``gemm`` by default; its operands and the place of its
result, under the names of the verb's parameters (`oocgemm.jobs.support.VERBS`); and ``options``. If a verb
returns its result in memory, the place is ``out``.

An operand is the path of an array, or a *made* value: an object with the name of a function or class of this
package, and its arguments: ``{"as_matrix": {"x": "X.zarr", "rows": [0]}}``. Transforms, the steps of an
epilogue and reductions are made values, too. An array among their arguments is a list of numbers, or
``{"load": PATH}``, the content of a .npy file. So all paths of a spec are known by their places in it
(`with_paths`), and no other text of a spec is ever opened.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from math import isfinite
from types import NoneType
from typing import Any

from oocgemm.errors import InputError
from oocgemm.jobs.support import COUNT, NUMBERS, OUT, REDUCTION, VERBS

LOAD = "load"
# What may make the values of operands, transforms, steps of an epilogue, and reductions.
VIEWS, TRANSFORMS = ("as_matrix", "concat", "keep"), ("Transform",)
STEPS = ("Scale", "RankOne", "Add", "Divide", "Correlation", "Gaussian", "Cast")
REDUCTIONS = ("TopK", "Threshold", "Reduce", "MatVec")
# Their arguments that are operands.
OPERANDS_OF = {"as_matrix": "x", "concat": "parts", "keep": "x", "Add": "d", "Divide": "d"}
# Maximum depth of made values in one another.
MAX_DEPTH = 4

Spec = Mapping[str, Any]
# Called with the name, the path, and whether it is written.
Change = Callable[[str, str, bool], str]


def parameters(verb: str) -> dict[str, str]:
    """Return the fields of a job beside its options: what each parameter of the verb takes, by its name."""
    found = dict(VERBS[verb].parameters)
    return found if OUT in found.values() else found | {"out": OUT}


def place_of(verb: str) -> str:
    """Return the name of the field that says where the result is stored."""
    return next(name for name, kind in parameters(verb).items() if kind == OUT)


def out_of(spec: Spec) -> str:
    """Return where the result of a job is stored."""
    return str(spec[place_of(spec.get("verb", "gemm"))])


def in_memory(spec: Spec) -> bool:
    """Return whether the verb returns the result of a job in memory, so that it must be saved."""
    verb = VERBS[spec.get("verb", "gemm")]
    return OUT not in verb.parameters.values() or bool(verb.selects & spec["options"].keys())


def with_paths(spec: Spec, change: Change) -> dict[str, Any]:
    """Return a spec whose paths are replaced by what `change` returns for them."""
    verb = spec.get("verb", "gemm")
    found = dict(spec) | {"options": dict(spec.get("options", {}))}
    for name, kind in parameters(verb).items():
        if found.get(name) is not None:
            operand = kind not in (COUNT, NUMBERS, REDUCTION)
            found[name] = _changed(name, found[name], change, operand=operand, write=kind == OUT)
    for name, value in found["options"].items():  # made values may have paths; texts have none
        found["options"][name] = _changed(name, value, change, operand=False)
    return found


def _changed(
    name: str, value: Any, change: Change, *, operand: bool, write: bool = False, depth: int = 0
) -> Any:
    def inner(each: Any, *, operand: bool) -> Any:
        return _changed(name, each, change, operand=operand, depth=depth + 1)

    if isinstance(value, str):
        return change(name, value, write) if operand else value
    if depth > 3 * MAX_DEPTH:
        raise InputError(f"{name} has too many values in one another")
    if isinstance(value, list):
        return [inner(each, operand=operand) for each in value]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((made, given),) = value.items()
    if made == LOAD and isinstance(given, str):
        return {LOAD: change(name, given, False)}
    if not isinstance(given, dict):
        return value
    return {made: {key: inner(each, operand=key == OPERANDS_OF.get(made)) for key, each in given.items()}}


def encoded(name: str, value: Any) -> Any:  # noqa: PLR0911 - one case after the other
    """Return a value that a caller passes as JSON: a made value, an array of few numbers, or plain data.

    Raises `InputError` if JSON cannot hold it.
    """
    kind = type(value).__name__
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: encoded(name, each) for key, each in value.items()}
    if kind == "Folded":
        folding = value.folding
        parts = {str(axis): list(part) if isinstance(part, tuple) else part for axis, part in folding.isel}
        sides = {side: getattr(folding, side) for side in ("rows", "cols")}
        named = {side: list(axes) for side, axes in sides.items() if axes is not None}
        more = {"isel": parts} if parts else {}
        return {"as_matrix": {"x": encoded(name, value.source), **named, **more}}
    if kind == "Kept":
        lines = {side: getattr(value, side) for side in ("rows", "cols")}
        kept = {side: encoded(name, each) for side, each in lines.items() if each is not None}
        return {"keep": {"x": encoded(name, value.source), **kept}}
    if kind == "Joined":
        return {"concat": {"parts": [encoded(name, part) for part in value.parts], "axis": value.axis}}
    if kind in (*TRANSFORMS, *STEPS, *REDUCTIONS):
        given = {field.name: getattr(value, field.name) for field in fields_of(value)}
        return {
            kind: {key: encoded(f"{key} of {name}", each) for key, each in given.items() if each is not None}
        }
    if hasattr(value, "tolist"):  # an array or a number of NumPy
        value = value.tolist()
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [encoded(name, each) for each in value]
    if isinstance(value, str | int | float | NoneType):
        return value
    raise InputError(f"{name} is a {type(value).__name__}, which a job cannot have: leave it out")
