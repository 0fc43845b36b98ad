"""The CUDA backend. Only this package imports cupy.

`gpu` opens a device, `session` runs operations on it, `multiplier` chooses cuBLAS or one of our own
kernels. `repeated` keeps a session for the next run of its plan.
"""
