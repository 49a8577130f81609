"""Common style of all figures: size, colours, and files that are identical from one drawing to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.figure import Figure

COLUMN = 3.35
"""Width of a column of a paper, in inches: 85 mm."""
HEIGHT = 2.3
PAGE = 2 * COLUMN + 0.3

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of Okabe and Ito, distinct also for people who cannot tell red from green; the strongest first; no yellow."""
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5), (2.5, 1), (8, 2))
"""Line styles, so that lines differ in a grey print as well; the first is solid."""
GREY = "#555555"

BELOW: Any = {"loc": "outside lower center"}
"""Place of a legend where it hides no data."""

STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 300,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.2,
    "svg.fonttype": "none",  # text stays text: searchable, small, and in the reader's hand
    "svg.hashsalt": "npu-vlrl",  # else the ids inside an SVG are new each time
}


@contextmanager
def styled() -> Iterator[None]:
    """Context in which figures look alike everywhere: no matplotlibrc has an effect."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def save(figure: Figure, folder: Path, name: str) -> None:
    """Writes `name`.png and `name`.svg, which hold neither date nor version of the program."""
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
