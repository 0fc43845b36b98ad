"""Frozen dataclasses of this package behave as those of the standard library."""

import copy
import dataclasses
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest

from oocgemm import values

Decorate = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Base:
    """Made by the standard library."""

    a: int


def declared(dataclass: Decorate) -> dict[str, Any]:
    """Return classes of all kinds, made by a decorator."""

    @dataclass(frozen=True)
    class Point:
        """A point."""

        x: int
        y: float = 0.5
        unit: ClassVar[str] = "m"

        @cached_property
        def size(self) -> float:
            return abs(self.x) + abs(self.y)

    @dataclass(frozen=True)
    class Weighted(Point):
        """A point with a weight."""

        weight: int = 1
        tags: list[str] = field(default_factory=list, compare=False)

    @dataclass(frozen=True, slots=True)
    class Slotted:
        """Two numbers."""

        a: int
        b: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("negative")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Keywords:
        """Passed by name."""

        a: int
        b: int = field(default=2, hash=False)

    @dataclass(frozen=True)
    class Mixed:
        """Passed by position and by name."""

        a: int = field(kw_only=True)
        b: int = field(repr=False)

    @dataclass(frozen=True, eq=False)
    class Unequal:
        """Compared by identity."""

        a: int

    @dataclass(frozen=True)
    class Own:
        """With functions of its own."""

        a: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "own"

    @dataclass(frozen=True, slots=True)
    class Empty:
        """Nothing."""

    @dataclass(frozen=True, slots=True, order=True)
    class Ordered:
        """In order."""

        a: int

    @dataclass
    class Mutable:
        """May change."""

        a: int

    @dataclass(frozen=True)
    class Inheriting(Base):
        """From a class of the standard library."""

        b: int = 2

    return {name: made for name, made in locals().items() if name != "dataclass"}


OURS, THEIRS = declared(values.dataclass), declared(dataclasses.dataclass)
GIVEN: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "Point": [((1,), {}), ((1, 0.5), {}), ((1,), {"y": 2.0}), ((True,), {})],
    "Weighted": [((1,), {}), ((1, 0.5, 1, ["t"]), {}), ((1,), {"weight": 2})],
    "Slotted": [((1,), {}), ((1, ()), {}), ((1, (2,)), {}), ((-1,), {})],
    "Keywords": [((), {"a": 1}), ((), {"a": 1, "b": 3}), ((1,), {})],
    "Mixed": [((2,), {"a": 1}), ((3,), {"a": 1}), ((), {"a": 1})],
    "Unequal": [((1,), {}), ((1,), {})],
    "Own": [((1,), {}), ((2,), {})],
    "Empty": [((), {}), ((), {}), ((1,), {})],
    "Ordered": [((1,), {}), ((2,), {})],
    "Inheriting": [((1,), {}), ((1, 2), {}), ((1,), {"b": 3})],
    "Mutable": [((1,), {}), ((2,), {})],
}


def outcome(act: Callable[[], Any]) -> Any:
    """Return a result, or the class of the exception."""
    try:
        return act()
    except Exception as error:
        return type(error)


def same_hash(x: object, y: object) -> bool:
    return hash(x) == hash(y)


def behaviour(made: Any, name: str) -> Iterator[Any]:
    """Yield what a class and its instances do. It must not depend on who has made the class."""
    yield [
        (f.name, f.type, f.default, f.init, f.repr, f.hash, f.compare, f.kw_only)
        for f in dataclasses.fields(made)
    ]
    yield str(inspect.signature(made)).replace("<factory>", "...").split("=")[0]
    yield (
        list(inspect.signature(made).parameters),
        made.__match_args__,
        made.__doc__,
        made.__init__.__annotations__,
        get_type_hints(made.__init__),
        made.__init__.__globals__ is globals(),
    )
    yield hasattr(made, "__slots__"), getattr(made, "__slots__", None)
    built = [outcome(partial(made, *some, **named)) for some, named in GIVEN[name]]
    yield [x if isinstance(x, type) else repr(x).partition("<locals>.")[2] or repr(x) for x in built]
    alive = [x for x in built if not isinstance(x, type)]
    yield [[x == y for y in alive] for x in alive], [x == 1 for x in alive]
    yield [[outcome(partial(same_hash, x, y)) for y in alive] for x in alive]
    if name not in ("Unequal", "Mutable"):
        yield [hash(x) for x in alive]
    yield [dataclasses.asdict(x) for x in alive]
    for x in alive:
        yield copy.copy(x) == x, copy.deepcopy(x) == x, repr(replace(x)) == repr(x)
        for attribute in ("a", "x", "other"):
            # With slots, the standard library refuses some attributes by a TypeError.
            yield outcome(partial(setattr, x, attribute, 3)) is None
            yield outcome(partial(delattr, x, attribute)) is None


@pytest.mark.parametrize("name", OURS)
def test_a_class_behaves_as_that_of_the_standard_library(name: str) -> None:
    for ours, theirs in zip(behaviour(OURS[name], name), behaviour(THEIRS[name], name), strict=True):
        assert ours == theirs


def test_other_attributes_of_subclasses_can_change() -> None:
    sub = type("Sub", (OURS["Point"],), {})(1)
    sub.other = 2
    assert (sub.size, sub.other) == (1.5, 2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        sub.x = 2
    del sub.other
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'y'"):
        del sub.y


def test_each_instance_gets_an_object_of_its_own_from_a_factory() -> None:
    one, other = OURS["Weighted"](1), OURS["Weighted"](1)
    assert one.tags == []
    assert one.tags is not other.tags


def test_the_first_object_can_be_created_after_its_module_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = declared(values.dataclass)["Slotted"]
    monkeypatch.delitem(sys.modules, __name__)
    assert made(1).b == ()
    assert made.__init__.__globals__ is globals()


def test_instances_with_slots_can_be_pickled() -> None:
    from oocgemm.planning import TileShape
    from oocgemm.planning.layout import Layout
    from oocgemm.system.resources import CpuTimes

    for value in (CpuTimes(1.0, 2.0), TileShape(1, 2, 3), Layout()):
        assert pickle.loads(pickle.dumps(value)) == value


def test_the_package_makes_its_classes_this_way() -> None:
    package = Path(values.__file__).parent
    pattern = r"^from dataclasses import .*\bdataclass\b|dataclasses\.dataclass\("
    slow = {path.name for path in package.rglob("*.py") if re.search(pattern, path.read_text(), re.M)}
    assert slow == {"values.py"}
