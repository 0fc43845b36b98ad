"""Check every tile of C against checksums of the panels that it was computed from."""
