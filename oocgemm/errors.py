"""Define every error that oocgemm raises on purpose, and its warning about data.

A message names the object that is at fault, the numbers that do not fit, and the remedy.
"""

import sys
import warnings
from collections.abc import Callable, Mapping


class OocGemmError(Exception):
    """The base class of all errors of this package."""


class InputError(OocGemmError, ValueError):
    """Raised for an operand, an output or an option that cannot be used."""


class NotFoundError(InputError, FileNotFoundError):
    """Raised for a path at which no array exists."""


class CombinationError(InputError):
    """Raised for a product that can be computed, but not by the executor that was asked to compute it.

    Executors are one device, several devices, workers, and the service. The message says what to drop.
    """


class BudgetError(OocGemmError, MemoryError):
    """Raised for a memory budget that is too small for every plan of the requested product.

    The message names budgets that suffice.

    - `least`: the smallest sufficient value, in bytes, of the budget that the message names first; None if
      unknown.
    - `needed`: the bytes of device memory and of host memory that the smallest plan needs; None if unknown.
    - `named`: the sizes that the message names, in bytes by option, if they are budgets of a product.
    - `naming`: returns an error like this one that names other sizes; None if there are none.
    """

    def __init__(
        self,
        message: str,
        *,
        least: int | None = None,
        needed: tuple[int, int] | None = None,
        named: Mapping[str, int] | None = None,
        naming: "Callable[[Mapping[str, int]], BudgetError] | None" = None,
    ) -> None:
        super().__init__(message)
        self.least = least
        self.needed = needed
        self.named = {} if named is None else named
        self.naming = naming


class BackendError(OocGemmError):
    """Raised for a backend, device, kernel or library that was requested and is unavailable."""


class OutOfMemoryError(BackendError):
    """Raised if a plan fits its budgets, but the device or the host has too little free memory now."""


class ExecutionError(OocGemmError):
    """Raised for a run that failed.

    The message names the operation that failed, and the tile or block of a matrix that it processed.
    """


class DataWarning(UserWarning):
    """Warns about values in the data that change what a result means, such as rows without variation.

    The library issues it with `warnings.warn`. A command prints it as one line on stderr, and a job of the
    service keeps it in its field `warnings`.
    """


def warn_of_data(message: str) -> None:
    """Issue a `DataWarning`, at the line outside this package that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("oocgemm."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DataWarning, stacklevel=level)


def missing_bfloat16() -> InputError:
    """Return the error for bfloat16 operands if ml_dtypes, which defines that dtype for NumPy, is missing."""
    return InputError("bfloat16 needs the package ml_dtypes: pip install 'oocgemm[bfloat16]'")
