"""Out-of-core streamed matrix products: ``C = alpha op(A) @ op(B) + beta C`` for zarr arrays that fit neither
the GPU's memory nor the host's.

>>> import oocgemm
>>> result = oocgemm.matmul([[1.0, 2.0]], [[3.0], [4.0]], backend="host")
>>> result.out
array([[11.]])
"""

from oocgemm.errors import (
    BackendError,
    BudgetError,
    ExecutionError,
    InputError,
    OocGemmError,
    OutOfMemoryError,
)
from oocgemm.jobs.api import gemm, matmul, plan
from oocgemm.jobs.result import Result
from oocgemm.jobs.verify import Verification, verify
from oocgemm.planning import Plan, TileShape
from oocgemm.system.version import __version__ as __version__
from oocgemm.timeline import Report, Timeline, read_log, report

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
