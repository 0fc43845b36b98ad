"""kernels/common/layout.cuh, compiled by g++: operands in shared memory, and the order of tiles."""

import ctypes
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import SUPPORT, TOP

HEADER = TOP / "kernels" / "common" / "layout.cuh"
PANELS = SUPPORT / "panels.cpp"
SOURCE = """
extern "C" {
int swizzled_(int row, int byte) { return swizzled(row, byte); }
int element_offset_(bool k_major, int x, int k, int item) { return element_offset(k_major, x, k, item); }
unsigned long long slab_descriptor_(unsigned address, bool k_major, int depth) { return
slab_descriptor(address, k_major, depth); }
int step_bytes_(bool k_major, int item) { return step_bytes(k_major, item); }
unsigned long long tile_at_(unsigned index, unsigned rows, unsigned columns, unsigned group) {
    const tile_position at = tile_at(index, rows, columns, group);
    return static_cast<unsigned long long>(at.row) << 32 | at.column;
}
}
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("layout")
    source, library = folder / "layout.cpp", folder / "layout.so"
    source.write_text(f'#include "{HEADER}"\n{SOURCE}')
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True
    )
    loaded = ctypes.CDLL(str(library))
    for name in ("slab_descriptor_", "tile_at_"):
        getattr(loaded, name).restype = ctypes.c_ulonglong
    return loaded


def test_eight_rows_of_a_chunk_column_lie_in_different_banks(layout: ctypes.CDLL) -> None:
    for chunk in range(8):
        assert len({layout.swizzled_(row, 16 * chunk) % 128 for row in range(8, 16)}) == 8


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("k_major", [True, False])
def test_element_offsets_follow_the_128_byte_swizzle_of_tma(
    layout: ctypes.CDLL, k_major: bool, item: int
) -> None:
    depth, rows = 128 // item, 128
    seen = set()
    for x in range(rows):
        for k in range(depth):
            # An operand is stored as `rows` lines if k runs along a line, else as several times `depth`
            # lines. A line is 128 bytes, and its 16-byte pieces are permuted.
            line, byte = (x, k * item) if k_major else (x // depth * depth + k, x % depth * item)
            expected = line * 128 + ((byte // 16) ^ (line % 8)) * 16 + byte % 16
            assert layout.element_offset_(k_major, x, k, item) == expected
            seen.add(expected)
    assert seen == set(range(0, rows * 128, item))


def test_pairs_that_sixteen_lanes_read_lie_in_different_banks(layout: ctypes.CDLL) -> None:
    """Threads that read pairs of the tf32 operand of wgmma at the same time read from different memory banks.

    wgmma takes this operand from registers. Thread 4 g + q of a warp reads rows 2 g and 2 g + 1, at k = q, or
    at k = q + 4 if q is odd.
    """
    for row in range(0, 64, 16):
        for half in range(2):
            lanes = [(lane // 4, lane % 4) for lane in range(16 * half, 16 * half + 16)]
            reads = [layout.element_offset_(False, row + 2 * g, q + 4 * (q & 1), 4) for g, q in lanes]
            assert len({at % 128 // 8 for at in reads}) == 16


def test_words_that_a_warp_reads_lie_in_different_banks(layout: ctypes.CDLL) -> None:
    """In the operands of mma, all threads of a warp read from different memory banks.

    Thread 4 g + q reads row g.
    """
    reads = [layout.element_offset_(False, 16 + g, q + 4 * (q & 1), 4) for g in range(8) for q in range(4)]
    assert len({at % 128 // 4 for at in reads}) == 32


@pytest.mark.parametrize(("k_major", "depth", "leading"), [(True, 64, 1), (False, 64, 512), (False, 32, 256)])
def test_slab_descriptors_encode_address_and_strides(
    layout: ctypes.CDLL, k_major: bool, depth: int, leading: int
) -> None:
    for block_of_cluster in (0, 1):
        value = layout.slab_descriptor_(block_of_cluster << 24 | 0x2A400, k_major, depth)
        fields = value & 0x3FFF, value >> 16 & 0x3FFF, value >> 32 & 0x3FFF, value >> 62
        assert fields == (0x2A400 >> 4, leading, 1024 // 16, 1)
        assert value == fields[0] | fields[1] << 16 | fields[2] << 32 | fields[3] << 62


@pytest.mark.parametrize("item", [2, 4])
def test_a_step_is_32_bytes_of_k(layout: ctypes.CDLL, item: int) -> None:
    for k_major in (True, False):
        # The formula is that of a line whose pieces are not permuted, which is line 0 and every eighth line.
        assert layout.step_bytes_(k_major, item) == layout.element_offset_(k_major, 0, 32 // item, item)


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), group=st.integers(1, 50))
def test_every_tile_is_taken_once(layout: ctypes.CDLL, rows: int, columns: int, group: int) -> None:
    taken = [divmod(layout.tile_at_(index, rows, columns, group), 2**32) for index in range(rows * columns)]
    assert sorted(taken) == [(row, column) for row in range(rows) for column in range(columns)]
    # Tiles are visited in groups of rows. Within a group, the next tile is in the next row, or in the first
    # row of the next column.
    for (row, column), (after, column_after) in pairwise(taken):
        assert (after, column_after) == (row + 1, column) or column_after in {column + 1, 0}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_panels_are_one_to_one_and_free_of_bank_conflicts(tmp_path: Path) -> None:
    program = tmp_path / "panels"
    options = "-std=c++17", "-Wall", "-Werror", "-O1", f"-I{HEADER.parent}"
    subprocess.run(["g++", *options, PANELS, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines(), done.returncode) == (["ok"], 0)
