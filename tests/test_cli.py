"""The command line, end to end: what each option does, what is printed, and the exit codes."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.cli import products
from oocgemm.cli.main import COMMANDS, cli
from oocgemm.cli.output import EXIT_BUDGET, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from oocgemm.jobs import result
from oocgemm.planning.search import planner
from tests.command import Finished, command, contents, run
from tests.problems import Array, integers

RNG = np.random.default_rng(11)
A, B, C = (integers(RNG, shape, "float64") for shape in ((12, 8), (8, 10), (12, 10)))
Z, Y = (integers(RNG, shape, "complex128") for shape in ((12, 8), (8, 10)))
ARRAYS = {
    "a": A, "b": B, "c": C, "at": A.T, "bt": B.T,
    "z": Z, "y": Y, "zt": Z.T, "yt": Y.T, "zh": Z.conj().T, "yh": Y.conj().T,
    "ones1": np.ones((12, 8)), "ones2": np.ones((8, 10)),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create all of `ARRAYS` in a new working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OOCGEMM_DEBUG", raising=False)
    for name, array in ARRAYS.items():
        zarr.create_array(name, data=array, chunks=(4, 4), compressors=None)
    return tmp_path


def stored(place: str) -> Array:
    return np.asarray(zarr.open_array(place, mode="r")[:])


# What is tested -> (operands, options, product).
RUNS: dict[str, tuple[str, str, Array]] = {
    "nothing asked for": ("a b new", "", A @ B),
    "alpha scales the product": ("a b new", "--alpha 3", 3 * A @ B),
    "alpha may be negative": ("a b new", "--alpha -2", -2 * A @ B),
    "alpha may be complex": ("z y new", "--alpha 1+2j", (1 + 2j) * (Z @ Y)),
    "i is as good as j": ("z y new", "--alpha 2i", 2j * (Z @ Y)),
    "alpha may be infinite": ("ones1 ones2 new", "--alpha inf", np.full((12, 10), np.inf)),
    "alpha may be nan": ("a b new", "--alpha nan", np.full((12, 10), np.nan)),
    "alpha 0 gives zeros": ("a b new", "--alpha 0", np.zeros((12, 10))),
    "beta adds the old C": ("a b c", "--beta 2", A @ B + 2 * C),
    "beta alone scales the old C": ("a b c", "--alpha 0 --beta -1", -C),
    "overwrite replaces the old C": ("a b c", "--overwrite", A @ B),
    "A is transposed": ("at b new", "--transpose-a", A @ B),
    "B is transposed": ("a bt new", "--transpose-b", A @ B),
    "both are transposed": ("at bt new", "--transpose-a --transpose-b", A @ B),
    "a transpose does not conjugate": ("zt yt new", "--transpose-a --transpose-b", Z @ Y),
    "A is conjugated and transposed": ("zh y new", "--adjoint-a", Z @ Y),
    "B is conjugated and transposed": ("z yh new", "--adjoint-b", Z @ Y),
    "one transposed, one conjugated too": ("zt yh new", "--transpose-a --adjoint-b", Z @ Y),
    "an operand meets itself": ("a a new", "--transpose-b", A @ A.T),
    "budgets are kept to": ("a b new", "--device-memory 20MB --host-memory 64MiB", A @ B),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("places", "options", "expected"), RUNS.values(), ids=RUNS)
def test_run_writes_the_product(places: str, options: str, expected: Array) -> None:
    done = run(*places.split(), *options.split(), "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    np.testing.assert_array_equal(stored(places.split()[2]), expected)


@pytest.mark.usefixtures("here")
def test_run_takes_the_tile_that_is_given() -> None:
    done = run("a", "b", "new", "--tile", "4x5x3", "--json").json()
    assert done["plan"]["tile"] == {"m": 4, "n": 5, "k": 3}
    assert (done["plan"]["tiles"], done["plan"]["steps"]) == ([3, 2], 18)
    assert done["report"]["lanes"]["compute"]["operations"] == 18
    np.testing.assert_array_equal(stored("new"), A @ B)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("tile", "used"),
    [("4x5x1000", "4x5x8"), ("1000x1000x3", "12x10x3"), ("012X10x8", "12x10x8"), ("4x99x8", "4x10x8")],
)
def test_a_tile_larger_than_the_product_is_clipped_to_it(tile: str, used: str) -> None:
    said = f"Note: tile {tile} is larger than the product: {used} is used\n"
    planned = command("plan", "a", "b", "--backend", "host", "--tile", tile, "--json")
    ran = run("a", "b", "new", "--tile", tile, "--json")
    w, h, r = map(int, used.split("x"))
    for done in (planned, ran):
        assert done.err == ("" if tile.startswith("0") else said)
    for plan in (planned.json(), ran.json()["plan"]):
        assert plan["tile"] == {"m": w, "n": h, "k": r}
    assert run("a", "b", "new", "--tile", tile, "--resume", "--quiet") == Finished(0, "", "")
    np.testing.assert_array_equal(stored("new"), A @ B)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("compressor", "codec"),
    [
        ("none", None),
        ("zstd", "ZstdCodec"),
        ("gzip", "GzipCodec"),
        ("blosc-lz4", "BloscCodec"),
        ("blosc-zstd", "BloscCodec"),
    ],
)
def test_run_creates_c_with_the_given_chunks_and_compressor(compressor: str, codec: str | None) -> None:
    assert run("a", "b", "new", "--chunks", "6x5", "--compressor", compressor).code == 0
    made = zarr.open_array("new", mode="r")
    assert made.chunks == (6, 5)
    assert [type(c).__name__ for c in made.compressors] == ([codec] if codec else [])
    np.testing.assert_array_equal(made[:], A @ B)


@pytest.mark.usefixtures("here")
def test_run_reads_and_writes_npy_files() -> None:
    np.save("a.npy", A)
    assert run("a.npy", "b", "new.npy").code == 0
    np.testing.assert_array_equal(np.load("new.npy"), A @ B)


@pytest.mark.usefixtures("here")
def test_run_prints_figures_and_names_c_and_the_timeline() -> None:
    done = run("a", "b", "new", "--timeline", "log")
    assert (done.code, done.err) == (0, "")
    for part in (
        "compute share",
        "copy overlap",
        "storage overlap",
        "exposed",
        "multiplied by blas",
        "C: new",
        "oocgemm report log",
    ):
        assert part in done.out


@pytest.mark.usefixtures("here")
def test_the_command_that_is_suggested_can_be_pasted() -> None:
    done = run("a", "b", "new", "--timeline", "my log's.jsonl")
    suggested = re.search(r"\((oocgemm report .*)\)", done.out)
    assert suggested is not None
    assert shlex.split(suggested[1]) == ["oocgemm", "report", "my log's.jsonl"]


@pytest.mark.usefixtures("here")
def test_json_is_one_object_with_plan_report_and_places() -> None:
    done = run("a", "b", "new", "--json", "--timeline", "log")
    assert done.err == ""
    found = done.json()
    assert set(found) == {"c", "plan", "report", "backend", "timeline"}
    assert (found["c"], found["timeline"], found["backend"]["name"]) == ("new", "log", "host")
    assert found["report"]["flops"] == 2 * 12 * 10 * 8
    assert {link: moved["bytes"] for link, moved in found["report"]["traffic"].items()} == found["plan"][
        "traffic"
    ]


@pytest.mark.usefixtures("here")
def test_json_goes_before_quiet() -> None:
    assert run("a", "b", "new", "--json", "--quiet").json()["c"] == "new"


@pytest.mark.usefixtures("here")
def test_report_has_the_figures_of_the_run() -> None:
    ran = run("a", "b", "new", "--tile", "4x4x4", "--json", "--timeline", "log").json()
    reported = command("report", "log", "--json")
    assert (reported.code, reported.err) == (0, "")
    assert reported.json() == ran["report"]
    shown = command("report", "log")
    assert shown.code == 0
    assert f"{100 * ran['report']['compute_share']:.1f}%" in shown.out


@pytest.mark.usefixtures("here")
def test_a_later_run_replaces_the_timeline() -> None:
    assert run("a", "b", "one", "--tile", "4x4x4", "--timeline", "log").code == 0
    ran = run("a", "b", "two", "--json", "--timeline", "log").json()
    assert command("report", "log", "--json").json() == ran["report"]


def test_plan_says_what_run_would_do_and_writes_nothing(here: Path) -> None:
    before = contents(here)
    options = ("--tile", "4x5x3", "--device-memory", "20MB", "--host-memory", "20MB")
    planned = command("plan", "a", "b", "new", "--backend", "host", "--json", *options)
    assert (planned.code, planned.err) == (0, "")
    assert contents(here) == before
    assert planned.json() == run("a", "b", "new", "--json", *options).json()["plan"]


def test_plan_explains_its_choice(here: Path) -> None:
    before = contents(here)
    shown = command("plan", "a", "b", "--backend", "host", "--explain")
    assert (shown.code, shown.err) == (0, "")
    for part in ("tile", "slots", "memory", "predicted", "considered", "why not", "chosen"):
        assert part in shown.out
    assert "considered" not in command("plan", "a", "b", "--backend", "host").out
    found = command("plan", "a", "b", "c", "--beta", "1", "--backend", "host", "--explain", "--json").json()
    assert [row["why"] for row in found["considered"]].count("chosen") == 1
    assert contents(here) == before


@pytest.mark.usefixtures("here")
def test_plan_for_cuda_needs_the_device_memory_and_no_device() -> None:
    asked = command("plan", "a", "b", "--backend", "cuda")
    assert asked.code == EXIT_USAGE
    assert "--device-memory" in asked.err
    planned = command("plan", "a", "b", "--backend", "cuda", "--device-memory", "2GiB", "--json").json()
    assert planned["budget"]["device"] == 2 << 30


def test_info_lists_what_is_installed_and_missing() -> None:
    found = command("info", "--json").json()
    assert found["versions"]["oocgemm"] == oocgemm.__version__
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    host = found["host_backend"]
    assert host["numpy"] == np.__version__
    assert {"float64", "complex128"} <= set(host["kernels"])
    assert {"read", "decode", "write"} <= set(host["links"])
    assert set(host["assumed"]) <= {*host["kernels"], *host["links"]}
    assert {"missing"} == set(found["cuda_backend"]) or found["cuda_backend"]["links"]["h2d"] > 0
    shown = command("info")
    assert shown.code == 0
    for part in ("versions", "machine", "host", "cuda", np.__version__, "read, page cache", "float64"):
        assert part in shown.out
    for lacking in found["missing"]:
        assert lacking["command"] in shown.out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "arguments",
    [
        "info",
        "plan a b --backend host --explain",
        "run a b new --backend host",
        "report log",
        "report log log",
        "verify a b product",
    ],
)
def test_keys_of_json_hold_no_spaces(arguments: str) -> None:
    run("a", "b", "product", "--timeline", "log", "--quiet")
    found = [command(*arguments.split(), "--json").json()]
    keys: set[str] = set()
    while found:
        one = found.pop()
        keys |= one.keys()
        found += [value for value in one.values() if isinstance(value, dict)]
        found += [
            x for value in one.values() if isinstance(value, list) for x in value if isinstance(x, dict)
        ]
    assert keys
    assert [key for key in keys if " " in key] == []


def test_info_tells_the_version_of_a_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("oocgemm.machine.info.version", version)
    assert command("info", "--json").json()["versions"]["oocgemm"] == oocgemm.__version__


def test_info_says_how_to_install_missing_packages(tmp_path: Path) -> None:
    """The machine has a driver for CUDA 12, but not the packages cupy, resvg_py and ml_dtypes."""
    code = (
        "import ctypes, sys; from pathlib import Path; from unittest.mock import patch\n"
        "sys.modules |= dict.fromkeys(('cupy', 'resvg_py', 'ml_dtypes'))\n"
        "class Driver:\n"
        "    def cuDriverGetVersion(self, version): version._obj.value = 12080; return 0\n"
        "from oocgemm.cli import main as cli, reporting\n"
        "with patch.object(ctypes, 'CDLL', lambda name: Driver()), patch.object(Path, 'exists', lambda path: "
        "True):\n    cli.cli(['info', '--json'])"
    )
    environment = os.environ | {"OOCGEMM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    found = json.loads(done.stdout)
    commands = {one["what"]: one["command"] for one in found["missing"]}
    assert commands["cupy"] == "pip install 'oocgemm[cuda12]'"
    assert commands["cupy"] in found["cuda_backend"]["missing"]
    assert commands["resvg_py"] == "pip install 'oocgemm[png]'"
    assert commands["ml_dtypes"] == "pip install 'oocgemm[bfloat16]'"
    assert commands["rates of host"] == "oocgemm calibrate --backend host"
    assert "bfloat16" not in found["host_backend"]["kernels"]


def test_help_and_version_are_no_errors() -> None:
    assert command("--version").out == f"oocgemm, version {oocgemm.__version__}\n"
    for name in ("run", "plan", "report", "calibrate", "info"):
        assert name in command("--help").out
        assert command(name, "-h").code == 0
    assert command().code == EXIT_USAGE


@pytest.mark.usefixtures("here")
def test_exit_codes_tell_usage_budget_and_failure_apart() -> None:
    assert run("a", "b", "new", "--quite").code == EXIT_USAGE
    assert run("a", "a", "new").code == EXIT_USAGE
    assert run("a", "b", "new", "--device-memory", "1").code == EXIT_BUDGET
    Path("a/c/1/1").write_bytes(b"short")
    assert run("a", "b", "new").code == EXIT_FAILED
    assert [EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET, EXIT_INTERRUPTED] == [1, 2, 3, 130]


@pytest.mark.parametrize("options", ["", "--tile 4x5x3", "--chunks 4x5 --compressor zstd"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_budget_that_an_error_names_suffices(here: Path, tier: str, options: str) -> None:
    before = contents(here)
    asked = run("a", "b", "new", f"--{tier}-memory", "1", *options.split())
    assert (asked.code, asked.out, asked.err.count("\n")) == (EXIT_BUDGET, "", 1)
    assert contents(here) == before
    least = re.search(r"(\d+) bytes", asked.err)
    assert least, asked.err
    assert run("a", "b", "new", f"--{tier}-memory", least[1], *options.split()).code == 0
    np.testing.assert_array_equal(stored("new"), A @ B)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("tier", ["device", "host"])
def test_one_byte_less_than_a_tile_needs_is_refused(tier: str) -> None:
    options = ("--tile", "4x5x3", f"--{tier}-memory")
    least = re.search(r"(\d+) bytes", run("a", "b", "new", *options, "1").err)
    assert least
    assert run("a", "b", "new", *options, str(int(least[1]) - 1)).code == EXIT_BUDGET
    assert run("a", "b", "new", *options, least[1]).code == 0


@pytest.mark.usefixtures("here")
def test_debug_shows_the_traceback_at_any_position(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], Finished]] = [
        lambda: command("--debug", "run", "a", "a", "new"),
        lambda: command("run", "a", "a", "--debug", "new"),
        lambda: command("run", "a", "a", "new", "--debug"),
    ]
    plain = command("run", "a", "a", "new")
    for call in calls:
        done = call()
        assert (done.code, "Traceback" in done.err) == (EXIT_USAGE, True)
    assert "Traceback" not in plain.err
    monkeypatch.setenv("OOCGEMM_DEBUG", "1")
    assert "Traceback" in command("run", "a", "a", "new").err


def _process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.usefixtures("here")
def test_the_module_as_a_process_exits_as_the_entry_point_does() -> None:
    done = _process("-m", "oocgemm", "run", "a", "b", "new", "--backend", "host", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    np.testing.assert_array_equal(stored("new"), A @ B)
    again = _process("-m", "oocgemm", "run", "a", "b", "new", "--backend", "host", "--quiet")
    assert (again.returncode, again.stdout, again.stderr.count("\n")) == (EXIT_USAGE, "", 1)


@pytest.mark.usefixtures("here")
def test_a_reader_that_exits_causes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "oocgemm", "plan", "a", "b", "--backend", "host"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import oocgemm", id="import", marks=pytest.mark.slow),
        pytest.param("import oocgemm.cli.main", id="the command line", marks=pytest.mark.slow),
        pytest.param("from oocgemm.__main__ import main; main()", id="plan"),
    ],
)
def test_cupy_stays_out_even_where_it_is_installed(here: Path, code: str) -> None:
    package = here / "site" / "cupy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import pathlib; pathlib.Path('imported').touch(); raise ImportError"
    )
    report = "import atexit, sys; atexit.register(lambda: print('cupy' in sys.modules, file=sys.stderr)); "
    plan = ("plan", "a", "b", "--backend", "cuda", "--device-memory", "1GiB")
    done = _process("-c", report + code, *plan, PYTHONPATH=str(here / "site"))
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert not (here / "imported").exists()
    assert "ImportError" in _process("-c", "import cupy", PYTHONPATH=str(here / "site")).stderr
    assert (here / "imported").exists()  # the trap works: importing cupy creates this file


def test_shells_can_complete_commands_without_zarr_or_cupy() -> None:
    environment = {"COMP_WORDS": "oocgemm cal", "COMP_CWORD": "1"}
    asked = _process("-m", "oocgemm", _OOCGEMM_COMPLETE="bash_complete", **environment)
    assert (asked.returncode, asked.stdout) == (0, "plain,calibrate\n")
    assert "_oocgemm_completion" in _process("-m", "oocgemm", _OOCGEMM_COMPLETE="bash_source").stdout
    loaded = (
        "import atexit, sys; "
        "atexit.register(lambda: print({'zarr', 'cupy'} & set(sys.modules), file=sys.stderr)); "
    )
    code = loaded + "from oocgemm.__main__ import main; main()"
    slow = _process("-c", code, _OOCGEMM_COMPLETE="bash_complete", **environment)
    assert slow.stderr == "set()\n"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_no_array_packages(option: str) -> None:
    code = (
        "import sys; from oocgemm.__main__ import main\n"
        "try: main()\n"
        "finally: print({'numpy', 'zarr', 'rich', 'oocgemm.planning'} & set(sys.modules), file=sys.stderr)"
    )
    done = _process("-c", code, option)
    assert (done.returncode, done.stderr) == (0, "set()\n")


def test_summaries_are_those_of_the_commands() -> None:
    summaries = {name: command.get_short_help_str(200) for name, command in cli.commands.items()}
    assert summaries == {name: summary for name, (_, summary) in COMMANDS.items()}
    assert list(COMMANDS) == sorted(COMMANDS)


def test_a_slow_plan_is_noted_before_it_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MIN_SLOW", 0.01)
    for name in "xy":
        np.save(here / f"{name}.npy", np.ones((200, 200)))
    refused = run("x.npy", "y.npy", "z.npy", "--device-memory", "1", "--host-memory", "9MiB").err
    device = re.findall(r"\((\d+) bytes", refused)[0]
    options = ("--device-memory", device, "--host-memory", "9MiB")
    planned = command("plan", "x.npy", "y.npy", "z.npy", "--backend", "host", *options)
    note = re.search(r"Note: .* with --device-memory \d+MiB it would take .*", planned.out)
    assert note
    assert note[0] in run("x.npy", "y.npy", "z.npy", *options).err
    assert "Note" not in run("x.npy", "y.npy", "z.npy", *options, "--overwrite", "--quiet").err
    assert command("plan", "x.npy", "y.npy", "--backend", "host", *options, "--json").json()["faster"]


def test_a_report_takes_no_more_memory_than_its_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MIN_REPORT_ROOM", 0)
    monkeypatch.setattr(result, "REPORTED_SPAN_BYTES", 1 << 30)
    shown = run("a", "b", "new", "--device-memory", "20MiB", "--host-memory", "20MiB", "--timeline", "log")
    assert shown.code == 0
    assert re.search(
        r"no report is shown: for \d+ operations it would take \d+ GiB of memory, more than the 40 MiB",
        shown.out,
    )
    assert "compute share" not in shown.out
    options = ("--device-memory", "20MiB", "--host-memory", "20MiB", "--json")
    found = run("a", "b", "other", *options).json()
    assert found["report"] is None
    assert found["backend"]["name"] == "host"
    assert command("report", "log", "--json").json()["flops"] == found["plan"]["flops"]
    np.testing.assert_array_equal(stored("new"), A @ B)
