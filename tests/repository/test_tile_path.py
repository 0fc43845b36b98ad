"""A reader who follows one tile from the command to the chunk that is written reads few files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "code_figures.py"


@pytest.mark.slow
def test_one_tile_passes_through_few_modules() -> None:
    # In a process of its own: threads that other tests have left would not be counted.
    done = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tile modules"] <= 14
