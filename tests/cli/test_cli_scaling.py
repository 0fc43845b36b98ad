"""`oocgemm plan --workers` and `Plan.scaling`: the table of a product on several workers."""

from pathlib import Path

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.errors import InputError
from tests.support.command import command

GPU = ("--backend", "cuda", "--device-memory", "4GiB", "--host-memory", "8GiB")


@pytest.fixture(autouse=True)
def operands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create operands without chunk files: plans do not read them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in "ab":
        zarr.create_array(name, shape=(60000, 60000), chunks=(2000, 2000), dtype="f8", compressors=None)


def test_the_table_has_a_row_per_choice() -> None:
    shown = command("plan", "a", "b", "c", *GPU, "--workers", "1..8", "--storage-read", "1TB/s")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("workers"))
    for column in ("used", "parts", "predicted", "speed-up", "bottleneck", "why no more"):
        assert column in lines[head]
    assert lines[head + 1].split()[:3] == ["1", "1", "1x1x1"]
    assert lines[-1].startswith("8 of 8 workers used: ")
    assert all(len(line) <= 80 for line in lines[head:])
    one = command("plan", "a", "b", "c", *GPU, "--workers", "8", "--storage-read", "1TB/s").out.splitlines()
    assert [line.split() for line in one[-2:]] == [line.split() for line in lines[-2:]]  # not the widths


def test_numbers_with_the_same_choice_share_a_row() -> None:
    shown = command("plan", "a", "b", "c", *GPU, "--workers", "1..64", "--storage-read", "10GB/s").out
    rows = shown[shown.index("workers  used") :].splitlines()[1:-1]
    assert len(rows) < 16
    assert rows[-1].split()[0].endswith("-64")
    assert "each more costs" in rows[-1]


def test_json_has_every_number_of_workers() -> None:
    found = command("plan", "a", "b", "c", *GPU, "--workers", "2..5", "--json").json()["scaling"]
    assert [row["available"] for row in found] == [2, 3, 4, 5]
    for row in found:
        assert row["workers"] <= row["available"]
        assert row["predicted_seconds"] > 0
        assert row["reason"].startswith(f"{row['workers']} of {row['available']} workers used: ")
    assert "scaling" not in command("plan", "a", "b", "c", *GPU, "--json").json()


def test_faster_storage_makes_more_workers_worthwhile() -> None:
    used = [
        command("plan", "a", "b", "c", *GPU, "--workers", "64", "--storage-read", rate, "--json").json()
        for rate in ("5GB/s", "50GB/s", "500GB/s")
    ]
    counts = [row["scaling"][0]["workers"] for row in used]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "0"), "'0' is not a number of workers: write one from 1 to 1024, or a range"),
        (("--workers", "2..x"), "'2..x' is not a number of workers"),
        (("--workers", "1..2000"), "from 1 to 1024"),
        (("--workers", "8..2"), "'8..2' is an empty range"),
        (("--workers", "2", "--storage-read", "fast"), "cannot read 'fast' as a rate"),
        (("--workers", "2", "--storage-read", "20GB"), "such as 20GB/s"),
        (("--storage-read", "20GB/s"), "pass --workers N too"),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], message: str) -> None:
    asked = command("plan", "a", "b", "c", *GPU, *options)
    assert asked.code == EXIT_USAGE
    assert message in " ".join(asked.err.split())


def test_workers_need_a_stored_c() -> None:
    asked = command("plan", "a", "b", *GPU, "--workers", "2")
    assert asked.code == EXIT_USAGE
    assert "C is in the memory of this process" in asked.err


def test_the_method_gives_the_same_table() -> None:
    plan = oocgemm.plan("a", "b", "c", backend="cuda", device_memory="4GiB", host_memory="8GiB")
    (one,) = plan.scaling(4, 2e10)
    assert plan.scaling([2, 4], "20GB/s")[1] == one
    printed = command("plan", "a", "b", "c", *GPU, "--workers", "4", "--storage-read", "20GB/s", "--json")
    assert printed.json()["scaling"] == [one.to_dict()]
    assert str(one).startswith(one.reason)
    with pytest.raises(InputError, match="must be positive"):
        plan.scaling(2, 0)


def test_a_given_tile_is_kept() -> None:
    shape = oocgemm.TileShape(16000, 16000, 2000)
    plan = oocgemm.plan("a", "b", "c", backend="cuda", device_memory="4GiB", host_memory="8GiB", tile=shape)
    assert plan.scaling(64, 1e12)[0].plan.tile == shape


def test_operands_in_memory_are_refused() -> None:
    x = np.ones((8, 8))
    with pytest.raises(InputError, match="A is in the memory of this process"):
        oocgemm.plan(x, x, "c", backend="host").scaling(2)
