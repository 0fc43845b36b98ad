"""Bad operands, results and options end in one line that names what is wrong, and in the right exit code.

Nothing is written, and no file is changed or lost.
"""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import zarr

import oocgemm
from oocgemm import BackendError, InputError
from oocgemm.cli.process import EXIT_BUDGET, EXIT_FAILED, EXIT_USAGE
from tests.support.backends_here import CUDA
from tests.support.bad_arrays import UNSUPPORTED, A, B, assert_one_line, copy_of, create_everything
from tests.support.command import command, contents, run


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_everything(tmp_path_factory.mktemp("everything"))


@pytest.fixture
def here(everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copy_of(everything, tmp_path / "here", monkeypatch)


@pytest.fixture(scope="module")
def shared(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A copy that no test changes, and its contents."""
    with pytest.MonkeyPatch.context() as patch:
        folder = copy_of(everything, tmp_path_factory.mktemp("shared") / "here", patch)
        return folder, contents(folder)


@pytest.fixture
def untouched(shared: tuple[Path, dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder that tests share, and check that the test has changed nothing there."""
    folder, before = shared
    monkeypatch.delenv("OOCGEMM_DEBUG", raising=False)
    monkeypatch.chdir(folder)
    yield
    assert contents(folder) == before


# File or folder that is no operand -> a part of the error.
OPERANDS = {
    "vector": "has 1 dimensions, a matrix has 2: reshape",
    "vector.npy": "has 1 dimensions",
    "number.npy": "has 0 dimensions",
    "cube": "has 3 dimensions (1 x 12 x 8), a matrix has 2: fold them, such as ",
    "group": "group is a zarr group, not an array; give an array in it: inner",
    "missing": "there is nothing at missing",
    "missing.npy": "there is nothing at missing.npy",
    "plain/below": "there is nothing at plain/below",
    "dangling": "there is nothing at dangling: it is a symbolic link to ",
    "": "'' is not a path",
    "empty": "no zarr array at empty: it contains no zarr metadata",
    ".": "no zarr array at .: it contains no zarr metadata",
    "plain": "no zarr array at plain",
    "a/c": "no zarr array at a/c",
    "garbage": "no zarr array at garbage",
    "list": "no zarr array at list: its metadata cannot be read",
    "bytes": "no zarr array at bytes",
    "half": "no zarr array at half: its metadata cannot be read",
    "short.npy": "short.npy cannot be opened as a .npy file",
    "header.npy": "header.npy cannot be opened as a .npy file",
    "nothing.npy": "nothing.npy cannot be opened as a .npy file",
    "text.npy": "text.npy cannot be opened as a .npy file",
    "objects.npy": "objects.npy cannot be opened as a .npy file",
    "archive.npy": "archive.npy cannot be opened as a .npy file: it is an archive",
    "records.npy": "is of dtype [('x', '<f8')], supported are float16",
    "square": "op(A) is 8 x 8 and op(B) is 12 x 8",
} | {f"a-{dtype}{end}": "supported are float16" for dtype in UNSUPPORTED for end in ("", ".npy")}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("operand", "part"), OPERANDS.items(), ids=OPERANDS)
def test_an_unusable_operand_is_named(operand: str, part: str) -> None:
    other = "a" if operand == "square" else "b"
    assert_one_line(run(operand, other, "new"), EXIT_USAGE, part)
    with pytest.raises(InputError) as raised:
        oocgemm.matmul(operand, other, out="new", backend="host")
    assert part in str(raised.value)


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 40])
def test_a_refused_thread_is_not_reported_as_a_missing_array(
    here: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    (here / "a" / ".zarray").touch()  # so that the array is left to zarr
    monkeypatch.setattr(zarr, "open", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    done = run("a", "b", "new")
    assert_one_line(done, EXIT_FAILED, "A at a: the system cannot start a thread for zarr: can't start new")
    limited = r"\d+ of the 1048576 MiB of address space are in use: raise the limit \(ulimit -v\)"
    assert re.search(limited if limit > 0 else r"\(ulimit -u\)", done.err)
    assert not re.search("no zarr array", done.err)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("operand", ["missing", "group", "cube", "a-uint64.npy", "short.npy"])
def test_either_operand_may_be_the_bad_one(operand: str) -> None:
    assert_one_line(run("b", operand, "new"), EXIT_USAGE, "B")
    assert_one_line(command("plan", "b", operand, "--backend", "host"), EXIT_USAGE, "B")


SAME, EXISTS = "C is the same array as ", "C exists at "
# Name of a case -> (A, B and C, options, a part of the error).
RESULTS = {
    "C is A": ("square square.npy square", "--overwrite", SAME + "A"),
    "C is B": ("square.npy square square", "--overwrite", SAME + "B"),
    "C is A, and read": ("square square.npy square", "--beta 1", SAME + "A"),
    "C is A by a relative path": ("square square.npy ../here/./square", "--overwrite", SAME + "A"),
    "C is A by a trailing slash": ("square square.npy square/", "--overwrite", SAME + "A"),
    "C is A by a link": ("square square.npy link", "--overwrite", SAME + "A"),
    "A is C by a link": ("link square.npy square", "--overwrite", SAME + "A"),
    "C is A as a .npy file": ("square.npy square square.npy", "--overwrite", SAME + "A"),
    "C is A by a link to a .npy file": ("square.npy square link.npy", "--overwrite", SAME + "A"),
    "C is A by a hard link": ("square.npy square hard.npy", "--overwrite", SAME + "A"),
    "C in A": ("a b a/new", "", "C at a/new would be inside A"),
    "C deep in A": ("a b a/c/0/new.npy", "", "would be inside A"),
    "C in B": ("a b b/new", "", "C at b/new would be inside B"),
    "C in A by way of nothing": ("a b missing/../a/new", "", "would be inside A"),
    "C in A by way of a link": ("link square link/new", "", "would be inside A"),
    "C exists as zarr": ("a b c", "", EXISTS + "c: pass overwrite=True (--overwrite)"),
    "C exists as .npy": ("a b c.npy", "", EXISTS + "c.npy"),
    "C is a plain file": ("a b plain", "--overwrite", "no zarr array at plain"),
    "C is a folder of other things": ("a b .", "--overwrite", "no zarr array at ."),
    "C is a group": ("a b group", "--overwrite", "is a zarr group"),
    "C is damaged": ("a b garbage", "--overwrite", "no zarr array at garbage"),
    "C is a cut .npy file": ("a b c-short.npy", "--overwrite", "cannot be opened"),
    "C is a text": ("a b text.npy", "--overwrite", "cannot be opened"),
    "C is a link to nothing": (
        "a b dangling",
        "--overwrite",
        "nowhere, which does not exist; remove the link",
    ),
    "C is the folder a path comes back to": ("a b missing/..", "--overwrite", "nothing at missing/.."),
    "C is an empty path": ("a b ", "--overwrite", "'' is not a path"),
    "C is of another shape": ("a b square", "--overwrite", "C exists with shape (8, 8)"),
    "C is of another shape, and read": ("a b square.npy", "--beta 1", "C exists with shape (8, 8)"),
    "C is of another dtype": ("a b c-float32", "--overwrite", "dtype float32, the product has"),
    "C is of no dtype to multiply": ("a b a-uint64", "--overwrite", "C is of dtype uint64"),
    "C is a vector": ("a b vector", "--overwrite", "C has 1 dimensions"),
    "C is to be read and is not there": ("a b new", "--beta 1", "beta = 1.0 needs an existing C"),
    "C is to be read by nan": ("a b new.npy", "--beta nan", "beta = nan needs an existing C"),
    "C exists, and is to have chunks": ("a b c", "--overwrite --chunks 4x4", "C exists: drop --chunks"),
    "C exists, and is to be compressed": (
        "a b c",
        "--overwrite --compressor zstd",
        "C exists: drop --chunks",
    ),
    "C below a file": ("a b plain/new", "", "plain/new"),
    "C below a file, as .npy": ("a b plain/new.npy", "", "plain/new.npy"),
    "C where nothing can be made": ("a b /proc/new", "", "cannot create /proc/new"),
    "C where no file can be made": ("a b /proc/new.npy", "", "cannot create /proc/new.npy"),
    "C of a name too long": (f"a b {'c' * 300}", "", "File name too long"),
    "a .npy file has no chunks": ("a b new.npy", "--chunks 4x4", "C would be a .npy file"),
    "a .npy file has no compressor": ("a b new.npy", "--compressor zstd", "C would be a .npy file"),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("places", "options", "part"), RESULTS.values(), ids=RESULTS)
def test_a_path_that_cannot_store_c_is_left_unchanged(places: str, options: str, part: str) -> None:
    assert_one_line(run(*places.split(" "), *options.split()), EXIT_USAGE, part)


# Option with a bad value -> (exit code, a part of the error).
OPTIONS: dict[str, tuple[int, str]] = {
    "--alpha three": (EXIT_USAGE, "'--alpha': 'three' is not a number"),
    "--alpha 1+2j": (EXIT_USAGE, "alpha = (1+2j) is complex, but the operands are real"),
    "--beta 1,5": (EXIT_USAGE, "'--beta': '1,5' is not a number"),
    "--device-memory lots": (EXIT_USAGE, "cannot read 'lots' as a size"),
    "--device-memory 2XiB": (EXIT_USAGE, "cannot read '2XiB' as a size"),
    "--device-memory 1e9": (EXIT_USAGE, "cannot read '1e9' as a size"),
    "--device-memory -5": (EXIT_USAGE, "cannot read '-5' as a size"),
    "--device-memory 0": (EXIT_USAGE, "a size must be positive"),
    "--device-memory 0.2": (EXIT_USAGE, "a size must be positive"),
    "--host-memory ²": (EXIT_USAGE, "cannot read '²' as a size"),
    "--host-memory 0KiB": (EXIT_USAGE, "a size must be positive"),
    "--host-memory 99999PiB": (EXIT_USAGE, "a size must be below"),
    f"--host-memory {'9' * 400}": (EXIT_USAGE, "as a size"),
    "--device-memory 1": (EXIT_BUDGET, "device memory 1 B cannot hold"),
    "--host-memory 1": (EXIT_BUDGET, "host memory 1 B cannot hold"),
    "--tile 4x4x4 --device-memory 1KiB": (EXIT_BUDGET, "tile 4x4x4"),
    "--tile big": (EXIT_USAGE, "cannot read 'big' as a tile"),
    "--tile 4x4": (EXIT_USAGE, "cannot read '4x4' as a tile"),
    "--tile 4x4x4x4": (EXIT_USAGE, "as a tile"),
    "--tile 4xx4": (EXIT_USAGE, "as a tile"),
    "--tile 0x4x4": (EXIT_USAGE, "as a tile"),
    "--tile -4x4x4": (EXIT_USAGE, "as a tile"),
    "--tile 4x4x1.5": (EXIT_USAGE, "as a tile"),
    "--tile ²x4x4": (EXIT_USAGE, "as a tile"),
    "--tile 3x4x4 --chunks 2x2": (EXIT_USAGE, "make m a multiple of 2"),
    "--tile 4x3x4 --chunks 2x2": (EXIT_USAGE, "make n a multiple of 2"),
    "--chunks 4": (EXIT_USAGE, "'--chunks': '4' is not a chunk shape"),
    "--chunks 0x4": (EXIT_USAGE, "is not a chunk shape"),
    "--chunks 4x-4": (EXIT_USAGE, "is not a chunk shape"),
    "--chunks ²x4": (EXIT_USAGE, "is not a chunk shape"),
    "--chunks 999999999x999999999": (EXIT_BUDGET, "host memory"),
    "--compressor zip": (EXIT_USAGE, "'--compressor': 'zip' is not one of"),
    "--backend gpu": (EXIT_USAGE, "'--backend': 'gpu' is not one of"),
    "--kernel fast": (EXIT_USAGE, "'--kernel': 'fast' is not one of"),
    "--kernel tiled": (EXIT_USAGE, "the host backend has no kernel 'tiled'"),
    "--device -1": (EXIT_USAGE, "'--device'"),
    "--transpose-a --adjoint-a": (EXIT_USAGE, "--transpose-a and --adjoint-a exclude each other"),
    "--transpose-b --adjoint-b": (EXIT_USAGE, "--transpose-b and --adjoint-b exclude each other"),
    "--transpose-a": (EXIT_USAGE, "op(A) is 8 x 12 and op(B) is 8 x 10"),
    "--nonsense": (EXIT_USAGE, "No such option"),
    "too many": (EXIT_USAGE, "unexpected extra argument"),
    "--timeline missing/log": (EXIT_USAGE, "folder"),
    "--timeline plain/log": (EXIT_USAGE, "folder"),
    "--timeline empty": (EXIT_USAGE, "is a directory"),
    "--timeline a.npy": (EXIT_USAGE, "the timeline at a.npy would be inside A"),
    "--timeline b/zarr.json": (EXIT_USAGE, "the timeline at b/zarr.json would be inside B"),
    "--timeline new": (EXIT_USAGE, "the timeline at new would overwrite C"),
    "--timeline ./new": (EXIT_USAGE, "the timeline at ./new would overwrite C"),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("options", "code", "part"), [(o, *e) for o, e in OPTIONS.items()], ids=[o[:40] for o in OPTIONS]
)
def test_a_bad_option_is_named(options: str, code: int, part: str) -> None:
    assert_one_line(run("a.npy", "b", "new", *options.split()), code, part)


def test_a_bad_option_of_plan_is_named() -> None:
    assert_one_line(command("plan"), EXIT_USAGE, "Missing argument 'A'")
    assert_one_line(command("plain"), EXIT_USAGE, "No such command 'plain'")


@pytest.mark.skipif(CUDA, reason="a CUDA device answers here")
def test_cuda_without_a_device_says_what_runs_without(here: Path) -> None:
    before = contents(here)
    assert_one_line(
        run("a", "b", "new", "--backend", "cuda"), EXIT_FAILED, "--backend host runs without a GPU"
    )
    with pytest.raises(BackendError):
        oocgemm.matmul(A, B, backend="cuda")
    assert contents(here) == before
