"""Split addresses of HDF5 datasets, such as ``file.h5::/group/x``, into the file and the dataset."""

import os

from oocgemm.stores.opener import open_regular

# Files with these suffixes are HDF5 files. A file with another suffix can be one too.
SUFFIXES = (".h5", ".hdf5", ".he5", ".h5ad", ".loom", ".nc", ".nc4", ".mat", ".nxs")
MARK = "::"  # ends the path of the file
# The first bytes of an HDF5 file. A user block of 512 bytes, or a power of two above that, may precede them.
SIGNATURE = b"\x89HDF\r\n\x1a\n"
MAX_USER_BLOCK = 1 << 20


def split(path: str) -> tuple[str, str] | None:
    """Split an address into the path of the file and the name of the dataset; None if it is no address.

    The path of the file ends at the first ``::``. It must have a suffix of an HDF5 file, or lead to a file.

    >>> split("dir/a.h5::/x"), split("a.h5::layers/raw"), split("a.h5"), split("gzip::s3://bucket/x.zarr")
    (('dir/a.h5', '/x'), ('a.h5', 'layers/raw'), None, None)
    """
    file, mark, dataset = path.partition(MARK)
    if mark and (file.lower().endswith(SUFFIXES) or os.path.isfile(file)):
        return file, dataset
    return None


def leads_to_file(path: str) -> bool:
    """Return whether a local path leads to an HDF5 file, by its suffix or signature. Never raises."""
    return os.path.isfile(path) and (path.lower().endswith(SUFFIXES) or has_signature(path))


def has_signature(path: str) -> bool:
    """Return whether a file has the signature of HDF5. Never raises."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            offset = 0
            while offset <= MAX_USER_BLOCK:
                file.seek(offset)
                if file.read(len(SIGNATURE)) == SIGNATURE:
                    return True
                offset = 2 * offset or 512
    except (OSError, ValueError):
        pass
    return False
