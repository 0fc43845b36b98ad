"""A confined process, and a confined job, can use only the folders that they were given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oocgemm.errors import InputError
from oocgemm.service import confinement
from tests.support import TOP
from tests.support.confined import as_abi, attempts, confined, race, swapping, threaded

needs_landlock = pytest.mark.skipif(not confinement.abi(), reason="this kernel has no Landlock")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a root to read (`data`), a root to write (`out`), and a folder that is no root."""
    for name in ("data", "out", "secret"):
        (tmp_path / name / "dir").mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
        (tmp_path / name / "dir" / "file").write_text(name)
    for name in ("data", "out"):
        (tmp_path / name / "link").symlink_to("../secret/file")
        (tmp_path / name / "self").symlink_to(f"/proc/self/root/{tmp_path}/secret/file")
        (tmp_path / name / "inside").symlink_to("dir/file")
    return tmp_path


@needs_landlock
def test_a_confined_process_uses_only_its_folders(base: Path) -> None:
    data, out, secret = (str(base / name) for name in ("data", "out", "secret"))
    expected = [
        # A root that may be read.
        ("ok", "read", f"{data}/file"),
        ("ok", "read", f"{data}/inside"),
        ("ok", "list", data),
        ("EACCES", "read", f"{data}/link"),
        ("EACCES", "read", f"{data}/self"),
        ("EACCES", "read", f"{data}/../secret/file"),
        ("EACCES", "write", f"{data}/file"),
        ("EACCES", "create", f"{data}/new"),
        ("EACCES", "mkdir", f"{data}/new"),
        ("EACCES", "unlink", f"{data}/file"),
        ("EACCES", "rename", f"{data}/file", f"{data}/new"),
        ("EACCES", "symlink", "x", f"{data}/new"),
        ("EACCES", "rename", f"{data}/file", f"{out}/new"),
        ("EACCES", "run", f"{data}/file"),
        # A root that may be written.
        ("ok", "read", f"{out}/file"),
        ("ok", "write", f"{out}/file"),
        ("ok", "truncate", f"{out}/file"),
        ("ok", "create", f"{out}/new"),
        ("ok", "mkdir", f"{out}/folder"),
        ("ok", "rename", f"{out}/new", f"{out}/folder/new"),
        ("ok", "unlink", f"{out}/folder/new"),
        ("ok", "rmdir", f"{out}/folder"),
        ("EACCES", "read", f"{out}/link"),
        ("EACCES", "write", f"{out}/link"),
        ("EACCES", "write", f"{out}/self"),
        ("EACCES", "symlink", "../secret", f"{out}/way"),
        ("EACCES", "mkfifo", f"{out}/pipe"),
        ("EACCES", "rename", f"{out}/file", f"{secret}/new"),
        # Everything else.
        ("EACCES", "read", f"{secret}/file"),
        ("EACCES", "write", f"{secret}/file"),
        ("EACCES", "list", secret),
        ("EACCES", "list", str(base)),
        ("EACCES", "list", "/"),
        ("EACCES", "create", f"{secret}/new"),
        ("EACCES", "create", str(base / "new")),
        ("EACCES", "read", "/etc/fstab"),
        ("EACCES", "read", f"/proc/self/root{secret}/file"),
        ("EACCES", "read", f"/proc/self/cwd/{os.path.relpath(secret)}/file"),
        # Child processes inherit the restriction.
        ("ok", "run", "/bin/cat", f"{data}/file"),
        ("EACCES", "run", "/bin/cat", f"{secret}/file"),
        ("ok", "read", "/proc/self/status"),
        ("ok", "read", "/dev/zero"),
    ]
    found = confined([base / "data"], [base / "out"], attempts, [command for _, *command in expected])
    assert list(zip(found, (command for _, *command in expected), strict=True)) == [
        (result, command) for result, *command in expected
    ]
    assert (base / "secret/file").read_text() == "secret"


