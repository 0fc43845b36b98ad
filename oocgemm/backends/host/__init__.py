"""The host backend: NumPy's BLAS multiplies, threads are the streams."""
