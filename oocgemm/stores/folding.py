"""Fold the axes of an array of any number of dimensions into the rows and columns of a matrix.

A `Folding` is what a caller asks for: which axes are rows and which are columns, by position or by name, and
which part of each axis (`isel`). A `Fold` is the same for one array, with positions and extents. Row number r
of the matrix stands for the indices along the axes of its rows in C order: the last axis varies fastest.

A chunk of the array is a *rectangle* of the matrix if its elements are a block of the matrix, in row-major or
column-major order. Then a matrix with these chunks, which have other keys, reads the array: no code that
reads chunks knows of folding (`rectangles`). Chunks are rectangles if, in the axes of the rows and in those
of the columns,

- the axes after the first axis along which a chunk has more than one index are whole in a chunk, and
- chunks divide this first axis evenly, unless no axis before it has several indices.

Otherwise, a block of the matrix is read as boxes (n-d blocks) of the array (`oocgemm.stores.boxes`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from numbers import Integral
from typing import Any, Literal

from oocgemm.errors import InputError
from oocgemm.planning.tiling import Range, ceil_div
from oocgemm.values import dataclass

Name = str | int  # an axis, by name or by position
Names = Name | Sequence[Name]
# What is used of an axis: the index at which it is dropped, or the range [start, stop) that is kept.
Part = int | tuple[int | None, int | None]
Order = Literal["C", "F"]  # the order in which elements are stored


@dataclass(frozen=True)
class Axis:
    """An axis of an array: its position, and the part [start, start + extent) that is used."""

    position: int
    start: int
    extent: int


@dataclass(frozen=True)
class Fold:
    """The axes of an array that are the rows and the columns of a matrix, and those with one index only.

    Each axis of the array is in one of the three.
    """

    rows: tuple[Axis, ...]
    cols: tuple[Axis, ...]
    fixed: tuple[Axis, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return prod(axis.extent for axis in self.rows), prod(axis.extent for axis in self.cols)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, in the order of the array."""
        return tuple(sorted((*self.rows, *self.cols, *self.fixed), key=lambda axis: axis.position))

    @property
    def order(self) -> tuple[int, ...]:
        """The positions of the axes of the rows, of the columns, and of the others."""
        return tuple(axis.position for axis in (*self.rows, *self.cols, *self.fixed))

    @property
    def at_start(self) -> "Fold":
        """The fold of the array that has only the used part of each axis."""
        groups = self.rows, self.cols, self.fixed
        return Fold(*(tuple(replace(axis, start=0) for axis in group) for group in groups))

    @property
    def stated(self) -> list[list[list[int]]]:
        """The fold as plain data, for fingerprints."""
        groups = self.rows, self.cols, self.fixed
        return [[[axis.position, axis.start, axis.extent] for axis in group] for group in groups]


@dataclass(frozen=True)
class Folding:
    """Which axes of an array become the rows and the columns of a matrix.

    `rows` or `cols` may be None: that side then has all axes that the other side does not name.
    `isel` has pairs of an axis and the part of it that is used. Axes at one index are neither rows nor
    columns.
    """

    rows: tuple[Name, ...] | None = None
    cols: tuple[Name, ...] | None = None
    isel: tuple[tuple[Name, Part], ...] = ()

    @classmethod
    def of(cls, rows: Names | None, cols: Names | None, isel: Mapping[Any, Any] | None) -> "Folding":
        """Return the folding that a caller asks for. Raises `InputError` for values of other types."""
        return cls(_names("rows", rows), _names("cols", cols), tuple(map(_part, (isel or {}).items())))

    def fold(self, place: str, shape: Sequence[int], names: Sequence[str | None] | None = None) -> Fold:
        """Return the fold of an array with a shape, and with names of its axes if it has any.

        `place` says in errors what the array is. Raises `InputError` unless each axis has one use.
        """
        known = _known(shape, names)
        here = f"{place} has {described_axes(shape, known)}"

        def position(name: Name) -> int:
            if isinstance(name, str) and known.count(name) == 1:
                return known.index(name)
            if isinstance(name, int) and -len(shape) <= name < len(shape):
                return name % len(shape)
            raise InputError(f"{here}, and no axis {name!r}: pass names or positions of its axes")

        parts: dict[int, Part] = {}
        for name, part in self.isel:
            if (at := position(name)) in parts:
                raise InputError(f"{here}, and isel names axis {name!r} twice: drop one of them")
            parts[at] = part
        axes = [_used(here, at, extent, parts.get(at, (None, None))) for at, extent in enumerate(shape)]
        dropped = {at for at, part in parts.items() if isinstance(part, int)}
        given = [None if group is None else list(map(position, group)) for group in (self.rows, self.cols)]
        named = [at for group in given for at in group or ()]
        for at in named:
            if named.count(at) > 1 or at in dropped:
                other = "dropped by isel" if at in dropped else "named twice"
                raise InputError(f"{here}, and axis {_shown(known, at)} is {other}: name it once")
        left = [at for at in range(len(shape)) if at not in named and at not in dropped]
        if given[0] is None and given[1] is None:
            if len(left) != 2:
                raise InputError(
                    f"{here}, and {len(left)} of them are left for a matrix, which has 2: pass rows or cols "
                    "(--rows, --cols)"
                )
            given = [left[:1], left[1:]]
        elif None in given:
            given[given.index(None)] = left
        elif left:
            unused = ", ".join(_shown(known, at) for at in left)
            raise InputError(
                f"{here}, of which {unused} are neither rows nor columns: name them too, or pass an "
                "index for each by isel (--isel)"
            )
        rows, cols = (tuple(axes[at] for at in group or ()) for group in given)
        return Fold(rows, cols, tuple(axes[at] for at in sorted(dropped)))


