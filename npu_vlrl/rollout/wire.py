"""Rounds as messages: JSON for what is small, raw bytes for ids, logprobs and pixels, so that nothing is rounded.

A round is {"requests": [[session, tokens, [picture, …], sampling], …], "pictures": [[hash, grid, tokens, size], …],
"dropped": [hash, …]} with the ids of all requests as the first blob. `size` is [height, width] of a picture whose
pixels come along, as a blob of their own, and null for one that the engine holds.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from npu_vlrl.rollout.rounds import EngineError, Outcome, Request
from npu_vlrl.sync.channel import Message
from npu_vlrl.types import Generation, Image, ImageInput, SamplingParams, StopReason

INTEGERS, FLOATS = np.dtype("<i8"), np.dtype("<f8")

KEPT_BYTES = 2**28
"""Pixels that an engine process keeps for later rounds."""


class PictureWriter:
    """Knows which pictures a reader holds, so that pixels travel once.

    What was used longest ago is dropped when all together exceed `kept_bytes`, but nothing that the message needs.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.kept_bytes = kept_bytes
        self._held: OrderedDict[str, int] = OrderedDict()
        """Bytes of each picture by hash, in the order of use."""

    def pack(self, images: Iterable[ImageInput]) -> tuple[dict[str, Any], list[bytes]]:
        """The `pictures` and `dropped` of a message, and the pixels that come along; the images are distinct."""
        pictures: list[Any] = []
        pixels: list[bytes] = []
        for image in images:
            rgb, name = image.image.rgb, image.image.hash
            is_new = name not in self._held
            if is_new:
                pixels.append(rgb.tobytes())
            self._held[name] = rgb.nbytes
            self._held.move_to_end(name)
            pictures.append([name, image.grid, image.n_tokens, rgb.shape[:2] if is_new else None])
        return {"pictures": pictures, "dropped": self._drop({name for name, *_ in pictures})}, pixels

    def _drop(self, needed: set[str]) -> list[str]:
        dropped = []
        size = sum(self._held.values())
        for name in [name for name in self._held if name not in needed]:
            if size <= self.kept_bytes:
                break
            size -= self._held.pop(name)
            dropped.append(name)
        return dropped


class PictureReader:
    """Keeps the pictures that came until it is told to drop them."""

    def __init__(self) -> None:
        self._held: dict[str, Image] = {}

    def unpack(self, content: Mapping[str, Any], pixels: Iterable[bytes]) -> list[ImageInput]:
        """What `PictureWriter.pack` was given. Raises ValueError when a picture is not the one that its hash names."""
        arriving = iter(pixels)
        for name in content["dropped"]:
            del self._held[name]
        images = []
        for name, grid, n_tokens, size in content["pictures"]:
            if size is not None:
                image = Image(np.frombuffer(next(arriving), np.uint8).reshape(*size, 3))
                if image.hash != name:
                    raise ValueError(f"picture {name[:12]} came with the pixels of {image.hash[:12]}")
                self._held[name] = image
            images.append(ImageInput(self._held[name], tuple(grid), n_tokens))
        return images


class RoundWriter:
    """The learner's side of one engine."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._pictures = PictureWriter(kept_bytes)

    def pack(self, requests: Sequence[Request]) -> tuple[dict[str, Any], list[bytes]]:
        """Content and blobs of a message that `RoundReader.unpack` reads back."""
        numbers: dict[ImageInput, int] = {}
        asked = []
        for request in requests:
            shown = [numbers.setdefault(image, len(numbers)) for image in request.images]
            asked.append([request.session, len(request.token_ids), shown, dataclasses.astuple(request.sampling)])
        pictures, pixels = self._pictures.pack(numbers)
        ids = as_bytes([token for request in requests for token in request.token_ids], INTEGERS)
        return {"requests": asked, **pictures}, [ids, *pixels]


class RoundReader:
    """The engine's side."""

    def __init__(self) -> None:
        self._pictures = PictureReader()

    def unpack(self, message: Message) -> list[Request]:
        """Raises ValueError when a picture is not the one that its hash names."""
        content = message.content
        ids = np.frombuffer(message.blobs[0], INTEGERS)
        images = self._pictures.unpack(content, message.blobs[1:])
        ends = accumulate(n_tokens for _, n_tokens, _, _ in content["requests"])
        return [
            Request(
                session,
                tuple(ids[end - n_tokens : end].tolist()),
                tuple(images[number] for number in shown),
                SamplingParams(*sampling),
            )
            for end, (session, n_tokens, shown, sampling) in zip(ends, content["requests"], strict=True)
        ]


def pack_outcomes(outcomes: Sequence[Outcome]) -> tuple[dict[str, Any], list[bytes]]:
    """Content and blobs of an answer that `unpack_outcomes` reads back."""
    answers: list[Any] = []
    done: list[Generation] = []
    for outcome in outcomes:
        if isinstance(outcome, Generation):
            answers.append({"tokens": len(outcome.token_ids), "stop": outcome.stop_reason.value})
            done.append(outcome)
        elif isinstance(outcome, ValueError):
            answers.append({"refused": str(outcome)})
        else:
            answers.append({"failed": f"{type(outcome).__name__}: {outcome}"})
    return {"answers": answers}, [
        as_bytes([token for one in done for token in one.token_ids], INTEGERS),
        as_bytes([logprob for one in done for logprob in one.logprobs], FLOATS),
        as_bytes([version for one in done for version in one.weight_versions], INTEGERS),
    ]


def unpack_outcomes(message: Message, engine: object) -> list[Outcome]:
    """The outcomes of a round. What was no fault of a request becomes an EngineError that names `engine`."""
    ids, logprobs, versions = (
        np.frombuffer(blob, dtype).tolist()
        for blob, dtype in zip(message.blobs, (INTEGERS, FLOATS, INTEGERS), strict=True)
    )
    outcomes: list[Outcome] = []
    start = 0
    for answer in message.content["answers"]:
        if "tokens" in answer:
            own = slice(start, start + answer["tokens"])
            start = own.stop
            values = (tuple(ids[own]), tuple(logprobs[own]), tuple(versions[own]))
            outcomes.append(Generation(*values, StopReason(answer["stop"])))
        elif "refused" in answer:
            outcomes.append(ValueError(answer["refused"]))
        else:
            outcomes.append(EngineError(f"{engine}: {answer['failed']}"))
    return outcomes


def as_bytes(values: Sequence[float], dtype: np.dtype) -> bytes:
    """Numbers as a blob."""
    return np.array(values, dtype).tobytes()
