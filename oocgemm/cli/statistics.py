"""The commands that compute statistics of a matrix: corr, cov, similarity, grm, pca, and others.

A verb with a summary in `oocgemm.jobs.support.VERBS` has a command without a function of its own here.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import oocgemm
from oocgemm import stores
from oocgemm.cli.display import doing
from oocgemm.cli.parameters import QUIET, Place, verb_command, verb_options, views
from oocgemm.cli.process import (
    JSON,
    print_interrupted,
    print_json,
    print_note,
    silence_warnings,
    stopping,
    taking,
)
from oocgemm.cli.products import run_product
from oocgemm.engine.executor import Observer
from oocgemm.errors import InputError, OocGemmError
from oocgemm.jobs import support
from oocgemm.jobs.options import SELECTION_OPTIONS
from oocgemm.jobs.pca_passes import state_path
from oocgemm.jobs.request import Destination
from oocgemm.jobs.stats import stats as summarize
from oocgemm.planning import Plan
from oocgemm.planning.units import format_time
from oocgemm.timeline import Span
from oocgemm.verbs import correlation
from oocgemm.verbs.pca import PCAPlan
from oocgemm.verbs.pca import pca as find_components
from oocgemm.verbs.relationship import grm as relate
from oocgemm.verbs.similarity import check_saving
from oocgemm.verbs.similarity import similarity as find_similar

# Number of singular values that are shown.
SHOWN = 5


def __getattr__(verb: str) -> click.Command:
    """Make the command of a verb that saves its result: ``oocgemm VERB X OUT``, with the verb's options."""
    if not support.VERBS.get(verb, support.Verb()).command:
        raise AttributeError(f"module {__name__!r} has no attribute {verb!r}")

    def run(x: str, out: str, **options: Any) -> None:
        if not options["dry_run"]:
            Destination.parse(out).check_place(lambda: 0)
        run_product(partial(getattr(oocgemm, verb), x), out, _given(x, options), **options)

    name, summary = verb.replace("_", "-"), support.VERBS[verb].command
    return verb_command(verb, "x", "out", name=name, help=summary)(run)


