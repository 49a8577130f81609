"""Converts a record to the content of the page: messages instead of ids, and images where the model saw them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from npu_vlrl.report.record_schema import PER_TOKEN
from npu_vlrl.report.view.run_images import RunImages
from npu_vlrl.report.view.tokens import TokenTexts

BEGIN = "<|im_start|>"

KEPT = (
    "step",
    "id",
    "group",
    "task",
    "data_source",
    "answer",
    "status",
    "error",
    "solved",
    "solved_first_try",
    "label",
)
KEPT_OF_TURNS = ("state", "text", "parsed", "verdict", "tool_calls", "feedback", "judge_error")


class Content:
    """Describes records. Without `tokens` no text of a context is known; without `patch` no size that a model saw."""

    def __init__(self, images: RunImages, tokens: TokenTexts | None, patch: int | None) -> None:
        self._images = images
        self._tokens = tokens
        self._patch = patch
        self.control = tokens.control if tokens else frozenset[int]()
        """Ids of tokens that only a template writes."""
        self._image = tokens.id_of(tokens.chat.image) if tokens else None
        self._begin = tokens.id_of(BEGIN) if tokens else None

    def page(self, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Content of a page: `records`, and the distinct segments of their contexts, which they name by number: lists
        of blocks.

        A block is the text of one role, {"role", "pieces", "ids", "images"}: a piece is a token's text, or the number
        of the image in its place. `pieces` is None where there is no tokenizer.
        """
        segments: dict[str, int] = {}
        blocks: list[list[dict[str, Any]]] = []

        def number(segment: dict[str, Any]) -> int:
            key = json.dumps([segment["kind"], segment["token_ids"], segment.get("images")])
            if key not in segments:
                segments[key] = len(blocks)
                blocks.append(self._blocks(segment))
            return segments[key]

        shown = []
        for record in records:
            turns = record.get("turns", [])
            own = {key: record.get(key) for key in KEPT}
            own["turns"] = [
                self._turn(record, k, [number(s) for s in turns[k]["new_context"]]) for k in range(len(turns))
            ]
            shown.append(own)
        return {"records": shown, "segments": blocks}

    def _turn(self, record: dict[str, Any], k: int, context: list[int]) -> dict[str, Any]:
        turn = record["turns"][k]
        action = turn["action"]
        return {
            **{key: turn.get(key) for key in KEPT_OF_TURNS},
            "continues": turn.get("continues", True),
            "context": context,
            "advantage": _mean_advantage(record, k),
            "ids": action["token_ids"],
            "pieces": self._tokens and self._tokens.pieces(action["token_ids"]),
            "stop": action.get("stop_reason"),
            "reward": action.get("reward"),
            "values": {name: action[name] for name in PER_TOKEN if name in action},
            "tool_results": [
                {**result, "images": [self._described(name, None) for name in result.get("images", [])]}
                for result in turn.get("tool_results", [])
            ],
        }

    def _blocks(self, segment: dict[str, Any]) -> list[dict[str, Any]]:
        images = [self._described(image["hash"], image["grid"]) for image in segment.get("images", [])]
        ids = segment["token_ids"]
        if self._tokens is None:
            return [{"role": segment["kind"], "pieces": None, "ids": ids, "images": images}]
        pieces: list[str | int] = []
        kept: list[int] = []
        coming = 0
        left = 0
        for token, piece in zip(ids, self._tokens.pieces(ids), strict=True):
            if token != self._image:
                pieces.append(piece)
                kept.append(token)
            elif left:
                left -= 1
            elif coming < len(images):
                pieces.append(coming)
                kept.append(token)
                left = images[coming]["tokens"] - 1
                coming += 1
        return [self._block(pieces[a:b], kept[a:b], images) for a, b in _spans(kept, self._begin)]

    def _block(self, pieces: list[str | int], ids: list[int], images: list[dict[str, Any]]) -> dict[str, Any]:
        role = None
        if ids[0] == self._begin:
            words = [str(piece) for piece in pieces[1:]]
            role = "".join(words).partition("\n")[0]
        used = [piece for piece in pieces if isinstance(piece, int)]
        first = used[0] if used else 0
        pieces = [piece - first if isinstance(piece, int) else piece for piece in pieces]
        return {"role": role, "pieces": pieces, "ids": ids, "images": [images[i] for i in used]}

    def _described(self, name: str, grid: list[int] | None) -> dict[str, Any]:
        """Sizes of an image, [width, height]: `seen` by the model, and `stored` in the file, None where it is
        missing.
        """
        found: dict[str, Any] = {"hash": name, "stored": self._images.size(name)}
        if grid is not None:
            found |= {"grid": grid, "tokens": _tokens_of(grid)}
            if self._patch:
                found["seen"] = [grid[2] * self._patch, grid[1] * self._patch]
        return found


def _tokens_of(grid: list[int]) -> int:
    return grid[0] * grid[1] * grid[2] // 4  # all supported towers merge 2 x 2 patches


def _spans(ids: list[int], begin: int | None) -> list[tuple[int, int]]:
    """Spans (begin, end) of the messages."""
    starts = [place for place, token in enumerate(ids) if place == 0 or token == begin]
    return list(itertools.pairwise([*starts, len(ids)]))


def _mean_advantage(record: dict[str, Any], k: int) -> float | None:
    """Mean advantage of a turn's tokens; None for a turn that was not trained."""
    advantages = record.get("advantages") or {}
    values = advantages.get(record["id"]) or [None] * k + (advantages.get(f"{record['id']}/{k}") or [None])
    found: float | None = values[k] if k < len(values) else None
    return found
