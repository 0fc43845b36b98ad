"""The commands run, plan and report: what each option does, what is printed, and the exit codes."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from oocgemm.cli import products
from oocgemm.cli.process import EXIT_BUDGET, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from oocgemm.jobs import run as running
from oocgemm.planning.search import planner
from tests.support.cli_arrays import A, B, C, Y, Z, folder_of_arrays, stored
from tests.support.command import Finished, command, contents, run
from tests.support.problems import Array
from tests.support.suite import each_value


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder_of_arrays(tmp_path, monkeypatch)


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


@pytest.mark.usefixtures("here")
def test_exit_codes_tell_usage_budget_and_failure_apart() -> None:
    assert run("a", "b", "new", "--quite").code == EXIT_USAGE
    assert run("a", "a", "new").code == EXIT_USAGE
    assert run("a", "b", "new", "--device-memory", "1").code == EXIT_BUDGET
    Path("a/c/1/1").write_bytes(b"short")
    assert run("a", "b", "new").code == EXIT_FAILED
    assert [EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET, EXIT_INTERRUPTED] == [1, 2, 3, 130]


@each_value
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
    monkeypatch.setattr(running, "REPORTED_SPAN_BYTES", 1 << 30)
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
