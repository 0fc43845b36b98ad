"""Workers are killed at each point between the start and the end of a job."""

import os
from pathlib import Path

import pytest

from tests.faults.test_service_kills import Victims
from tests.support import SUPPORT
from tests.support.suite import slow

POINTS = [f"{when} {name}" for name in ("lock", "owner.json", "result.json") for when in ("before", "after")]
FIRST = "before result.json"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("point", "jobs"), [(FIRST, 2), *slow(*((point, 8) for point in POINTS))])
def test_a_job_may_die_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, jobs: int
) -> None:
    """Each job dies once, and is started again. Only one that has left its result ends at once."""
    dead = tmp_path / "dead"
    dead.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT / 'dying'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OOCGEMM_DIE", point)
    monkeypatch.setenv("OOCGEMM_DEAD", str(dead))
    monkeypatch.setenv("OOCGEMM_JOBS", str(tmp_path / "jobs"))
    victims = Victims(tmp_path, seed=3)
    victims.submit(jobs)
    victims.start()
    try:
        ended = victims.finish(0, 0, 800)
        victims.check(ended)
    finally:
        victims.close()
    assert {path.name for path in dead.iterdir()} == {job.id for job in ended}
    completed = point == "after result.json"
    assert {job.attempt for job in ended} == {1 if completed else 2}
    # The death of a worker that has had a job before, and has not begun with this one, is no failure of it.
    begun = point in ("after owner.json", "before result.json")
    assert {job.failures for job in ended} <= ({0} if completed else {1} if begun else {0, 1})
