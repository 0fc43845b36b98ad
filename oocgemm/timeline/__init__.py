"""Timelines: what ran when, the figures that say how much of the copying was hidden, and pictures of it."""

from oocgemm.timeline.figures import Report, report
from oocgemm.timeline.gantt import gantt
from oocgemm.timeline.spans import Span, Timeline, read_log, write_log

__all__ = ["Report", "Span", "Timeline", "gantt", "read_log", "report", "write_log"]
