"""`npu-vlrl plot`: files, messages, and files that do not change from one drawing to the next."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tests.support.program import program
from tests.support.recorded import run_folder

LINES = [{"step": k, "reward": k / 4, "entropy": None} for k in range(5)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run", LINES)


def curve(svg: Path) -> np.ndarray:
    """The longest open line of an SVG, as points [n, 2], up being positive."""
    texts = [element.get("d", "") for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}path")]
    paths = [re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", text) for text in texts if "z" not in text]
    return np.array(max(paths, key=len), float) * (1, -1)


def test_a_run_gives_figures_in_its_folder(run: Path) -> None:
    done = program("plot", run)
    assert done.code == 0 and done.err == ""
    said = done.out.splitlines()
    assert said[1] == f"reward: {run / 'plots' / 'reward'}.png, .svg"
    assert "entropy: not drawn, no run has entropy" in said
    assert "turns: not drawn, no run has turns or eval/all/turns" in said
    files = sorted(file.name for file in (run / "plots").iterdir())
    assert files == ["overview.png", "overview.svg", "reward.png", "reward.svg"]
    with PIL.Image.open(run / "plots" / "reward.png") as image:
        assert 950 <= image.width <= 1050  # a column of 85 mm at 300 dots an inch


def test_the_svg_holds_the_curve_and_its_words_as_text(run: Path) -> None:
    program("plot", run)
    svg = run / "plots" / "reward.svg"
    points = curve(svg)
    assert len(points) == len(LINES)
    moved = np.diff(points, axis=0)
    np.testing.assert_allclose(moved, np.broadcast_to(moved[0], moved.shape), rtol=1e-4)  # a straight line
    assert (moved > 0).all()  # upwards, and to the right
    words = [element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Reward", "mean reward", "step"} <= set(words)


def test_figures_are_the_same_each_time_whatever_the_user_prefers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = tmp_path / "a", tmp_path / "b"
    program("plot", run, "--out", outs[0])
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        program("plot", run, "--out", outs[1])
    for name in ("reward.png", "reward.svg", "overview.png", "overview.svg"):
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()
    assert b"20" + b"26-" not in (outs[0] / "reward.svg").read_bytes()  # no date


def test_several_runs_need_a_folder_for_their_figures(run: Path, tmp_path: Path) -> None:
    other = run_folder(tmp_path / "other", LINES, optim={"lr": 1e-3})
    assert "--out: name a folder" in program("plot", run, other).refused()
    assert program("plot", run, other, "--out", tmp_path / "figures").code == 0
    text = (tmp_path / "figures" / "reward.svg").read_text()
    assert "lr=1e-06" in text and "lr=0.001" in text


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    assert "is no run folder" in program("plot", tmp_path / "nothing").refused()
    (tmp_path / "file").touch()
    assert program("plot", run, "--out", tmp_path / "file").refused().startswith("--out: ")
