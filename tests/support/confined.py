"""A confined process: ``python -m tests.support.confined READ WRITE FUNCTION ARGUMENTS``, all of them JSON.

It restricts itself to the folders READ and WRITE, unless they are null. Then it calls a function of this
module, and prints what that returns. It imports no NumPy, which starts threads.
"""

import ctypes
import errno
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oocgemm.service import confinement
from oocgemm.service.limits import PathError, Root, resolve

AT_FDCWD, RENAME_EXCHANGE = -100, 2


def confined(
    read: Sequence[Path] | None, write: Sequence[Path] | None, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Call a function of this module in a confined process; return its result."""
    texts = [
        json.dumps([str(path) for path in paths] if paths is not None else None) for paths in (read, write)
    ]
    command = [
        sys.executable,
        "-m",
        "tests.support.confined",
        *texts,
        function.__name__,
        json.dumps(arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def attempts(commands: Sequence[Sequence[str]]) -> list[str]:
    """Make system calls, each a name of `CALLS` and its arguments; return "ok" or the name of the error."""
    return [_attempt(*command) for command in commands]


def _attempt(name: str, *arguments: str) -> str:
    try:
        CALLS[name](*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "ok"


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _write(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(b"x")


def _create(path: str) -> None:
    with open(path, "xb") as file:
        file.write(b"x")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(errno.EACCES, done.stderr)


CALLS: dict[str, Callable[..., object]] = {
    "read": _read,
    "write": _write,
    "create": _create,
    "run": _run,
    "list": os.listdir,
    "mkdir": os.mkdir,
    "rmdir": os.rmdir,
    "unlink": os.unlink,
    "rename": os.rename,
    "symlink": os.symlink,
    "link": os.link,
    "mkfifo": os.mkfifo,
    "truncate": lambda path: os.truncate(path, 0),
}


def threaded() -> str:
    """Return the message of `restrict` in a process with a second thread."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        confinement.restrict([], [])
    except RuntimeError as error:
        return str(error)
    finally:
        end.set()
        thread.join()
    return "restricted"


def as_abi(version: int, read: Sequence[str], write: Sequence[str], commands: Any) -> list[str]:
    """Restrict this process as on a kernel with another version of Landlock; return as `attempts` does."""
    confinement.abi = lambda: version
    confinement.restrict([Path(path) for path in read], [Path(path) for path in write])
    return attempts(commands)


def race(root: str, path: str, wins: int) -> dict[str, int]:
    """Resolve a path and read it, until it led out of the root so many times; count what happened.

    Keys: "checked" (the check refused it), "inside" (a file of the root was read), "blocked" (the kernel
    refused it after the check), "escaped" (a file outside was read).
    """
    roots = {"data": Root("data", Path(root), False)}
    counts = Counter({"blocked": 0, "escaped": 0})
    while counts["blocked"] + counts["escaped"] < wins:
        try:
            found = resolve(roots, f"data:{path}", write=False)
        except PathError:
            counts["checked"] += 1
            continue
        assert roots["data"].folder in found.parents
        os.sched_yield()
        try:
            counts["inside" if found.read_text() == "data" else "escaped"] += 1
        except PermissionError:
            counts["blocked"] += 1
    return dict(counts)


@contextmanager
def swapping(one: Path, other: Path) -> Iterator[None]:
    """Exchange two paths as often as possible, in another process, for the block."""
    command = [sys.executable, "-m", "tests.support.confined", "null", "null", "swap"]
    with subprocess.Popen([*command, json.dumps([str(one), str(other)])], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            assert process.poll() is None
            process.kill()


def swap(one: str, other: str) -> None:
    """Exchange two paths until this process is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(one), os.fsencode(other)
    print("swapping", flush=True)
    while not libc.renameat2(AT_FDCWD, first, AT_FDCWD, second, RENAME_EXCHANGE):
        os.sched_yield()


if __name__ == "__main__":
    read, write = (json.loads(each) for each in sys.argv[1:3])
    if read is not None:
        confinement.restrict([Path(path) for path in read], [Path(path) for path in write])
    print(json.dumps(globals()[sys.argv[3]](*json.loads(sys.argv[4]))))
