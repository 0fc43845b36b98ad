"""Rounding bounds, checksums of tiles, and Freivalds' check of a whole product."""
