"""Timelines: what ran when, the figures that say how much of the copying was hidden, and pictures of it."""

from oocgemm.timeline.diagnosis import Diagnosis, diagnose
from oocgemm.timeline.figures import Report, in_place, report, same_product
from oocgemm.timeline.gantt import gantt
from oocgemm.timeline.log import Recorder, read_log
from oocgemm.timeline.remedies import Remedy, diagnosis_lines, remedy
from oocgemm.timeline.spans import Span, Timeline
from oocgemm.timeline.verdict import Verdict

__all__ = [
    "Diagnosis",
    "Recorder",
    "Remedy",
    "Report",
    "Span",
    "Timeline",
    "Verdict",
    "diagnose",
    "diagnosis_lines",
    "gantt",
    "in_place",
    "read_log",
    "remedy",
    "report",
    "same_product",
]
