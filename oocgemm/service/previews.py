"""What a job shows of its result: corners of arrays, a thumbnail of a matrix, and what limited the run.

All of it is small, and made by the process of the job, which is confined.
"""

import base64
import dataclasses
import logging
from typing import Any

# Maximum rows and columns of a corner, of a thumbnail, and length of a list of singular values.
CORNER, THUMBNAIL, VALUES = 6, 32, 50
# Maximum number of operations of a run whose report is made to say what limited it.
MAX_SPANS = 20_000

logger = logging.getLogger("oocgemm")


def shown_of(result: Any) -> dict[str, Any]:
    """Return ``preview`` and ``verdict`` of what a verb has returned. What cannot be shown is left out."""
    found = dict[str, Any]()
    for name, make in (("preview", _preview), ("verdict", _verdict)):
        try:
            if made := make(result):
                found[name] = made
        except Exception:  # the result is there, and must not be lost
            logger.exception("the %s cannot be made", name)
    return found


def _preview(result: Any) -> dict[str, Any]:
    """Return the corners of arrays by name, and for a matrix, a thumbnail of grey levels, row by row."""
    import numpy as np

    out = getattr(result, "out", result)
    if getattr(out, "ndim", 0) and out.dtype.kind in "biufc":
        found: dict[str, Any] = {"arrays": {"": _corner(out)}}
        if out.ndim == 2 and out.dtype.kind != "c" and min(out.shape) > 1:
            part = np.asarray(out[:THUMBNAIL, :THUMBNAIL], np.float64)
            finite = part[np.isfinite(part)]
            low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
            levels = np.nan_to_num(255 * (part - low) / ((high - low) or 1), posinf=255, neginf=0).clip(
                0, 255
            )
            pixels = base64.b64encode(levels.astype(np.uint8).tobytes()).decode()
            found["thumbnail"] = {"columns": part.shape[1], "least": low, "most": high, "pixels": pixels}
        return found
    arrays = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    arrays = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    found = {"arrays": {name: _corner(array) for name, array in arrays.items()}}
    if (values := arrays.get("singular_values")) is not None:
        found["values"] = [float(value) for value in values[:VALUES] if np.isfinite(value)]
    return found


def _corner(array: Any) -> dict[str, Any]:
    """Return the shape of an array, and its first elements as numbers, or as texts where JSON has none."""
    import numpy as np

    part = np.asarray(array[(slice(CORNER),) * min(2, array.ndim)])
    rows = part.reshape(len(part), -1)[:, :CORNER] if part.ndim > 1 else part.reshape(1, -1)
    return {"shape": list(array.shape), "rows": [[_text(each) for each in row] for row in rows.tolist()]}


def _text(number: Any) -> Any:
    return number if isinstance(number, int) else f"{number:.6g}"


def _verdict(result: Any) -> str:
    """Return what limited the run; "" if it is unknown, or would take long to find."""
    run = getattr(result, "run", result)
    if not hasattr(run, "log") or run.log.spans > MAX_SPANS or not run.plan.steps:
        return ""
    from oocgemm.reports.advice import diagnosis_lines

    return " ".join(diagnosis_lines(run.report, run.timeline))
