"""Schedules, waits, footprints and loads are those that `schedules.json` keeps."""

import json
from typing import Any

import pytest

from tests.nets.schedules import KEPT, Case, candidate_of, cases, digest, restored

CASES, RECORDS = dict(cases()), json.loads(KEPT.read_text())


def test_every_case_is_kept() -> None:
    assert [name for name in RECORDS if name not in CASES] == []
    assert [name for name in CASES if name not in RECORDS and candidate_of(CASES[name])] == []


@pytest.mark.parametrize("name", RECORDS)
def test_a_schedule_has_not_changed(name: str) -> None:
    case, record = CASES[name], dict(RECORDS[name])
    candidate = restored(record.pop("candidate"))
    assert digest(case, candidate) == record


def test_the_planner_chooses_the_slots_that_are_kept() -> None:
    """Only the search may change this: it is right to write the file anew then."""
    changed: dict[str, Any] = {}
    for name, record in RECORDS.items():
        case: Case = CASES[name]
        found = candidate_of(case)
        if found != restored(record["candidate"]):
            changed[name] = found
    assert not changed
