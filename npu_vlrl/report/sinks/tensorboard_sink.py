"""Sink for TensorBoard: event files in the folder `tensorboard` of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from npu_vlrl.report.sinks.sinks import CaptionedImage, Opening


class TensorBoardSink:
    """Sink for TensorBoard, see `Sink`."""

    def __init__(self, opening: Opening) -> None:
        # a reader forgets what earlier files say of `first_step` and later ones
        purge = opening.first_step if opening.resumed else None
        self._writer = SummaryWriter(str(opening.folder / "tensorboard"), purge_step=purge)
        text = json.dumps(opening.config, indent=2, default=str).replace("\n", "\n    ")
        self._writer.add_text("config", f"    {text}", opening.first_step)
        self._step = opening.first_step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def images(self, step: int, images: Sequence[CaptionedImage]) -> None:
        for number, image in enumerate(images):
            self._writer.add_image(f"trajectory/{number}", image.rgb, step, dataformats="HWC")
        self._writer.add_text("trajectory/caption", f"    {images[0].caption}", step)
        self._writer.flush()

    def close(self, error: str | None) -> None:
        self._writer.add_text("state", "finished" if error is None else f"    {error}", self._step)
        self._writer.close()


def open_sink(opening: Opening) -> TensorBoardSink:
    return TensorBoardSink(opening)
