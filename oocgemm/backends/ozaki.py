"""What the kernels of products from int8 products are told when they are compiled. Nothing here imports cupy."""

from collections.abc import Sequence
from functools import lru_cache

from oocgemm.backends.kernel import C_TYPES
from oocgemm.plan.emulation import LEVELS, residues


@lru_cache
def split_options(dtype: str, k_major: bool, number: int) -> tuple[str, ...]:
    """What kernels/ozaki_split.cu is told."""
    found = residues(number)
    return (
        f"-DOOC_STORED={C_TYPES[dtype]}",
        f"-DOOC_K_MAJOR={int(k_major)}",
        f"-DOOC_MODULI={_listed(found.moduli)}",
        f"-DOOC_EXPONENT={found.exponent!r}",
        f"-DOOC_LEVELS={_listed(LEVELS)}",
    )


@lru_cache
def combine_options(dtype: str, number: int) -> tuple[str, ...]:
    """What kernels/ozaki_combine.cu is told."""
    found = residues(number)
    return (
        f"-DOOC_STORED={C_TYPES[dtype]}",
        f"-DOOC_WEIGHTS={','.join('{' + _listed(parts) + '}' for parts in found.weights)}",
        f"-DOOC_MODULUS={_listed(found.modulus)}",
        f"-DOOC_INVERSE={found.inverse!r}",
    )


def _listed(values: Sequence[float]) -> str:
    return ",".join(map(repr, values))