def _given(x: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of the operands: X, and Y if there is one."""
    return tuple(filter(None, (x, options.get("y"))))


@verb_command("corr", "x", "out")
def corr(x: str, out: str, topk: int | None, threshold: float | None, **options: Any) -> None:
    """Compute Pearson's correlation coefficients of the rows of X, or of its rows with those of Y.

    All coefficients are stored in OUT, the path of a zarr array or a .npy file. With --topk or --threshold,
    the other coefficients are not stored, and OUT is a new zarr group as for `oocgemm similarity`.

    Example: oocgemm corr X.zarr pairs.zarr --threshold 0.5
    """
    if topk is None and threshold is None:
        run_product(partial(correlation.corr, x, out), out, _given(x, options), **options)
        return
    dropped = options["constant"] == "drop"  # the number of rows that are left is not known then
    if not options["dry_run"]:
        check_saving(out, x, None if dropped else topk, options["axis"])
    # With --topk or --threshold, most other options are refused if they are given.
    known = SELECTION_OPTIONS | {"y", "axis", "constant", "pairwise", "as_json", "quiet", "dry_run"}
    options = {name: value for name, value in options.items() if value or name in known}
    run_product(
        partial(correlation.corr, x, topk=topk, threshold=threshold), out, _given(x, options), **options
    )


@verb_command("cov", "x", "out")
def cov(x: str, out: str, **options: Any) -> None:
    """Compute covariances of the rows of X, and store them.

    OUT is the path of a zarr array or of a .npy file.

    Example: oocgemm cov X.zarr C.zarr
    """
    run_product(partial(correlation.cov, x, out), out, _given(x, options), **options)


@verb_command("similarity", "e", "out")
def similarity(e: str, out: str, **options: Any) -> None:
    """Find the most similar rows of each row of E. E E^T is computed, but not stored.

    E is the path or URL of a zarr array, or the path of a .npy file or an HDF5 dataset. OUT is the path of a
    new zarr group. With --topk, it gets an array `indices` of row numbers and an array `scores` of
    similarities. Each has a row for each row of E, the most similar first. With --threshold, it gets the
    pairs as a sparse matrix in CSR format: `indptr`, `indices` and `scores`.

    Example: oocgemm similarity E.zarr neighbors.zarr --topk 50
    """
    if not options["dry_run"]:
        check_saving(out, e, options["topk"])
    run_product(partial(find_similar, e), out, _given(e, options), **options)


@verb_command("neighbors", "x", "out")
def neighbors(x: str, out: str, **options: Any) -> None:
    """Find the nearest rows of X, or of Y, to each row of X.

    OUT is the path of a new zarr group. With --topk, it gets the arrays `indices`, of row numbers, and
    `distances`, with a row for each row of X, the nearest first. With --radius, it gets a sparse matrix in
    CSR format: `indptr`, `indices` and `distances`.

    Example: oocgemm neighbors X.zarr nearest.zarr --topk 10
    """
    if not options["dry_run"]:
        check_saving(out, x, options["topk"])
    run_product(partial(oocgemm.neighbors, x), out, _given(x, options), **options)


@verb_command("distances", "x", "out")
def distances(x: str, out: str, **options: Any) -> None:
    """Compute the distance of each row of X to each row of X, or of Y.

    OUT is the path of a zarr array or of a .npy file.

    Example: oocgemm distances X.zarr D.zarr --y Y.zarr
    """
    run_product(partial(oocgemm.distances, x, out), out, _given(x, options), **options)


@verb_command("ld", "x", "out")
@click.option("--scores", type=Place(), metavar="FILE", help="Also save LD scores at FILE, a new .npy file.")
def ld(x: str, out: str, scores: str | None, **options: Any) -> None:
    """Compute the correlations of pairs of variants that are near one another, and store them.

    X has genotypes 0, 1 and 2 of individuals (rows) at variants (columns). OUT is the path of a new zarr
    group. It gets a sparse matrix in the format of AnnData (csr_matrix) with the correlation r of each pair
    whose r^2 is at least --min-r2, above the diagonal.

    Example: oocgemm ld data.bed ld.zarr --window 1000 --unit kb --min-r2 0.2
    """
    if not options["dry_run"]:
        check_saving(out, x, None)
        if scores is not None:
            Destination.parse(scores).check_place(lambda: 0)
    if scores is not None and options["pairwise"]:
        raise click.UsageError(
            "--pairwise leaves missing genotypes out, and --scores replaces them by means: drop one of them"
        )

    def run(**given: Any) -> Any:
        found: Any = oocgemm.ld(x, out=out, **given)
        return found if given.get("dry_run") else found.run

    run_product(run, out, (x,), **options)
    if scores is not None and not options["dry_run"]:
        own = ("min_r2", "pairwise", "timeline")
        others = {name: value for name, value in options.items() if name not in own}
        others |= {"as_json": False, "quiet": True}
        run_product(partial(oocgemm.ld_scores, x), scores, (x,), **others)


@verb_command("grm", "x", "out")
def grm(x: str, out: str, quiet: bool, dry_run: bool, **options: Any) -> None:
    """Compute the genetic relationship matrix (GRM) of the individuals in X, and store it.

    X has genotypes 0, 1 and 2: a PLINK 1 .bed file with its .bim and .fam files, or an array. Missing
    genotypes are replaced by means. Variants with one allele, and variants of a .bed file that are not on
    autosomes, are left out. OUT is the path of a zarr array, a .npy file, or a .grm.bin file of GCTA. In the
    last case, .grm.id and .grm.N.bin files are written too.

    Example: oocgemm grm data.bed data.grm.bin
    """
    counts = run_product(partial(relate, x, out), out, (x,), quiet=quiet, dry_run=dry_run, **options)
    if quiet:
        return
    if dry_run:
        print_note("X is also read for allele frequencies, unless they are cached")
        if options["pairwise"]:
            print_note("X is also read for a second product of the same extents, which counts variants")
        return
    whole = counts.variants + counts.excluded + counts.elsewhere
    if counts.elsewhere:
        print_note(f"{counts.elsewhere} of {whole} variants were left out: they are on other chromosomes")
    if counts.excluded:
        print_note(
            f"{counts.excluded} of {whole} variants were left out: they have one allele, or no known genotype"
        )


@verb_command("king", "x", "out")
def king(x: str, out: str, **options: Any) -> None:
    """Compute KING's robust kinship of the individuals in X, as plink2 --make-king does.

    X has genotypes 0, 1 and 2: a PLINK 1 .bed file with its .bim and .fam files, or an array. OUT is the path
    of a zarr array or a .npy file. With --threshold, only pairs of at least this kinship are stored, and OUT
    is a new zarr group as for `oocgemm similarity`.

    Example: oocgemm king data.bed related.zarr --threshold 0.0884
    """
    _relate(oocgemm.king, x, out, **options)


@verb_command("ibs", "x", "out")
def ibs(x: str, out: str, **options: Any) -> None:
    """Compute the share of alleles that the individuals in X share (IBS), or counts of variants.

    X and OUT are as for `oocgemm king`.

    Example: oocgemm ibs data.bed similarities.zarr
    """
    _relate(oocgemm.ibs, x, out, **options)


def _relate(verb: Callable[..., Any], x: str, out: str, threshold: float | None, **options: Any) -> None:
    """Run a verb that stores a matrix or, with a threshold, pairs."""
    if threshold is None:
        run_product(partial(verb, x, out), out, (x,), **options)
        return
    if not options["dry_run"]:
        check_saving(out, x, None, options["axis"])
    # Most other options are refused if they are given.
    known = SELECTION_OPTIONS | {"axis", "missing", "chromosomes", "measure", "as_json", "quiet", "dry_run"}
    options = {name: value for name, value in options.items() if value or name in known}
    run_product(partial(verb, x, threshold=threshold), out, (x,), **options)


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place(), required=False)
@click.option(
    "--components", metavar="N", type=int, required=True, help="Number of components to find, such as 50."
)
@verb_options("pca")
@taking(views("x"), JSON, QUIET)
def pca(
    x: str,
    out: str | None,
    as_json: bool,
    dry_run: bool,
    components: int,
    **options: Any,
) -> None:
    """Find the principal components of X, by one read of X where that is faster.

    X has samples as rows and features as columns, and may be larger than memory. It is the path or URL of a
    zarr array, or the path of a .npy file or an HDF5 dataset. OUT is the path of a new zarr group, with the
    arrays components, singular_values, explained_variance, mean, scale, residuals and errors, and with
    --scores also scores.

    Example: oocgemm pca X.zarr components.zarr --components 50
    """
    stores.load_without_cupy(*filter(None, (x, out)))
    quiet = options.pop("quiet")
    if dry_run:
        _print_plan(find_components(x, components, dry_run=True, **options), as_json=as_json)
        return
    if out is None:
        raise click.UsageError("OUT is missing: give a path for it, or pass --dry-run")
    if quiet:
        silence_warnings()
    started = perf_counter()
    hint = f"To continue, add --resume ({state_path(out)} has the state)."
    try:
        with stopping(lambda: print_interrupted(hint)), doing(not (quiet or as_json)) as say:
            progress = counting(options["iterations"] + options["scores"], say)
            found = find_components(x, components, out, progress=progress, **options)
    except (OocGemmError, MemoryError, KeyboardInterrupt) as error:
        if state_path(out).exists() and not isinstance(error, InputError):
            error.add_note(hint)
        raise
    if as_json:
        arrays = ("singular_values", "explained_variance", "residuals", "errors")
        lists = {name: getattr(found, name).tolist() for name in arrays}
        print_json({"out": out, "passes": found.passes} | lists | {"converged": found.converged})
    elif not quiet:
        again = ", and again to check each product" if options["verify"] else ""
        click.echo(f"X was read {found.passes} times{again}, in {format_time(perf_counter() - started)}")
        click.echo(f"singular values: {_listed(found.singular_values, 6)}")
        click.echo(f"residuals:       {_listed(found.residuals, 2)}")
        click.echo(f"\nComponents: {out}")


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place())
@click.option(
    "--axis", type=click.IntRange(0, 1), default=0, show_default=True,
    help="0: one number for each column of X. 1: for each row.",
)  # fmt: skip
@click.option(
    "--missing", type=float, metavar="CODE",
    help="Code of missing elements, such as -1 or nan, which are left out.  [default: what X declares]",
)  # fmt: skip
@click.option("--log1p", is_flag=True, help="Compute statistics of log(1 + x).")
@click.option("--no-decode", is_flag=True, help="Take the numbers of X as they are stored.")
@click.option("--memory", metavar="SIZE", help="Upper bound on memory, such as 4GiB.  [default: 50% of RAM]")
@taking(JSON, QUIET)
def stats(
    x: str,
    out: str,
    axis: int,
    missing: float | None,
    log1p: bool,
    no_decode: bool,
    memory: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compute means, variances and extremes of the columns or rows of X, by one read of X.

    OUT is the path of a new .npz file with the arrays count, missing, mean, variance, min and max. Elements
    that X declares as missing are left out.

    Example: oocgemm stats X.zarr stats.npz --axis 1
    """
    stores.load_without_cupy(x)
    if not out.endswith(".npz"):
        raise InputError(f"OUT at {out}: statistics are stored in a .npz file: give {out}.npz")
    if os.path.lexists(out):
        raise InputError(f"something exists at {out}: give another path, or remove it")
    if quiet:
        silence_warnings()
    found = summarize(x, axis, missing=missing, log1p=log1p, decode=not no_decode, host_memory=memory)
    arrays = {field.name: getattr(found, field.name) for field in fields(found)}
    with open(out, "xb") as file:
        np.savez(file, **arrays)
    facts = {"out": out, "extent": len(found.count), "missing": int(found.missing.sum())}
    if as_json:
        print_json(facts)
    elif not quiet:
        lines = ("columns", "rows")[axis]
        click.echo(f"{facts['extent']} {lines}, {facts['missing']} missing elements")
        for name in ("mean", "variance", "min", "max"):
            click.echo(f"{name + ':':10}{_listed(arrays[name], 6)}")
        click.echo(f"\nStatistics: {out}")


def _listed(numbers: NDArray[np.float64], digits: int) -> str:
    more = ", ..." if len(numbers) > SHOWN else ""
    return ", ".join(f"{number:.{digits}g}" for number in numbers[:SHOWN]) + more


def counting(most: int, say: Callable[[str], None]) -> Callable[[Plan], Observer]:
    """Return a progress callback that says the number of the pass over X, and how much of it is done."""
    number = 0

    def begin(planned: Plan) -> Observer:
        nonlocal number
        number += 1
        pass_name = f"pass {number} of at most {most} over X"
        say(pass_name)
        done = 0

        def observe(span: Span) -> None:
            nonlocal done
            done += span.flops
            say(f"{pass_name}, {100 * done // max(1, planned.flops)}%")

        return observe

    return begin


def _print_plan(planned: PCAPlan, *, as_json: bool) -> None:
    if as_json:
        read = {"passes": planned.passes, "statistics": planned.statistics, "checks": planned.checks}
        print_json(read | {"bytes_read": planned.bytes_read, "pass": planned.pass_plan.to_dict()})
        return
    from oocgemm.cli.display import print_plan

    click.echo(f"{planned.summary}. {planned.what}:\n")
    print_plan(planned.pass_plan)
