"""Read two-dimensional HDF5 datasets, also those of h5ad and netCDF4 files, without HDF5's global lock."""
