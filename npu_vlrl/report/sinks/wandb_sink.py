"""Sink for Weights & Biases. WANDB_MODE=offline keeps everything in the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import wandb

from npu_vlrl.report.sinks.sinks import CaptionedImage, Opening

PROJECT = "npu_vlrl"


class WandbSink:
    """Sink for Weights & Biases, see `Sink`."""

    def __init__(self, opening: Opening) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=opening.folder.absolute().name,
            id=opening.id,
            resume="allow",
            dir=opening.folder,
            config=dict(opening.config),
            settings=wandb.Settings(console="off"),  # the terminal is the dashboard's
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # a step that the service has already, as after a resume, it leaves as it is
        self._run.log(dict(values), step=step)

    def images(self, step: int, images: Sequence[CaptionedImage]) -> None:
        shown = [wandb.Image(image.rgb, caption=image.caption) for image in images]
        self._run.log({"trajectory": shown}, step=step)

    def close(self, error: str | None) -> None:
        if error is not None:
            self._run.summary["error"] = error
        self._run.finish(exit_code=0 if error is None else 1)


def open_sink(opening: Opening) -> WandbSink:
    return WandbSink(opening)
