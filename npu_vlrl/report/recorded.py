"""Reads trajectories back that `run_folder.py` wrote."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as PillowImage

from npu_vlrl.report.record_schema import read_record
from npu_vlrl.report.verdicts import verdict_of
from npu_vlrl.types import (
    DataError,
    EpisodeStatus,
    Image,
    ImageInput,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

TRAINED = re.compile(r"(step\d+\.\d+|task\d+)/")
"""Pattern of the names of groups that were played for training; those of evaluations begin otherwise."""


class Recorded:
    """Records of a run folder. Raises DataError when it has none."""

    def __init__(self, run: Path, special: SpecialTokens, merge_size: int) -> None:
        self._file, self._image_folder = run / "trajectories.jsonl", run / "images"
        self._special, self._merged = special, merge_size**2
        self._images: dict[str, Image] = {}
        if not self._file.is_file():
            raise DataError(
                f"{run}: no trajectories.jsonl; give the folder of a run with run.record_every=1, e.g. runs/latest"
            )

    def steps(self) -> Iterator[tuple[int, list[list[Trajectory]]]]:
        """Groups of each step that were played for training, in the order in which they were played.

        Raises DataError for a line that is no record of a trajectory, or whose tokens are not those of this model.
        """
        for step, records in itertools.groupby(self._records(), key=lambda record: record["step"]):
            groups: dict[str, list[Trajectory]] = {}
            for record in records:
                groups.setdefault(record["group"], []).append(self._trajectory(record))
            self._images.clear()
            yield step, list(groups.values())

    def _records(self) -> Iterator[dict[str, Any]]:
        with self._file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = read_record(line)
                except ValueError as error:
                    raise self._unusable(f"line {number}", error) from error
                if TRAINED.match(record["group"]):
                    yield record

    def _trajectory(self, record: dict[str, Any]) -> Trajectory:
        try:
            turns: list[Turn] = []
            for turn in record["turns"]:
                turns.append(self._turn(turn, turns[-1] if turns else None))
            return Trajectory(
                Task(record["task"], (), record["answer"], record["data_source"]),
                record["group"],
                int(record["id"].rpartition("/")[2]),
                tuple(turns),
                EpisodeStatus(record["status"]),
                record["error"],
            )
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise self._unusable(str(record.get("id")), error) from error

    def _turn(self, record: dict[str, Any], before: Turn | None) -> Turn:
        kept = (*before.context, before.action) if before and record["continues"] else ()
        verdict = record["verdict"]
        return Turn(
            context=(*kept, *map(self._segment, record["new_context"])),
            action=self._segment(record["action"]),
            text=record["text"],
            verdict=verdict and verdict_of(verdict),
            tool_calls=tuple(ToolCall(call["name"], call["arguments"]) for call in record["tool_calls"]),
            tool_results=tuple(
                ToolResult(result["text"], tuple(map(self._image, result["images"])), result["error"])
                for result in record["tool_results"]
            ),
            feedback=record["feedback"],
            judge_error=record["judge_error"],
            state=record["state"],
            invalid=record.get("invalid", False),  # earlier releases did not write it
        )

    def _segment(self, record: dict[str, Any]) -> Segment:
        images = []
        for image in record.get("images", ()):
            time, height, width = image["grid"]
            tokens = time * height * width // self._merged
            images.append(ImageInput(self._image(image["hash"]), (time, height, width), tokens))
        stop = record.get("stop_reason")
        return Segment(
            SegmentKind(record["kind"]),
            tuple(record["token_ids"]),
            self._special,
            tuple(images),
            # engines say float32, and nine digits tell one from all others
            logprobs=tuple(np.array(record.get("logprobs", ()), np.float32).tolist()),
            weight_versions=tuple(record.get("weight_versions", ())),
            stop_reason=stop and StopReason(stop),
            reward=record.get("reward", 0.0),
        )

    def _image(self, name: str) -> Image:
        if name not in self._images:
            with PillowImage.open(self._image_folder / f"{name}.png") as file:
                image = Image(np.asarray(file.convert("RGB")).copy())
            if image.hash != name:
                raise ValueError(f"images/{name}.png is not the image that was recorded; restore it")
            self._images[name] = image
        return self._images[name]

    def _unusable(self, which: str, error: Exception) -> DataError:
        return DataError(
            f"{self._file}: {which} cannot be used ({type(error).__name__}: {error}); record the run again with the "
            "same model and release"
        )
