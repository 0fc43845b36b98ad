"""Any change of a timeline ends with a report, or with one line that says what is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import ended, folder_of_operands, fuzz, garbled, mutated


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_of_operands(tmp_path_factory.mktemp("fuzz")) as folder:
        yield folder


@pytest.fixture(scope="module")
def log(here: Path) -> list[str]:
    assert (
        ended("run", "a", "b", "logged.npy", "--backend", "host", "--tile", "4x5x3", "--timeline", "log").code
        == 0
    )
    return (here / "log").read_text().splitlines()


@fuzz(600)
@given(data=st.data())
def test_any_log_ends_well(here: Path, log: list[str], data: st.DataObject) -> None:
    lines = list(log)
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.sampled_from([0, len(lines) - 1, *range(len(lines))])) if lines else 0
        match data.draw(st.integers(0, 3)):
            case 0 if lines:
                del lines[number]
            case 1 if lines:
                lines.insert(data.draw(st.integers(0, len(lines))), lines[number])
            case _ if lines:
                try:
                    lines[number] = json.dumps(mutated(data, json.loads(lines[number])))
                except ValueError:
                    lines[number] = "{"
    content = "\n".join(lines).encode()
    if data.draw(st.integers(0, 3)) == 0:
        content = garbled(data, content)
    (here / "odd.jsonl").write_bytes(content)
    ended("report", "odd.jsonl", *data.draw(st.sampled_from([[], ["--json"]])))


@pytest.mark.parametrize(
    "damage",
    [
        *(
            {"plan": 5},
            {"plan": {"least": []}},
            {"plan": {"required": {"read": "x"}}},
            {"plan": {"machine": 3}},
        ),
        *({"rates": {"kernel": 0}}, {"rates": 7}, {"operands": []}, {"operands": {"A": 1}}, {"retried": 3}),
        *(
            {"checks": [1]},
            {"checks": {"tiles": 1}},
            {"backend": []},
            {"machine": "x"},
            {"machine": {"memory": "x"}},
            {"devices": 2},
            {"workers": [{"name": "a"}]},
        ),
    ],
    ids=str,
)
def test_a_header_that_says_nonsense_is_refused(here: Path, log: list[str], damage: dict[str, Any]) -> None:
    # A fact in the last line replaces the same fact in the first line.
    ends = (json.dumps(json.loads(line) | damage) for line in (log[0], log[-1]))
    (here / "odd.jsonl").write_text("\n".join([next(ends), *log[1:-1], next(ends)]))
    assert "its header is damaged" in ended("report", "odd.jsonl").err
