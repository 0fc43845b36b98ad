"""The options of each verb, and how they are looked up.

A verb's options are a class that inherits the groups it takes (`oocgemm.jobs.option_groups`), and is named
for the verb. From them come

- the keyword arguments of the library's functions: their static types, the check of unknown names
  (`check_names`), and their documentation (`documented`),
- the options of the command line (`oocgemm.cli.parameters`),
- what a service may ask for (`options_of`).
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from types import UnionType
from typing import Annotated, Any, TypedDict, TypeVar, Union, get_args, get_origin

from numpy.typing import NDArray

from oocgemm.errors import InputError
from oocgemm.jobs import support
from oocgemm.jobs.option_groups import (
    BIT_ORDERS,
    CONSTANT,
    DISTANCES,
    GRM_CASTS,
    GRM_METHODS,
    IBS_MEASURES,
    METHODS,
    METRICS,
    PCA_METHODS,
    CorrelationOptions,
    DenseOptions,
    GramOptions,
    MissingOptions,
    Operand,
    Option,
    Options,
    PairOptions,
    PathLike,
    PcaOptions,
    PlanOptions,
    SimilarityOptions,
    StepOptions,
    TransformOptions,
    TransposeOptions,
    WritableArray,
)
from oocgemm.planning.cover import GRAMS
from oocgemm.stores.genetics import Chromosomes

F = TypeVar("F", bound=Callable[..., Any])

# A class that is named for a verb has all options of this verb
# except `dry_run`. The function of a verb takes its own options as parameters, and shared options as
# `**options`. The classes give the types for calls with and without `dry_run`.


class _DryRun(TypedDict, total=False):
    dry_run: Annotated[
        bool,
        Option(
            "Plan only: show how the result would be computed. Nothing is computed or written.",
            "The result is a `Plan`, or several for products in sequence. No GPU is used; the cuda backend "
            "requires {device_memory}.",
            False,
            service=False,
        ),
    ]


GemmArguments = Options


class _Axis(TypedDict, total=False):
    axis: Annotated[
        int,
        Option(
            "Axis of X that survives. 0: the result is about the rows of X, as X X^T. 1: about its columns, "
            "as X^T X.",
            default=0,
            least=0,
            most=1,
        ),
    ]


class _Uplo(TypedDict, total=False):
    uplo: Annotated[
        str | None,
        Option(
            "Triangle of the result to store, with the diagonal: lower or upper. full stores both, which are "
            "exact mirror images.",
            "Elements outside of a triangle are 0 in an array that the run creates, and stay as they are in "
            "an existing one. `Result.uplo` and an attribute of a zarr array record the triangle.",
            shown="full; lower in a .grm.bin file; with {resume}, that of the run",
            choices=GRAMS,
        ),
    ]


class GramArguments(_Uplo, _Axis, GramOptions, total=False):
    """All options of `oocgemm.gram`."""


class _Second(TypedDict, total=False):
    y: Annotated[
        Operand | None,
        Option(
            "Compare with the rows of this operand, such as Y.zarr, in place of those of the first one.",
            "It has as many columns. Where `axis` is 1, columns are compared with columns. A transform "
            "applies to both operands.",
            metavar="PATH",
            service=False,
        ),
    ]


class _Similar(TypedDict, total=False):
    topk: Annotated[
        int | None,
        Option(
            "Find this many rows for each row, such as 50.",
            "Rows of equal scores are in ascending order of their numbers. Rounding, "
            "which depends on tiles, may make the scores of equally similar rows differ. NaN ranks last.",
            metavar="N",
        ),
    ]
    threshold: Annotated[
        float | None,
        Option(
            "Find all pairs of rows whose similarity is at least this number, such as 0.8.",
            "Cosines near this number are computed again in float64, and compared exactly. For the metric "
            "dot, the number is rounded to the dtype of the scores. NaN is left out.",
            metavar="NUMBER",
        ),
    ]


class _Compared(TypedDict, total=False):
    metric: Annotated[
        str,
        Option(
            "cosine: inner products of rows divided by their norms, at least -1 and at most 1; cosines "
            "with a zero row are 0. dot: inner products.",
            default=METRICS[0],
            choices=METRICS,
        ),
    ]
    exclude_self: Annotated[
        bool,
        Option(
            "Leave out the similarity of a row to itself.",
            "With {y}, no row is left out.",
            True,
            flags=(("--include-self", "Also compare each row with itself."),),
        ),
    ]


class ComparisonOptions(_Second, _Compared, SimilarityOptions, total=False):
    """Options of `oocgemm.similarity` except `topk` and `threshold`."""


class SimilarityArguments(_Similar, ComparisonOptions, total=False):
    """All options of `oocgemm.similarity`."""


class _Metric(TypedDict, total=False):
    metric: Annotated[
        str,
        Option(
            "The distance of two rows. euclidean: the length of x - y. sqeuclidean: its square. cosine: 1 "
            "minus the cosine of their angle; 1 for a zero row. jaccard, of bool or packed bits: the number "
            "of columns where they differ, divided by the number where one of them is true; 0 for two zero "
            "rows. hamming, of bool, packed bits, or at most 16 codes in int8 or uint8: the share of columns "
            "where they differ.",
            default=DISTANCES[0],
            choices=DISTANCES,
        ),
    ]
    bits: Annotated[
        int | None,
        Option(
            "X and Y have packed bits, this many per row, such as 1024. Their dtype is uint8.",
            "They are packed as by ``numpy.packbits(x, axis=1)``. For the metrics jaccard and hamming.",
            shown="elements are not packed",
            metavar="N",
        ),
    ]
    bitorder: Annotated[
        str,
        Option(
            "Order of the bits in a byte, as for NumPy: big has the first bit in the highest place.",
            default=BIT_ORDERS[0],
            choices=BIT_ORDERS,
        ),
    ]


class DistancesArguments(_Second, _Metric, CorrelationOptions, total=False):
    """All options of `oocgemm.distances`."""


class NeighborsArguments(_Second, _Metric, SimilarityOptions, total=False):
    """All options of `oocgemm.neighbors`."""

    topk: Annotated[
        int | None,
        Option("Find this many nearest rows for each row, such as 10.", metavar="N"),
    ]
    radius: Annotated[
        float | None,
        Option("Find all rows at a distance of at most this number, such as 0.5.", metavar="NUMBER"),
    ]
    exclude_self: Annotated[
        bool,
        Option(
            "Do not count a row as its own neighbor.",
            "With {y}, no row is left out.",
            True,
            flags=(("--include-self", "Also compare each row with itself."),),
        ),
    ]


class _Correlated(TypedDict, total=False):
    topk: Annotated[
        int | None,
        Option("Store only the N largest coefficients of each row.", "As `similarity` does.", metavar="N"),
    ]
    threshold: Annotated[
        float | None,
        Option("Store only coefficients of at least this magnitude, such as 0.5.", metavar="NUMBER"),
    ]


class _Coefficient(TypedDict, total=False):
    method: Annotated[
        str,
        Option(
            "pearson: correlations of elements. spearman: correlations of their ranks in each row.",
            "Equal elements have the mean of their ranks. The ranks are computed in a pass before, and kept "
            "in memory or, if that is bounded, in a temporary file.",
            METHODS[0],
            choices=METHODS,
            service=False,
        ),
    ]


class _Constant(TypedDict, total=False):
    constant: Annotated[
        str,
        Option(
            "Rows of equal elements, which have no coefficients. nan: store NaN in their place. drop: leave "
            "these rows out. raise: stop.",
            "With nan, as for NumPy, {topk} ranks them last and {threshold} leaves them out. With drop, the "
            "result is that of the other rows of X, and `Result.kept` has their numbers. In both "
            "cases, a `DataWarning` counts the rows.",
            CONSTANT[0],
            choices=CONSTANT,
        ),
    ]


class _Pairwise(TypedDict, total=False):
    pairwise: Annotated[
        bool,
        Option(
            "Leave out missing elements: a pair of rows is compared by the columns that both know, as pandas "
            "does.",
            "Missing are NaN, missing genotypes of a .bed file, and what the operand declares (`_FillValue`, "
            "`missing_value`). Means and variances are those of the columns that both know, in float64; "
            "those of genotypes are exact. A pair that has no result is NaN: it has less than two columns, "
            "or one of its rows has equal elements there.",
            False,
        ),
    ]


class CoefficientOptions(_Second, _Coefficient, _Constant, _Pairwise, CorrelationOptions, total=False):
    """Options of `oocgemm.corr` except `topk`, `threshold` and `axis`."""


class CorrArguments(_Axis, _Correlated, CoefficientOptions, total=False):
    """All options of `oocgemm.corr`."""


class CovArguments(_Second, _Axis, _Pairwise, CorrelationOptions, total=False):
    """All options of `oocgemm.cov`."""

    ddof: Annotated[
        int,
        Option("Divide sums of products by the number of elements of a row minus N.", default=1, metavar="N"),
    ]


class _Calls(TypedDict, total=False):
    missing: Annotated[
        float | None,
        Option(
            "Code of missing genotypes, such as -9 or nan.",
            "NaN counts as missing too. None: no genotype is missing.",
            -1,
            metavar="CODE",
        ),
    ]
    chromosomes: Annotated[
        Chromosomes | None,
        Option(
            "Chromosomes of a .bed file whose variants are used, such as 1-22,X or all.",
            "The .bim file names them. A number, such as 21, is a name too. For other operands, pass None or "
            '"all".',
            shown="autosomes, which are 1-22; all if the .bim file names none",
            metavar="NAMES",
        ),
    ]


class _Related(TypedDict, total=False):
    threshold: Annotated[
        float | None,
        Option(
            "Keep only pairs of different individuals whose result is at least this number.",
            "The sparse matrix is kept in memory, like that of `similarity`.",
            metavar="NUMBER",
        ),
    ]


class KinshipOptions(_Uplo, _Axis, _Calls, DenseOptions, total=False):
    """Options of `oocgemm.king` and `ibs` except `threshold` and `measure`."""


class KingArguments(_Related, KinshipOptions, total=False):
    """All options of `oocgemm.king`."""


class IbsArguments(_Related, KinshipOptions, total=False):
    """All options of `oocgemm.ibs`."""

    measure: Annotated[
        str,
        Option(
            "similarity: the share of alleles that two individuals share. ibs0, ibs1, ibs2: the number of "
            "variants at which they share 0, 1 or 2 alleles.",
            default=IBS_MEASURES[0],
            choices=IBS_MEASURES,
        ),
    ]


class GrmArguments(_Uplo, _Axis, _Calls, DenseOptions, total=False):
    """All options of `oocgemm.grm`."""

    method: Annotated[
        str,
        Option(
            "gcta: the mean over variants of products of standardized genotypes. vanraden: the sum of "
            "products of centered genotypes, divided by the sum of 2 p (1 - p).",
            "They are the algorithms 0 and 1 of GCTA's --make-grm-alg.",
            GRM_METHODS[0],
            choices=GRM_METHODS,
        ),
    ]
    cast: Annotated[
        str | None,
        Option(
            "dtype in which genotypes are multiplied.",
            "A GPU is fastest with float16 and bfloat16; the matrix is then float32.",
            shown="float32 for int8, and so for .bed files; else as for `Transform`",
            choices=GRM_CASTS,
        ),
    ]
    pairwise: Annotated[
        bool,
        Option(
            "Divide by the number of variants that both individuals have, as GCTA does. It takes a second "
            "product. The numbers are stored beside the result.",
            "With vanraden, also divide by the mean of 2 p (1 - p) over all variants. The second product is "
            "exact. The numbers are in x.grm.N.bin for x.grm.bin, in x.counts.zarr for x.zarr. A pair "
            "without a common variant is 0.",
            False,
        ),
    ]


class PcaArguments(TransformOptions, MissingOptions, PcaOptions, total=False):
    """All options of `oocgemm.pca`."""

    center: Annotated[
        bool,
        Option(
            "Subtract the mean of each column. False gives a truncated SVD of X.",
            default=True,
            flags=(("--no-center", "Do not subtract the mean of each column: find a truncated SVD of X."),),
        ),
    ]
    method: Annotated[
        str,
        Option(
            "exact: eigenvectors of a Gram matrix, X^T X or the smaller X X^T, which one read of X computes. "
            "randomized: a block method that reads X once per iteration. auto: the one that is predicted to "
            "be faster.",
            "The exact method needs five matrices of d x d (or n x n) in float64 in host memory. With auto, "
            "it is used only if they fit. With more columns than rows, it reads X twice. Before that, X is "
            "read once for the means of its columns, unless they are cached, as for files. Singular values "
            "that rounding errors of the Gram matrix may change by more than 1e-5 of the largest one are "
            "refined by further iterations.",
            PCA_METHODS[0],
            choices=PCA_METHODS,
        ),
    ]
    iterations: Annotated[
        int,
        Option(
            "Maximum number of times that X is read. More iterations give more accurate components.",
            "The more slowly singular values decay, the more iterations the randomized method needs. The "
            "read for a Gram matrix is an iteration too, of every {method}.",
            6,
            metavar="N",
        ),
    ]
    tol: Annotated[
        float,
        Option(
            "Stop when the residual of each component is below this share of the gap to its neighbours. 0: "
            "read X as often as {iterations} says.",
            "`PCA.errors` has these shares. The error of a singular value is about the square of its "
            "share. With 0, there is no warning, and the {method} auto is the randomized one. The exact "
            "method reaches any other tolerance by its first iteration, unless components must be refined.",
            0.01,
            metavar="X",
        ),
    ]
    oversampling: Annotated[
        int,
        Option(
            "Minimum number of further directions that are kept. With more, fewer iterations suffice.",
            default=10,
            metavar="N",
        ),
    ]
    seed: Annotated[
        int,
        Option(
            "Seed of the random start, of both methods.",
            "With the same seed, budgets and backend, results are equal in every bit.",
            0,
            metavar="N",
        ),
    ]
    scores: Annotated[
        bool,
        Option("Also store the scores, X projected on the components. X is read once more.", default=False),
    ]
    resume: Annotated[
        bool,
        Option(
            "Continue a run of the same command that was interrupted or killed.",
            "That run wrote to `out`. If there is nothing to continue, start a run.",
            False,
            service=False,
        ),
    ]


class SvdArguments(PcaOptions, total=False):
    """All options of `oocgemm.svd`."""

    u: Annotated[
        WritableArray | PathLike | bool | None,
        Option(
            "Also compute the vectors U, and store them at this path, such as U.zarr. X is read once more.",
            "If X has more columns than rows, it is V that is stored, as n x k. True: keep them in memory. "
            "Or an array, as for `gemm`.",
            metavar="PATH",
            service=False,
        ),
    ]


# Numbers for the rows of X, or the path of a .npy file with them.
Weights = NDArray[Any] | Sequence[float] | PathLike


class _Fitted(TypedDict, total=False):
    intercept: Annotated[
        bool,
        Option(
            "Add a constant to the model, which is found too.",
            default=False,
        ),
    ]
    weights: Annotated[
        Weights | None,
        Option(
            "Weights of the squares of residuals: a .npy file with a number of at least 0 for each row.",
            "Or an array.",
            metavar="FILE",
            service=False,
        ),
    ]
    refine: Annotated[
        bool,
        Option(
            "Read X again to correct the solution, until its error is a rounding error.",
            "Without, X is read once, and the error is about 1e-16 times the square of the condition number.",
            True,
            flags=(("--no-refine", "Read X only once: the error is then larger."),),
        ),
    ]


class LstsqArguments(_Fitted, PcaOptions, total=False):
    """All options of `oocgemm.lstsq`."""


class RidgeArguments(_Fitted, PcaOptions, total=False):
    """All options of `oocgemm.ridge`."""


class KernelMatmulArguments(PairOptions, total=False):
    """All options of `oocgemm.kernel_matmul`."""

    gamma: Annotated[
        float,
        Option("A positive number. 1 / (2 s^2) gives the kernel of the standard deviation s.", cli=False),
    ]


class ReduceArguments(StepOptions, TransposeOptions, PairOptions, total=False):
    """All options of `oocgemm.reduce`."""


class _Windows(TypedDict, total=False):
    window: Annotated[
        float | None,
        Option(
            "Largest distance of two variants that are compared, in {unit}, such as 1000.",
            "Variants on different chromosomes are never compared.",
            metavar="N",
        ),
    ]
    unit: Annotated[
        str,
        Option(
            "Unit of {window}. variants: numbers of variants. kb: thousands of base pairs. cm: centimorgans.",
            default="variants",
            choices=("variants", "kb", "cm"),
        ),
    ]
    positions: Annotated[
        Any,
        Option(
            "Position of each variant, an array or a .npy file: in base pairs for the {unit} kb, in "
            "centimorgans for cm.",
            "Positions must not decrease on a chromosome.",
            shown="those in the .bim file of a .bed file",
            metavar="FILE",
            service=False,
        ),
    ]
    chromosomes: Annotated[
        Any,
        Option(
            "The number or name of the chromosome of each variant, an array or a .npy file.",
            "The variants of a chromosome must follow one another.",
            shown="those in the .bim file of a .bed file; for other operands, one chromosome",
            metavar="FILE",
            service=False,
        ),
    ]
    axis: Annotated[
        int,
        Option("Axis of X with the variants. 0: its rows. 1: its columns.", default=1, least=0, most=1),
    ]
    constant: Annotated[
        str,
        Option(
            "Variants with equal genotypes only, which have no correlations. raise: stop. drop: leave them "
            "out, and do not count them in windows.",
            "A `DataWarning` counts the variants that are left out. Their scores are NaN.",
            "raise",
            choices=("raise", "drop"),
        ),
    ]


class LdScoresArguments(_Windows, SimilarityOptions, total=False):
    """All options of `oocgemm.ld_scores`."""

    adjusted: Annotated[
        bool,
        Option(
            "Subtract the expected square of the correlation of independent variants, as LDSC does.",
            "With n individuals, r^2 - (1 - r^2) / (n - 2) is summed instead of r^2.",
            False,
        ),
    ]


class LdArguments(_Windows, SimilarityOptions, total=False):
    """All options of `oocgemm.ld`."""

    pairwise: Annotated[
        bool,
        Option(
            "Compute r of two variants from the individuals that are known at both, as plink does. Leave out "
            "pairs whose r is not defined.",
            "Missing are NaN, missing genotypes of a .bed file, and what the operand declares. By default, "
            "missing genotypes of a .bed file are replaced by the means of their variants.",
            False,
        ),
    ]
    out: Annotated[
        PathLike | None,
        Option(
            "Path of a new zarr group, to which the pairs are also written, as `LD.save` does.",
            cli=False,
            service=False,
        ),
    ]
    min_r2: Annotated[
        float,
        Option(
            "Keep the pairs whose squared correlation is at least this number, from 0 to 1.",
            default=0.0,
            metavar="X",
        ),
    ]


# The options of each verb: the class that is named for it.
VERBS: Mapping[str, type] = {
    verb: globals()[verb.title().replace("_", "") + "Arguments"] for verb in support.VERBS
}
PLAN_OPTIONS, OPTIONS = (frozenset(each.__annotations__) for each in (PlanOptions, Options))
SELECTION_OPTIONS = frozenset(SimilarityOptions.__annotations__)


def _annotations(verb: str | type) -> dict[str, Any]:
    """Return the annotated types of all options of a verb, or of one of the classes above."""
    if isinstance(verb, type):
        return verb.__annotations__
    return VERBS[verb].__annotations__ | _DryRun.__annotations__


def options_of(verb: str | type) -> dict[str, Option]:
    """Return the options of a verb, or of one of the classes above, by name; options of `gemm` last."""
    found, last = _annotations(verb), [*Options.__annotations__, "dry_run"]
    names = sorted(found, key=lambda name: name in last and 1 + (name == "dry_run"))
    return {name: get_args(found[name])[1] for name in names}


def types_of(verb: str | type, name: str) -> frozenset[Any]:
    """Return the types of the values of an option, without None."""
    kind = get_args(_annotations(verb)[name])[0]
    alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return frozenset(alternatives) - {type(None)}


def check_choices(verb: str, **given: Any) -> None:
    """Raise `InputError` for a value that is neither the default nor a choice of an option of a verb."""
    options = options_of(verb)
    for name, value in given.items():
        choices = options[name].choices
        if value not in (options[name].default, *choices):
            raise InputError(f"{name} = {value!r}: choose one of {', '.join(choices)}")


def check_names(function: str, options: Iterable[str], known: type | Iterable[str]) -> None:
    """Raise `TypeError` for an unknown option, as Python does for an unknown parameter.

    `known` is a class of options, or their names. Raises `CombinationError` for an option that chooses an
    executor which cannot run the function.
    """
    names = known.__annotations__ if isinstance(known, type) else known
    for name in options:
        if name not in names:
            support.check_option(function, name)
            raise TypeError(
                f"{function}() got an unexpected option {name!r}: it takes {', '.join(sorted(names))}"
            )


def documented(verb: str, shared: type | None = None) -> Callable[[F], F]:
    """Return a decorator that replaces the line ``{options}`` of a docstring by the options of a verb.

    Options that are also in `shared` are only named, in one entry that refers to `gemm`.
    """

    def describe(function: F) -> F:
        if function.__doc__:  # python -OO removes it
            function.__doc__ = function.__doc__.replace("        {options}\n", _entries(verb, shared))
        return function

    return describe


def _entries(verb: str, shared: type | None) -> str:
    known, lines = () if shared is None else tuple(shared.__annotations__), list[str]()
    for name, option in options_of(verb).items():
        if name in known:
            continue
        shown = option.shown or ("" if option.default in (None, False, ()) else repr(option.default))
        first = option.help if option.help[1:2].isupper() else option.help[0].lower() + option.help[1:]
        choices = ", ".join(f'"{choice}"' for choice in option.choices)
        texts = (
            first,
            f"Choices: {choices}." if choices else "",
            option.more,
            f"Default: {shown}." if shown else "",
        )
        lines.append(f"{name}: {rendered(' '.join(filter(None, texts)), '`{}`'.format)}")
    if known:
        lines.append(f"options: those of `gemm` that are listed here: {', '.join(known)}.")
    return "".join(
        textwrap.fill(
            line, 110, initial_indent=" " * 8, subsequent_indent=" " * 12, break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
        for line in lines
    )  # fmt: skip


def rendered(text: str, name: Callable[[str], str]) -> str:
    """Return a text of an `Option`, in which `name` formats the names of other options."""
    parts = Formatter().parse(text)
    return "".join(plain + ("" if field is None else name(field)) for plain, field, _, _ in parts)
