"""Measure this machine: rates for predictions, benchmarks of kernels, and hardware counters of the GPU."""
