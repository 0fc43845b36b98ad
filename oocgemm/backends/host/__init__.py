"""The host backend, which needs no GPU: NumPy's BLAS multiplies, and each stream is a thread."""
