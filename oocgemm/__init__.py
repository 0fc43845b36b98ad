"""Out-of-core streamed matrix products: ``C = alpha op(A) @ op(B) + beta C`` for zarr arrays that fit neither
the GPU's memory nor the host's.

>>> import oocgemm
>>> result = oocgemm.matmul([[1.0, 2.0]], [[3.0], [4.0]], backend="host")
>>> result.out
array([[11.]])
"""

from oocgemm.api import gemm, matmul, plan
from oocgemm.errors import (
    BackendError,
    BudgetError,
    ExecutionError,
    InputError,
    OocGemmError,
    OutOfMemoryError,
)
from oocgemm.plan import Plan, TileShape
from oocgemm.result import Result
from oocgemm.timeline import Report, Timeline, read_log, report
from oocgemm.verify import Verification, verify
from oocgemm.version import __version__ as __version__

__all__ = [
    "BackendError",
    "BudgetError",
    "ExecutionError",
    "InputError",
    "OocGemmError",
    "OutOfMemoryError",
    "Plan",
    "Report",
    "Result",
    "TileShape",
    "Timeline",
    "Verification",
    "gemm",
    "matmul",
    "plan",
    "read_log",
    "report",
    "verify",
]
