"""The arguments of a job's verb: its spec is checked by the table of options, and its values are made.

`oocgemm.service.job_spec` describes specs.
"""

import os
from collections.abc import Mapping
from math import isfinite
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from oocgemm.errors import InputError
from oocgemm.jobs import support
from oocgemm.jobs.support import ARRAY, COUNT, NUMBERS, OPERAND, OPTIONAL, OUT, REDUCTION, VERBS
from oocgemm.service.job_spec import (
    LOAD,
    MAX_DEPTH,
    OPERANDS_OF,
    REDUCTIONS,
    STEPS,
    TRANSFORMS,
    VIEWS,
    Spec,
    in_memory,
    parameters,
    with_paths,
)

if TYPE_CHECKING:
    from oocgemm.jobs.option_groups import Option

# The JSON types of an option, by the kind of its values (`kind_of`).
TYPES: Mapping[str, tuple[type, ...]] = {
    "flag": (bool,),
    "pair": (list,),
    "scalar": (int, float, str),  # a complex, infinite or nan value is a text
    "number": (int, float, str),
    "count": (int,),
    "size": (int, str),
    "word": (str,),
    "transform": (dict,),
    "steps": (list,),
}
# Numbers that JSON does not have.
_SPECIAL = ("nan", "inf", "-inf")
# Maximum characters of a path, and bytes of a .npy file that is loaded.
MAX_PATH, MAX_LOADED = 4096, 256 << 20
# Maximum characters of a spec. A worker receives the spec as one message.
MAX_SPEC = 1 << 17


def job_options(verb: str) -> "dict[str, Option]":
    """Return the options of a verb that a job may have, by name."""
    from oocgemm.jobs.options import options_of

    own = parameters(verb)
    return {name: option for name, option in options_of(verb).items() if option.service and name not in own}


def kind_of(verb: str, name: str) -> str:
    """Return the kind of the values of an option, a key of `TYPES`."""
    from oocgemm.jobs.options import types_of
    from oocgemm.jobs.steps import Epilogue
    from oocgemm.stores.transform import Transform

    types = types_of(verb, name)
    if types == {bool}:
        return "flag"
    kinds: Mapping[Any, str] = {
        **{
            tuple[int, int]: "pair",
            Transform: "transform",
            Epilogue: "steps",
            complex: "scalar",
            float: "number",
        }
    }
    if found := next((kind for each, kind in kinds.items() if each in types), ""):
        return found
    if int in types:
        return "count" if types == {int} else "size"
    return "word"


def takes_none(verb: str, name: str) -> bool:
    """Return whether None is a value of an option."""
    from oocgemm.jobs.options import VERBS as OPTIONS

    kind, option = get_args(OPTIONS[verb].__annotations__[name])
    return option.default is None or NoneType in get_args(kind)


def checked(spec: Spec) -> dict[str, Any]:
    """Return a spec with absolute paths. Raises `InputError` for wrong fields, options or types."""
    verb, options = spec.get("verb", "gemm"), spec.get("options", {})
    if not isinstance(verb, str) or verb not in VERBS:
        raise InputError(f"unknown verb {verb!r}: choose one of {', '.join(VERBS)}")
    names, known = parameters(verb), job_options(verb)
    unknown = sorted({*spec} - {*names, "verb", "options"})
    if unknown:
        raise InputError(f"unknown fields {', '.join(unknown)}: a job has {', '.join(names)} and options")
    if not isinstance(options, Mapping):
        raise InputError('options must be an object, such as {"beta": 1}')
    for name, kind in names.items():
        if spec.get(name) is not None or kind != OPTIONAL:
            _check_field(name, kind, spec.get(name))
    for name, value in options.items():
        if name not in known:
            raise support.refusal(support.SERVICE, "option", name=name, known=", ".join(sorted(known)))
        if value is not None or not takes_none(verb, name):
            _check_option(name, kind_of(verb, name), value)
    options = {name: x for name, x in options.items() if x is not None or known[name].default is not None}
    found = with_paths(dict(spec) | {"options": options}, _absolute)
    given = {
        name: _argument(name, kind, value)
        for name, value in found["options"].items()
        if isinstance(value, str) and (kind := kind_of(verb, name)) in ("scalar", "number")
    }
    found["options"] |= {
        name: value for name, value in given.items() if isinstance(value, float) and isfinite(value)
    }
    if len(str(found)) > MAX_SPEC:
        raise InputError(
            f"the job has {len(str(found))} characters, and {MAX_SPEC} are allowed: store its arrays in .npy "
            'files, and name each as {"load": PATH}; join files in groups, and the groups'
        )
    return found


def _absolute(name: str, path: str, write: bool) -> str:
    if not path or "\0" in path or len(path) > MAX_PATH:
        raise InputError(f"{name} must be the path of an array")
    if "://" in path:
        raise support.refusal(support.SERVICE, "URL", name=name)
    return os.path.abspath(path)


def _check_field(name: str, kind: str, value: Any) -> None:
    if kind == COUNT:
        if type(value) is not int:
            raise InputError(f"{name} must be an integer, not {value!r}")
    elif kind == NUMBERS:
        if any(type(each) not in (int, float) for each in (value if isinstance(value, list) else [value])):
            raise InputError(f"{name} must be a number, or a list of numbers, not {value!r}")
    elif kind == REDUCTION:
        _check_made(name, value, REDUCTIONS)
    elif isinstance(value, str) and value:
        pass
    elif kind in (OPERAND, OPTIONAL) and isinstance(value, dict):
        _check_made(name, value, VIEWS)
    else:
        raise InputError(f"{name} must be the path of an array")


