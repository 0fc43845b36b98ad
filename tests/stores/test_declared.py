"""What attributes declare about elements is respected in every store, by every verb."""

import base64
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.stores import open_matrix
from oocgemm.stores.declared import CompleteMatrix
from tests.stores.test_formats import obey
from tests.support.backends_here import BACKENDS, running_on
from tests.support.command import command
from tests.support.suite import each_value, slow

Array = NDArray[Any]
dask: Any = pytest.importorskip("dask.array")
ONES = np.ones((6, 1))
ON_HOST: dict[str, Any] = {"backend": "host"}


def values(dtype: str = "f8") -> Array:
    """Return 10 x 6 small numbers, one of which is 99."""
    x = np.random.default_rng(5).integers(1, 6, (10, 6)).astype(dtype)
    x[7, 4] = 99
    return x


# Makers of operands: they store an array with attributes, and return what is passed to a verb.
Maker = Callable[[Path, Array, Mapping[str, Any]], Any]


def _hdf5(**options: Any) -> Maker:
    def make(folder: Path, x: Array, attributes: Mapping[str, Any]) -> str:
        with h5py.File(folder / "x.h5", "w") as file:
            file.create_dataset("x", data=x, **options).attrs.update(attributes)
        return f"{folder}/x.h5::x"

    return make


def _hdf5_object(folder: Path, x: Array, attributes: Mapping[str, Any]) -> Any:
    return h5py.File(_hdf5(chunks=(4, 3))(folder, x, attributes).partition("::")[0])["x"]


def _zarr(zarr_format: int, **options: Any) -> Maker:
    def make(folder: Path, x: Array, attributes: Mapping[str, Any]) -> str:
        given: dict[str, Any] = {"chunks": (4, 3), "zarr_format": zarr_format, **options}
        path = folder / "x.zarr"
        zarr.create_array(path, data=x, attributes=_json(attributes), **given)
        return str(path)

    return make


def _json(attributes: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: np.asarray(value).tolist() for name, value in attributes.items()}
    plain = {name: [x.real, x.imag] if isinstance(x, complex) else x for name, x in plain.items()}
    return {name: "NaN" if isinstance(x, float) and np.isnan(x) else x for name, x in plain.items()}


def _zarr_object(zarr_format: int) -> Maker:
    return lambda *given: zarr.open_array(_zarr(zarr_format)(*given), mode="r")


def _in_memory(folder: Path, x: Array, attributes: Mapping[str, Any]) -> Any:
    return zarr.create_array({}, data=x, chunks=(4, 3), attributes=_json(attributes))


def _url(folder: Path, x: Array, attributes: Mapping[str, Any]) -> str:
    from zarr.storage import ObjectStore

    from oocgemm.stores.objects import Bucket

    bucket = Bucket(url := f"memory://{folder}/x")
    zarr.create_array(
        ObjectStore(bucket.store), data=x, chunks=(4, 3), attributes=_json(attributes), overwrite=True
    )
    return url


def _tensorstore(driver: str) -> Maker:
    def make(*given: Any) -> Any:
        path = _zarr(3 if driver == "zarr3" else 2)(*given)
        return tensorstore.open({"driver": driver, "kvstore": {"driver": "file", "path": path}}).result()

    return make


def _dask(of: Maker, **options: Any) -> Maker:
    return lambda *given: dask.from_array(of(*given), **{"chunks": (5, 6), **options})


def _moved(*given: Any) -> Any:
    """Return a dask array that moves elements around, and does not change them."""
    x = dask.from_array(_hdf5_object(*given), chunks=(4, 3))
    return dask.concatenate([x[:5], x[5:]]).T.rechunk((3, 3)).T


class _Variable:
    """An array like those of xarray: it has attributes, and is sliced."""

    def __init__(self, x: Array, attributes: Mapping[str, Any]) -> None:
        self.attrs, self.shape, self.dtype, self._x = dict(attributes), x.shape, x.dtype, x

    def __getitem__(self, at: Any) -> Array:
        return np.asarray(self._x[at])


def _variable(folder: Path, x: Array, attributes: Mapping[str, Any]) -> Any:
    return _Variable(x, attributes)


