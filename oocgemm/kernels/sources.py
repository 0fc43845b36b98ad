"""Find the CUDA sources: inside the package in a wheel, beside it in a source tree.

The sources are sorted into folders; each source has a unique name. Includes are relative to the top folder.

    plain/      kernels that show one idea each            emulation/  float64 and float32 from int8 products
    fast/       kernels for speed                          integers/   exact products of int8
    checks/     checksums for the verification             transforms/ transforms of panels on load
    common/     shared headers, and the kernels finish and turn
    decoding/   panels composed of decoded chunks      encoding/   chunks of C compressed
    host/       C for the host (`oocgemm.system.installed`)
"""

from functools import cache
from pathlib import Path

from oocgemm.errors import BackendError


@cache
def kernel_folder() -> Path:
    """Return the top folder of the CUDA sources. Raises `BackendError` if the installation lacks it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / "common" / "scalar.cuh").is_file():
            return folder
    raise BackendError(f"the kernel sources are missing beside {package}: reinstall oocgemm")


def kernel_path(name: str) -> Path:
    """Return the path of the CUDA source `NAME.cu`.

    Raises:
        BackendError: there is no such source; the message lists those that exist.
    """
    found = {path.stem: path for path in kernel_folder().glob("*/*.cu")}
    if name not in found:
        raise BackendError(f"there is no kernel {name!r}; there are {', '.join(sorted(found))}")
    return found[name]
