"""A wheel and an editable install both contain the kernels and the files of the HTML page.

The same code finds them in both.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from oocgemm.errors import BackendError
from oocgemm.kernels.compile import kernel_folder, kernel_path
from tests.support import TOP


def test_the_source_tree_has_its_kernels() -> None:
    assert "extern" in kernel_path("tiled").read_text()
    with pytest.raises(BackendError, match=r"there are assemble, chain, .*finish, .*rank_one, .*tiled"):
        kernel_path("nonsense")


def test_an_installed_wheel_has_its_kernels_and_its_page(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(TOP)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # an installer does the same
    has_compiler = shutil.which("cc") is not None
    code = (
        f"from oocgemm.system.installed import *; assert bool(compiled()) == {has_compiler}; "
        "from oocgemm.kernels.compile import *; print(kernel_folder()); kernel_path('tiled'); "
        "from oocgemm.reports.exports import *; page([('', Timeline((), 1))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
    )
    assert Path(found.stdout.strip()) == site / "oocgemm" / "_kernels"
    tree, installed = TOP / "kernels", site / "oocgemm" / "_kernels"
    assert {p.relative_to(tree) for p in tree.glob("*/*.[ch]*")} == {
        p.relative_to(installed) for p in installed.rglob("*") if p.is_file()
    }
    for folder in (Path("oocgemm/reports/web"), Path("oocgemm/service/page")):
        assert {p.name for p in (TOP / folder).iterdir()} == {p.name for p in (site / folder).iterdir()}


def test_every_kernel_says_how_it_works() -> None:
    for path in kernel_folder().glob("*/*.cu"):
        assert path.read_text().startswith(f"// {path.stem}: ")