def _check_option(name: str, kind: str, value: Any) -> None:
    if type(value) not in (allowed := TYPES[kind]):
        kinds = " or ".join(each.__name__ for each in allowed)
        raise InputError(f"option {name} must be of type {kinds}, not {type(value).__name__}")
    if kind == "transform":
        _check_made(f"option {name}", value, TRANSFORMS)
    elif kind == "steps":
        for number, step in enumerate(value):
            _check_made(f"option {name}[{number}]", step, STEPS)
    elif isinstance(value, float) and not isfinite(value):
        raise InputError(f"option {name} is {value}, which JSON does not have: pass it as a text")


def _check_made(name: str, value: Any, makers: tuple[str, ...], depth: int = 0) -> None:
    """Raise `InputError` unless a value is made by one of some makers, of arguments that a spec can have."""
    made = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else None
    if made not in makers or not isinstance(value[made], dict) or depth > MAX_DEPTH:
        raise InputError(
            f'{name} must be made by {" or ".join(makers)}, such as {{"{makers[0]}": {{...}}}}, at most '
            f"{MAX_DEPTH} in one another"
        )
    for key, each in value[made].items():
        where = f"{key} of {made} of {name}"
        if key != OPERANDS_OF.get(made):
            _check_plain(where, each)
            if made == "keep" and isinstance(each, str):  # a path, and `with_paths` does not know it
                raise InputError(f'{where} must be a list of numbers, or {{"{LOAD}": PATH}}')
        elif made == "concat" and not isinstance(each, list):
            raise InputError(f"{where} must be a list of operands")
        else:
            for part in each if made == "concat" else [each]:
                if not isinstance(part, str):
                    _check_made(where, part, VIEWS, depth + 1)


def _check_plain(name: str, value: Any) -> None:
    """Raise `InputError` unless an argument is a number, a text, a list of these, loaded, or has axes."""
    if isinstance(value, dict) and name.startswith("isel of "):
        value = list(value.values())
    elif isinstance(value, dict):
        value = value[LOAD] if [*value] == [LOAD] and isinstance(value[LOAD], str) else value
    for part in value if isinstance(value, list) else [value]:
        for each in part if isinstance(part, list) else [part]:
            if not isinstance(each, str | int | float | NoneType) or (
                type(each) is float and not isfinite(each)
            ):
                raise InputError(
                    f'{name} must be a finite number, "nan", a text, a list of numbers, or {{"{LOAD}": PATH}}'
                )


def arguments(spec: Spec) -> dict[str, Any]:
    """Return a spec as keyword arguments of its verb. Raises `InputError` for unreadable arrays."""
    verb = spec.get("verb", "gemm")
    found: dict[str, Any] = {}
    for name, kind in parameters(verb).items():
        if spec.get(name) is None or (kind == OUT and in_memory(spec)):
            continue
        value = {LOAD: spec[name]} if kind == ARRAY else spec[name]
        found[name] = _made(name, value) if isinstance(value, dict) else value
    return found | {name: _argument(name, kind_of(verb, name), x) for name, x in spec["options"].items()}


def _argument(name: str, kind: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _made(name, value)
    if kind == "steps":
        return [_made(name, each) for each in value]
    if kind == "pair" and value is not None:
        if len(value) != 2 or any(type(each) is not int for each in value):
            raise InputError(f"option {name} must be two integers, such as [1024, 1024], not {value}")
        return tuple(value)
    if isinstance(value, str) and kind in ("scalar", "number"):
        try:
            number = complex(value)
        except ValueError:
            raise InputError(f"option {name} must be a number, such as 1.5 or 2+1j, not {value!r}") from None
        if number.imag and kind == "number":
            raise InputError(f"option {name} must be a real number, such as 1.5, not {value!r}")
        return number if number.imag else number.real
    return value


def _made(name: str, value: Mapping[str, Any]) -> Any:
    """Return a made value, or a loaded array."""
    import oocgemm

    ((made, given),) = value.items()  # `checked` has made sure that it is one of a few
    if made == LOAD:
        return _loaded(name, given)
    found = dict[str, Any]()
    for key, each in given.items():
        if key == "isel" and each is not None:  # JSON has positions of axes as texts
            found[key] = {int(x) if x.lstrip("-").isdecimal() else x: part for x, part in each.items()}
        elif key == OPERANDS_OF.get(made) and isinstance(each, list):
            found[key] = [part if isinstance(part, str) else _made(name, part) for part in each]
        elif isinstance(each, dict):
            found[key] = _made(f"{key} of {name}", each)
        elif isinstance(each, list) and made != "as_matrix":
            found[key] = _numbers(f"{key} of {name}", each)
        else:
            found[key] = float(each) if each in _SPECIAL else each
    try:
        return getattr(oocgemm, made)(**found)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be made by {made}: {error}") from error


def _numbers(name: str, given: list[Any]) -> Any:
    import numpy as np

    try:
        found = np.array(given)
    except (TypeError, ValueError, OverflowError):
        found = np.array("")
    if found.dtype.kind not in "biuf":
        raise InputError(f"{name} must be numbers, in rows of equal length")
    return found


def _loaded(name: str, path: str) -> Any:
    import numpy as np

    from oocgemm.stores.files import open_regular

    with open(path, "rb", opener=open_regular) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_LOADED:
            raise InputError(f"{name}: {path} has {size} bytes, and {MAX_LOADED} are loaded at most")
        try:
            found = np.load(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise InputError(f"{name}: {path} cannot be loaded: {error}: write it by numpy.save") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
        raise InputError(f"{name}: {path} has no array of real numbers: write one by numpy.save")
    return found
