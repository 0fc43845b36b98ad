"""Make frozen dataclasses in less than half of the time that `dataclasses.dataclass` takes.

A first product needs 130 of these classes. The standard library compiles seven functions for each of them,
which took more than a third of the time of importing the package. Here only `__init__` is compiled, when the
first object is created. The other functions are closures over the names of the fields, and
`operator.attrgetter` makes them as fast.

Pseudo-fields (`InitVar`) and fields that `__init__` does not take are not supported.
A class may inherit from a frozen dataclass of the standard library, but not the other way around.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, **options):
        """Make a class a dataclass. The options and the result are those of `dataclasses.dataclass`."""
        if not frozen or options.get("order"):
            return dataclasses.dataclass(cls, frozen=frozen, **options)
        return (lambda each: _frozen(each, **options)) if cls is None else _frozen(cls, **options)


__all__ = ["dataclass"]

# The default of a parameter of `__init__` whose value a factory makes.
_MADE = object()
_set = object.__setattr__


def _frozen(cls: Any, **options: Any) -> Any:
    """Make a class a frozen dataclass. Functions that the class defines itself are kept."""
    bases = (base.__dict__.get("__dataclass_params__") for base in cls.__mro__[1:])
    if any(base.frozen for base in bases if base):  # made by the standard library, which refuses others
        return dataclasses.dataclass(frozen=True, **options)(cls)
    made: Any = dataclasses.dataclass(cls, **options | {"init": False, "repr": False, "eq": False})
    fields = dataclasses.fields(made)
    functions = dict(
        zip(("__setattr__", "__delattr__"), _refusals(made, {f.name for f in fields}), strict=True)
    )
    if options.get("repr", True):
        functions["__repr__"] = _repr([field.name for field in fields if field.repr])
    if options.get("eq", True):
        functions["__eq__"] = _eq(_values(field.name for field in fields if field.compare))
        hashed = (field for field in fields if (field.compare if field.hash is None else field.hash))
        functions["__hash__"] = _hash(_values(field.name for field in hashed))
    if options.get("slots"):  # pickle would call the `__setattr__` that refuses
        functions |= {"__getstate__": _state, "__setstate__": _restore}
    for name, function in functions.items():
        if cls.__dict__.get(name) is None:
            function.__name__, function.__qualname__ = name, f"{cls.__qualname__}.{name}"
            setattr(made, name, function)
    if "__init__" not in cls.__dict__:
        made.__init__ = _Init(made, fields)
    return made


class _Init:
    """The method `__init__` of a class until its first use, which compiles it."""

    def __init__(self, cls: Any, fields: Iterable[dataclasses.Field[Any]]) -> None:
        # By the first use, the module may have been replaced.
        self._class, self._fields, self._module = cls, fields, vars(sys.modules[cls.__module__])

    def __get__(self, instance: object, owner: Any = None) -> Any:
        function = self._class.__init__ = _init(self._class, self._fields, self._module)
        return function.__get__(instance, owner)


def _init(cls: Any, fields: Iterable[dataclasses.Field[Any]], module: dict[str, Any]) -> Any:
    """Compile the method `__init__` of a class among the names of its module."""
    known: dict[str, Any] = {"_set": _set, "_MADE": _MADE}
    parameters, keywords, lines = ["self"], list[str](), list[str]()
    for field in fields:
        name = parameter = value = field.name
        if field.default is not dataclasses.MISSING:
            known[f"_default_{name}"] = field.default
            parameter = f"{name}=_default_{name}"
        elif field.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"] = field.default_factory
            parameter, value = f"{name}=_MADE", f"_make_{name}() if {name} is _MADE else {name}"
        (keywords if field.kw_only else parameters).append(parameter)
        lines.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    if keywords:
        parameters += ["*", *keywords]
    body, scope = "\n  ".join(lines or ["pass"]), dict[str, Any]()
    function = f"def __init__({', '.join(parameters)}):\n  {body}\n return __init__"
    exec(f"def make({', '.join(known)}):\n {function}", module, scope)
    made = scope["make"](**known)
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {field.name: field.type for field in fields} | {"return": None}
    return made


def _refusals(cls: Any, names: set[str]) -> tuple[Any, Any]:
    """Return methods that refuse to set and delete attributes. Subclasses may have others than the fields."""

    def refuse_setting(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def refuse_deleting(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return refuse_setting, refuse_deleting


def _values(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the attributes of an object with these names."""
    known = list(names)
    if len(known) > 1:
        return attrgetter(*known)
    return lambda self: tuple(getattr(self, name) for name in known)


def _repr(names: list[str]) -> Any:
    return lambda self: (
        f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
    )


def _eq(values: Callable[[Any], object]) -> Any:
    return lambda self, other: (
        values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented
    )


def _hash(values: Callable[[Any], object]) -> Any:
    return lambda self: hash(values(self))


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        _set(self, field.name, value)
