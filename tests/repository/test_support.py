"""The page on what runs where says what is so: its cells run, and its holes are refused."""

from pathlib import Path

import pytest
import support  # type: ignore[import-not-found]
from support import EXECUTORS, PAGE, Cell, cells, covering, page

import oocgemm
from oocgemm.jobs.options import options_of
from oocgemm.jobs.support import HOLES, OPTIONS, VERBS, hole
from tests.support.staying import Stay
from tests.support.support_cells import CALLS, A, run

RUNS = [cell for cell in cells() if cell.hole is None]
COVERING = covering()


def named(cell: Cell) -> str:
    return f"{cell.verb}-{cell.operand}-{cell.executor}-{cell.mode}"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_each_pair_of_values_runs(
    executor: str, tmp_path: Path, stay: Stay, subtests: pytest.Subtests
) -> None:
    stay(60)
    for cell in COVERING:
        if cell.executor == executor:
            with subtests.test(named(cell)):
                (folder := tmp_path / named(cell)).mkdir()
                run(cell, folder)


@pytest.mark.slow
@pytest.mark.parametrize("cell", RUNS, ids=named)
def test_each_combination_runs(cell: Cell, tmp_path: Path) -> None:
    run(cell, tmp_path)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page()


def test_few_combinations_have_all_pairs() -> None:
    pairs = {pair for cell in RUNS for pair in support.pairs(cell)}
    assert pairs == {pair for cell in COVERING for pair in support.pairs(cell)}
    assert len(COVERING) < len(RUNS) / 5


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_take_the_options_of_the_executors_that_run_them(verb: str) -> None:
    for name, executor in OPTIONS.items():
        assert (name in options_of(verb)) == (hole(executor, VERBS[verb].uses) is None)


REFUSED = [
    (verb, option)
    for verb, facts in sorted(VERBS.items())
    for option in ("devices", "workers")
    if hole(OPTIONS[option], facts.uses) is not None
]


@pytest.mark.parametrize(("verb", "option"), REFUSED)
def test_executors_refuse_verbs_that_they_cannot_run(verb: str, option: str) -> None:
    call, chosen = CALLS[verb], {"devices": "0,0", "workers": 2}[option]
    with pytest.raises(oocgemm.CombinationError, match=r"one (device|process)"):
        call.call(A, *call.more, **call.options, **{option: chosen})


def test_holes_have_reasons() -> None:
    assert all(len(one.reason.split()) >= 5 and one.executors for one in HOLES)
    assert all(cell.hole for cell in cells() if cell not in RUNS)
