"""Command `npu-vlrl plot`."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_vlrl.commands.options import Commands
from npu_vlrl.config import ConfigError


def add(commands: Commands) -> None:
    plot = commands.add_parser("plot", help="draw the curves of a run, or of several")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="run folder; those that differ in the seed form one line")
    plot.add_argument("--out", metavar="DIR", help="folder for the figures; RUN/plots for a single run")
    plot.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> None:
    from npu_vlrl.report.console import printable
    from npu_vlrl.report.plots.draw import plot

    if options.out is None and len(options.runs) > 1:
        raise ConfigError("--out: name a folder for the figures of several runs, e.g. --out plots")
    runs = [Path(run) for run in options.runs]
    for line in plot(runs, Path(options.out) if options.out is not None else runs[0] / "plots"):
        print(printable(line), flush=True)
