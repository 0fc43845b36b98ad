"""The host backend: NumPy's BLAS multiplies, and threads are the streams."""
