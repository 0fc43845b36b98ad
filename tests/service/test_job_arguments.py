"""Specs of jobs: which are refused, where their paths are, and what their verbs are called with."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import InputError
from oocgemm.errors import OocGemmError
from oocgemm.jobs.option_groups import LazyArray, PathLike
from oocgemm.jobs.options import options_of, types_of
from oocgemm.jobs.support import OUT, VERBS
from oocgemm.service.job_arguments import arguments, checked, job_options, kind_of
from oocgemm.service.job_planner import planned
from oocgemm.service.job_spec import encoded, out_of, parameters, with_paths
from tests.support.services import LIMITS
from tests.support.suite import examples

OTHERS = {"plan", "dry_run", "options"}  # parameters of verbs that are neither operands nor options


@pytest.mark.parametrize("verb", VERBS)
def test_the_table_of_verbs_has_their_parameters(verb: str) -> None:
    found = inspect.signature(getattr(oocgemm, verb)).parameters
    options = options_of(verb)
    own = {name for name in found if name not in OTHERS and name not in options}
    table = VERBS[verb].parameters
    # `out` of a verb that returns its result is not used: the job saves the result.
    assert own - {"out"} == {name for name in table if name not in options} - {"out"}
    assert not {name for name, kind in table.items() if kind == OUT} - {*found}


@pytest.mark.parametrize("verb", VERBS)
def test_no_option_of_a_job_is_a_path_or_an_operand(verb: str) -> None:
    """All paths of a spec are known by their places in it."""
    for name in job_options(verb):
        types = types_of(verb, name)
        assert not types & {LazyArray, Any}, name
        assert not {*getattr(PathLike, "__args__", ())} <= types, name


# Paths in the places where a job can have some, and texts that are none.
PATHS: list[tuple[dict[str, Any], list[str]]] = [
    ({"a": "1", "b": "2", "c": "3"}, ["1", "2", "3"]),
    (
        {"verb": "gram", "x": {"concat": {"parts": ["1", {"as_matrix": {"x": "2"}}]}}, "out": "3"},
        ["1", "2", "3"],
    ),
    (
        {"verb": "corr", "x": "1", "y": {"keep": {"x": "2", "rows": {"load": "3"}}}, "out": "4"},
        ["1", "2", "3", "4"],
    ),
    ({"verb": "kernel_matmul", "x": "1", "v": "2", "out": "3"}, ["1", "2", "3"]),
    ({"verb": "reduce", "a": "1", "to": {"MatVec": {"v": {"load": "2"}}}, "out": "3"}, ["1", "2", "3"]),
    (
        {
            "verb": "gram",
            "x": "1",
            "out": "2",
            "options": {
                "transform": {"Transform": {"center": {"load": "3"}, "impute": "mean", "scale": "k"}},
                "epilogue": [
                    {"Add": {"d": {"concat": {"parts": ["4"]}}}},
                    {"Scale": {"rows": {"load": "5"}}},
                ],
                "tile": "8x8x8",
            },
        },
        ["1", "2", "3", "4", "5"],
    ),
    (
        {"verb": "pca", "x": {"as_matrix": {"x": "1", "rows": ["t"], "isel": {"l": 0}}}, "k": 2, "out": "3"},
        ["1", "3"],
    ),
]


@pytest.mark.parametrize(("spec", "paths"), PATHS)
def test_all_paths_are_found_and_nothing_else(spec: dict[str, Any], paths: list[str]) -> None:
    seen: list[str] = []

    def change(name: str, path: str, write: bool) -> str:
        seen.append(path)
        assert write == (path == out_of(spec))
        return f"/root/{path}"

    changed = with_paths(spec, change)
    assert sorted(seen) == paths
    assert (
        with_paths(changed, lambda name, path, write: path.removeprefix("/root/")) == {"options": {}} | spec
    )
    assert checked(changed)["options"].keys() == changed["options"].keys()


X = "/data/x.npy"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"verb": "eval"}, "unknown verb 'eval'"),
    ({"verb": "gram", "x": X}, "out must be the path"),
    ({"verb": "gram", "x": X, "out": X, "a": X}, "unknown fields a"),
    ({"verb": "gram", "x": [X], "out": X}, "x must be the path"),
    ({"verb": "gram", "x": X, "out": {"concat": {"parts": [X]}}}, "out must be the path"),
    ({"verb": "gram", "x": {"load": X}, "out": X}, "x must be made by as_matrix or concat"),
    ({"verb": "gram", "x": {"release": {}}, "out": X}, "x must be made by"),
    ({"verb": "gram", "x": {"concat": {"parts": X}}, "out": X}, "must be a list of operands"),
    ({"verb": "gram", "x": {"keep": {"x": X, "rows": X}}, "out": X}, "must be a list of numbers"),
    ({"verb": "gram", "x": {"as_matrix": {"x": [X]}}, "out": X}, "x of as_matrix of x must be made by"),
    ({"verb": "gram", "x": X, "out": "s3://b/o"}, "out is a URL"),
    ({"verb": "gram", "x": {"concat": {"parts": ["s3://b/o"]}}, "out": X}, "x is a URL"),
    ({"verb": "pca", "x": X, "k": True, "out": X}, "k must be an integer"),
    ({"verb": "ridge", "x": X, "y": X, "alpha": "1", "out": X}, "alpha must be a number"),
    ({"verb": "kernel_matmul", "x": X, "v": {"load": X}, "out": X}, "v must be the path"),
    ({"verb": "reduce", "a": X, "to": "sum", "out": X}, "to must be made by TopK"),
    *(
        ({"verb": "gram", "x": X, "out": X, "options": options}, message)
        for options, message in (
            ({"y": X}, "unknown option y"),
            ({"devices": "all"}, "unknown option devices"),
            ({"out": X}, "unknown option out"),
            ({"transform": "center=k"}, "must be of type dict"),
            ({"transform": {"Scale": {}}}, "must be made by Transform"),
            ({"transform": {"Transform": {"center": {"release": {}}}}}, "must be a finite number"),
            ({"transform": {"Transform": {"center": {"load": {"load": X}}}}}, "must be a finite number"),
            ({"transform": {"Transform": {"missing": float("nan")}}}, "must be a finite number"),
            ({"epilogue": [{"Transform": {}}]}, "must be made by Scale"),
            ({"epilogue": {"Scale": {}}}, "must be of type list"),
            ({"alpha": float("nan")}, "JSON does not have"),
            ({"alpha": None}, "must be of type"),
        )
    ),
]


@pytest.mark.parametrize(("spec", "message"), WRONG)
def test_wrong_specs_are_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(spec)


def test_a_spec_is_short(tmp_path: Path) -> None:
    many = [f"{tmp_path}/{number}" for number in range(10_000)]
    with pytest.raises(InputError, match="characters, and 131072 are allowed"):
        checked({"verb": "gram", "x": {"concat": {"parts": many}}, "out": X})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("arrays")
    np.save(made / "x.npy", np.arange(48.0).reshape(8, 6) % 5)
    np.save(made / "v.npy", np.arange(8.0))
    np.save(made / "n-d.npy", np.arange(48.0).reshape(2, 4, 6))
    np.savez(made / "z.npz", x=np.ones(6))
    (made / "text.npy").write_text("root:x:0:0")
    return made


def test_values_become_what_a_caller_passed(folder: Path) -> None:
    """What a client encodes are the arguments with which the verb is called."""
    x = str(folder / "x.npy")
    transform = oocgemm.Transform(missing=float("nan"), impute=0.5, center=np.arange(6.0), clip=(-1, 1))
    steps = [oocgemm.Scale(rows=np.arange(8.0), value=2), oocgemm.Add(x), oocgemm.Cast("float32")]
    kept = oocgemm.keep(oocgemm.concat([x, oocgemm.as_matrix(x, [0], isel={1: slice(0, 6)})]), rows=[0, 2])
    options = {"transform": encoded("t", transform), "epilogue": encoded("e", steps), "chunks": [4, 4]}
    sent = {"verb": "gram", "x": encoded("x", kept), "out": str(folder / "o"), "options": options}
    spec = json.loads(json.dumps(sent))
    found = arguments(checked(spec))
    assert encoded("x", found["x"]) == spec["x"]
    assert encoded("t", found["transform"]) == spec["options"]["transform"]
    assert [encoded("e", step) for step in found["epilogue"]] == spec["options"]["epilogue"]
    assert found["chunks"] == (4, 4)
    np.testing.assert_array_equal(found["transform"].center, np.arange(6.0))


@pytest.mark.parametrize("name", ["text.npy", "z.npz", "absent.npy"])
def test_only_npy_files_of_numbers_are_loaded(folder: Path, name: str) -> None:
    spec = checked({"verb": "kernel_matmul", "x": X, "v": str(folder / name), "out": X})
    with pytest.raises((InputError, OSError)) as refused:
        arguments(spec)
    assert "root:x" not in str(refused.value)


def test_arrays_in_memory_have_no_pickles(folder: Path) -> None:
    np.save(folder / "object.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be loaded"):
        arguments(checked({"verb": "kernel_matmul", "x": X, "v": str(folder / "object.npy"), "out": X}))


NUMBERS = st.integers(-3, 70) | st.floats() | st.sampled_from(["nan", "inf", "1e3", "-1", "1j", "x"])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(["k", "mean", "hwe", "raise", "float16"])
LISTS = st.lists(SCALARS, max_size=3) | st.just([0.5] * 6) | st.just([[1], [2, 3]])
NAMES = [
    "missing",
    "impute",
    "center",
    "scale",
    "cast",
    "clip",
    "log1p",
    "target_sum",
    "rows",
    "cols",
    "value",
]
ARGUMENTS = st.dictionaries(st.sampled_from(NAMES), SCALARS | LISTS, max_size=3)
STEPS = st.sampled_from(["Scale", "RankOne", "Cast", "Correlation", "Gaussian"])


def values(kind: str, choices: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Return values of the JSON types of an option, most of them wrong."""
    made: dict[str, st.SearchStrategy[Any]] = {
        "flag": st.booleans(),
        "pair": st.lists(st.integers(0, 9), min_size=2, max_size=2),
        "scalar": NUMBERS,
        "number": NUMBERS,
        "count": st.integers(-2, 9),
        "size": st.sampled_from(["1GiB", "x", -1, 0, 1 << 30]),
        "word": st.sampled_from(["x", "", "8x8x8", "float32", *choices]),
        "transform": st.builds(lambda x: {"Transform": x}, ARGUMENTS),
        "steps": st.lists(st.builds(lambda name, x: {name: x}, STEPS, ARGUMENTS), max_size=2),
    }
    return made[kind]


