"""Describe oocgemm's own CUDA kernels: their parameters, how to compile them, and which is the fastest."""
