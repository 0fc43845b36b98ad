#!/usr/bin/env python
"""List the places that test for a kind of sink, element step or store outside the files of these kinds.

usage: scripts/kinds.py [--count]

Such a place is an `isinstance`, a class pattern of `match` or a comparison of types that names a class of
arrays, sinks, covers, operands or layouts, a comparison of the name of one, or an attribute that says which
element steps a product has. Every place makes the next kind harder to add.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
PACKAGE = TOP / "oocgemm"
# Attributes of a product that say which element steps it has.
FLAGS = {"centered", "measured", "expands"}
# Attributes of which a comparison with a name would ask for a kind, and the values that hold these kinds.
NAMED = {"cover", "sink", "b"}
# Files of kinds: each may know itself. `jobs/request.py`, `jobs/operands.py`, `jobs/verify.py` and
# `jobs/row_slices.py` make sinks, and `planning/problem.py` makes products from records.
OWN = (
    *("stores/", "planning/problem.py", "planning/layout.py", "planning/sinks.py", "planning/cover.py"),
    *("integrity/samples.py",),
    *("backends/host/finish.py", "backends/cuda/finisher.py", "backends/cuda/session.py"),
    *("kernels/launches.py", "jobs/operands.py", "jobs/verify.py", "jobs/request.py", "jobs/row_slices.py"),
)


@cache
def kinds() -> set[str]:
    """Return the names of the classes of arrays, sinks, covers and operands, but for protocols and bases."""
    found = set[str]()
    for path in (PACKAGE / "stores").rglob("*.py"):
        found |= {each for each in _classes(path) if each.endswith(("Matrix", "Store"))}
    for name in ("sinks", "cover"):
        found |= set(_classes(PACKAGE / "planning" / f"{name}.py"))
    for base in ("Layout", "Route", "Operand", "ElementStep"):
        found |= _extensions(base, (PACKAGE / "planning").glob("*.py"))
    found |= _extensions("Into", [PACKAGE / "jobs" / "request.py"])
    return found - {"Matrix", "Store", "Sink", "Cover", "Alike"}


def _extensions(base: str, files: Iterable[Path]) -> set[str]:
    """Return the names of the classes in some files that extend a class, directly or not."""
    bases = {
        node.name: {each.id for each in node.bases if isinstance(each, ast.Name)}
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    found, before = {base}, set[str]()
    while found != before:
        before = found
        found = found | {name for name, above in bases.items() if above & found}
    return found - {base}


def _classes(path: Path) -> Iterator[str]:
    return (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def places() -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, text) of each place that tests for a kind."""
    classes = kinds()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(OWN):
            continue
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if _tests_kind(node, classes):
                yield name, node.lineno, lines[node.lineno - 1].strip()  # type: ignore[attr-defined]


def _tests_kind(node: ast.AST, classes: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return _names(node.args[1], classes)
    if isinstance(node, ast.MatchClass):
        return _names(node.cls, classes)
    if isinstance(node, ast.Compare) and any(map(_is_type, (node.left, *node.comparators))):
        return _names(node, classes)
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "name":
        owner = node.left.value
        return isinstance(owner, ast.Attribute) and owner.attr in NAMED
    if isinstance(node, ast.Attribute) and node.attr in FLAGS:
        owner = node.value
        named = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        return named.endswith(("problem", "product")) or named == "b"  # variables that hold a product
    return False


def _names(node: ast.AST, classes: set[str]) -> bool:
    """Return whether an expression names one of the classes, as a name or as an attribute of a module."""
    found = (x.id if isinstance(x, ast.Name) else getattr(x, "attr", "") for x in ast.walk(node))
    return any(name in classes for name in found)


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def main() -> int:
    """Print the places, or only their number. Return 1 if there are any."""
    found = list(places())
    if "--count" not in sys.argv:
        for name, line, text in found:
            print(f"oocgemm/{name}:{line}: {text}")
    print(f"{len(found)} places in {len({name for name, _, _ in found})} modules test for a kind")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
