"""``oocgemm`` and ``python -m oocgemm``: the command line, with the BLAS kernels that suit the processor.

Importing this package loads NumPy and with it the BLAS, which settles on its kernels at that moment. Where they are not
the best ones, the command starts itself anew with the environment that gives them: 0.2 s, on such processors only. Here
and not in the library, which leaves the environment of the program that uses it alone.
"""

import os
import sys
from typing import NoReturn

from oocgemm import backends
from oocgemm.backends.host.blas import CHOICE, better_family
from oocgemm.cli import main as cli
from oocgemm.cli.streams import use_safe_streams

# The others multiply nothing.
MULTIPLYING = {"run", "verify", "calibrate", "info"}


def main() -> NoReturn:
    """Entry point."""
    use_safe_streams()
    if CHOICE not in os.environ and MULTIPLYING & set(sys.argv[1:]) and _on_host():
        _choose_kernels()
    cli.main()


def _on_host() -> bool:
    """Whether the processor will do the multiplying, as far as the command line says."""
    words = {word.removeprefix("--backend=") for word in sys.argv[1:]}
    return backends.resolve(next((name for name in ("cuda", "host") if name in words), "auto")) == "host"


def _choose_kernels() -> None:
    """Start anew with the better kernel family, if there is one."""
    better = better_family()
    if better is None or not sys.executable:
        return
    picked, family = better
    if not {"--quiet", "--json"} & set(sys.argv[1:]):
        print(
            f"Note: {CHOICE}={family}, as this processor has AVX-512 and NumPy's BLAS had picked {picked} kernels",
            file=sys.stderr,
            flush=True,
        )
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {CHOICE: family})
    except OSError as error:
        print(f"Note: {picked} kernels all the same: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
