"""Timelines, which record when each operation of a run started and ended, and figures computed from them.

A run only records spans. The modules that compute figures are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oocgemm.timeline.log import Recorder, damage, read_log
from oocgemm.timeline.spans import Span, Timeline

if TYPE_CHECKING:
    from oocgemm.timeline.activities import Verdict
    from oocgemm.timeline.metrics import Diagnosis, Report, diagnose, in_place, report, same_product

__all__ = [
    "Diagnosis",
    "Recorder",
    "Report",
    "Span",
    "Timeline",
    "Verdict",
    "damage",
    "diagnose",
    "in_place",
    "read_log",
    "report",
    "same_product",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'activities' if name == 'Verdict' else 'metrics'}"), name)
