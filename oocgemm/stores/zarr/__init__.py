"""zarr arrays: matrices, chunks, and their codecs."""
