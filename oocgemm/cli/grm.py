"""The command grm: genetic relationship matrices."""

from typing import Any

import click

from oocgemm.cli.basics import taking
from oocgemm.cli.options import STATISTICS
from oocgemm.cli.output import print_json, print_note
from oocgemm.cli.parameters import Place
from oocgemm.cli.products import note_clipped, run_product
from oocgemm.jobs import api
from oocgemm.jobs.grm import CASTS, METHODS, Relationships, placeholder
from oocgemm.jobs.grm import grm as compute_grm
from oocgemm.jobs.options import Progress
from oocgemm.jobs.request import GRAM_PLAN_OPTIONS
from oocgemm.jobs.result import Result
from oocgemm.planning.problem import GRAMS


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place())
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=METHODS[0],
    show_default=True,
    help="gcta: the mean over variants of products of standardized genotypes. vanraden: the sum of products "
    "of centered genotypes, divided by the sum of 2 p (1 - p).",
)
@click.option(
    "--axis",
    type=click.IntRange(0, 1),
    default=0,
    show_default=True,
    help="0: the rows of X are individuals. 1: its columns are.",
)
@click.option(
    "--uplo",
    type=click.Choice(GRAMS),
    help="Triangle of the matrix to store.  [default: full; lower in a .grm.bin file; with --resume, that of "
    "the run]",
)
@click.option(
    "--missing",
    metavar="CODE",
    type=float,
    default=-1,
    show_default=True,
    help="Code of missing genotypes, such as -9 or nan.",
)
@click.option(
    "--cast",
    type=click.Choice(CASTS),
    help="dtype in which genotypes are multiplied.  [default: float32 for int8, and so for .bed files]",
)
@click.option(
    "--pairwise",
    is_flag=True,
    help="Divide by the number of variants that both individuals have, as GCTA does. It takes a second "
    "product. The numbers are stored beside OUT.",
)
@click.option(
    "--chromosomes",
    metavar="NAMES",
    help="Chromosomes of a .bed file whose variants are used, such as 1-22,X or all.  [default: autosomes, "
    "which are 1-22]",
)
@taking(*STATISTICS)
@click.option(
    "--dry-run", is_flag=True, help="Show how OUT would be computed. Read no genotypes, and write nothing."
)
def grm(
    x: str,
    out: str,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    uplo: str | None,
    method: str,
    missing: float,
    cast: str | None,
    pairwise: bool,
    chromosomes: str | None,
    **options: Any,
) -> None:
    """Compute the genetic relationship matrix (GRM) of the individuals in X, and store it.

    X has genotypes 0, 1 and 2: a PLINK 1 .bed file with its .bim and .fam files, or an array. Missing
    genotypes are replaced by means. Variants with one allele are left out, and those of a .bed file that are
    not on autosomes. OUT is the path of a zarr array, a
    .npy file, or a .grm.bin file of GCTA. In the last case, .grm.id and .grm.N.bin files are written too.

    Example: oocgemm grm data.bed data.grm.bin
    """
    if dry_run:
        from oocgemm.cli.display import print_plan

        kept = {name: value for name, value in options.items() if name in (*GRAM_PLAN_OPTIONS, "axis")}
        transform = placeholder(x, options["axis"], method, missing, cast, chromosomes)
        planned = api.plan_gram(x, out, uplo=uplo, transform=transform, **kept)
        note_clipped(options["tile"], planned)
        if as_json:
            print_json(planned.to_dict())
        else:
            print_plan(planned)
        if not quiet:
            print_note("X is also read for allele frequencies, unless they are cached")
        if not quiet and pairwise:
            print_note("X is also read for a second product of the same extents, which counts variants")
        return
    found: list[Relationships] = []

    def compute(progress: Progress | None) -> Result:
        given: dict[str, Any] = {
            "method": method,
            "uplo": uplo,
            "missing": missing,
            "cast": cast,
            "pairwise": pairwise,
            "chromosomes": chromosomes,
            "progress": progress,
        }
        found.append(compute_grm(x, out, **given, **options))
        return found[0]

    run_product(compute, out, (x,), options, as_json=as_json, quiet=quiet)
    counts = found[0]
    whole = counts.variants + counts.excluded + counts.elsewhere
    if not quiet and counts.elsewhere:
        print_note(f"{counts.elsewhere} of {whole} variants were left out: they are on other chromosomes")
    if not quiet and counts.excluded:
        print_note(
            f"{counts.excluded} of {whole} variants were left out: they have one allele, or no known genotype"
        )
