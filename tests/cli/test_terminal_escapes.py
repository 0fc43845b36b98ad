"""No text from elsewhere controls the terminal, or forges a line, whatever command shows it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.service import transport
from oocgemm.system.text import plain
from tests.support.command import command
from tests.support.stub_service import Stub, stub_service
from tests.support.suite import each_value

CONTROLS = [
    *map(chr, range(32)),
    *map(chr, range(127, 160)),
    "\u202e",
    "\u2066",
    "\u2028",
    "\u200b",
    "\udc9b",
]
# Clears the screen, sets the title, reverses text, rings, and begins lines of its own.
EVIL = "".join(CONTROLS) + "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\nError: forged\r\nsucceeded"
FIELDS = ("name", "owner", "reason", "error", "a", "b", "c")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(transport, "FIRST_DELAY", 0.002)
    with stub_service(tmp_path) as found:
        monkeypatch.setenv("OOCGEMM_SERVICE", str(found.socket))
        yield found


def _check(shown: str) -> None:
    assert not set(shown) & set(CONTROLS) - {"\n"}
    for line in shown.splitlines():
        assert not line.startswith(("Error: forged", "succeeded"))


@pytest.mark.parametrize("control", CONTROLS)
def test_a_plain_text_has_no_control_character(control: str) -> None:
    assert plain(f"a{control}b") in ("ab", "a b")
    assert plain(f"a{control}b", keep=control) == f"a{control}b"
    assert plain("naïve 数据 × 1.5 µs […]") == "naïve 数据 × 1.5 µs […]"


@each_value
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "words",
    ["queue --all", "queue --all --json", "status last", "status last --json", "wait last"],
)
def test_commands_of_the_queue_show_plain_texts(stub: Stub, field: str, words: str) -> None:
    values: dict[str, Any] = {"state": "failed", "exit_code": 1, "error": "why", field: EVIL}
    stub.add(**values, options={"tile": EVIL}, plan={"m": 1, "n": 1, "k": 1, "a_dtype": EVIL})
    done = command(*words.split())
    _check(done.out)
    _check(done.err)
    assert "forged" in done.out + done.err or not words.startswith("status")


def test_logs_are_plain_lines(stub: Stub) -> None:
    stub.add(state="failed", exit_code=1)
    stub.log = EVIL.replace("\udc9b", "").encode() + b"\xff\x9b\nnext\tword\n"
    done = command("logs", "last")
    assert not set(done.out) & set(CONTROLS) - {"\n", "\t"}
    assert done.out.endswith("\nnext\tword\n")
    assert json.loads(command("logs", "last", "--json").out)["log"]


def test_errors_of_a_service_are_plain(stub: Stub) -> None:
    stub.faults.append((422, {}))
    stub.add(name=EVIL, state="failed")
    done = command("status", EVIL.replace("\0", "").replace("\udc9b", ""))
    assert done.code
    _check(done.err)


@pytest.mark.parametrize("field", ["machine", "note", "kernels", "retried"])
def test_a_report_of_the_timeline_of_another_is_plain(tmp_path: Path, field: str) -> None:
    values = np.ones((64, 64))
    log = tmp_path / "timeline"
    oocgemm.gemm(values, values, tmp_path / "C.npy", backend="host", timeline=log)
    first, *rest = log.read_text().splitlines()
    header = json.loads(first)
    plan = header["plan"]
    match field:
        case "machine" | "note":
            plan[field] = EVIL
        case "kernels":
            header["backend"]["multiplied by"] = [EVIL]
        case "retried":
            rest[-1] = json.dumps(json.loads(rest[-1]) | {"retried": [EVIL]})
    log.write_text("\n".join([json.dumps(header), *rest]) + "\n")
    for words in (("report", str(log)), ("report", str(log), str(log)), ("report", str(log), "--json")):
        done = command(*words)
        assert done.code == 0, done.err
        _check(done.out)


def test_names_of_files_are_plain_in_errors(tmp_path: Path) -> None:
    name = "".join(each for each in EVIL if each not in "\0/\udc9b")
    (tmp_path / f"{name[-60:]}.npy").write_bytes(b"no array")
    done = command("plan", f"{tmp_path}/{name[-60:]}.npy", f"{tmp_path}/{name[-60:]}.npy")
    assert done.code == 2
    _check(done.err)
