"""The command similarity: the most similar rows of a matrix."""

from typing import Any

import click

from oocgemm.cli.basics import taking
from oocgemm.cli.options import SELECTION
from oocgemm.cli.parameters import Place
from oocgemm.cli.products import run_product
from oocgemm.jobs.options import Progress
from oocgemm.jobs.result import Result
from oocgemm.jobs.similarity import METRICS, Neighbors, Pairs, check_saving
from oocgemm.jobs.similarity import similarity as find


@click.command()
@click.argument("e", type=Place())
@click.argument("out", type=Place())
@click.option("--topk", metavar="N", type=int, help="Find this many rows for each row, such as 50.")
@click.option(
    "--threshold",
    metavar="NUMBER",
    type=float,
    help="Find all pairs of rows whose similarity is at least this number, such as 0.8.",
)
@click.option(
    "--metric",
    type=click.Choice(METRICS),
    default=METRICS[0],
    show_default=True,
    help="cosine: inner products of rows divided by their norms. dot: inner products.",
)
@click.option("--include-self", is_flag=True, help="Also compare each row with itself.")
@taking(*SELECTION)
def similarity(e: str, out: str, as_json: bool, quiet: bool, include_self: bool, **options: Any) -> None:
    """Find the most similar rows of each row of E. E E^T is computed, but not stored.

    E is the path or URL of a zarr array, or the path of a .npy file or an HDF5 dataset. OUT is the path of a
    new zarr group. With --topk, it gets an array `indices` of row numbers and an array `scores` of
    similarities. Each has a row for each row of E, the most similar first. With --threshold, it gets the
    pairs as a sparse matrix in CSR format: `indptr`, `indices` and `scores`.

    Example: oocgemm similarity E.zarr neighbors.zarr --topk 50
    """
    check_saving(out, e, options["topk"])

    def compute(progress: Progress | None) -> Result:
        found: Neighbors | Pairs = find(e, exclude_self=not include_self, progress=progress, **options)
        found.save(out)
        return found.run

    run_product(compute, out, (e,), options, as_json=as_json, quiet=quiet)
