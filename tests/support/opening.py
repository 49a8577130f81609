"""A run as a sink meets it, in three calls of the program: begun, resumed after a failure, and done.

`python -m tests.support.opening SINK FOLDER FIRST_STEP [fail]` records two steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from npu_vlrl.report.sinks import CaptionedImage, Opening, Sinks

CONFIG = {"optim": {"lr": 1e-3, "betas": [0.9, 0.95]}, "critic": None}


def shaded(shade: int) -> CaptionedImage:
    return CaptionedImage(np.full((6, 8, 3), shade, np.uint8), f"'up', right answer 'up', reward {shade}, solved")


def record(sinks: Sinks, step: int) -> None:
    sinks.scalars(step, {"reward": step / 4, "kl": float("nan"), "eval/all/accuracy": 0.5})
    sinks._each(lambda sink: sink.images(step, [shaded(step), shaded(100 + step)]))


def main(name: str, folder: str, first: str, *fail: str) -> None:
    def opening(sink: str) -> Opening:
        return Opening.of(Path(folder), sink, CONFIG, int(first), first != "0")

    with Sinks([name], opening, print) as sinks:
        for step in range(int(first), int(first) + 2):
            record(sinks, step)
        if fail:
            raise RuntimeError("the machine burnt")


if __name__ == "__main__":
    main(*sys.argv[1:])
