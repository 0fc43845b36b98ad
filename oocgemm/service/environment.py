"""The environment of the processes that open arrays of users: workers and planners.

Such a process gets the variables that are listed here, and no other ones. The environment of the server may
have tokens. What a process has in its environment, it could be made to write into a result.
"""

import os
from collections.abc import Mapping

# What Python, the C library and the dynamic loader use.
SYSTEM = (
    *("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "LC_NUMERIC", "PATH", "TMPDIR", "TZ"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
    *("PYTHONFAULTHANDLER", "PYTHONMALLOC", "PYTHONNOUSERSITE", "PYTHONUSERBASE"),
    *("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"),
)
# What this package and the libraries that it uses take: none of these values is a secret.
LIBRARIES = (
    *("OOCGEMM_CACHE", "OOCGEMM_DEBUG", "OOCGEMM_PROBE", "XDG_CACHE_HOME", "HDF5_PLUGIN_PATH"),
    *("HDF5_USE_FILE_LOCKING", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"),
    *("OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_MAIN_FREE", "GOTO_NUM_THREADS"),
    *("MKL_NUM_THREADS", "MKL_DYNAMIC", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "BLOSC_NTHREADS", "RAYON_NUM_THREADS"),
    *("CUDA_PATH", "CUDA_HOME", "CUDA_ROOT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE", "CUDA_LAUNCH_BLOCKING"),
    *(
        "CUDA_MODULE_LOADING",
        "CUDA_FORCE_PTX_JIT",
        "CUDA_DISABLE_PTX_JIT",
    ),
    *("CUPY_CACHE_IN_MEMORY", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE"),
)
ALLOWED = frozenset((*SYSTEM, *LIBRARIES))


def environment(**more: str) -> Mapping[str, str]:
    """Return the environment of a worker or a planner: the listed variables of this process, and `more`."""
    return {name: value for name, value in os.environ.items() if name in ALLOWED} | more
