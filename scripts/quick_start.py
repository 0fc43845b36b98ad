"""Run the quick start of the README with the installed package, in the present folder.

usage: quick_start.py yes|no VERSION

The first argument says whether the compiled library must be in the package.
"""

import re
import subprocess
import sys
from pathlib import Path

import oocgemm
from oocgemm.system.installed import compiled

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks() -> list[tuple[str, str]]:
    """Return the language and the text of each block of the quick start."""
    text = README.read_text().partition("## Quick start\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(sh|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def main(library: str, version: str) -> None:
    found = (oocgemm.__version__, bool(compiled()))
    if found != (version, library == "yes"):
        sys.exit(f"quick start: version and compiled library are {found}, not {(version, library == 'yes')}")
    for language, text in blocks():
        line = [sys.executable, "-c", text] if language == "python" else ["sh", "-ec", text]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    print(f"quick start: oocgemm {version} of {Path(oocgemm.__file__).parent} works")


if __name__ == "__main__":
    main(*sys.argv[1:])
