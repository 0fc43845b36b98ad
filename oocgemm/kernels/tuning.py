"""The results of `oocgemm tune`: per GPU, dtype and class of shapes, the rate of every rung and its best
parameters.

They are stored beside the calibrations.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oocgemm.errors import InputError
from oocgemm.kernels.registry import LADDER
from oocgemm.kernels.spec import Params
from oocgemm.system import cache

FORMAT = "oocgemm-tuning"
VERSION = 1
CUBLAS = "cublas"

# The product (m, n, k) on which each class is measured.
CLASSES = {"square": (8192, 8192, 8192), "update": (12288, 12288, 1024), "thin": (16384, 128, 4096)}
_THIN = 256


def shape_class(m: int, n: int, k: int) -> str:
    """Return the class of a product: `thin` if C has few rows or columns, `update` if k is small beside
    both."""
    if min(m, n) <= _THIN:
        return "thin"
    return "update" if 4 * k <= min(m, n) else "square"


@dataclass(frozen=True, slots=True)
class Measured:
    """The best parameters of a rung (none for cuBLAS) and their rate in flop/s."""

    rate: float
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """Measurements of one GPU: by dtype (`measured_as`), class and rung."""

    device: str
    date: str
    rungs: Mapping[str, Mapping[str, Mapping[str, Measured]]] = field(default_factory=dict)

    def choice(
        self, kernel: str, dtype: str, compute: str, shape: tuple[int, int, int]
    ) -> tuple[str, Params | None]:
        """Return a rung and its parameters (None: the defaults).

        `auto` is the fastest rung that was measured, or cuBLAS if none was.
        """
        found = self.rungs.get(measured_as(dtype, compute), {}).get(shape_class(*shape), {})
        if kernel == "auto":
            kernel = max(found, key=lambda name: found[name].rate, default=CUBLAS)
        return kernel, found[kernel].params if kernel in found else None

    def describe(self, kernel: str, dtype: str, compute: str) -> str:
        """Describe the choice for every class. Equal descriptions give equal bits."""
        said: dict[str, list[str]] = {}
        for name, shape in CLASSES.items():
            rung, params = self.choice(kernel, dtype, compute, shape)
            chosen = " ".join((rung, *(f"{key}={value}" for key, value in (params or {}).items())))
            said.setdefault(chosen, []).append(name)
        if len(said) == 1:
            return next(iter(said))
        return ", ".join(f"{chosen} for {' and '.join(classes)}" for chosen, classes in said.items())


def measured_as(dtype: str, compute: str) -> str:
    """Return the key of a dtype's measurements: the dtype, with "/compute" if that is not native."""
    return dtype if compute == "native" else f"{dtype}/{compute}"


def path_of(device: str) -> Path:
    """Return the path of a GPU's tuning file."""
    return cache.folder() / f"tuned-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def save(tuning: Tuning) -> Path:
    """Store a tuning and return its path. It replaces earlier measurements of the same dtypes and classes.

    Raises:
        InputError: the file cannot be written.
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
    """Return the tuning of a GPU: empty if its file is missing, damaged or of another version. Never raises.

    Rungs and parameters that are no longer in the ladder are left out.
    """
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
