"""Describe oocgemm's own CUDA kernels: their parameters, how to compile them, and which is the fastest."""

# The names that `--kernel` accepts for the kernels of the ladder (`oocgemm.kernels.ladder`), simplest first.
RUNGS = (
    "naive", "naive_grid", "single_block", "tiled", "register", "liang_normal", "liang_opt", "simt", "tensor",
)  # fmt: skip
