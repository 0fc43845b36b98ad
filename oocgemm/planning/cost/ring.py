"""The size of the ring: the pinned buffers through which pageable arrays are copied to and from a GPU."""

from dataclasses import dataclass

from oocgemm.planning.setting import Setting

# Bytes of a buffer, unless the host budget is small. With larger buffers, the last pieces of a block keep
# fewer threads busy. With smaller ones, Python takes longer to issue the copy of a piece than the link takes
# to copy it.
PIECE = 4 << 20
# Buffers have at least this many bytes, and a multiple of them: a page.
MIN_PIECE = 4096
# Buffers per thread. The second one for uploads is filled while the first one is copied to the device.
UPLOAD_BUFFERS, DOWNLOAD_BUFFERS = 2, 1


@dataclass(frozen=True, slots=True)
class RingShape:
    """`threads` threads copy each block. Every buffer has `piece` bytes."""

    threads: int
    piece: int

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, for copies in both directions."""
        return self.threads * (UPLOAD_BUFFERS + DOWNLOAD_BUFFERS) * self.piece


def ring_shape(setting: Setting) -> RingShape | None:
    """Choose the shape of the ring; None if no operand is copied through it.

    The ring takes at most a quarter of the host budget, unless that is below 12 KiB.
    """
    layouts = setting.layouts
    if not any(map(setting.streams, (layouts.a, layouts.b, layouts.c))):
        return None
    threads, piece = setting.machine.copy_threads, PIECE
    while piece > MIN_PIECE and RingShape(threads, piece).bytes > setting.budgets.host // 4:
        piece //= 2
    while threads > 1 and RingShape(threads, piece).bytes > setting.budgets.host // 4:
        threads -= 1
    return RingShape(threads, piece)
