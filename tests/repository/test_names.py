"""Each module of the package gives a name at its top level to one thing.

A linter finds functions and classes that are defined twice, but not constants.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import oocgemm

MODULES = sorted(Path(oocgemm.__file__).parent.rglob("*.py"))


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the statements of a module define, once for each definition."""
    for node in tree.body:
        match node:
            case (
                ast.FunctionDef(name=name, decorator_list=decorators)
                | ast.ClassDef(name=name, decorator_list=decorators)
            ):
                if not any(isinstance(one, ast.Name) and one.id == "overload" for one in decorators):
                    yield name
            case ast.Assign(targets=targets):
                for target in targets:
                    parts = target.elts if isinstance(target, ast.Tuple) else [target]
                    yield from (part.id for part in parts if isinstance(part, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                yield name
            case ast.ImportFrom(names=names):
                yield from (one.asname or one.name for one in names)


def repeated(source: str) -> list[str]:
    """Return the names that a module defines more than once."""
    return [name for name, count in Counter(defined(ast.parse(source))).items() if count > 1]


def test_a_module_defines_a_name_once() -> None:
    assert MODULES
    found = {str(path): repeated(path.read_text()) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


def test_second_definitions_are_found() -> None:
    source = "from a import b\nb: int = 1\nC = D = 2\nC, e = 3, 4\ndef e(): ...\nf: int\nf = 1\n"
    assert sorted(repeated(source)) == ["C", "b", "e"]
