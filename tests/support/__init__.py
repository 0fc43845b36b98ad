"""What tests share: operands, problems, runs, servers, fake devices, and programs that tests start."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TOP = SUPPORT.parent.parent  # of the repository
