"""Check each tile of C against checksums of the blocks of A and B that it was computed from."""
