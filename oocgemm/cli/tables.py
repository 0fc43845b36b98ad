"""Tables of the text output."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def table_of(*columns: str) -> Table:
    """Return a table whose first column contains names. Cells that are too wide are folded, never cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a table without breaking a word. If it is too wide for that, print a block of lines per row.

    Only the widest column is wrapped.
    """
    full = full_width(out, table)
    columns = [[column.header, *column.cells] for column in table.columns]
    widths = [max(len(line) for text in texts for line in str(text).split("\n")) for texts in columns]
    widest = max(range(len(widths)), key=widths.__getitem__)
    word = max(len(word) for text in columns[widest] for word in ["", *str(text).split()])
    if full - widths[widest] + word <= out.width:
        for number, column in enumerate(table.columns):
            column.no_wrap = full <= out.width or number != widest
        out.print(table)
        return
    names = [str(column.header).strip() for column in table.columns]
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        out.print(f"[bold]{' '.join(filter(None, (names[0], str(first))))}[/]")
        for name, cell in zip(names[1:], others, strict=True):
            if cell:
                out.print(f"  {name} {cell}")


def full_width(out: Console, table: Table) -> int:
    """Return the width of a table, in columns, if no cell is folded."""
    return Measurement.get(out, out.options.update(max_width=1000), table).maximum