STORES: dict[str, Maker] = {
    "hdf5, contiguous": _hdf5(),
    "hdf5, gzip": _hdf5(chunks=(4, 3), compression="gzip", shuffle=True),
    "h5py.Dataset": _hdf5_object,
    "zarr v2": _zarr(2),
    "zarr v3": _zarr(3),
    "zarr v3, raw": _zarr(3, compressors=None),
    "zarr v3, shards": _zarr(3, shards=(8, 6)),
    "zarr.Array v2": _zarr_object(2),
    "zarr.Array v3": _zarr_object(3),
    "zarr.Array in memory": _in_memory,
    "object store": _url,
    "tensorstore v2": _tensorstore("zarr"),
    "tensorstore v3": _tensorstore("zarr3"),
    "dask of h5py": _dask(_hdf5_object),
    "dask of h5py, inlined": _dask(_hdf5_object, inline_array=True, name="named"),
    "dask of zarr": _dask(_zarr_object(2)),
    "dask, moved": _moved,
    "variable": _variable,
}
SLOW = (
    *("hdf5, contiguous", "hdf5, through h5py", "zarr v2, filters", "zarr.Array in memory", "zarr v3, raw"),
    *("dask of h5py, inlined", "tensorstore v2", "zarr v3, shards"),
)
STORES["hdf5, through h5py"] = _hdf5(chunks=(4, 3), **hdf5plugin.Blosc2())
STORES["zarr v2, filters"] = _zarr(2, filters=[numcodecs.AsType(encode_dtype="<f4", decode_dtype="<f8")])


@pytest.fixture(params=[*(name for name in STORES if name not in SLOW), *slow(*((name,) for name in SLOW))])
def make(request: pytest.FixtureRequest) -> Maker:
    return STORES[request.param]


PACKED: list[dict[str, Any]] = [
    {"scale_factor": 0.1},
    {"add_offset": np.array([273.15])},
    {"scale_factor": 0.25, "add_offset": -2.0, "_FillValue": 99.0},
]


@pytest.mark.filterwarnings("ignore:A at .* is read by h5py")
def test_packed_numbers_are_unpacked_in_every_store(make: Maker, tmp_path: Path) -> None:
    x, b = values(), np.eye(6)
    for attributes in PACKED:
        operand = make(tmp_path, x, attributes)
        unpacked = x * attributes.get("scale_factor", 1) + attributes.get("add_offset", 0)
        if "_FillValue" in attributes:
            with pytest.raises(ExecutionError, match=r"the element at \[7, 4\] of A.* is 99.0, which stands"):
                oocgemm.matmul(operand, b, **ON_HOST)
            unpacked[7, 4] = 0
            for code in (99, np.nan):
                change = oocgemm.Transform(missing=code, impute=0)
                found = oocgemm.gemm(operand, b, transform_a=change, **ON_HOST).out
                np.testing.assert_array_equal(found, unpacked)
        else:
            np.testing.assert_array_equal(oocgemm.matmul(operand, b, **ON_HOST), unpacked)
        found = oocgemm.matmul(operand, x.T.copy(), decode=False, **ON_HOST)
        np.testing.assert_array_equal(found, x @ x.T)
        _clear(tmp_path)


BACKEND = pytest.mark.parametrize("backend", BACKENDS)


