"""`Transform`: the computation on each element of an operand between storage and the product."""

import hashlib
import importlib
from dataclasses import fields
from math import isfinite, isnan
from typing import Any

import numpy as np

from oocgemm.errors import InputError, missing_bfloat16
from oocgemm.planning.elements import GIVEN, STREAMED, ElementStep
from oocgemm.planning.emulation import EXACT_LIMIT
from oocgemm.stores.base import Array, named_dtype
from oocgemm.values import dataclass

# The dtypes to which a transform can cast.
CASTS = ("float16", "bfloat16", "float32", "float64", "int8")
# The dtype of the result if `Transform.cast` is not given, for each dtype that is not kept. float64 can
# represent all int32 and uint32.
_DEFAULTS = {
    **dict.fromkeys(("bool", "int8", "uint8", "int16", "uint16"), "float32"),
    **dict.fromkeys(("int32", "uint32", "int64"), "float64"),
}


@dataclass(frozen=True, eq=False)
class Transform:
    """A transform of the elements of an operand on load. The operand stays as it is in storage.

    An element x of the stored array becomes ``(f(x) - center) / scale`` in the dtype `cast`. f is log1p, or
    nothing. A missing element is first replaced as `impute` says. The arithmetic is in float64, and the
    result is rounded once, to `cast`. Centers, scales and means are per index along k, the axis over which
    the product sums: per column of X for ``X @ X.T``.

    Args:
        missing: the code of missing elements, such as -1 or NaN. None: there are none.
        impute: the replacement of a missing element: "mean" (default), the mean of the other elements at the
            same index along k, after log1p; or a number; or an ndarray with one number per index along k; or
            "raise": an operand with missing elements is refused.
        log1p: replace x by log(1 + x).
        center: the number to subtract: "k", the mean of the elements that are not missing, after log1p; or an
            array with one number per index along k; or None.
        scale: the number to divide by: "k", the standard deviation of these elements (with the divisor n);
            "hwe", sqrt(2 p (1 - p)) with p = mean / 2, the standard deviation of genotypes 0, 1 and 2 in
            Hardy-Weinberg equilibrium; or an array; or None.
        clip: (low, high): a result below `low` becomes `low`, and one above `high` becomes `high`. NaN stays
            NaN.
        cast: dtype that is multiplied: float16, bfloat16, float32, float64 or int8. By default that of a
            floating-point operand; float32 for integers of 8 or 16 bits and bool; float64 for int32, uint32
            and int64. An int8 operand that is only imputed with 0 stays int8. An int8 operand may also be
            centred and stay int8, with cast="int8": then its product is exact, and the centers are subtracted
            from C, which is float64.

        target_sum: first multiply each stored row by a factor, so that its sum becomes this number, such as
            1e4; or an ndarray with one factor per stored row. Sums are those of all stored columns, as in
            scanpy's `normalize_total`. NaN does not count, and rows of zeros stay zeros.

    Raises:
        InputError: an argument cannot be used.
    """

    missing: float | None = None
    impute: Any = "mean"
    log1p: bool = False
    center: Any = None
    scale: Any = None
    cast: str | None = None
    clip: tuple[float, float] | None = None
    target_sum: Any = None

    def __post_init__(self) -> None:
        missing = self.missing
        if missing is not None and not (isinstance(missing, int | float | np.number) and np.isreal(missing)):
            raise InputError(f"missing = {missing!r} is not a real number: pass the code, such as -1 or NaN")
        if missing is not None:  # equal codes are shown alike
            whole = isinstance(missing, int | np.integer) or float(missing).is_integer()
            object.__setattr__(self, "missing", int(missing) if whole else float(missing))
        by_word = isinstance(self.impute, str) and self.impute in ("mean", "raise")
        if isinstance(self.impute, np.ndarray):
            object.__setattr__(self, "impute", _vector("impute", self.impute, ("mean", "raise")))
        elif not by_word and not _is_number(self.impute):
            raise InputError(f"impute = {self.impute!r}: pass 'mean', a finite number, 'raise' or an ndarray")
        for name, words in (("center", ("k",)), ("scale", ("k", "hwe"))):
            object.__setattr__(self, name, _vector(name, getattr(self, name), words))
        if isinstance(self.scale, str) and self.scale == "hwe" and self.log1p:
            raise InputError(
                "scale = 'hwe' is for genotypes 0, 1 and 2, and log1p changes them: drop one of them"
            )
        if self.clip is not None:
            object.__setattr__(self, "clip", _limits(self.clip))
        if self.target_sum is not None:
            object.__setattr__(self, "target_sum", _target(self.target_sum))
            if self.missing is not None and not isnan(self.missing):
                raise InputError(
                    f"missing = {self.missing} with target_sum: missing elements would count in the sums "
                    "of rows; pass missing=float('nan')"
                )
        if self.cast is not None:
            name = named_dtype(self.cast)
            if name not in CASTS:
                raise InputError(f"cast = {self.cast!r}: choose one of {', '.join(CASTS)}")
            object.__setattr__(self, "cast", name)

    @property
    def imputes_mean(self) -> bool:
        return self.missing is not None and isinstance(self.impute, str) and self.impute == "mean"

    @property
    def imputed(self) -> float | None:
        """The number that replaces missing elements, if it is one for all."""
        one = self.missing is not None and isinstance(self.impute, int | float | np.number)
        return float(self.impute) if one else None

    @property
    def raises(self) -> bool:
        return self.missing is not None and isinstance(self.impute, str) and self.impute == "raise"

    @property
    def needs_stats(self) -> bool:
        """Whether the operand must be read once before the product, for its means or its missing elements."""
        return isinstance(self.center, str) or isinstance(self.scale, str) or self.imputes_mean or self.raises

    @property
    def is_plain(self) -> bool:
        """Whether elements keep their values, except that missing ones become 0. C may be corrected later."""
        imputes = self.imputes_mean or isinstance(self.impute, np.ndarray) or self.imputed not in (None, 0)
        changes = self.log1p or imputes or self.clip or self.target_sum is not None
        kept = not changes and self.scale is None
        return kept and (self.center is None or self.cast == "int8")

    @property
    def corrects(self) -> bool:
        """Whether centers are subtracted from the product of int8 instead of from its operand."""
        return self.cast == "int8" and self.center is not None

    def code(self, name: str, stored: np.dtype[Any]) -> float | None:
        """Return the code of missing elements as a number of the dtype `stored`; None if there is no code.

        Raises `InputError` if the operand `name`, of the dtype `stored`, cannot have such an element.
        """
        if self.missing is None:
            return None
        value = float(self.missing)
        if stored.kind in "biu":
            limits = np.iinfo("int8" if stored.kind == "b" else stored)
            low, high = max(int(limits.min), 1 - EXACT_LIMIT), min(int(limits.max), EXACT_LIMIT - 1)
            if not (isfinite(value) and value.is_integer() and low <= value <= high):
                raise InputError(
                    f"missing = {self.missing!r} cannot be an element of {name}, which has dtype {stored}: "
                    f"pass an integer from {low} to {high}"
                )
            return value
        with np.errstate(over="ignore"):
            rounded = float(np.array(value).astype(stored))
        if isfinite(value) != isfinite(rounded) and not isnan(value):
            raise InputError(
                f"missing = {self.missing!r} cannot be an element of {name}: it is too large for {stored}"
            )
        return rounded

    def steps(self, code: float | None, axis: str) -> tuple[ElementStep, ...]:
        """Return the steps that transform each element.

        `code` is the stored code of missing elements; None if no element is missing. Steps have one number
        per row (`axis` "rows") or per column ("cols") of the stored array.
        """
        found = [ElementStep("log1p")] if self.log1p else []
        if code is not None:
            rule = self.impute if isinstance(self.impute, str) else ""
            found.append(ElementStep("impute", axis, STREAMED if rule == "mean" else GIVEN, rule, (code,)))
        for kind, given in (("correct" if self.corrects else "center", self.center), ("scale", self.scale)):
            rule = given if isinstance(given, str) else ""
            if given is not None:
                found.append(ElementStep(kind, axis, STREAMED if rule else GIVEN, rule))
        if self.clip is not None:
            found.append(ElementStep("clip", constants=self.clip))
        return tuple(found)

    def result(self, name: str, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype that is multiplied if the operand `name` has the dtype `stored`.

        Raises `InputError` if the transform cannot be applied to such an operand.
        """
        if stored.kind == "c":
            raise InputError(
                f"{name} has dtype {stored}, and transforms are for real operands: drop the transform, or "
                "multiply the real and the imaginary parts"
            )
        default = (
            "int8" if stored.name == "int8" and self.is_plain else _DEFAULTS.get(stored.name, stored.name)
        )
        if self.cast == "int8" and default != "int8":
            raise InputError(
                f"cast = 'int8' needs an int8 {name} without log1p and scale, and with impute=0 or 'raise', "
                f"since all else gives other numbers; {name} has dtype {stored}: choose another cast, such "
                "as float16"
            )
        return _dtype(self.cast or default)

    def __str__(self) -> str:
        """Return the arguments that are not defaults. Arrays are shown by a digest of their contents."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        return ", ".join(
            f"{field.name}={_shown(value)}"
            for field, value in given
            if isinstance(value, np.ndarray) or value != field.default
        )


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        try:
            found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
            return found
        except ImportError as error:
            raise missing_bfloat16() from error
    return np.dtype(name)


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{len(value)} numbers {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return str(value)


def _limits(given: Any) -> tuple[float, float]:
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        raise InputError(f"clip = {given!r}: pass two numbers, such as (-10, 10)") from None
    if not low <= high:
        raise InputError(f"clip = ({low:g}, {high:g}): pass a lower limit that is at most the upper one")
    return low, high


def _target(given: Any) -> float | Array:
    if isinstance(given, np.ndarray):
        factors = np.array(given, np.float64)
        if factors.ndim != 1 or not np.isfinite(factors).all():
            raise InputError("target_sum: pass a number, or a vector with one finite factor per stored row")
        factors.setflags(write=False)
        return factors
    if not (_is_number(given) and given > 0):
        raise InputError(f"target_sum = {given!r}: pass a positive number, such as 1e4")
    return float(given)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return bool(number and np.isreal(value) and isfinite(value))


def _vector(name: str, given: Any, words: tuple[str, ...]) -> Array | str | None:
    """Return `center` or `scale` as a word, or as float64 numbers. Raises `InputError` for anything else."""
    if given is None or (isinstance(given, str) and given in words):
        return given
    expected = f"{' or '.join(map(repr, words))}, or an array with one number per index along k"
    try:
        if isinstance(given, str) or np.iscomplexobj(given):
            raise TypeError
        values = np.array(given, np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} = {given!r}: pass {expected}") from None
    if values.ndim != 1:
        raise InputError(f"{name} has {values.ndim} dimensions: pass {expected}")
    wrong = np.flatnonzero(~np.isfinite(values) | ((values == 0) if name == "scale" else False))
    if len(wrong):
        what = "the elements there would be divided by it: pass 1 where elements shall stay as they are"
        if values[wrong[0]] != 0:
            what = "pass finite numbers"
        raise InputError(f"{name}[{wrong[0]}] = {values[wrong[0]]}: {what}")
    values.setflags(write=False)
    return values
