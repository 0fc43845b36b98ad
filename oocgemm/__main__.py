"""``python -m oocgemm``."""

from oocgemm.cli import main

main()
