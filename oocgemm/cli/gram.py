"""The command gram: products of a matrix and its transpose."""

from typing import Any

import click

from oocgemm import stores
from oocgemm.cli.output import JSON, taking
from oocgemm.cli.parameters import QUIET, Place, verb_options
from oocgemm.cli.products import note_clipped, run_product
from oocgemm.jobs import api
from oocgemm.jobs.options import Progress
from oocgemm.jobs.result import Result

# Options of a run, which a plan does not need.
_RUN_ONLY = ("device", "timeline", "overwrite", "resume", "trust_operands", "quiet")


@click.command()
@click.argument("x", type=Place())
@click.argument("c", type=Place(), required=False)
@verb_options("gram")
@taking(JSON, QUIET)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show how C would be computed, as `oocgemm plan` does. Write nothing.",
)
def gram(
    x: str, c: str | None, as_json: bool, dry_run: bool, uplo: str | None, axis: int, **options: Any
) -> None:
    """Multiply X and its conjugate transpose, and store the product in C.

    This takes about half the work of `oocgemm run`. X and C are paths or URLs of zarr arrays, or paths of
    .npy files. X may also be an HDF5 dataset, such as file.h5::/name, or a PLINK .bed file.
    --alpha and --beta must be real.

    Example: oocgemm gram X.zarr K.zarr
    """
    if dry_run:
        from oocgemm.cli.display import print_plan
        from oocgemm.cli.output import print_json

        stores.load_without_cupy(*filter(None, (x, c)))
        kept = {name: value for name, value in options.items() if name not in _RUN_ONLY}
        planned = api.plan_gram(x, c, axis=axis, uplo=uplo, **kept)
        note_clipped(options["tile"], planned)
        if as_json:
            print_json(planned.to_dict())
        else:
            print_plan(planned)
        return
    if c is None:
        raise click.UsageError("C is missing: give a path for it, or pass --dry-run")
    quiet = options.pop("quiet")

    def compute(progress: Progress | None) -> Result:
        return api.gram(x, c, axis=axis, uplo=uplo, progress=progress, **options)

    run_product(compute, c, (x,), options, as_json=as_json, quiet=quiet)
