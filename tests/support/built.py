"""Build arrays once for all tests of a run, and copy them for each: zarr takes 0.5 ms to write a chunk."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.native import BUILDS


def copy_built(name: str, build: Callable[[Path], object], folder: Path) -> None:
    """Copy into a folder what `build` writes into an empty one.

    All processes of a test run share what was built by its name.
    """
    kept = Path(os.environ[BUILDS], name)
    if not kept.exists():
        new = kept.with_name(f"{name}.{os.getpid()}")
        new.mkdir()
        build(new)
        with suppress(OSError):  # another process has built it meanwhile
            new.rename(kept)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
