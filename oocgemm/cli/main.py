"""The command line: runs and plans of products, measurements, and the queue of a service.

The module of a command is imported when the command is used, because importing NumPy alone takes longer than
`oocgemm --help` may take.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import NoReturn, cast

import click

from oocgemm.cli.process import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    Interrupted,
    exit_code,
    print_error,
    print_interrupted,
    warnings_as_notes,
)
from oocgemm.errors import OocGemmError
from oocgemm.jobs.support import VERBS
from oocgemm.system.installed import __version__

# Where each command is defined, and its summary in the help of the command line.
_OWN = {
    "bench": ("measuring:bench_group", "Measure single parts of oocgemm: at present, its kernels."),
    "calibrate": ("measuring:calibrate", "Measure this machine, for plans and reports."),
    "cancel": ("queue:cancel", "Cancel jobs of a service."),
    "corr": (
        "statistics:corr",
        "Compute Pearson's correlation coefficients of the rows of X, or of its rows with those of Y.",
    ),
    "cov": ("statistics:cov", "Compute covariances of the rows of X, and store them."),
    "distances": ("statistics:distances", "Compute the distance of each row of X to each row of X, or of Y."),
    "gram": (
        "products:gram",
        "Multiply X and its conjugate transpose, and store the product in C.",
    ),
    "grm": (
        "statistics:grm",
        "Compute the genetic relationship matrix (GRM) of the individuals in X, and store it.",
    ),
    "hold": ("queue:hold", "Keep queued jobs from starting, until `oocgemm release`."),
    "ibs": (
        "statistics:ibs",
        "Compute the share of alleles that the individuals in X share (IBS), or counts of variants.",
    ),
    "info": ("measuring:info", "Show what is installed, how fast it is, and what is missing."),
    "king": (
        "statistics:king",
        "Compute KING's robust kinship of the individuals in X, as plink2 --make-king does.",
    ),
    "ld": (
        "statistics:ld",
        "Compute the correlations of pairs of variants that are near one another, and store them.",
    ),
    "logs": ("queue:logs", "Show what a job has printed."),
    "lstsq": ("fitting:lstsq", "Find the b for which the sum of squares of Y - X b is smallest, in float64."),
    "neighbors": ("statistics:neighbors", "Find the nearest rows of X, or of Y, to each row of X."),
    "pause": ("queue:pause", "Stop running jobs so that other jobs can run."),
    "pca": ("statistics:pca", "Find the principal components of X, by one read of X where that is faster."),
    "plan": ("products:plan", "Show how a product would be computed."),
    "queue": ("queue:queue", "List the jobs of a service."),
    "release": ("queue:release", "Let held jobs start."),
    "report": ("measuring:report", "Show what limited the speed of a run, and what to change."),
    "resume": ("queue:resume", "Continue paused jobs."),
    "retry": ("queue:retry", "Queue jobs again that failed or were cancelled."),
    "ridge": (
        "fitting:ridge",
        "Find the b for which the sum of squares of Y - X b, plus ALPHA times that of b, is smallest.",
    ),
    "run": ("products:run", "Multiply A and B, and store the product in C."),
    "serve": ("serve:serve", "Run a queue of products in front of the GPUs of this machine."),
    "similarity": ("statistics:similarity", "Find the most similar rows of each row of E."),
    "stats": (
        "statistics:stats",
        "Compute means, variances and extremes of the columns or rows of X, by one read of X.",
    ),
    "status": ("queue:status", "Show a job of a service."),
    "submit": ("submit:submit", "Submit a product to a service, which computes it in the background."),
    "svd": (
        "fitting:svd",
        "Find the largest singular values of X and their vectors, in float64, by a few reads of X.",
    ),
    "token": (
        "serve:token",
        "Make, list and revoke the tokens with which users reach `oocgemm serve --listen`.",
    ),
    "tune": ("measuring:tune", "Find the fastest kernels on this GPU, for --kernel auto."),
    "verify": ("products:verify", "Check that C is the product of A and B within rounding error."),
    "wait": ("queue:wait", "Wait until jobs have ended."),
}
_OF_VERBS = {
    name.replace("_", "-"): (f"statistics:{name}", verb.command.partition("\n")[0])
    for name, verb in VERBS.items()
    if verb.command
}
COMMANDS = dict(sorted((_OWN | _OF_VERBS).items()))
# The sections of the help, by the module of a command. Commands of other modules compute, or only look.
_SECTIONS = {"measuring": "Machine", "queue": "Service", "serve": "Service", "submit": "Service"}
_LOOKING = ("plan", "report", "stats", "verify")


def sections() -> dict[str, list[str]]:
    """Return the names of the commands by section of the help."""
    found: dict[str, list[str]] = {"Compute": [], "Look": [], "Machine": [], "Service": []}
    for name, (place, _) in COMMANDS.items():
        own = _SECTIONS.get(place.partition(":")[0], "Compute")
        found["Look" if name in _LOOKING else own].append(name)
    return found


class _Commands(Mapping[str, click.Command]):
    """The commands by name. A command's module is imported at the first access."""

    def __getitem__(self, name: str) -> click.Command:
        module, attribute = COMMANDS[name][0].split(":")
        return cast(click.Command, getattr(import_module(f"oocgemm.cli.{module}"), attribute))

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _CommandLine(click.Group):
    """The group of all commands. Its help imports none of them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, names in sections().items():
            with formatter.section(section):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names])


@click.group(
    cls=_CommandLine,
    commands=_Commands(),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="oocgemm")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error, as OOCGEMM_DEBUG=1 does.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Multiply matrices larger than memory: C = alpha op(A) op(B) + beta C.

    A, B and C are zarr arrays or .npy files. A and B may also be HDF5 datasets, such as file.h5::/name, or
    PLINK .bed files. op(X) is X, its transpose or its conjugate transpose.

    Example: oocgemm run A.zarr B.zarr C.zarr --transpose-a
    """
    context.with_resource(warnings_as_notes())


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
            from oocgemm.cli.display import print_traceback

            print_traceback()
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
