"""The page on architecture names files that exist, and lists all of them."""

import re
from pathlib import Path

from architecture import PACKAGES, PAGE, ROOT, listing, page  # type: ignore[import-not-found]

PATHS = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*(?:/|\.py|\.cu|\.c))`", PAGE.read_text())))


def test_each_file_that_the_page_names_exists() -> None:
    assert PATHS
    missing = [p for p in PATHS if not (ROOT / "oocgemm" / p).exists() and not (ROOT / p).exists()]
    assert missing == []


def test_the_list_of_files_is_current() -> None:
    assert PAGE.read_text() == page(), "run scripts/architecture.py"


def test_the_list_has_every_module() -> None:
    package = ROOT / "oocgemm"
    listed = listing()
    folders = {path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")}
    assert folders - {"."} == set(PACKAGES)
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        assert Path(name).name == "__init__.py" or f"`{name}`" in listed
