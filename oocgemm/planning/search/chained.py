"""Enumerate the tile shapes of two chained products (`GemmProblem.chained`).

C and Q stay on the device. A step multiplies a panel of all rows of op(A), twice. So only the depth of the
panels is open. It does not depend on measured rates: the same problem in the same budgets is always divided
in the same way, and its result is rounded in the same way.
"""

from collections.abc import Iterator

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileShape

# Target size of a panel of A, in bytes. A GPU copies larger ones no faster. The host reads smaller ones while
# it multiplies others.
PANEL_BYTES, HOST_PANEL_BYTES = 64 << 20, 16 << 20
# X is divided into at least this many panels, so that few are read before the first product, unless they
# would be smaller than MIN_PANEL_BYTES.
PANELS, MIN_PANEL_BYTES = 16, 1 << 20


def chained_shapes(setting: Setting) -> Iterator[TileShape]:
    """Yield the tile shapes to try, the best one first: with panels of whole chunks, then thinner ones."""
    problem, layout = setting.problem, setting.layouts.a
    row = problem.m * problem.itemsizes["A"]
    size = HOST_PANEL_BYTES if setting.machine.unified else PANEL_BYTES
    size = max(MIN_PANEL_BYTES, min(size, row * problem.depth // PANELS))
    target = max(1, size // row)
    chunk = layout.read_chunk[1]
    depth = min(problem.depth, max(1, target // chunk) * chunk)
    while depth > 1:
        yield TileShape(problem.m, problem.n, depth)
        # Half of the chunks in a panel, then parts of chunks that divide them evenly.
        depth = depth // chunk // 2 * chunk if depth >= 2 * chunk else -(-depth // 2)
    yield smallest_shape(problem)


def smallest_shape(problem: GemmProblem) -> TileShape:
    """Return the tile shape that needs the least memory: panels of one row of the stored A."""
    return TileShape(problem.m, problem.n, 1)
