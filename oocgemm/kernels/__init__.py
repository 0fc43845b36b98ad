"""The ladder of CUDA kernels as data: what each kernel is, how it is compiled, and which is fastest for which
product."""
