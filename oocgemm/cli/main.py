"""The command line: run, plan, verify, report, calibrate, bench, tune, info."""

import os
import sys
import traceback
from typing import NoReturn

import click

from oocgemm import __version__
from oocgemm.cli import measuring, products, reporting
from oocgemm.cli.interrupts import Interrupted
from oocgemm.cli.output import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    exit_code,
    print_error,
    print_interrupted,
    warnings_as_notes,
)
from oocgemm.errors import OocGemmError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oocgemm")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error, as OOCGEMM_DEBUG=1 does.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Multiply matrices larger than memory: C = alpha op(A) op(B) + beta C.

    A, B and C are zarr arrays or .npy files. op(X) is X, its transpose or its conjugate transpose.

    Example: oocgemm run A.zarr B.zarr C.zarr --transpose-a
    """
    context.with_resource(warnings_as_notes())


for command in (
    *(products.run, products.plan, products.verify, reporting.report),
    *(measuring.calibrate, measuring.bench_group, measuring.tune, reporting.info),
):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line. An error becomes one line on stderr and an exit code."""
    debug = "--debug" in sys.argv[1:] or bool(os.environ.get("OOCGEMM_DEBUG"))
    # --debug is allowed after the command too.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    code = 0
    try:
        code = cli.main(args=arguments, prog_name="oocgemm", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context else ""
        print_error(f"{error.format_message().rstrip('.')}{hint}")
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error
        print_interrupted(_notes(cause))
        code = cause.code if isinstance(cause, Interrupted) else EXIT_INTERRUPTED
    except (OocGemmError, MemoryError) as error:
        if debug:
            traceback.print_exc()
        message = str(error)
        if not isinstance(error, OocGemmError):
            message = "out of host memory: pass a smaller --host-memory, or end other programs"
        print_error(". ".join(filter(None, (message, _notes(error)))))
        code = exit_code(error)
    sys.exit(code)


def _notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


if __name__ == "__main__":
    main()
