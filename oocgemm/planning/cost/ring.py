"""The size of the ring: the pinned buffers through which pageable arrays are copied to and from a GPU."""

from dataclasses import dataclass
from functools import lru_cache

from oocgemm.planning.setting import Setting

# Maximum bytes of a buffer, and of a piece of a block that one thread copies at a time. With larger pieces,
# the last ones of a block keep fewer threads busy. With smaller ones, Python takes longer to issue the copy
# of a piece than the link takes to copy it.
PIECE = 8 << 20
# A block is cut into one piece per thread, but not into smaller pieces than this many bytes. Other blocks, if
# some are being copied, give the threads enough to do: pieces are larger then.
MIN_PIECE, MIN_BUSY_PIECE = 2 << 20, 8 << 20
# The same for threads that run compiled code, to which pieces cost no time under the GIL. The link copies
# slowly to buffers that are in the caches of cores: with two of 512 KiB for each of 12 threads, downloads ran
# at 15 GB/s on an H100, with two of 4 MiB at 49 GB/s.
MIN_COMPILED_PIECE, MAX_COMPILED_PIECE = 256 << 10, 4 << 20
# Pieces of files have at least this many bytes: to open a file takes as long as to copy some 50 KiB.
MIN_STORED_PIECE = 512 << 10
# Maximum number of such threads if all blocks are in memory. More of them only wait for the driver's lock.
# From the page cache, 8 threads of the host of an H100 read 33 to 45 GB/s, and 12 threads 44 to 68 GB/s.
COMPILED_LANES = 8
# Buffers have at least this many bytes, and a multiple of them: a page.
PAGE = 4096
# Buffers per thread: one is filled while the other one is copied.
BUFFERS = 2
# Bytes per buffer in which the device marks what it has copied.
MARKS = 256


@dataclass(frozen=True, slots=True)
class RingShape:
    """`lanes` threads, of which one belongs to the run, copy blocks.

    A buffer has `piece` bytes, and those for marks. Compiled threads divide the memory of a lane otherwise.
    """

    lanes: int
    piece: int

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, for copies in both directions."""
        return 2 * self.lanes * BUFFERS * (self.piece + MARKS)


@lru_cache(64)
def ring_shape(setting: Setting) -> RingShape | None:
    """Choose the shape of the ring of each device; None if no operand is copied through it.

    All rings together take at most a quarter of the host budget, unless that is below 34 KiB per device. If
    the device transposes strips, a ring takes at most a quarter of its budget, too.
    """
    machine, devices = setting.machine, setting.devices
    copied = [route.layout for route in setting.routes.values() if route.rings]
    if not copied:
        return None
    compiled = machine.compiled and all(x.contiguous_rows for x in copied) and not setting.turns_on_device
    lanes, piece = 1 + machine.copy_threads_of(devices), PIECE
    if compiled:
        lanes = min(lanes, 1 + COMPILED_LANES)
    room = setting.budgets.host // 4 // devices
    if setting.turns_on_device:
        room = min(room, (setting.budgets.device - machine.device_reserve) // 4)
    while piece > PAGE and RingShape(lanes, piece).bytes > room:
        piece //= 2
    while lanes > 2 and RingShape(lanes, piece).bytes > room:
        lanes -= 1
    return RingShape(lanes, piece)
