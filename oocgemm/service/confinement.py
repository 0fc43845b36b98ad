"""What processes that open arrays of users may use: files, by Landlock, and environment variables.

A path that `limits.resolve` has checked can be replaced by a symbolic link before a job opens it. A chunk of
an array can be such a link from the start. So the check serves clear messages only, and Landlock
(landlock(7), Linux 5.13 and later) is the boundary. Workers and planners call `restrict_to`.

A process cannot undo its restriction. Its child processes inherit the restriction, but have no part of /proc.
Outside the folders of jobs, a process may read single files, and folders with code only: shared libraries,
Python, and Python's packages. The kernel checks a right when a file is opened, on the file to which all
symbolic links lead. A link is therefore no way out, whenever it was made. These remain possible: to use files
that are open already, to call stat(2) on any path, and to read a file through a hard link in an allowed
folder. Nobody can make a hard link to a file that they cannot write themselves (``fs.protected_hardlinks``).

A restricted process gets the environment variables that are listed here, and no other ones. The environment
of the server may contain tokens, and a process could be made to write its environment into a result.
"""

import ctypes
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path

import oocgemm
from oocgemm.errors import InputError
from oocgemm.system import cache

# The folders that jobs may "read", and those that they may "write" too: see `limits.allowed_folders`.
Confinement = Mapping[str, Sequence[str]]

# The numbers of the system calls are the same on all architectures. glibc has no wrappers.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38

# Rights, as bits (LANDLOCK_ACCESS_FS_*).
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
# The number of rights that an ABI version knows. Later versions add rights of other kinds, on network,
# signals and threads. They are not used: the data of a job chooses files only.
_KNOWN = {0: 0, 1: 13, 2: 14, 3: 15, 4: 15, 5: 16}

READ = READ_FILE | READ_DIR
# A run makes files and folders, and moves them between folders (REFER). It needs no links and no devices.
WRITE = READ | WRITE_FILE | TRUNCATE | MAKE_REG | MAKE_DIR | REMOVE_FILE | REMOVE_DIR | REFER
# The rights that a rule on a file, not a folder, may have.
ON_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
DEVICE = ON_FILE & ~EXECUTE | READ_DIR

# What Python and CUDA read while a job runs, as strace(1) and a library that wraps open(2) showed it for jobs
# on the host and on GPUs. A pattern stands for all files that match it.
SYSTEM = (
    # The dynamic loader reads the first two files, Python the time zone.
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime"),
    # This package reads memory, cores and the machine's boot; the C library overcommitment; CUDA device
    # numbers, the driver's version and parameters, and the lowest address.
    *("/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/version", "/proc/filesystems", "/proc/devices"),
    *("/proc/modules", "/proc/driver/nvidia/params", "/proc/driver/nvidia/version"),
    *("/proc/sys/kernel/random/boot_id", "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/mmap_min_addr"),
    *("/sys/devices/system/cpu/online", "/sys/devices/system/cpu/possible"),
    *("/sys/devices/system/cpu/present", "/sys/devices/system/memory/block_size_bytes"),
    *("/sys/devices/system/node/online", "/sys/devices/system/node/possible"),
    *(f"/sys/devices/system/node/node*/{name}" for name in ("cpumap", "cpulist", "meminfo", "distance")),
    # The links of GPUs.
    *(f"/sys/bus/pci/devices/*/{name}" for name in ("numa_node", "max_link_speed", "max_link_width")),
    *(f"/sys/kernel/mm/transparent_hugepage/{name}" for name in ("enabled", "hpage_pmd_size")),
)
# Files of this process in /proc: maps (to find BLAS), mounts, cgroups, memory, and its start. Its environment
# and its descriptors stay closed, and so do the folders of other processes.
OF_PROCESS = ("maps", "mountinfo", "cgroup", "status", "statm", "stat")
# Limits and usage of the cgroups of this process, in their folders and those above.
OF_CGROUP = (
    *("memory.max", "memory.high", "memory.current", "memory.stat"),
    *("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
CGROUPS = Path("/sys/fs/cgroup")
# Folders with shared libraries and their data, which packages have installed for all users to read.
SHARED_LIBRARIES = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib"),
    *("/usr/local/lib64", "/usr/local/cuda*", "/usr/local/nvidia"),
    *("/usr/share/nvidia", "/usr/share/locale", "/usr/share/zoneinfo"),
)
# Folders with programs. A program can be run only if it can be read.
PROGRAMS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin")
# Variables with folders that the dynamic loader, or cupy, searches for libraries.
LIBRARIES = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")
# Device files. CUDA opens those of its driver for reading and writing, and works by ioctls on them: without
# IOCTL_DEV it finds no device. The files must exist already, because nvidia-modprobe, which makes them, is
# setuid. So `limits` opens the GPUs first. Other devices, disks above all, stay closed.
DEVICES = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
    *("/dev/nvidia*", "/dev/dxg"),
)