@settings(max_examples=examples(20_000, quick=200), deadline=None)
@given(data=st.data())
def test_any_options_are_planned_or_refused(folder: Path, data: st.DataObject) -> None:
    """No option makes the planner fail by anything but an error of this package."""
    verb = data.draw(st.sampled_from([*VERBS]))
    x, v = str(folder / "x.npy"), str(folder / "v.npy")
    made = st.builds(lambda rows: {"as_matrix": {"x": x, "rows": rows, "isel": {"0": 0}}}, LISTS)
    to = [{"Reduce": {"kind": "sum"}}, {"TopK": {"k": -1}}, {"MatVec": {"v": [1] * 8}}]
    usual: dict[str, st.SearchStrategy[Any]] = {
        "count": st.integers(-1, 9),
        "numbers": st.just(0.5) | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
        "array": st.sampled_from([v, v, v, x]),
        "reduction": st.sampled_from(to),
        "operand": st.one_of(*[st.just(x)] * 6, st.sampled_from([v, str(folder / "n-d.npy")]), made),
        "optional": st.sampled_from([None, None, x, v]),
        "out": st.sampled_from([str(folder / "o.zarr"), str(folder / "o.npy")]),
    }
    spec: dict[str, Any] = {name: data.draw(usual[kind]) for name, kind in parameters(verb).items()}
    known = job_options(verb)
    needed = {} if verb == "corr" else {"topk": 2, "gamma": 0.5, "window": 2}
    chosen = data.draw(st.lists(st.sampled_from([*known]), unique=True, max_size=3))
    options = {name: data.draw(values(kind_of(verb, name), known[name].choices)) for name in chosen}
    options = {name: value for name, value in needed.items() if name in known} | options
    try:
        found = planned(checked(spec | {"verb": verb, "options": options}), LIMITS, "host")
    except (OocGemmError, OSError):
        return
    json.dumps(found.spec, allow_nan=False)
