"""The command similarity: the most similar rows of a matrix."""

from typing import Any

import click

from oocgemm.cli.output import JSON, taking
from oocgemm.cli.parameters import QUIET, Place, verb_options
from oocgemm.cli.products import run_product
from oocgemm.jobs.options import Progress
from oocgemm.jobs.result import Result
from oocgemm.jobs.similarity import Neighbors, Pairs, check_saving
from oocgemm.jobs.similarity import similarity as find


@click.command()
@click.argument("e", type=Place())
@click.argument("out", type=Place())
@verb_options("similarity")
@taking(JSON, QUIET)
def similarity(e: str, out: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Find the most similar rows of each row of E. E E^T is computed, but not stored.

    E is the path or URL of a zarr array, or the path of a .npy file or an HDF5 dataset. OUT is the path of a
    new zarr group. With --topk, it gets an array `indices` of row numbers and an array `scores` of
    similarities. Each has a row for each row of E, the most similar first. With --threshold, it gets the
    pairs as a sparse matrix in CSR format: `indptr`, `indices` and `scores`.

    Example: oocgemm similarity E.zarr neighbors.zarr --topk 50
    """
    check_saving(out, e, options["topk"])

    def compute(progress: Progress | None) -> Result:
        found: Neighbors | Pairs = find(e, progress=progress, **options)
        found.save(out)
        return found.run

    run_product(compute, out, (e,), options, as_json=as_json, quiet=quiet)
