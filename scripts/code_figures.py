#!/usr/bin/env python
"""Print figures of the package's code: its size, its names, and how much of it one tile passes through.

usage: scripts/code_figures.py [--json]

- lines, modules, classes: of the package, without the tests.
- repeated class names, repeated file names: names with several definitions. `base.py`, `__init__.py`, and a
  class that extends one of its own name do not count.
- tile modules, tile functions: those with a function that runs more often if C has more tiles. Calls of the
  planner do not count: it predicts the time of a larger product, and no tile passes through it.
- first call modules, first call seconds: modules of the package that a first `matmul` imports, and the time
  that they take by themselves, without NumPy and other packages.
- kinds: places that test for a kind of sink, element step or store (`scripts/kinds.py`).
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import kinds

PACKAGE = kinds.PACKAGE
FIRST_CALL = "import oocgemm; oocgemm.matmul([[1.0]], [[1.0]], backend='host')"


def size() -> dict[str, Any]:
    """Count lines, modules, classes, and names that are defined several times."""
    paths = sorted(PACKAGE.rglob("*.py"))
    homes, lines, classes = defaultdict[str, set[str]](set), 0, 0
    for path in paths:
        source = path.read_text()
        lines += source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                classes += 1
                homes[node.name] |= {str(path)} if node.name not in bases else set()
    files = Counter(path.name for path in paths if path.name not in ("base.py", "__init__.py"))
    return {
        "lines": lines,
        "modules": len(paths),
        "classes": classes,
        "repeated class names": sum(len(found) > 1 for found in homes.values()),
        "repeated file names": sum(count > 1 for count in files.values()),
    }


# Calls of functions of the package, by file and name, while a product runs. Threads that are kept from one
# product to the next count them, too.
counted: Counter[tuple[str, str]] = Counter()
TOP = str(PACKAGE) + "/"
PLANNER = tuple(TOP + room for room in ("planning/search/", "planning/cost/"))


def count(frame: Any, event: str, _: Any) -> None:
    """Count a call, unless the planner makes it."""
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(TOP):
        return
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith(PLANNER):
            return
        caller = caller.f_back
    counted[code.co_filename.removeprefix(TOP), code.co_qualname] += 1


def calls(tiles: int, folder: Path) -> Counter[tuple[str, str]]:
    """Run a product of zarr arrays with some tiles. Count the calls of each function of the package."""
    import numpy as np
    import zarr

    from oocgemm.cli import main

    for name, shape in (("a", (8 * tiles, 8)), ("b", (8, 8))):
        path = folder / f"{name}{tiles}.zarr"
        zarr.create_array(path, data=np.ones(shape), chunks=(8, 8), compressors=None, overwrite=True)
    paths = [str(folder / f"{name}{tiles}.zarr") for name in "abc"]
    options = ["--backend", "host", "--tile", "8x8x8", "--overwrite", "--quiet"]
    counted.clear()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        main.cli(["run", *paths, *options], standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return counted.copy()


def tile_path() -> set[tuple[str, str]]:
    """Return the functions, as (file, name), that each tile of `oocgemm run` passes through."""
    with tempfile.TemporaryDirectory() as folder:
        calls(4, Path(folder))  # what runs only once per process has run
        # Some functions run from time to time, however many tiles there are. So three runs are compared.
        few, some, many = (calls(tiles, Path(folder)) for tiles in (4, 22, 40))
    return {of for of in many if many[of] >= some[of] + 15 and some[of] >= few[of] + 15}


def first_call() -> dict[str, Any]:
    """Return how many modules of the package a first call imports, and the seconds that they take."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", FIRST_CALL], capture_output=True, text=True, check=True
    )
    own = re.findall(r"import time: +(\d+) \| +\d+ \| +oocgemm[.\w]*", done.stderr)
    return {"first call modules": len(own), "first call seconds": round(sum(map(int, own)) / 1e6, 3)}


def main() -> None:
    """Print all figures."""
    passed = tile_path()
    figures = {
        **size(),
        "tile modules": len({file for file, _ in passed}),
        "tile functions": len(passed),
        **first_call(),
        "kinds": len(list(kinds.places())),
    }
    if "--json" in sys.argv:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        print(f"{name:24}{figure:>10,}")
    print("each tile passes through:", *sorted({file for file, _ in passed}), sep="\n  ")


if __name__ == "__main__":
    main()