def described_axes(shape: Sequence[int], names: Sequence[str | None] | None = None) -> str:
    """Return the axes of an array in words: their number, names and extents.

    >>> described_axes((3, 4), ("time", None)), described_axes((3, 4))
    ('2 dimensions (time 3, axis 1 4)', '2 dimensions (3 x 4)')
    """
    known = _known(shape, names)
    shown = " x ".join(map(str, shape))
    if any(known):
        parts = enumerate(zip(known, shape, strict=True))
        shown = ", ".join(f"{name or f'axis {at}'} {extent}" for at, (name, extent) in parts)
    return f"{len(shape)} dimensions{f' ({shown})' if len(shape) > 1 else ''}"


def not_a_matrix(name: str, shape: Sequence[int], names: Sequence[str | None] | None = None) -> str:
    """Return the message for an operand, called `name`, that has not two dimensions."""
    problem = f"{name} has {described_axes(shape, names)}, a matrix has 2"
    if len(shape) < 2:
        return f"{problem}: reshape it to (1, n) or (n, 1)"
    if name == "C":
        return f"{problem}: pass an array with two dimensions"
    known = _known(shape, names)
    rows, cols = ([known[at] or at for at in group] for group in ((0,), range(1, len(shape))))
    flag = f"{name.lower()}-" if name in ("A", "B") else ""
    texts = [",".join(map(str, group)) for group in (rows, cols)]
    return (
        f"{problem}: fold them, such as oocgemm.as_matrix({name}, rows={rows}, cols={cols}) (--{flag}rows "
        f"{texts[0]} --{flag}cols {texts[1]})"
    )


def _known(shape: Sequence[int], names: Sequence[str | None] | None) -> list[str | None]:
    """Return a name or None for each axis."""
    return list(names) if names and len(names) == len(shape) else [None] * len(shape)


def _shown(names: Sequence[str | None], at: int) -> str:
    return repr(names[at] or at)


def _names(option: str, given: Names | None) -> tuple[Name, ...] | None:
    if given is None:
        return None
    parts = [given] if isinstance(given, str | int | Integral) else given
    try:
        found = tuple(each if isinstance(each, str) else int(each) for each in parts)
        if not any(isinstance(each, bool | float) for each in parts):
            return found
    except (TypeError, ValueError):
        pass
    raise InputError(f"{option} = {given!r}: pass names or positions of axes, such as ['time'] or [0, 1]")


def _part(given: tuple[Any, Any]) -> tuple[Name, Part]:
    axis, part = given
    (name,) = _names("isel", [axis]) or ()
    match part:
        case slice(step=None | 1, start=start, stop=stop):
            ends = start, stop
        case (start, stop):
            ends = start, stop
        case Integral() if not isinstance(part, bool):
            return name, int(part)
        case _:
            ends = part, part
    if all(end is None or (isinstance(end, Integral) and not isinstance(end, bool)) for end in ends):
        start, stop = (None if end is None else int(end) for end in ends)
        return name, (start, stop)
    raise InputError(f"isel has {part!r} for axis {axis!r}: pass an index, or a slice without a step")


def _used(here: str, at: int, extent: int, part: Part) -> Axis:
    """Return the used part of an axis. Raises `InputError` for an index that the axis does not have."""
    if isinstance(part, int):
        if not -extent <= part < extent:
            raise InputError(f"{here}, and axis {at} has no index {part}: pass one from 0 to {extent - 1}")
        return Axis(at, part % extent, 1)
    start, stop, _ = slice(*part).indices(extent)
    return Axis(at, start, max(0, stop - start))


