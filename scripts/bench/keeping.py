"""What several scripts use: options, the folder for matrices, and functions that write a results file."""

import json
from pathlib import Path
from typing import Any

import click

from oocgemm.machine import info as system

work = click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for the matrices.  [default: a temporary one]"
)
output = click.option("--output", type=click.Path(path_type=Path), help="JSON to add the results to.")


def keep(path: Path | None, key: str, found: dict[str, Any]) -> None:
    """Add results to a JSON file under a key, with the machine and the versions. Other keys are kept."""
    if path is not None:
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept | {key: here() | found}, indent=1) + "\n")


def here() -> dict[str, Any]:
    """Return a description of the machine and the versions of the packages."""
    return {"machine": system.machine(), "versions": system.versions()}
