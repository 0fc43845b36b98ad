"""Every part of the search for plans gains what its lines cost."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/ablation.py"


def test_every_part_of_the_search_gains() -> None:
    """The script fails for parts that gain too little, here on the products that lose most without one."""
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