@dataclass(frozen=True)
class Number:
    """The index of a chunk along an axis: ``first + number // divide % modulo``.

    `number` is the row (`axis` 0) or the column (1) of the chunk in the grid of the matrix.
    """

    axis: int
    first: int
    divide: int = 1
    modulo: int = 1

    def __call__(self, place: Sequence[int]) -> int:
        return self.first + place[self.axis] // self.divide % self.modulo


@dataclass(frozen=True)
class Rectangles:
    """Chunks that are rectangles of the matrix.

    - `chunk`: the rows and columns of a chunk.
    - `order`: "C" if its elements are stored row by row, "F" if column by column.
    - `numbers`: the index of a chunk along each axis of the array.
    """

    chunk: tuple[int, int]
    order: Order
    numbers: tuple[Number, ...]

    def key(self, of_array: Callable[[tuple[int, ...]], str]) -> Callable[[tuple[int, ...]], str]:
        """Return the function that returns keys of chunks of the matrix, given that of the array."""
        return lambda place: of_array(tuple(number(place) for number in self.numbers))

    def place(self, indices: Sequence[int]) -> tuple[int, int] | None:
        """Return the row and the column in the grid of a chunk with these indices; None if not used."""
        found = [0, 0]
        for number, index in zip(self.numbers, indices, strict=True):
            if not 0 <= index - number.first < number.modulo:
                return None
            found[number.axis] += (index - number.first) * number.divide
        return found[0], found[1]


def rectangles(fold: Fold, chunk: Sequence[int], order: Order = "C") -> Rectangles | None:
    """Return how chunks of an array fold to rectangles; None if they do not.

    `order` is the order in which the elements of a chunk are stored: "C", or "F" for Fortran's.
    """
    numbers: dict[int, Number] = {}
    for axis in fold.fixed:
        if chunk[axis.position] != 1:
            return None
        numbers[axis.position] = Number(0, axis.start)
    extents = [1, 1]
    for side, axes in enumerate((fold.rows, fold.cols)):
        cut = next((at for at, axis in enumerate(axes) if chunk[axis.position] > 1), len(axes) - 1)
        several = prod(axis.extent for axis in axes[:cut]) > 1
        counts = []
        for at, axis in enumerate(axes):
            size = chunk[axis.position]
            whole = size == axis.extent
            if (
                axis.start % size
                or (at > cut and not whole)
                or (at == cut and several and axis.extent % size)
            ):
                return None
            counts.append(ceil_div(axis.extent, size))
            extents[side] *= size
        for at, axis in enumerate(axes):
            first = axis.start // chunk[axis.position]
            numbers[axis.position] = Number(side, first, prod(counts[at + 1 :]), max(1, counts[at]))
    found = _order(fold, chunk, order)
    if found is None:
        return None
    return Rectangles((extents[0], extents[1]), found, tuple(numbers[at] for at in range(len(numbers))))


def _order(fold: Fold, chunk: Sequence[int], order: Order) -> Order | None:
    """Return the order of the elements of chunks in the matrix; None if they are in neither order."""
    rows, cols = (
        [axis.position for axis in axes if chunk[axis.position] > 1] for axes in (fold.rows, fold.cols)
    )
    backwards = order == "F"
    if [*rows, *cols] == sorted([*rows, *cols], reverse=backwards):
        return "C"
    return "F" if [*cols, *rows] == sorted([*cols, *rows], reverse=backwards) else None


Box = tuple[Range, ...]


def boxes(axes: Sequence[Axis], span: Range) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of which a range of rows or columns consists, each with its first row or column.

    >>> list(boxes((Axis(0, 5, 3), Axis(1, 0, 4)), (2, 9)))
    [(2, ((5, 6), (2, 4))), (4, ((6, 7), (0, 4))), (8, ((7, 8), (0, 1)))]
    """
    start, stop = span
    if start >= stop:
        return
    if not axes:
        yield 0, ()
        return
    (first, *rest), inner = axes, prod(axis.extent for axis in axes[1:])
    while start < stop:
        index, within = divmod(start, inner)
        if within or stop - start < inner:
            end = min(stop, (index + 1) * inner)
            for at, box in boxes(rest, (within, end - index * inner)):
                yield index * inner + at, ((first.start + index, first.start + index + 1), *box)
        else:
            last = stop // inner
            end = last * inner
            whole = ((axis.start, axis.start + axis.extent) for axis in rest)
            yield start, ((first.start + index, first.start + last), *whole)
        start = end


def band(axes: Sequence[Axis], chunk: Sequence[int]) -> int:
    """Return how many rows or columns have chunks in common: a panel of as many reads few chunks twice."""
    cut = next((at for at, axis in enumerate(axes) if chunk[axis.position] > 1), len(axes) - 1)
    if not axes:
        return 1
    first = min(chunk[axes[cut].position], max(1, axes[cut].extent))
    return max(1, first * prod(axis.extent for axis in axes[cut + 1 :]))
