"""The command grm: genetic relationship matrices."""

from typing import Any

import click

from oocgemm.cli.output import JSON, print_json, print_note, taking
from oocgemm.cli.parameters import QUIET, Place, verb_options
from oocgemm.cli.products import note_clipped, run_product
from oocgemm.jobs import api
from oocgemm.jobs.grm import Relationships, placeholder
from oocgemm.jobs.grm import grm as compute_grm
from oocgemm.jobs.options import GramPlanOptions, Progress
from oocgemm.jobs.result import Result


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place())
@verb_options("grm")
@taking(JSON, QUIET)
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

        kept = {
            name: value
            for name, value in options.items()
            if name in (*GramPlanOptions.__annotations__, "axis")
        }
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
