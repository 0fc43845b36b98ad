"""Options that the scripts share: where their matrices go, and the results."""

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
    """Put results into a JSON file, by a key, and where they were had; those of other keys stay."""
    if path is not None:
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept | {key: here() | found}, indent=1) + "\n")


def here() -> dict[str, Any]:
    """The machine and the versions that results are of."""
    return {"machine": system.machine(), "versions": system.versions()}
