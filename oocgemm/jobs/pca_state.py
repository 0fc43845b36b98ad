"""The state of an unfinished `oocgemm.pca`, which a file keeps beside the result.

It is replaced after each pass: the new file is written and flushed to the disk, and renamed into place. So a
run that is killed at any time loses one pass at most, and a resumed run computes the same bits.
"""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.jobs.pca_passes import PcaState
from oocgemm.jobs.subspace import Ritz, Subspace
from oocgemm.stores.durable import sync_path
from oocgemm.stores.files import open_regular

# The arrays of `Ritz`.
_FOUND = tuple(field.name for field in fields(Ritz))


def path_of(out: str) -> Path:
    """Return the path of the state of a run that writes to `out`."""
    return Path(f"{out.rstrip('/')}.pca-state.npz")


def save(path: Path, identity: Mapping[str, Any], state: PcaState) -> None:
    """Save a state after a pass. Raises `InputError` if nothing can be written there."""
    subspace = state.subspace
    arrays = {
        "basis": subspace.basis,
        "last": None if subspace.last is None else np.stack(subspace.last),
        "center": state.center,
    }
    if subspace.found is not None:
        arrays |= {name: getattr(subspace.found, name) for name in _FOUND}
    facts = {"identity": identity, "passes": subspace.passes, "tile": state.tile, "folded": state.folded}
    facts["exponent"] = state.exponent
    file = io.BytesIO()
    named: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    np.savez(file, facts=np.array(json.dumps(facts)), **named)
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "wb") as target:
            target.write(file.getbuffer())
            target.flush()
            os.fsync(target.fileno())
        os.replace(new, path)
        sync_path(path.absolute().parent)
    except OSError as error:
        raise InputError(f"the state of the run cannot be written to {path}: {error.strerror}") from error


def load(path: Path, identity: Mapping[str, Any], *, resume: bool) -> PcaState | None:
    """Return the saved state; None if there is none.

    Raises `InputError` if there is one and the run shall not be resumed, if it is that of a run with other
    arguments, or if it cannot be read.
    """
    if path.exists() and not resume:
        raise InputError(
            f"there is an unfinished run, whose state is at {path}: pass resume=True (--resume) to continue "
            "it, or remove the file to start over"
        )
    try:
        with open(path, "rb", opener=open_regular) as stored, np.load(stored, allow_pickle=False) as file:
            facts = json.loads(str(file["facts"]))
            arrays = {name: file[name] for name in file.files if name != "facts"}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"the state of the run at {path} cannot be read ({error}): remove it to start over"
        ) from error
    known = json.loads(json.dumps(identity, default=str))
    changed = [name for name in known if known[name] != facts["identity"].get(name)]
    if changed:
        raise InputError(
            f"the unfinished run at {path} has other arguments ({', '.join(changed)}): pass the same ones, "
            "or remove the file to start over"
        )
    last = (arrays["last"][0], arrays["last"][1]) if "last" in arrays else None
    found = Ritz(*(arrays[name] for name in _FOUND)) if "values" in arrays else None
    subspace = Subspace(arrays["basis"], last, facts["passes"], found)
    return PcaState(subspace, arrays["center"], facts["folded"], facts["tile"], facts["exponent"])
