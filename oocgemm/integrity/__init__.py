"""Check that C is the product of A and B: rounding error bounds, checksums per tile, Freivalds' algorithm."""
