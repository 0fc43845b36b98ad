"""Store the results of `oocgemm tune`, and choose a kernel from them.

Products are divided into three classes of shapes: "square", "update" and "thin" (`shape_class`). For each
dtype, precision and class, the results have the best parameters of each kernel, and its rate with them. There
is one file per GPU, in oocgemm's cache directory.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from oocgemm.errors import InputError
from oocgemm.kernels.ladder import LADDER
from oocgemm.kernels.spec import Params
from oocgemm.system import cache
from oocgemm.values import dataclass

# A tuning file contains this FORMAT, and the VERSION of its layout. `load` ignores files with another FORMAT
# or VERSION.
FORMAT = "oocgemm-tuning"
VERSION = 1
CUBLAS = "cublas"

# Classes of shapes, each with the product (m, n, k) on which `oocgemm tune` measures it.
CLASSES = {"square": (8192, 8192, 8192), "update": (12288, 12288, 1024), "thin": (16384, 128, 4096)}
_THIN = 256  # a product is thin if C has at most this many rows, or at most this many columns


def shape_class(m: int, n: int, k: int) -> str:
    """Return the class of a product: "thin", "update" or "square".

    It is "thin" if m or n is at most 256. Otherwise it is "update" if k is at most a quarter of m and of n:
    such a product updates a large C. All others are "square".
    """
    if min(m, n) <= _THIN:
        return "thin"
    return "update" if 4 * k <= min(m, n) else "square"


@dataclass(frozen=True, slots=True)
class Measured:
    """The parameters with which a kernel was the fastest (empty for cuBLAS), and its flop/s with them."""

    rate: float
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """The measurements of one GPU.

    Attributes:
        device: the name of the GPU.
        date: the date of the last measurement, in ISO format.
        rungs: `rungs[x][y][z]` is the result of kernel z for products of class y. x is the dtype and
            precision, as `measured_as` returns it.
    """

    device: str
    date: str
    rungs: Mapping[str, Mapping[str, Mapping[str, Measured]]] = field(default_factory=dict)

    def choice(
        self, kernel: str, dtype: str, compute: str, shape: tuple[int, int, int]
    ) -> tuple[str, Params | None]:
        """Return the name of the kernel to use, and its best parameters (None if they were not measured).

        `kernel` is a name or "auto", for the fastest kernel that was measured for this dtype, precision and
        class of shapes. If none was measured, "auto" gives cuBLAS.
        """
        found = self.rungs.get(measured_as(dtype, compute), {}).get(shape_class(*shape), {})
        if kernel == "auto":
            kernel = max(found, key=lambda name: found[name].rate, default=CUBLAS)
        return kernel, found[kernel].params if kernel in found else None

    def describe(self, kernel: str, dtype: str, compute: str) -> str:
        """Describe the kernel and the parameters that `choice` returns for each class of shapes.

        Two runs with equal descriptions use the same kernels, so their results have equal bits.
        """
        said: dict[str, list[str]] = {}
        for name, shape in CLASSES.items():
            rung, params = self.choice(kernel, dtype, compute, shape)
            chosen = " ".join((rung, *(f"{key}={value}" for key, value in (params or {}).items())))
            said.setdefault(chosen, []).append(name)
        if len(said) == 1:
            return next(iter(said))
        return ", ".join(f"{chosen} for {' and '.join(classes)}" for chosen, classes in said.items())


def measured_as(dtype: str, compute: str) -> str:
    """Return the key of measurements for a dtype and precision, such as "float64" or "float32/tf32"."""
    return dtype if compute == "native" else f"{dtype}/{compute}"


def path_of(device: str) -> Path:
    return cache.folder() / f"tuned-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def save(tuning: Tuning) -> Path:
    """Merge a tuning into the file of its GPU, and return the path of the file.

    New measurements replace old ones of the same dtype and class of shapes. Raises `InputError` if the file
    cannot be written.
    """
    path = path_of(tuning.device)
    rungs = {dtype: dict(classes) for dtype, classes in load(tuning.device).rungs.items()}
    for dtype, classes in tuning.rungs.items():
        rungs[dtype] = rungs.get(dtype, {}) | dict(classes)
    whole = {"format": FORMAT, "version": VERSION} | asdict(Tuning(tuning.device, tuning.date, rungs))
    try:
        cache.write_whole(path, json.dumps(whole, indent=1).encode())
    except OSError as error:
        raise InputError(
            f"the tuning cannot be written to {path}: {error.strerror}; "
            "set OOCGEMM_CACHE to a writable folder"
        ) from error
    return path


def load(device: str) -> Tuning:
    """Return the tuning of a GPU, without kernels and parameters that this version does not have.

    The tuning is empty if the file is missing or damaged, or has another version.
    """
    return _load(device, cache.version())


@lru_cache(16)
def _load(device: str, version: object) -> Tuning:
    """Return the tuning in the file of a GPU. `version` differs if the file may have changed."""
    with suppress(OSError, InputError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        data = json.loads(path_of(device).read_text(encoding="utf-8"))
        if (data["format"], data["version"], data["device"]) == (FORMAT, VERSION, device):
            rungs = {
                dtype: {shape: _known(found) for shape, found in classes.items()}
                for dtype, classes in data["rungs"].items()
            }
            return Tuning(device, str(data["date"]), rungs)
    return Tuning(device, "")


def _known(found: Mapping[str, Any]) -> dict[str, Measured]:
    kept = {}
    for name, entry in found.items():
        rate, params = float(entry["rate"]), dict(entry["params"])
        variants = [variant for kernel in LADDER if kernel.name == name for variant in kernel.variants]
        if rate > 0 and (name == CUBLAS or params in variants):
            kept[name] = Measured(rate, params)
    return kept