@needs_landlock
def test_a_confined_process_sees_nothing_of_the_server(base: Path) -> None:
    """Not even root sees the environment or the open files of another process."""
    server = f"/proc/{os.getpid()}"
    commands = [
        ["read", f"{server}/environ"],
        ["read", f"{server}/root{base}/secret/file"],
        ["list", f"{server}/fd"],
        ["read", f"{server}/cmdline"],
        ["read", "/proc/self/environ"],
    ]
    assert confined([base / "data"], [], attempts, commands) == ["EACCES"] * 5
    assert confined(None, None, attempts, commands) == ["ok"] * 5


@needs_landlock
def test_a_single_file_may_be_allowed(base: Path) -> None:
    found = confined(
        [base / "secret/file"],
        [],
        attempts,
        [["read", str(base / "secret" / x)] for x in ("file", "dir/file")],
    )
    assert found == ["ok", "EACCES"]


@needs_landlock
@pytest.mark.parametrize(
    ("working", "file", "allowed"), [("data", "data", False), ("data", "lib", True), ("lib", "lib", False)]
)
def test_folders_of_modules_are_allowed_but_for_the_working_folder(
    base: Path, working: str, file: str, allowed: bool
) -> None:
    """``python -m`` puts the working folder into ``sys.path``, and it may hold anything."""
    (base / "lib").mkdir()
    (base / "lib" / "file").touch()
    repository = TOP
    script = (
        "from oocgemm.service.confinement import restrict\n"
        f"restrict([], [])\nopen({str(base / file / 'file')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=base / working,
        env=os.environ | {"PYTHONPATH": f"{repository}:{base / 'lib'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is allowed, done.stderr
    assert ("PermissionError" in done.stderr) is not allowed


@needs_landlock
def test_restricting_needs_a_process_with_one_thread() -> None:
    assert (
        confined(None, None, threaded)
        == "restrict must be called before a thread starts: there are 2 threads"
    )


def test_missing_folders_and_a_kernel_without_landlock_are_named(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "abi", lambda: 0)
    with pytest.raises(InputError, match=r"this kernel has no Landlock.*pass --no-confine"):
        confinement.restrict([], [])
    monkeypatch.undo()
    if confinement.abi():
        with pytest.raises(AssertionError, match=f"a job cannot be given {base}/absent: No such file"):
            confined([base / "absent"], [], attempts, [])


@pytest.mark.parametrize(
    ("version", "count"), [(0, 0), (1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (6, 16), (7, 16), (99, 16)]
)
def test_each_version_of_landlock_is_asked_for_the_rights_that_it_knows(version: int, count: int) -> None:
    assert confinement.known(version) == (1 << count) - 1


@needs_landlock
@pytest.mark.parametrize("version", [1, 2, 3, 5, 99])
def test_rights_of_an_older_kernel_confine_a_process_too(base: Path, version: int) -> None:
    if 99 > version > confinement.abi():
        pytest.skip(f"this kernel has version {confinement.abi()}")
    read, write = [str(base / "data")], [str(base / "out")]
    commands = [
        ["read", f"{base}/data/file"],
        ["create", f"{base}/out/new"],
        ["read", f"{base}/data/link"],
        ["write", f"{base}/data/file"],
        ["rename", f"{base}/out/file", f"{base}/out/dir/new"],
    ]
    moved = "ok" if version > 1 else "EXDEV"  # the first version never allows this
    found = confined(None, None, as_abi, version, read, write, commands)
    assert found == ["ok", "ok", "EACCES", "EACCES", moved]


@needs_landlock
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ["dir/file", "file"])
@pytest.mark.parametrize("wins", [50, pytest.param(10_000, marks=pytest.mark.slow)])
def test_links_that_replace_a_checked_path_do_not_lead_out(base: Path, path: str, wins: int) -> None:
    """Another process exchanges a folder or a file and a link to secrets as fast as it can."""
    name = path.partition("/")[0]
    (base / "data/away").symlink_to(f"../secret/{name}")
    with swapping(base / "data" / name, base / "data/away"):
        found = confined([base / "data"], [], race, str(base / "data"), path, wins)
        assert (found["blocked"], found["escaped"]) == (wins, 0)
        # Without Landlock, each of 50 reads leads out.
        free = confined(None, None, race, str(base / "data"), path, 50)
        assert (free["blocked"], free["escaped"]) == (0, 50)
    print(path, found)
