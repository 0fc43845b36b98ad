"""``oocgemm`` and ``python -m oocgemm``: the command line, with the BLAS kernels that suit the processor.

The BLAS of NumPy chooses its kernels once, when it is loaded. If it does not choose the fastest ones, the
command executes itself again with an environment that selects them. That costs 0.2 s, on such processors
only. The library never does this, since it must not change the environment of its program. Commands that do
not multiply load neither NumPy nor its BLAS here.
"""

import os
import sys
from typing import NoReturn

from oocgemm.cli import main as cli
from oocgemm.cli.streams import use_safe_streams

# Commands that multiply on the host.
MULTIPLYING = {"run", "verify", "calibrate", "info"}


def main() -> NoReturn:
    """Run the command line."""
    use_safe_streams()
    if MULTIPLYING & set(sys.argv[1:]) and _on_host():
        _choose_kernels()
    cli.main()


def _on_host() -> bool:
    """Tell from the command line whether the processor multiplies."""
    from oocgemm import backends

    words = {word.removeprefix("--backend=") for word in sys.argv[1:]}
    return backends.resolve(next((name for name in ("cuda", "host") if name in words), "auto")) == "host"


def _choose_kernels() -> None:
    """Execute the command again with a faster kernel family, if there is one and the user has set none."""
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
    main()
