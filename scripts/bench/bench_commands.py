#!/usr/bin/env python
"""What the two commands of the README take: time and disk space of their first runs.

A clean clone is made for each of `scripts/demo` and `scripts/test`, which set up their environments in it.
Packages come from pip's cache or index: with a slow connection the first runs take longer.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

import click
from keeping import keep, output

TOP = Path(__file__).resolve().parents[2]
KEPT = {"PATH", "HOME", "LANG", "SSL_CERT_FILE"}


def left_by(clone: Path) -> dict[str, int]:
    """Return the bytes of each file or folder that git ignores."""
    line = ["git", "-C", str(clone), "status", "--porcelain", "--ignored"]
    shown = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    names = sorted(entry[3:].rstrip("/") for entry in shown.splitlines() if "__pycache__" not in entry)
    sizes = {}
    for name in names:
        size = subprocess.run(
            ["du", "-sb", name], cwd=clone, check=True, capture_output=True, text=True
        ).stdout
        sizes[name] = int(size.split()[0])
    return sizes


@click.command()
@output
def main(output: Path | None) -> None:
    seconds, sizes, names = dict[str, float](), dict[str, int](), dict[str, list[str]]()
    environment = {
        name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")
    }
    for name in ("demo", "test"):
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "oocgemm"
            subprocess.run(["git", "clone", "-q", str(TOP), str(clone)], check=True)
            start = time.perf_counter()
            done = subprocess.run([str(clone / "scripts" / name)], env=environment, check=False)
            if done.returncode:
                raise SystemExit(f"scripts/{name} failed: exit code {done.returncode}")
            seconds[name] = time.perf_counter() - start
            left = left_by(clone)
            sizes[name], names[name] = sum(left.values()), list(left)
            print(f"scripts/{name}: {seconds[name]:.0f} s, {sizes[name] / 1e6:.0f} MB in {', '.join(left)}")
            keep(output, "first run", {"seconds": seconds, "left_bytes": sizes, "left": names})


if __name__ == "__main__":
    main()
