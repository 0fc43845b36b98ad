"""Compute ``C = alpha op(A) @ op(B) + beta C`` for arrays that fit neither in GPU nor in host memory.

>>> import oocgemm
>>> oocgemm.matmul([[1.0, 2.0]], [[3.0], [4.0]], backend="host")
array([[11.]])

The package logs to the logger "oocgemm". Nothing is printed unless the program adds a handler to it.

The names of this package are imported at their first use. The command line shows its help without them.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from oocgemm.system.installed import __version__ as __version__

if TYPE_CHECKING:
    from oocgemm.backends import release
    from oocgemm.errors import (
        BackendError,
        BudgetError,
        CombinationError,
        DataWarning,
        ExecutionError,
        InputError,
        NotFoundError,
        OocGemmError,
        OutOfMemoryError,
    )
    from oocgemm.jobs.genotypes import genotypes
    from oocgemm.jobs.option_groups import Operand, Options, Output, PlanOptions, RunOptions
    from oocgemm.jobs.run import Neighbors, Pairs, Plan, Result
    from oocgemm.jobs.stats import Stats, stats
    from oocgemm.jobs.steps import Add, Cast, Correlation, Divide, Gaussian, RankOne, Scale
    from oocgemm.jobs.verify import Verification, verify
    from oocgemm.planning import TileShape
    from oocgemm.planning.partition import Partition
    from oocgemm.service.client import Client, Job
    from oocgemm.stores.folded import as_matrix
    from oocgemm.stores.joined import concat
    from oocgemm.stores.kept import keep
    from oocgemm.stores.transform import Transform
    from oocgemm.timeline import Report, Timeline, read_log, report
    from oocgemm.verbs.correlation import corr, cov
    from oocgemm.verbs.distances import distances
    from oocgemm.verbs.gemm import gemm, gram, matmul, plan, plan_gram
    from oocgemm.verbs.kinship import ibs, king
    from oocgemm.verbs.ld import LD, ld
    from oocgemm.verbs.ld_scores import LDScores, ld_scores
    from oocgemm.verbs.lstsq import LeastSquares, lstsq, ridge
    from oocgemm.verbs.neighbors import Nearest, neighbors
    from oocgemm.verbs.pca import PCA, PCAPlan, pca, plan_pca
    from oocgemm.verbs.reduce import MatVec, Reduce, Threshold, TopK, kernel_matmul, reduce
    from oocgemm.verbs.relationship import Relationships, grm
    from oocgemm.verbs.similarity import similarity
    from oocgemm.verbs.svd import SVD, svd
    from oocgemm.verbs.tensordot import tensordot

logging.getLogger("oocgemm").addHandler(logging.NullHandler())

__all__ = [
    "LD",
    "PCA",
    "SVD",
    "Add",
    "BackendError",
    "BudgetError",
    "Cast",
    "Client",
    "CombinationError",
    "Correlation",
    "DataWarning",
    "Divide",
    "ExecutionError",
    "Gaussian",
    "InputError",
    "Job",
    "LDScores",
    "LeastSquares",
    "MatVec",
    "Nearest",
    "Neighbors",
    "NotFoundError",
    "OocGemmError",
    "Operand",
    "Options",
    "OutOfMemoryError",
    "Output",
    "PCAPlan",
    "Pairs",
    "Partition",
    "Plan",
    "PlanOptions",
    "RankOne",
    "Reduce",
    "Relationships",
    "Report",
    "Result",
    "RunOptions",
    "Scale",
    "Stats",
    "Threshold",
    "TileShape",
    "Timeline",
    "TopK",
    "Transform",
    "Verification",
    "as_matrix",
    "concat",
    "corr",
    "cov",
    "distances",
    "gemm",
    "genotypes",
    "gram",
    "grm",
    "ibs",
    "keep",
    "kernel_matmul",
    "king",
    "ld",
    "ld_scores",
    "lstsq",
    "matmul",
    "neighbors",
    "pca",
    "plan",
    "plan_gram",
    "plan_pca",
    "read_log",
    "reduce",
    "release",
    "report",
    "ridge",
    "similarity",
    "stats",
    "svd",
    "tensordot",
    "verify",
]

# For each module, the public names that are imported from it.
_HOMES = {
    "errors": (
        *("BackendError", "BudgetError", "DataWarning", "ExecutionError", "InputError"),
        *("NotFoundError", "OocGemmError", "OutOfMemoryError", "CombinationError"),
    ),
    "backends": ("release",),
    "jobs.steps": ("Add", "Cast", "Correlation", "Divide", "Gaussian", "RankOne", "Scale"),
    "jobs.option_groups": ("Operand", "Options", "Output", "PlanOptions", "RunOptions"),
    "jobs.genotypes": ("genotypes",),
    "jobs.run": ("Neighbors", "Pairs", "Plan", "Result"),
    "jobs.stats": ("Stats", "stats"),
    "jobs.verify": ("Verification", "verify"),
    "planning": ("TileShape",),
    "planning.partition": ("Partition",),
    "service.client": ("Client", "Job"),
    "stores.folded": ("as_matrix",),
    "stores.joined": ("concat",),
    "stores.kept": ("keep",),
    "stores.transform": ("Transform",),
    "timeline": ("Report", "Timeline", "read_log", "report"),
    "verbs.correlation": ("corr", "cov"),
    "verbs.distances": ("distances",),
    "verbs.gemm": ("gemm", "gram", "matmul", "plan", "plan_gram"),
    "verbs.kinship": ("ibs", "king"),
    "verbs.ld": ("LD", "ld"),
    "verbs.ld_scores": ("LDScores", "ld_scores"),
    "verbs.lstsq": ("LeastSquares", "lstsq", "ridge"),
    "verbs.neighbors": ("Nearest", "neighbors"),
    "verbs.pca": ("PCA", "PCAPlan", "pca", "plan_pca"),
    "verbs.reduce": ("MatVec", "Reduce", "Threshold", "TopK", "kernel_matmul", "reduce"),
    "verbs.svd": ("SVD", "svd"),
    "verbs.tensordot": ("tensordot",),
    "verbs.relationship": ("Relationships", "grm"),
    "verbs.similarity": ("similarity",),
}
_MODULES = {name: f"oocgemm.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
