"""The command line tells what it is, what is installed and how to install the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import oocgemm
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.machine import info
from tests.support.command import command


def test_info_lists_what_is_installed_and_missing() -> None:
    found = command("info", "--json").json()
    assert found["versions"]["oocgemm"] == oocgemm.__version__
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    host = found["host_backend"]
    assert host["numpy"] == np.__version__
    assert {"float64", "complex128"} <= set(host["kernels"])
    assert {"read", "decode", "write"} <= set(host["links"])
    assert set(host["assumed"]) <= {*host["kernels"], *host["links"]}
    assert {"missing"} == set(found["cuda_backend"]) or found["cuda_backend"]["links"]["h2d"] > 0
    shown = command("info")
    assert shown.code == 0
    for part in ("versions", "machine", "host", "cuda", np.__version__, "read, page cache", "float64"):
        assert part in shown.out
    for lacking in found["missing"]:
        assert lacking["command"] in shown.out


def test_info_tells_the_version_of_a_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.machine.info.installed_versions", lambda *packages: {})
    info.versions.cache_clear()
    try:
        assert command("info", "--json").json()["versions"]["oocgemm"] == oocgemm.__version__
    finally:
        info.versions.cache_clear()


def test_info_says_how_to_install_missing_packages(tmp_path: Path) -> None:
    """The machine has a driver for CUDA 12, but not the packages cupy, resvg_py and ml_dtypes."""
    code = (
        "import ctypes, sys; from unittest.mock import patch\n"
        "sys.modules |= dict.fromkeys(('cupy', 'resvg_py', 'ml_dtypes'))\n"
        "class Driver:\n"
        "    def cuDriverGetVersion(self, version): version._obj.value = 12080; return 0\n"
        "from oocgemm.cli import main as cli\n"
        "from oocgemm.backends import registry\n"
        "real = ctypes.CDLL\n"
        "with patch.object(ctypes, 'CDLL', lambda name: Driver() if 'cuda' in name else real(name)), "
        "patch.object(registry, '_any_exists', "
        "lambda paths: True):\n    cli.cli(['info', '--json'])"
    )
    environment = os.environ | {"OOCGEMM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    found = json.loads(done.stdout)
    commands = {one["what"]: one["command"] for one in found["missing"]}
    assert commands["cupy"] == "pip install 'oocgemm[cuda12]'"
    assert commands["cupy"] in found["cuda_backend"]["missing"]
    assert commands["resvg_py"] == "pip install 'oocgemm[png]'"
    assert commands["ml_dtypes"] == "pip install 'oocgemm[bfloat16]'"
    assert commands["rates of host"] == "oocgemm calibrate --backend host"
    assert "bfloat16" not in found["host_backend"]["kernels"]


def test_help_and_version_are_no_errors() -> None:
    assert command("--version").out == f"oocgemm, version {oocgemm.__version__}\n"
    for name in ("run", "plan", "report", "calibrate", "info"):
        assert name in command("--help").out
        assert command(name, "-h").code == 0
    assert command().code == EXIT_USAGE
