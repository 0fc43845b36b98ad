"""Every error that oocgemm raises on purpose. Each message names the thing, the numbers and the remedy."""


class OocGemmError(Exception):
    """Base of all errors of this package."""


class InputError(OocGemmError):
    """An operand, an output or an option that cannot be used as it is."""


class BudgetError(OocGemmError):
    """A memory budget that cannot hold the smallest plan.

    The message names budgets that can. `least` is the number of bytes that the first budget it names must have.
    """

    def __init__(self, message: str, *, least: int | None = None) -> None:
        super().__init__(message)
        self.least = least


class BackendError(OocGemmError):
    """A backend, device, kernel or library that is asked for and does not answer."""


class OutOfMemoryError(BackendError):
    """Memory that a plan is to hold and that the device or the host does not have now."""


class ExecutionError(OocGemmError):
    """A run that failed on its way; the message names the operation and what it was working on."""


class ScheduleError(OocGemmError):
    """A schedule that breaks one of its invariants: always a defect of the planner."""


def missing_bfloat16() -> InputError:
    """What is said where NumPy has no bfloat16."""
    return InputError("bfloat16 needs the package ml_dtypes: pip install 'oocgemm[bfloat16]'")
