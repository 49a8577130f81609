"""Sink for trackio: a database on this machine, which `trackio show` displays; TRACKIO_SPACE_ID sends it to a Space."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import trackio

from npu_vlrl.report.sinks.sinks import CaptionedImage, Opening

PROJECT = "npu_vlrl"


class TrackioSink:
    """Sink for trackio, see `Sink`."""

    def __init__(self, opening: Opening) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{opening.folder.absolute().name}-{opening.id[:8]}",  # what it knows a run by
            resume="allow",
            config=dict(opening.config),
            embed=False,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def images(self, step: int, images: Sequence[CaptionedImage]) -> None:
        shown = {f"trajectory/{k}": trackio.Image(p.rgb, caption=p.caption) for k, p in enumerate(images)}
        self._run.log(shown, step=step)

    def close(self, error: str | None) -> None:
        if error is not None:
            trackio.alert("the run failed", error, level=trackio.AlertLevel.ERROR)
        self._run.finish()


def open_sink(opening: Opening) -> TrackioSink:
    return TrackioSink(opening)
