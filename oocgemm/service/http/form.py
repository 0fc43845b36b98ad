"""The form of the page: the fields of the jobs of each verb, from the tables of verbs and of options."""

from typing import Any

from oocgemm.jobs.option_groups import Option
from oocgemm.jobs.options import rendered
from oocgemm.jobs.support import ARRAY, COUNT, NUMBERS, OPERAND, OPTIONAL, OUT, REDUCTION, VERBS
from oocgemm.service.job_arguments import job_options, kind_of
from oocgemm.service.job_spec import parameters

# The fields of parameters, by what they take. ``{}`` is the name of the parameter.
_PARAMETERS: dict[str, dict[str, Any]] = {
    OPERAND: {"help": "ROOT:PATH of a matrix.", "place": "data:dir/{}.zarr", "root": "all"},
    OPTIONAL: {"help": "ROOT:PATH of another matrix.", "place": "none", "root": "all"},
    ARRAY: {"help": "ROOT:PATH of a .npy file.", "place": "data:dir/{}.npy", "root": "all"},
    COUNT: {"help": "How many are found, such as 10.", "kind": "number", "place": "10"},
    NUMBERS: {"help": "A number, or several: 0.1, 1, 10.", "kind": "numbers", "place": "1"},
    OUT: {"help": "ROOT:PATH of the result, in a writable root.", "place": "out:{}.zarr", "root": "rw"},
}
# The kinds of fields by the kind of an option's values. Others are texts.
_KINDS = {"flag": "check", "pair": "pair", "count": "number", "transform": "transform"}
TRANSFORM = "Such as missing=-1,center=k,scale=k,cast=float16."


def forms() -> dict[str, Any]:
    """Return the fields of each verb that has a form, as ``fields.js`` describes them."""
    return {
        verb: {"parameters": _operands(verb), "options": _options(verb)}
        for verb, facts in VERBS.items()
        if REDUCTION not in facts.parameters.values()
    }


def _operands(verb: str) -> list[dict[str, Any]]:
    found = []
    for name, kind in parameters(verb).items():
        field = _PARAMETERS[kind] | {"name": name, "required": kind != OPTIONAL}
        field["label"] = "Result" if name == "out" else name.upper() if len(name) == 1 else name.capitalize()
        found.append(field | {"place": field["place"].format(name.upper() if name != "out" else "result")})
    return found


def _options(verb: str) -> list[dict[str, Any]]:
    shared = job_options("gemm")
    found = []
    for name, option in job_options(verb).items():
        kind = kind_of(verb, name)
        if option.form is not None:
            field, kind = option.form, _KINDS.get(kind, "text")
            shown: dict[str, Any] = {"name": name, "label": field.label, "help": field.help}
            shown |= {"kind": field.choices or kind, "group": field.group}
            if kind in ("pair", "text") and not field.choices:
                shown["place"] = field.place or _default(option)
            found.append(shown)
        elif kind == "transform" or name not in shared:
            found.append(_described(name, kind, option) | {"group": "more" if name in shared else "verb"})
    return found


def _described(name: str, kind: str, option: Option) -> dict[str, Any]:
    """Return the field of an option that is described for the command line only."""
    shown: dict[str, Any] = {"name": name, "label": _words(name), "kind": _KINDS.get(kind, "text")}
    if kind == "flag" and option.flags:  # the check box switches the option off
        flag, text = option.flags[0]
        return shown | {"label": _words(flag.strip("-")), "help": rendered(text, _words), "off": True}
    if kind == "transform":
        return shown | {"help": TRANSFORM, "place": "none"}
    if option.choices:
        values = [("" if each == option.default else each, each) for each in option.choices]
        shown["kind"] = [*([] if option.default in option.choices else [("", "default")]), *values]
    return shown | {"help": rendered(option.help, _words), "place": _default(option)}


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ").capitalize()


def _default(option: Option) -> str:
    return rendered(option.shown, _words) or ("none" if option.default is None else str(option.default))
