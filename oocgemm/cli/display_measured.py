"""Tables of the commands that measure: calibrations, benchmarks of kernels, tuning."""

from typing import Any

from rich.console import Console
from rich.table import Table

from oocgemm.cli.display import console
from oocgemm.cli.plain import PlainConsole, escape
from oocgemm.cli.tables import full_width, print_table, table_of
from oocgemm.kernels.tuning import Tuning
from oocgemm.machine.kernel_bench import AGAINST, BY_NCU, against
from oocgemm.planning import Calibration
from oocgemm.planning.cost.links import LINKS, calibrated_rates
from oocgemm.planning.units import format_size, format_time


def print_calibration(found: Calibration, path: str) -> None:
    """Print the measured rates of a machine, and where they are stored."""
    out = console()
    out.print(f"[bold]{escape(found.device)}[/] ({found.backend}), {found.samples['seconds']:.0f} s\n")
    measured: dict[str, dict[str, float]] = found.samples["kernels"]
    depths = sorted({int(depth) for rates in measured.values() for depth in rates})
    scale, unit = (
        (1e12, "TFLOP/s") if max(fit.peak for fit in found.kernels.values()) >= 1e12 else (1e9, "GFLOP/s")
    )
    kernels = table_of(f"{unit}, panels deep", *map(str, depths), "fitted peak", "halved at")
    for dtype, rates in measured.items():
        fit = found.kernels[dtype]
        shown = (f"{rates[str(d)] / scale:.3g}" if str(d) in rates else "" for d in depths)
        kernels.add_row(dtype, *shown, f"{fit.peak / scale:.3g}", f"{fit.half_depth:.3g}")
    out.print(kernels)
    out.print()
    moved: dict[str, float] = {}
    for link, by_size in found.samples["copies"].items():
        if isinstance(by_size, dict):
            moved |= {f"{link}, {format_size(int(size))}": rate for size, rate in by_size.items()}
        else:
            moved[link] = by_size
    for name, rate in calibrated_rates(found).items():
        moved[LINKS[name] + (", fitted" if name in found.samples["copies"] else "")] = rate
    links = table_of("link", "GB/s")
    for name, rate in moved.items():
        links.add_row(name, f"{rate / 1e9:.3g}")
    out.print(links)
    out.print(f"prefaulting memory {found.rates['arena_seconds_per_byte'] * 2**30:.3g} s per GiB")
    out.print(f"submitting an operation {format_time(found.rates['issue'])}")
    others = found.samples["cores_used_by_others"]
    if others >= 0.2:
        out.print(
            f"other programs used {others:.1f} cores, so the rates are too low: calibrate again when they "
            "have ended"
        )
    out.print(f"\nstorage: {escape(found.samples['path'])}", soft_wrap=True)
    out.print(f"stored in {escape(path)}", soft_wrap=True)


def print_bench(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print a table per dtype: the fastest variant of each kernel, compared with cuBLAS.

    `rows` are the rows of `result` to print.
    """
    out = console()
    out.print(f"[bold]{escape(result['device'])}[/], clock at most {result['max_clock'] or '-'} MHz")
    columns = "GFLOP/s", "of peak", "of cuBLAS", "flop/byte", "loads", "stores", "conflicts", "occupancy"
    variants: dict[str, set[tuple[int, ...]]] = {}
    for row in result["rows"]:
        variants.setdefault(row["kernel"], set()).add(tuple(row["params"].values()))
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        table = table_of(f"\n{dtype}", "kernel", *columns)
        for column in table.columns[:2]:
            column.no_wrap, column.justify = True, "left"
        last = None
        for row in (row for row in rows if row["dtype"] == dtype):
            shape = _product_of(row)
            variant = (
                " " + ",".join(map(str, row["params"].values())) if len(variants[row["kernel"]]) > 1 else ""
            )
            numbers = (
                row.get(x)
                for x in ("intensity", "load_sectors", "store_sectors", "bank_conflicts", "occupancy")
            )
            table.add_row(
                "" if shape == last else shape,
                row["kernel"] + variant,
                f"{row['flops'] / 1e9:.4g}",
                *("" if share is None else f"{share:.3f}" for share in (row["of_peak"], row["of_cublas"])),
                *("" if number is None else f"{number:.3g}" for number in numbers),
            )
            last = shape
        _print_unfolded(out, table)
    out.print(
        "\nflop/byte, loads and stores (sectors of 32 bytes) and bank conflicts are computed as if without "
        "caches; the time of small products is that of a launch"
    )
    if "not_counted" in result:
        out.print(f"\nno counters of the device: {escape(result['not_counted'])}", soft_wrap=True)
    counted = table_of("\ncounted", "product", "kernel", *AGAINST)
    for column in counted.columns[:3]:
        column.no_wrap, column.justify = True, "left"
    for row in (row for row in rows if "ncu" in row):
        counted.add_row(row["dtype"], _product_of(row), row["kernel"], *against(row))
    if counted.row_count:
        _print_unfolded(out, counted)
        out.print(f"\n{BY_NCU}")


def _print_unfolded(out: Console, table: Table) -> None:
    """Print a table in its full width, without folding cells. A narrow terminal wraps its lines."""
    PlainConsole(highlight=False, width=max(out.width, full_width(out, table))).print(table)


def _product_of(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["shape"])) + (" beta 1" if row["beta"] else "")


def print_tuning(tuning: Tuning, path: str) -> None:
    """Print a table of kernels and their rates, per dtype and class of shapes ("square", "update", "thin").

    Within a class, the fastest kernel comes first.
    """
    out = console()
    table = table_of("dtype", "class", "kernel", "TFLOP/s", "parameters")
    for dtype, classes in tuning.rungs.items():
        for name, found in classes.items():
            for rung, best in sorted(found.items(), key=lambda item: -item[1].rate):
                params = " ".join(f"{key}={value}" for key, value in best.params.items())
                table.add_row(dtype, name, rung, f"{best.rate / 1e12:.4g}", params)
    print_table(out, table)
    out.print(f"\nstored in {path}")
