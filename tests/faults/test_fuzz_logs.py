"""Any change of a timeline ends with a report, or with one line that says what is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import ended, folder_of_operands, fuzz, garbled, mutated
from tests.support.logged_parts import merged
from tests.timeline.test_merge import MS, PART, PLAN, STARTED, child, op


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


@pytest.fixture(scope="module")
def merged_log(here: Path) -> list[str]:
    """The log of a run of two workers, of which one died and one added partial products."""
    logs = [
        child(here, "a", 0, PART, 50 * MS),
        child(here, "b", 5 * MS, PART[:2], None),
        child(here, "b", 60 * MS, [op(0, "read", 0, MS)], 2 * MS, task="reduce"),
    ]
    merged({"started": STARTED, "plan": PLAN}, logs, 80 * MS, here / "merged.jsonl")
    return (here / "merged.jsonl").read_text().splitlines()


@fuzz(600)
@given(data=st.data())
def test_any_log_ends_well(here: Path, log: list[str], data: st.DataObject) -> None:
    end_well(here, log, data)


@fuzz(600)
@given(data=st.data())
def test_any_log_of_a_distributed_run_ends_well(
    here: Path, merged_log: list[str], data: st.DataObject
) -> None:
    end_well(here, merged_log, data)


def end_well(here: Path, log: list[str], data: st.DataObject) -> None:
    """Change some lines of a log, and check that its report ends well."""
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


def below(x: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values in a JSON document, of a list only those in its first element."""
    if at:
        yield at
    if len(at) < 4 and isinstance(x, dict | list):
        for key in x if isinstance(x, dict) else range(min(1, len(x))):
            yield from below(x[key], (*at, key))


GONE = object()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--json"], ["--html", "odd.html"]], ids=str)
def test_a_header_without_any_one_of_its_values_ends_well(
    here: Path, log: list[str], more: list[str]
) -> None:
    """Each value of the header is removed once, or replaced by a value of another type, in turn."""
    others: tuple[Any, ...] = (GONE, None, "x", [], {}, -1)
    header, number = json.loads(log[0]), len(more)
    for at in below(header["plan"], ("plan",)):
        damaged, other = json.loads(log[0]), others[number % len(others)]
        number += 1
        inside = damaged
        for key in at[:-1]:
            inside = inside[key]
        if other is GONE:
            del inside[at[-1]]
        else:
            inside[at[-1]] = other
        (here / "odd.jsonl").write_text("\n".join([json.dumps(damaged), *log[1:]]))
        ended("report", "odd.jsonl", *more)


@pytest.mark.parametrize("missing", ["beta", "alpha", "m", "k", "a_dtype", "c_dtype", "gram", "compute"])
@pytest.mark.parametrize("output", ["", "--html"])
def test_a_product_without_one_of_its_values_ends_well(
    here: Path, log: list[str], missing: str, output: str
) -> None:
    damaged = json.loads(log[0])
    del damaged["plan"]["problem"][missing]
    (here / "odd.jsonl").write_text("\n".join([json.dumps(damaged), *log[1:]]))
    ended("report", "odd.jsonl", *((output, "odd.out") if output else ()))


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
