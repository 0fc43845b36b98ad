"""Bound rounding errors, check tiles by checksums, and verify a whole product by Freivalds' algorithm."""
