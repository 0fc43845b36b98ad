"""The CUDA backend. Only this package imports cupy."""
