"""Finds the CUDA sources: inside the package in a wheel, beside it in a source tree."""

from functools import cache
from pathlib import Path

from oocgemm.errors import BackendError


@cache
def kernel_folder() -> Path:
    """The folder that holds the `.cu` and `.cuh` files. Raises `BackendError` if the installation lacks it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / "scalar.cuh").is_file():
            return folder
    raise BackendError(f"the kernel sources are missing beside {package}: reinstall oocgemm")


def kernel_source(name: str) -> str:
    """The text of one kernel. Raises `BackendError` for a name that is no kernel, with those that are."""
    path = kernel_folder() / f"{name}.cu"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in kernel_folder().glob("*.cu")))
        raise BackendError(f"there is no kernel {name!r}; there are {names}")
    return path.read_text(encoding="utf-8")
