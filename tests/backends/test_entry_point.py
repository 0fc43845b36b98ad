"""The command starts itself again only if OpenBLAS chose slower kernels than the processor supports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oocgemm.backends import resolve
from oocgemm.backends.host.blas import AVX512_FLAGS, CHOICE, better_family, blas_name

# Runs the command as on a machine with a given processor and OpenBLAS. A second start is only printed.
CODE = """
import functools, json, os, sys
from pathlib import Path
from oocgemm import __main__ as entry
from oocgemm.backends.host import blas
cpuinfo, answers = Path(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
blas._ask = answers.get
blas.better_family = functools.partial(blas.better_family, cpuinfo)
def start(path, arguments, environment):
    assert path == sys.executable and arguments[1:] == sys.orig_argv[1:]
    print("started anew with", environment[blas.CHOICE])
    sys.exit()
os.execve = start
entry.cli.main = lambda: print("as it is")
entry.main()
"""
OLD = {"get_corename": "Haswell", "get_config": "OpenBLAS 0.3.31 DYNAMIC_ARCH NO_AFFINITY Haswell"}
RUN = ["run", "--backend", "host"]
ANEW, AS_IT_IS = "started anew with SkylakeX\n", "as it is\n"
ZEN5 = "fma avx2 sha_ni avx512_bf16 " + " ".join(sorted(AVX512_FLAGS))


@pytest.mark.parametrize(
    ("flags", "answers", "arguments", "environment", "out", "notes"),
    [
        pytest.param(
            ZEN5, OLD, ["run", "--backend=host"], {}, ANEW, 1, id="AVX2 kernels on a processor with AVX-512"
        ),
        pytest.param(ZEN5, OLD, [*RUN, "--quiet"], {}, ANEW, 0, id="quiet"),
        pytest.param(ZEN5, OLD, [*RUN, "--json"], {}, ANEW, 0, id="json", marks=pytest.mark.slow),
        pytest.param(ZEN5, OLD, ["run", "--backend", "cuda"], {}, AS_IT_IS, 0, id="on a GPU"),
        pytest.param(
            ZEN5, OLD, ["plan", "a", "b"], {}, AS_IT_IS, 0, id="nothing is multiplied", marks=pytest.mark.slow
        ),
        pytest.param(ZEN5, OLD, RUN, {CHOICE: "Haswell"}, AS_IT_IS, 0, id="the user has chosen"),
        pytest.param("fma avx2", OLD, RUN, {}, AS_IT_IS, 0, id="no AVX-512"),
        pytest.param(
            "avx2 avx512f avx512cd",
            OLD,
            RUN,
            {},
            AS_IT_IS,
            0,
            id="too little of AVX-512",
            marks=pytest.mark.slow,
        ),
        pytest.param(ZEN5, OLD | {"get_corename": "SkylakeX"}, RUN, {}, AS_IT_IS, 0, id="well picked"),
        pytest.param(
            ZEN5,
            OLD | {"get_config": "Haswell"},
            RUN,
            {},
            AS_IT_IS,
            0,
            id="one family built in",
            marks=pytest.mark.slow,
        ),
        pytest.param(ZEN5, {}, RUN, {}, AS_IT_IS, 0, id="another BLAS"),
        pytest.param(
            None, OLD, RUN, {}, AS_IT_IS, 0, id="a processor that is not known", marks=pytest.mark.slow
        ),
    ],
)
def test_the_command_line_selects_the_faster_kernels(
    tmp_path: Path,
    flags: str | None,
    answers: dict[str, str],
    arguments: list[str],
    environment: dict[str, str],
    out: str,
    notes: int,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu {flags} clzero\n\n")
    clean = {name: value for name, value in os.environ.items() if name != CHOICE}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(cpuinfo), json.dumps(answers), *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == out
    assert done.stderr.count(f"Note: {CHOICE}=SkylakeX") == len(done.stderr.splitlines()) == notes


@pytest.mark.skipif("openblas" not in blas_name(), reason="needs OpenBLAS")
def test_the_restarted_process_has_the_chosen_kernels() -> None:
    code = (
        "from oocgemm import __main__ as entry; entry._on_host = lambda: True; "
        "from oocgemm.backends.host import blas; blas.better_family = lambda: ('Nehalem', 'Haswell'); "
        "entry.main()"
    )
    clean = {name: value for name, value in os.environ.items() if name != CHOICE}
    done = subprocess.run(
        [sys.executable, "-c", code, "info"], env=clean, capture_output=True, text=True, check=True
    )
    assert f"{CHOICE}=Haswell" in done.stdout
    assert done.stderr.startswith(f"Note: {CHOICE}=Haswell is set, because this processor has AVX-512")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif("openblas" not in blas_name(), reason="needs OpenBLAS")
@pytest.mark.parametrize("environment", [{}, {CHOICE: "Haswell"}])
def test_info_names_the_kernels_in_use(environment: dict[str, str]) -> None:
    clean = {name: value for name, value in os.environ.items() if name != CHOICE}
    done = subprocess.run(
        [sys.executable, "-m", "oocgemm", "info"],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    chosen = environment.get(CHOICE)
    better = better_family() if resolve("auto") == "host" and CHOICE not in os.environ else None
    if chosen is None and better:
        assert len(done.stderr.splitlines()) == 1
        chosen = better[1]
    else:
        assert chosen is None or done.stderr == ""
    assert chosen is None or f"{CHOICE}={chosen}" in done.stdout


def test_the_library_leaves_the_environment_alone() -> None:
    code = "import os; before = dict(os.environ); import oocgemm.cli.main; assert dict(os.environ) == before"
    subprocess.run([sys.executable, "-c", code], check=True)
