"""Sink for SwanLab. SWANLAB_MODE selects `online` (its default), or `offline` or `local`, both in the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import swanlab

from npu_vlrl.report.sinks.sinks import CaptionedImage, Opening

PROJECT = "npu_vlrl"


class SwanLabSink:
    """Sink for SwanLab, see `Sink`."""

    def __init__(self, opening: Opening) -> None:
        folder = opening.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            experiment_name=opening.folder.absolute().name,
            id=opening.id,
            resume="allow",
            log_dir=str(folder),
            config=dict(opening.config),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def images(self, step: int, images: Sequence[CaptionedImage]) -> None:
        shown = [swanlab.Image(image.rgb, caption=image.caption) for image in images]
        self._run.log({"trajectory": shown}, step=step)

    def close(self, error: str | None) -> None:
        self._run.finish("success" if error is None else "crashed", error)


def open_sink(opening: Opening) -> SwanLabSink:
    return SwanLabSink(opening)