@BACKEND
@each_value
@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">u2", "i4", "i8", "f2", "f4"])
def test_packed_integers_are_unpacked_as_float32_or_float64(backend: str, dtype: str, tmp_path: Path) -> None:
    x = values(dtype)
    path = _zarr(3)(tmp_path, x, {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": 99})
    wide = (x.astype("f8") * 0.01 + 273.15).astype(
        "f4" if np.dtype(dtype).itemsize < 4 or dtype == "f4" else "f8"
    )
    known = np.where(x == 99, np.nan, wide.astype("f8"))
    with running_on(backend) as options:
        change = oocgemm.Transform(missing=99, impute=0)
        found = oocgemm.gemm(path, np.eye(6), transform_a=change, **options).out
        np.testing.assert_array_equal(found, np.where(x == 99, 0, x.astype("f8") * 0.01 + 273.15))
        np.testing.assert_array_equal(oocgemm.stats(path, missing=99).missing, (x == 99).sum(0))
        np.testing.assert_allclose(oocgemm.stats(path, missing=99).mean, np.nanmean(known, 0), rtol=1e-6)
        means = np.where(x == 99, np.nanmean(known, 0), wide)
        cov = oocgemm.cov(path, transform=oocgemm.Transform(missing=99), **options).out
        np.testing.assert_allclose(cov, np.cov(means), atol=1e-4)
        _clear(tmp_path)
        path = _zarr(3)(tmp_path, x, {"scale_factor": 0.5})
        gram = oocgemm.gram(path, uplo="full", **options).out
        assert gram.dtype == wide.dtype
        np.testing.assert_array_equal(gram, (x / 2).astype("f8") @ (x / 2).astype("f8").T)


@pytest.mark.filterwarnings("ignore:A at .* is read by h5py")
@pytest.mark.parametrize("attribute", ["_FillValue", *slow(("missing_value",))])
def test_missing_elements_stop_every_store(make: Maker, attribute: str, tmp_path: Path) -> None:
    x = values()
    operand, b = make(tmp_path, x, {attribute: 99.0}), np.ones((6, 2))
    with pytest.raises(
        ExecutionError, match=r"the element at \[7, 4\] of A.* is 99.0, which stands for a missing"
    ):
        oocgemm.matmul(operand, b, **ON_HOST)
    np.testing.assert_array_equal(oocgemm.matmul(operand, b, decode=False, **ON_HOST), x @ b)
    change = oocgemm.Transform(missing=99, impute=0)
    found = oocgemm.gemm(operand, b, transform_a=change, **ON_HOST).out
    np.testing.assert_array_equal(found, np.where(x == 99, 0, x) @ b)
    with pytest.raises(ExecutionError, match=r"\[7, 4\]"):
        oocgemm.gemm(operand, b, transform_a=oocgemm.Transform(missing=-1, impute=0), **ON_HOST)


@pytest.mark.filterwarnings("ignore:A at .* is read by h5py")
def test_attributes_that_change_nothing_cost_nothing(make: Maker, tmp_path: Path) -> None:
    x = values()
    x[0, 0] = np.nan
    attributes = {"scale_factor": 1.0, "add_offset": 0, "_FillValue": np.nan, "_Unsigned": "true"}
    operand = make(tmp_path, x, attributes)
    assert not isinstance(open_matrix("A", operand), CompleteMatrix)
    np.testing.assert_array_equal(oocgemm.matmul(operand, x.T.copy(), **ON_HOST), x @ x.T)


@each_value
@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8", ">f8", "i1", "<i4", ">i8", "<c8", ">c16"])
@pytest.mark.parametrize(
    "store", ["hdf5, gzip", "zarr v3", *slow(("h5py.Dataset",), ("zarr v2",), ("dask of zarr",))]
)
def test_codes_are_found_in_every_dtype(dtype: str, store: str, tmp_path: Path) -> None:
    x = values(dtype)
    operand = STORES[store](
        tmp_path, x, {"_FillValue": np.array(-7, x.dtype), "missing_value": np.array(99, x.dtype)}
    )
    matrix = open_matrix("A", operand)
    out = np.empty(matrix.shape, matrix.dtype)
    matrix.read((0, 7), (0, 6), out[:7])
    with pytest.raises(ExecutionError, match=r"the element at \[7, 4\] of A"):
        matrix.read((2, 10), (1, 6), out[2:, 1:])
    np.testing.assert_array_equal(out[2:7], x[2:7])


@pytest.mark.parametrize("stated", ["true", b"true", np.bytes_(b"True"), True])
@pytest.mark.parametrize(
    "store", ["hdf5, gzip", "zarr v2", *slow(("h5py.Dataset",), ("zarr.Array v3",), ("variable",))]
)
def test_unsigned_integers_are_read_as_such(stated: Any, store: str, tmp_path: Path) -> None:
    x = values("i1")
    x[2, 3] = -1
    plain = stated.decode() if isinstance(stated, bytes) and "zarr" in store else stated
    operand = STORES[store](tmp_path, x, {"_Unsigned": plain})
    wide = x.view("u1").astype("f4")
    np.testing.assert_array_equal(oocgemm.gram(operand, uplo="full", **ON_HOST).out, wide @ wide.T)
    found = oocgemm.gram(operand, decode=False, uplo="full", **ON_HOST).out
    np.testing.assert_array_equal(found, x.astype(int) @ x.T.astype(int))


@pytest.mark.parametrize("scale", [[0.1, 0.2], "much", np.inf])
def test_what_is_no_number_to_unpack_with_is_refused(scale: Any, tmp_path: Path) -> None:
    path = _hdf5()(tmp_path, values(), {"scale_factor": scale})
    with pytest.raises(
        InputError, match=r"has the attribute scale_factor.*so its numbers are packed: unpack it"
    ):
        oocgemm.gram(path, **ON_HOST)
    oocgemm.gram(path, decode=False, **ON_HOST)


def test_packed_numbers_beside_others_are_refused(tmp_path: Path) -> None:
    """One scale would be wrong for the other elements."""
    one = _dask(_hdf5_object)(tmp_path, values(), {"scale_factor": 0.5})
    for both in (dask.concatenate([one[:5], one[5:] * 0.5]), dask.concatenate([one, dask.ones((2, 6))])):
        with pytest.raises(InputError, match=r"scale_factor = 0.5.*so its numbers are packed"):
            oocgemm.gram(both, **ON_HOST)


def test_codes_that_no_element_can_have_are_ignored(tmp_path: Path) -> None:
    """-999 is no int8: 25, to which NumPy would wrap it, is a number like any other."""
    x = values("i1")
    x[0, 0] = 25
    for store in ("hdf5, gzip", "zarr v3", "h5py.Dataset"):
        operand = STORES[store](tmp_path, x, {"_FillValue": -999.0, "missing_value": 0.5})
        assert not isinstance(open_matrix("A", operand), CompleteMatrix)
        _clear(tmp_path)


@each_value
@pytest.mark.parametrize("number", [99.0, -np.inf])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_fill_values_of_xarray_in_zarr_format_3_are_in_base64(
    number: float, dtype: str, tmp_path: Path
) -> None:
    text = base64.standard_b64encode(struct.pack("<d", number)).decode()
    x = values(dtype)
    x[7, 4] = number
    for stated in (text, str(number)):
        with pytest.raises(ExecutionError, match=r"the element at \[7, 4\]"):
            oocgemm.gram(_zarr(3)(tmp_path, x, {"_FillValue": stated}), **ON_HOST)
        _clear(tmp_path)
    nan = base64.standard_b64encode(struct.pack("<d", np.nan)).decode()
    assert not isinstance(open_matrix("A", _zarr(3)(tmp_path, x, {"_FillValue": nan})), CompleteMatrix)


@pytest.mark.parametrize("how", ["path", "object", "tensorstore", "dask"])
def test_the_fill_value_of_zarr_format_2_is_a_code_if_dimensions_are_named(how: str, tmp_path: Path) -> None:
    opened: dict[str, Callable[[str], Any]] = {
        "path": str,
        "object": zarr.open_array,
        "tensorstore": lambda path: tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}
        ).result(),
        "dask": dask.from_zarr,
    }
    x = values()
    named = {"_ARRAY_DIMENSIONS": np.array(["a", "b"])}
    for fill, attributes, refused in (
        *((99.0, named, True), (99.0, {}, False), (np.nan, named, False), (None, named, False)),
        (0.0, named, False),
    ):
        operand = opened[how](_zarr(2, fill_value=fill)(tmp_path, x, attributes))
        if refused:
            with pytest.raises(ExecutionError, match=r"\[7, 4\]"):
                oocgemm.gram(operand, **ON_HOST)
        else:
            oocgemm.gram(operand, **ON_HOST)
        _clear(tmp_path)


