"""Timelines, which record when each operation of a run started and ended, and figures computed from them."""

from oocgemm.timeline.activities import Verdict
from oocgemm.timeline.log import Recorder, damage, read_log
from oocgemm.timeline.metrics import Diagnosis, Report, diagnose, in_place, report, same_product
from oocgemm.timeline.spans import Span, Timeline

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