# Environment variables that workers and planners get. Python, the C library and the dynamic loader use these.
_OF_SYSTEM = (
    *("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "LC_NUMERIC", "PATH", "TMPDIR", "TZ"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
    *("PYTHONFAULTHANDLER", "PYTHONMALLOC", "PYTHONNOUSERSITE", "PYTHONUSERBASE"),
    *("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"),
)
# Variables that this package and its libraries use. None of their values is a secret.
_OF_LIBRARIES = (
    *("OOCGEMM_CACHE", "OOCGEMM_DEBUG", "OOCGEMM_PROBE", "XDG_CACHE_HOME", "HDF5_PLUGIN_PATH"),
    *("HDF5_USE_FILE_LOCKING", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"),
    *("OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_MAIN_FREE", "GOTO_NUM_THREADS"),
    *("MKL_NUM_THREADS", "MKL_DYNAMIC", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "BLOSC_NTHREADS", "RAYON_NUM_THREADS"),
    *("CUDA_PATH", "CUDA_HOME", "CUDA_ROOT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT"),
    *("CUPY_CACHE_IN_MEMORY", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE"),
)
VARIABLES = frozenset((*_OF_SYSTEM, *_OF_LIBRARIES))


class _Ruleset(ctypes.Structure):
    """``struct landlock_ruleset_attr``, as far as the first ABI has it."""

    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    """``struct landlock_path_beneath_attr``, which is packed."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Return the version of Landlock's interface that the kernel has; 0 if Landlock cannot be used."""
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


def known(version: int) -> int:
    """Return the rights on files that an ABI version knows. A kernel refuses others.

    ABI 1 (Linux 5.13 to 5.18) never allows moving a file to another folder. There, jobs with beta != 0
    fail. Before ABI 3 (Linux 6.2), truncate(2) is not restricted, and before ABI 5 (Linux 6.10) ioctl(2).
    """
    return (1 << _KNOWN[min(version, max(_KNOWN))]) - 1


def environment(**more: str) -> Mapping[str, str]:
    """Return the environment of a worker or a planner: the listed variables of this process, and `more`."""
    return {name: value for name, value in os.environ.items() if name in VARIABLES} | more


def restrict_to(allowed: Confinement, *own: Path) -> None:
    """Restrict this process as `restrict` does, to the folders that jobs may use, and to its `own` ones.

    After this call, the package also refuses symbolic links that lead out of a root. Landlock alone would let
    a chunk be a link to a shared library, say, or to a file of another root.
    """
    read, write = ([Path(each) for each in allowed[mode]] for mode in ("read", "write"))
    restrict(read, [*write, *own])
    from oocgemm.stores.files import confine  # this import loads NumPy

    confine([*allowed["read"], *allowed["write"]])


def restrict(read: Sequence[Path], write: Sequence[Path]) -> None:
    """Restrict this process for good to what Python and CUDA need, and to folders or files.

    Raises `InputError` if the kernel has no Landlock, or a path cannot be opened. Raises `RuntimeError` if
    the process has several threads: Landlock would not restrict the others.
    """
    version = abi()
    if not version:
        raise InputError(
            "jobs cannot be confined: this kernel has no Landlock (Linux 5.13 or later, with landlock in "
            "lsm=): boot with it, or pass --no-confine"
        )
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"restrict must be called before a thread starts: there are {threads} threads")
    handled = known(version)
    ruleset = _call(
        _CREATE_RULESET,
        ctypes.byref(_Ruleset(handled)),
        ctypes.c_size_t(ctypes.sizeof(_Ruleset)),
        ctypes.c_uint32(0),
    )
    try:
        for path, rights in _needed():
            with suppress(OSError):  # few systems have all of these files
                os.close(_allow(ruleset, path, rights & handled))
        # The kernel may forget the entry of such a file, and make another entry, which has no rule. So the
        # file stays open.
        for name in OF_PROCESS:
            with suppress(OSError):
                _allow(ruleset, Path("/proc/self", name), READ_FILE & handled)
        for rights, paths in ((READ, read), (WRITE, write)):
            for path in paths:
                try:
                    os.close(_allow(ruleset, path, rights & handled))
                except OSError as error:
                    raise InputError(f"a job cannot be given {path}: {error.strerror}") from error
        # This rules out setuid programs. Without it, only a process with CAP_SYS_ADMIN may restrict itself.
        _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _needed() -> Iterator[tuple[Path, int]]:
    """Yield what Python, CUDA and this package use, with the rights that they need."""
    for pattern in (*SYSTEM, *_of_cgroups()):
        yield from ((Path(path), READ_FILE) for path in glob(pattern))
    # CUDA lists the NUMA nodes.
    yield Path("/sys/devices/system/node"), READ_DIR
    # CUDA names its threads by writing to /proc/self/task/*/comm, and finds no device if it cannot.
    yield Path("/proc/self/task"), WRITE_FILE | TRUNCATE
    for folder in _code():
        yield folder, READ | EXECUTE
    for program in PROGRAMS:
        yield Path(program), READ_FILE | EXECUTE
    # Calibrations, and compiled kernels. Jobs cannot write them: a chunk of C that is a link to a compiled
    # kernel would replace the code that the jobs of other users run.
    with suppress(InputError):
        yield cache.folder(), READ
    for pattern in DEVICES:
        yield from ((Path(path), DEVICE) for path in glob(pattern))


def _of_cgroups() -> Iterator[str]:
    """Yield the files of `OF_CGROUP` of the cgroups of this process, and of those above them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = CGROUPS / controllers if controllers else CGROUPS
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield from (f"{folder}/{name}" for name in OF_CGROUP)


def _code() -> Iterator[Path]:
    """Yield the folders with the code that this process may load."""
    package = Path(oocgemm.__file__).parent
    # In a checkout, the kernels lie beside the package.
    yield from (package, package.parent / "kernels")
    # A virtual environment has only links to the interpreter and the standard library of `base_prefix`.
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    yield from (Path(prefix, name) for prefix in prefixes for name in ("lib", "lib64", "targets"))
    for pattern in SHARED_LIBRARIES:
        yield from map(Path, glob(pattern))
    # `python -m` puts the working folder into sys.path. It may hold anything, so it is not allowed.
    for entry in sys.path:
        if entry and os.path.abspath(entry) != os.getcwd():
            yield from _packages(Path(entry))
    for name in LIBRARIES:
        yield from (Path(entry) for entry in os.environ.get(name, "").split(":") if entry)


def _packages(folder: Path) -> list[Path]:
    """Return the code in a folder of `sys.path`: the folder, or a checkout's packages without its data."""
    if not any((folder / name).exists() for name in ("pyproject.toml", "setup.py", ".git")):
        return [folder]
    return [path.parent for path in folder.glob("*/__init__.py") if path.parent.name != "tests"]


def _allow(ruleset: int, path: Path, rights: int) -> int:
    """Allow rights on a file, or on a folder and all in it. Return its descriptor. Raises `OSError`."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= ON_FILE
        rule = ctypes.byref(_PathBeneath(rights, descriptor))
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _call(number: int, *arguments: object) -> int:
    return _check(_libc().syscall(ctypes.c_long(number), *arguments))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
