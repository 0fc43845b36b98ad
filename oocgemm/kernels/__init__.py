"""The ladder of CUDA kernels as data: what they are, how they are compiled, and which is fastest for what."""
