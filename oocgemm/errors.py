"""Every error that oocgemm raises on purpose. A message names the object, the numbers and the remedy."""


class OocGemmError(Exception):
    """Base of all errors of this package."""


class InputError(OocGemmError, ValueError):
    """An operand, an output or an option that cannot be used."""


class NotFoundError(InputError, FileNotFoundError):
    """A path at which no array exists."""


class BudgetError(OocGemmError, MemoryError):
    """A memory budget that is too small for the smallest plan.

    The message names budgets that suffice. `least` is the size in bytes that the first budget named there
    must have. `needed` holds the bytes of device and of host memory that the smallest plan occupies.
    """

    def __init__(
        self, message: str, *, least: int | None = None, needed: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.least = least
        self.needed = needed


class BackendError(OocGemmError):
    """A backend, device, kernel or library that was requested and is unavailable."""


class OutOfMemoryError(BackendError):
    """Memory that a plan needs and that the device or the host cannot provide now."""


class ExecutionError(OocGemmError):
    """A run that failed. The message names the operation, and the tile or the block that it worked on."""


class ScheduleError(OocGemmError):
    """A schedule that violates an invariant. This is always a defect of the planner."""


def missing_bfloat16() -> InputError:
    """Return the error for bfloat16 operands where NumPy lacks the dtype."""
    return InputError("bfloat16 needs the package ml_dtypes: pip install 'oocgemm[bfloat16]'")
