"""Use zarr arrays as matrices: open and create them, and read, write, decode and encode their chunks."""
