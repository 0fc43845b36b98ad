"""Use zarr arrays in object stores as matrices: S3, Google Cloud Storage, Azure, and read-only by HTTP."""
