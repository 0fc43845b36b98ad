"""Compute ``C = alpha op(A) @ op(B) + beta C`` for arrays that fit neither in GPU nor in host memory.

>>> import oocgemm
>>> oocgemm.matmul([[1.0, 2.0]], [[3.0], [4.0]], backend="host")
array([[11.]])

The package logs to the logger "oocgemm". Nothing is printed unless the program adds a handler to it.
"""

import logging

from oocgemm.errors import (
    BackendError,
    BudgetError,
    ExecutionError,
    InputError,
    NotFoundError,
    OocGemmError,
    OutOfMemoryError,
)
from oocgemm.jobs.api import gemm, matmul, plan
from oocgemm.jobs.options import Operand, Options, Output, PlanOptions, RunOptions
from oocgemm.jobs.plan import Plan
from oocgemm.jobs.result import Result
from oocgemm.jobs.verify import Verification, verify
from oocgemm.planning import TileShape
from oocgemm.system.version import __version__ as __version__
from oocgemm.timeline import Report, Timeline, read_log, report

logging.getLogger("oocgemm").addHandler(logging.NullHandler())

__all__ = [
    "BackendError",
    "BudgetError",
    "ExecutionError",
    "InputError",
    "NotFoundError",
    "OocGemmError",
    "Operand",
    "Options",
    "OutOfMemoryError",
    "Output",
    "Plan",
    "PlanOptions",
    "Report",
    "Result",
    "RunOptions",
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