def test_elements_that_were_never_written_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    given: dict[str, Any] = {"zarr_format": 2, "attributes": {"_ARRAY_DIMENSIONS": ["a", "b"]}}
    found = zarr.create_array(path, shape=(4, 4), chunks=(2, 2), dtype="f8", fill_value=-1.0, **given)
    found[:2] = 1
    with pytest.raises(
        ExecutionError, match=r"\[2, 0\] of A: .* is -1.0, which stands for a missing element"
    ):
        oocgemm.matmul(path, np.ones((4, 1)), **ON_HOST)


def test_arrays_that_dask_computes_have_elements_of_their_own(tmp_path: Path) -> None:
    x = dask.from_array(_hdf5_object(tmp_path, values(), {"scale_factor": 2.0, "_FillValue": 99.0}))
    decoded = dask.where(x == 99, 0.0, x * 2.0).rechunk((4, 3))
    expected = np.where(values() == 99, 0, values() * 2)
    found = oocgemm.gram(decoded, uplo="full", **ON_HOST)
    np.testing.assert_array_equal(found.out, expected @ expected.T)


# What each verb does with an operand.
VERBS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, **given: oocgemm.matmul(np.ones((2, 10)), x, **given),
    "gemm": lambda x, **given: oocgemm.gemm(x, np.ones((6, 1)), **given),
    "gram": oocgemm.gram,
    "similarity": lambda x, **given: oocgemm.similarity(x, topk=2, **given),
    "corr": oocgemm.corr,
    "corr, topk": lambda x, **given: oocgemm.corr(x, topk=2, **given),
    "cov": lambda x, **given: oocgemm.cov(x, axis=1, **given),
    "pca": lambda x, **given: oocgemm.pca(x, 2, scores=True, **given),
    "reduce": lambda x, **given: oocgemm.reduce(x, to=oocgemm.Reduce("sum"), **given),
    "kernel_matmul": lambda x, **given: oocgemm.kernel_matmul(x, np.ones(10), gamma=1.0, **given),
    "D": lambda x, **given: oocgemm.gemm(
        np.ones((10, 1)), np.ones((1, 6)), epilogue=[oocgemm.Add(x)], **given
    ),
    "verify": lambda x, backend, **given: oocgemm.verify(x, ONES, values() @ ONES, **given),
    "stats": lambda x, backend, **given: oocgemm.stats(x, **given),
}


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "stats"])  # it leaves them out
@pytest.mark.parametrize("store", ["zarr v3", *slow(("hdf5, gzip",), ("zarr.Array v2",), ("h5py.Dataset",))])
def test_every_verb_respects_what_is_declared(verb: str, store: str, tmp_path: Path) -> None:
    call = VERBS[verb]
    for number, attributes in enumerate(({"add_offset": 1.0, "missing_value": 99.0}, {"_FillValue": 99.0})):
        folder = tmp_path / str(number)
        folder.mkdir()
        operand = STORES[store](folder, values(), attributes)
        for _ in range(2):  # statistics that are cached without decoding do not count
            with pytest.raises(ExecutionError, match="stands for a missing element"):
                call(operand, **ON_HOST)
            call(operand, decode=False, **ON_HOST)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "verify"])
