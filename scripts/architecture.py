#!/usr/bin/env python
"""Write the list of all files in docs/concepts/architecture.md, from the first lines of their docstrings.

usage: scripts/architecture.py [--check]

With --check, the page is not written: the script fails if it would change.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "concepts" / "architecture.md"
# The packages in oocgemm, in the order in which a call passes through them.
PACKAGES = (
    *("cli", "service", "service/http", "verbs", "jobs", "distributed"),
    *("planning", "planning/search", "planning/cost", "planning/schedule"),
    *("engine", "backends", "backends/host", "backends/cuda", "kernels", "stores"),
    *("integrity", "machine", "system", "timeline", "reports"),
)
# Folders with the scripts of HTML pages, and what each page shows.
PAGES = {"service/page": "The page of the service", "reports/web": "The HTML page of a report"}
HEAD = "| file | what it holds |\n| --- | --- |"
MARK = "<!-- All files: written by scripts/architecture.py -->\n"


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, or of the comment at the start of a kernel."""
    source = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(source)) or ""
    else:
        comment = re.match(r"(?://[^\n]*\n)+|/\*.*?\*/", source, re.DOTALL)
        text = re.sub(r"^(//|/\*| \*/?) ?|\*/$", "", comment.group() if comment else "", flags=re.MULTILINE)
    sentence = " ".join(re.split(r"\.\s|\n\s*\n", text)[0].split()).rstrip(".")
    return sentence.replace("``", "`").replace("|", r"\|")


def rows(folder: Path, pattern: str) -> Iterator[str]:
    """Yield a row of the table for each file of a folder that says what it is for."""
    for path in sorted(folder.glob(pattern)):
        if path.name != "__init__.py" and (found := summary(path)):
            yield f"| `{path.relative_to(ROOT).as_posix().removeprefix('oocgemm/')}` | {found} |"


def listing() -> str:
    """Return the tables of all files: per package, per HTML page, and of the CUDA and C sources."""
    package = ROOT / "oocgemm"
    about = f"{summary(package / '__init__.py')}. `__init__.py` has the functions that users import."
    parts = [f"### oocgemm\n\n{about}\n", HEAD, *rows(package, "*.py"), ""]
    for name in PACKAGES:
        folder = package / name
        parts += [f"### {name}\n\n{summary(folder / '__init__.py')}.\n", HEAD, *rows(folder, "*.py"), ""]
    for name, about in PAGES.items():
        parts += [f"### {name}\n\n{about}.\n", HEAD, *rows(package / name, "*.js"), ""]
    sources = [*rows(ROOT / "kernels", "*/*.cu"), *rows(ROOT / "kernels", "host/*.c")]
    parts += ["### Sources in CUDA and C\n\n`kernels/` is beside the package.\n", HEAD, *sources, ""]
    return "\n".join(parts)


def page() -> str:
    """Return the text of the page, with the list as it must be."""
    return PAGE.read_text().partition(MARK)[0] + MARK + "\n" + listing()


def main() -> None:
    """Write the page, or check it."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        raise SystemExit(f"{PAGE} is stale: run scripts/architecture.py")


if __name__ == "__main__":
    main()
