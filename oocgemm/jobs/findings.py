"""Results of passes over operands, which one process finds, and others are given.

A pass finds statistics, norms or other numbers per row or column. A run with several processes makes each
pass once: the process that plans it keeps the results in `Findings`, and sends them to the others. A process
that lacks a result makes the pass itself, and finds the same bits.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from oocgemm.stores.transformed import change_of

P = ParamSpec("P")
T = TypeVar("T")

# Results by keys, which say what was found of which matrix.
Findings = dict[str, Any]

# Arguments that say how a pass is made. The results are the same without them.
_MEANS = "memory", "sweep"

_kept: ContextVar[Findings | None] = ContextVar("findings", default=None)


@contextmanager
def keeping(findings: Findings) -> Iterator[None]:
    """Keep the results of passes in `findings` inside the context. No pass whose result is there is made."""
    token = _kept.set(findings)
    try:
        yield
    finally:
        _kept.reset(token)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that makes a pass over a matrix: a second call with equal arguments makes none.

    The results must not depend on the arguments in `_MEANS`. They are kept inside the context of `keeping`.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def found(*args: P.args, **options: P.kwargs) -> T:
        findings = _kept.get()
        if findings is None:
            return function(*args, **options)
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        details = [_shown(value) for name, value in bound.arguments.items() if name not in _MEANS]
        key = " ".join((function.__name__, *details))
        if key not in findings:
            findings[key] = function(*args, **options)
        result: T = deepcopy(findings[key])  # callers may change the arrays
        return result

    return found


def _shown(value: Any) -> str:
    """Return a text that tells the values of an argument apart."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
    if hasattr(value, "layout"):
        return f"{type(value).__name__} {value.name} {value.shape} {value.dtype} {change_of(value)}"
    if is_dataclass(value):  # the text of a long array would leave most of its elements out
        shown = (_shown(getattr(value, field.name)) for field in fields(value))
        return f"{type(value).__name__}({', '.join(shown)})"
    return str(value)
