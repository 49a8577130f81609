"""Implementation of `npu-vlrl plot`: run folders in, figures out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from npu_vlrl.config import ConfigError
from npu_vlrl.report.plots.angles import draw_angles
from npu_vlrl.report.plots.curves import CURVES, draw_curve, draw_overview
from npu_vlrl.report.plots.runs import group_runs, read_run
from npu_vlrl.report.plots.style import save, styled


def plot(folders: Sequence[Path], out: Path) -> Iterator[str]:
    """Writes each figure for which the runs have data, as PNG and as SVG; returns a line about each.

    Raises ConfigError for a path that is no run folder, or a file of it that holds no records.
    """
    groups = group_runs([read_run(folder) for folder in folders])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    figures: list[tuple[str, Callable[[], Figure | None], str]] = [
        ("overview", lambda: draw_overview(CURVES, groups), "any metric"),
        *((c.name, partial(draw_curve, c, groups), " or ".join(s.metric for s in c.series[:2])) for c in CURVES),
        ("angles", lambda: draw_angles(groups), "an episode of the rotation task that ends with an angle"),
    ]
    with styled():
        for name, draw, needs in figures:
            figure = draw()
            if figure is None:
                yield f"{name}: not drawn, no run has {needs}"
            else:
                save(figure, out, name)
                yield f"{name}: {out / name}.png, .svg"
