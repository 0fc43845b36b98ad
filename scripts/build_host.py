"""Compiles the C sources in `kernels/host` to a shared library in the package. The wheel's build calls it.

usage: scripts/build_host.py

Without a C compiler the library is left out, and the package does the same work in Python, more slowly.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))
from oocgemm.system.installed import LIBRARY, sources_version  # noqa: E402

FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC", "-fvisibility=default", "-pthread", "-D_GNU_SOURCE")


def build() -> bool:
    """Compile the library. Return whether there is a compiler that can."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        print(
            f"build_host: there is no C compiler {compiler[0]!r}: copies on the host are slower",
            file=sys.stderr,
        )
        return False
    sources = map(str, sorted((TOP / "kernels" / "host").glob("*.c")))
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent) as folder:
        made = Path(folder) / LIBRARY.name
        version = f'-DOOC_SOURCES="{sources_version()}"'
        done = subprocess.run([*compiler, *FLAGS, version, *sources, "-o", str(made)], check=False)
        if done.returncode:
            return _left_out(f"{compiler[0]!r} failed")
        made.replace(LIBRARY)  # a process that has loaded the old library keeps it
    return True


def _left_out(why: str) -> bool:
    print(f"build_host: {why}, so copies on the host will be slower", file=sys.stderr)
    return False


class Hook(BuildHookInterface[Any]):
    """Adds the library to wheels and to editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not build():
            return
        build_data["artifacts"].append(str(LIBRARY.relative_to(TOP)))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    sys.exit(not build())
