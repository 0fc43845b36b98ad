"""Compiler options and launch shapes of the kernels in kernels/emulation. Does not import cupy."""

from collections.abc import Sequence
from functools import lru_cache

from oocgemm.kernels.spec import C_TYPES, Device, Launch, TensorMap, blocks
from oocgemm.planning.emulation import LEVELS, residues

# Parameters of ozaki_multiply.cu, which explains them.
STAGES, GROUP = 4, 8
_TILE, _BOX = (256, 256), 128  # the tile of a cluster; rows of a TMA box


@lru_cache
def split_options(dtype: str, k_major: bool, number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_split.cu."""
    found = residues(number)
    return (
        f"-DOOC_STORED={C_TYPES[dtype]}",
        f"-DOOC_K_MAJOR={int(k_major)}",
        f"-DOOC_MODULI={_listed(found.moduli)}",
        f"-DOOC_EXPONENT={found.exponent!r}",
        f"-DOOC_LEVELS={_listed(LEVELS)}",
    )


@lru_cache
def multiply_options(number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_multiply.cu."""
    moduli = _listed(residues(number).moduli)
    return f"-DOOC_MODULI={moduli}", f"-DSTAGES={STAGES}", f"-DGROUP={GROUP}"


def multiply_launch(device: Device, rows: int, columns: int, number: int) -> Launch:
    """Return the launch of ozaki_multiply.cu for that many rows and columns of C, and that many moduli."""
    tiles = number * blocks(rows, _TILE[0]) * blocks(columns, _TILE[1])
    clusters = max(1, min(device.processors // 2, tiles))
    return Launch((2 * clusters, 1, 1), (384, 1, 1), STAGES * (3 * _BOX * 128 + 16) + 1024)


def planes_map(address: int, ld: int, rows: int, number: int, plane: int) -> TensorMap:
    """Return the tensor map of ozaki_multiply.cu for `number` planes of `plane` bytes with rows of `ld`
    bytes."""
    return TensorMap("int8", address, (ld, rows, number), (ld, plane), (128, _BOX, 1), 128)


@lru_cache
def combine_options(dtype: str, number: int) -> tuple[str, ...]:
    """Return the compiler options of ozaki_combine.cu."""
    found = residues(number)
    return (
        f"-DOOC_STORED={C_TYPES[dtype]}",
        f"-DOOC_WEIGHTS={','.join('{' + _listed(parts) + '}' for parts in found.weights)}",
        f"-DOOC_MODULUS={_listed(found.modulus)}",
        f"-DOOC_INVERSE={found.inverse!r}",
    )


def _listed(values: Sequence[float]) -> str:
    return ",".join(map(repr, values))
