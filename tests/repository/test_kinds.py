"""Only the code of a kind itself asks which kind of sink, cover, operand, layout or store there is."""

import ast

import kinds  # type: ignore[import-not-found]
import pytest


def test_no_shared_module_tests_for_a_kind() -> None:
    assert [f"{name}:{line}: {text}" for name, line, text in kinds.places()] == []


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(x, NpyMatrix)",
        "isinstance(x, int | stores.NpyMatrix)",
        "type(problem.sink) is Reduced",
        "problem.cover.name == 'full'",
        "problem.b.name in ('same',)",
        "problem.centered",
        "isinstance(layout, Lines)",
        "isinstance(b, Updated)",
        "match x:\n    case Triangle():\n        pass",
    ],
)
def test_each_way_to_test_for_a_kind_is_found(text: str) -> None:
    classes = kinds.kinds() | {"NpyMatrix"}
    tree = ast.parse(text)
    assert any(kinds._tests_kind(node, classes) for node in ast.walk(tree))
    harmless = ast.parse("isinstance(x, int)\nproblem.cover.elements(2, 2)\nx.name == 'a'\ntype(x) is int")
    assert not any(kinds._tests_kind(node, classes) for node in ast.walk(harmless))