def test_every_verb_unpacks(verb: str, tmp_path: Path) -> None:
    x = values()
    packed = _zarr(3)(tmp_path, x.astype("i4"), {"scale_factor": 0.5, "add_offset": 3.0})
    found, expected = (VERBS[verb](each, **ON_HOST) for each in (packed, x * 0.5 + 3))
    for name in ("out", "scores", "singular_values", "mean"):
        if hasattr(expected, name) and not isinstance(expected, np.ndarray):
            one, other = getattr(found, name), getattr(expected, name)
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-12, atol=1e-12)
            return
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_genotypes_with_a_declared_code_are_imputed(tmp_path: Path) -> None:
    x = np.random.default_rng(2).integers(0, 3, (12, 9)).astype("i1")
    x[3, 5] = -1
    plain, declared = (
        oocgemm.grm(x, **ON_HOST),
        oocgemm.grm(_zarr(3)(tmp_path, x, {"_FillValue": -1}), **ON_HOST),
    )
    np.testing.assert_array_equal(declared.out, plain.out)
    path = str(tmp_path / "x.zarr")
    np.testing.assert_array_equal(oocgemm.stats(path, missing=-1).missing, (x == -1).sum(0))
    np.testing.assert_array_equal(oocgemm.stats(path, decode=False).mean, x.mean(0))
    change = oocgemm.Transform(missing=-1)
    of_x, of_path = (oocgemm.pca(each, 2, transform=change, **ON_HOST) for each in (x, path))
    np.testing.assert_array_equal(of_path.singular_values, of_x.singular_values)


