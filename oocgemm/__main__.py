"""Run the command line, ``oocgemm`` or ``python -m oocgemm``, with the fastest BLAS kernels of the processor.

NumPy's BLAS chooses its kernels once, when NumPy is imported. On some processors it does not choose the
fastest ones. The command then executes itself again, with an environment variable that selects them, which
costs 0.2 s. The library never does this, because it must not change the environment of the program that
imports it.
"""

import os
import sys
from typing import NoReturn

from oocgemm.system.threads import wake

if "run" in sys.argv[1:2] and not (
    {"host", "--backend=host", "--device", "--workers", "--scheduler", "--scheduler-file"} & set(sys.argv)
):
    wake(0)  # while the modules below are imported

from oocgemm.cli import main as cli
from oocgemm.cli.process import EXIT_FAILED, print_error, use_safe_streams
from oocgemm.errors import OocGemmError

# The subcommands that use the host's BLAS. Only these restart the process with faster kernels.
MULTIPLYING = {"run", "verify", "calibrate", "info"}


def main() -> NoReturn:
    """Run the command line. If the BLAS has faster kernels for this processor, restart with them first."""
    use_safe_streams()
    if MULTIPLYING & set(sys.argv[1:]) and _on_host():
        _choose_kernels()
    cli.main()


def process() -> NoReturn:
    """Run the command line as a process of its own, and end the process as soon as its output is written.

    Python would first destroy all modules and objects, and CUDA its context, which takes a noticeable part of
    a short command. The system frees all of it too. C is durable by then, and no thread of a run is left.
    Exit handlers of other packages do not run.
    """
    code: object = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OocGemmError as error:  # see `cli.process`
        print_error(str(error))
        code = EXIT_FAILED
    os._exit(code if isinstance(code, int) else 0 if code is None else EXIT_FAILED)


def _on_host() -> bool:
    """Return whether the backend that the command line selects is the host backend, which uses the BLAS."""
    from oocgemm import backends

    words = {word.removeprefix("--backend=") for word in sys.argv[1:]}
    return backends.resolve(next((name for name in ("cuda", "host") if name in words), "auto")) == "host"


def _choose_kernels() -> None:
    """Replace this process by the same command with faster BLAS kernels.

    Return only if the kernels need no change, or if the system cannot replace the process.
    """
    from oocgemm.backends.host.blas import CHOICE, better_family

    if CHOICE in os.environ:
        return
    better = better_family()
    if better is None or not sys.executable:
        return
    picked, family = better
    if not {"--quiet", "--json"} & set(sys.argv[1:]):
        print(
            f"Note: {CHOICE}={family} is set, because this processor has AVX-512 and NumPy's BLAS chose "
            f"{picked} kernels",
            file=sys.stderr,
            flush=True,
        )
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {CHOICE: family})
    except OSError as error:
        print(f"Note: BLAS keeps its {picked} kernels: {error}", file=sys.stderr)


if __name__ == "__main__":
    process()
