"""Store matrices in zarr arrays: open them, read and write their chunks, decode and encode."""