COMMANDS = {
    "run": ("run", "x.zarr", "b.npy", "C.zarr", "--backend", "host"),
    "plan": ("plan", "x.zarr", "b.npy", "--backend", "host"),
    "gram": ("gram", "x.zarr", "C.zarr", "--backend", "host"),
    "gram --dry-run": ("gram", "x.zarr", "--dry-run", "--backend", "host"),
    "similarity": ("similarity", "x.zarr", "C.zarr", "--topk", "2", "--backend", "host"),
    "corr": ("corr", "x.zarr", "C.zarr", "--backend", "host"),
    "corr --topk": ("corr", "x.zarr", "C.zarr", "--topk", "2", "--backend", "host"),
    "cov": ("cov", "x.zarr", "C.zarr", "--backend", "host"),
    "pca": ("pca", "x.zarr", "C.zarr", "--components", "2", "--backend", "host"),
    "grm": ("grm", "x.zarr", "C.zarr", "--backend", "host"),
    "verify": ("verify", "x.zarr", "b.npy", "p.npy"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_no_decode(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(3).integers(0, 3, (8, 6)).astype("f8")
    _zarr(2)(tmp_path, x, {"scale_factor": 0.5})
    np.save("b.npy", b := np.ones((6, 3)))
    np.save("p.npy", x @ b)
    done = command(*COMMANDS[name])
    assert done.code == (1 if name == "verify" else 0), done.err
    shutil.rmtree("C.zarr", ignore_errors=True)
    done = command(*COMMANDS[name], "--no-decode")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_workers_read_what_the_coordinator_reads(tmp_path: Path) -> None:
    x = values()
    path = _zarr(3)(tmp_path, x, {"_FillValue": -9.0, "scale_factor": 0.5})
    np.save(tmp_path / "b.npy", b := np.ones((6, 3)))
    given: dict[str, Any] = {"workers": 2, "memory": "512MiB", **ON_HOST}
    oocgemm.gemm(path, tmp_path / "b.npy", tmp_path / "c.npy", **given)
    np.testing.assert_array_equal(np.load(tmp_path / "c.npy"), x / 2 @ b)
    (tmp_path / "c.npy").unlink()
    oocgemm.gemm(path, tmp_path / "b.npy", tmp_path / "c.npy", decode=False, **given)
    np.testing.assert_array_equal(np.load(tmp_path / "c.npy"), x @ b)


@pytest.mark.parametrize("store", ["zarr v2", *slow(("hdf5, gzip",), ("zarr v3",))])
def test_conversions_keep_what_is_declared(store: str, tmp_path: Path) -> None:
    """A dtype that must be converted first is no way around the attributes."""
    x = values("i2")
    packed = STORES[store](tmp_path, values("u8"), {"scale_factor": 0.1})
    with pytest.raises(InputError, match="so its numbers are packed"):
        oocgemm.matmul(packed, np.ones((6, 1)), **ON_HOST)
    _clear(tmp_path)
    path = STORES[store](tmp_path, x, {"_FillValue": 99})
    with pytest.raises(ExecutionError, match=r"\[7, 4\] of A.* is 99"):
        oocgemm.matmul(path, np.ones((6, 1)), **ON_HOST)
    _clear(tmp_path)
    path = STORES[store](tmp_path, values("u8"), {"_FillValue": 99})
    with pytest.raises(InputError) as raised:
        oocgemm.matmul(path, np.ones((6, 1)), **ON_HOST)
    made = obey(str(raised.value))
    with pytest.raises(ExecutionError, match=r"\[7, 4\]"):
        oocgemm.gram(made, **ON_HOST)


def test_a_file_of_netcdf_has_a_default_fill_value(tmp_path: Path) -> None:
    x = values("f4")
    x[7, 4] = np.float32(9.969209968386869e36)
    operand = _hdf5_object(tmp_path, x, {})
    oocgemm.gram(operand, **ON_HOST)
    operand.file.close()
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.attrs["_NCProperties"] = "version=2"
    with h5py.File(tmp_path / "x.h5") as file:
        for operand in (file["x"], dask.from_array(file["x"]), f"{tmp_path}/x.h5::x"):
            with pytest.raises(ExecutionError, match=r"\[7, 4\]"):
                oocgemm.gram(operand, **ON_HOST)


def test_what_xarray_writes_is_read_as_xarray_reads_it(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    x = values()
    x[7, 4] = np.nan
    for zarr_format in (2, 3):
        for number, encoding in enumerate(({}, {"_FillValue": -9.0}, {"dtype": "f4", "scale_factor": 0.5})):
            path = f"{tmp_path}/{zarr_format}-{number}.zarr"
            data = xarray.Dataset({"x": (("a", "b"), x)})
            data.to_zarr(path, zarr_format=zarr_format, encoding={"x": encoding}, consolidated=False)
            raw = xarray.open_zarr(path, mask_and_scale=False, consolidated=False)["x"]
            for operand in (f"{path}/x", raw, raw.data):
                if number == 0:
                    assert np.isnan(oocgemm.gram(operand, **ON_HOST).out).any()
                    continue
                if number == 1:
                    with pytest.raises(ExecutionError):
                        oocgemm.gram(operand, **ON_HOST)
                    continue
                want = xarray.open_zarr(path, consolidated=False)["x"].values
                np.testing.assert_allclose(oocgemm.gram(operand, uplo="full", **ON_HOST).out, want @ want.T)
            decoded = xarray.open_zarr(path, consolidated=False)["x"]
            assert np.isnan(oocgemm.gram(decoded, **ON_HOST).out).any()


def _clear(folder: Path) -> None:
    for place in folder.iterdir():
        shutil.rmtree(place) if place.is_dir() else place.unlink()


# Views of dask, and C.


def dask_of(folder: Path, stored: Array, **attributes: Any) -> Any:
    z = zarr.create_array(
        folder / "a.zarr", shape=stored.shape, chunks=(3, 4), dtype=stored.dtype, attributes=attributes
    )
    z[:] = stored
    return dask.from_zarr(folder / "a.zarr")


@pytest.mark.parametrize(
    ("stored", "code", "cast"),
    [
        ("f4", -9999.9, "f8"),
        ("i2", -9999, "i1"),
        ("i2", -9999, "f8"),
        (">f4", 0.1, "f8"),
    ],
)
def test_codes_are_cast_as_dask_casts_elements(tmp_path: Path, stored: str, code: float, cast: str) -> None:
    x = np.ones((6, 6), stored)
    x[4, 1] = code
    with np.errstate(all="ignore"):
        a = dask_of(tmp_path, x, _FillValue=code).astype(cast)
        with pytest.raises(ExecutionError, match="stands for a missing element"):
            oocgemm.matmul(a, np.eye(6, dtype=cast), backend="host")


def test_signed_numbers_that_stand_for_unsigned_ones_are_refused_after_a_cast(tmp_path: Path) -> None:
    a = dask_of(tmp_path, np.full((6, 6), -1, "i1"), _Unsigned="true").astype("f4")
    with pytest.raises(InputError, match="_Unsigned"):
        oocgemm.matmul(a, np.eye(6, dtype="f4"), backend="host")


@pytest.mark.parametrize(
    "view",
    [
        lambda d: dask.block([[d.blocks[0, :]], [d.blocks[1, :]]]),
        lambda d: d.swapaxes(0, 1),
        lambda d: dask.repeat(d, 2, axis=0),
        lambda d: dask.tile(d, (1, 2)),
        lambda d: dask.concatenate([d[:3], d[3:] * np.float32(1)]),
    ],
    ids=["blocks", "swapaxes", "repeat", "tile", "a computed part"],
)
def test_views_of_dask_declare_what_their_array_does(tmp_path: Path, view: Any) -> None:
    a = view(dask_of(tmp_path, np.full((6, 6), 3, "f4"), missing_value=3.0))
    with pytest.raises(ExecutionError, match="stands for a missing element"):
        oocgemm.matmul(a, np.eye(a.shape[1], dtype="f4"), backend="host")


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("attribute", ["scale_factor", "add_offset"])
def test_a_packed_c_is_refused(tmp_path: Path, attribute: str, beta: int) -> None:
    x, path = np.eye(6), tmp_path / "c.zarr"
    z = zarr.create_array(path, shape=(6, 6), chunks=(3, 4), dtype="f8", attributes={attribute: 5.0})
    z[:] = 1
    with pytest.raises(InputError, match=attribute):
        oocgemm.gemm(x, x, path, beta=beta, overwrite=beta == 0, backend="host")
    assert np.all(zarr.open_array(path)[:] == 1)
    oocgemm.gemm(x, x, path, beta=beta, overwrite=beta == 0, decode=False, backend="host")
    assert np.array_equal(zarr.open_array(path)[:], x + beta)
