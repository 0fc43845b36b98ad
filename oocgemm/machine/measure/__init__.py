"""Measurements of this machine: calibration, kernel benchmarks and the GPU's counters."""
