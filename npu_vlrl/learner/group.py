"""Data-parallel learner: broadcasts rank 0's commands and samples, and compares checksums of the weights.

    rank 0               Learn(Step, samples) ->  steps     compares the sums of the weights
    every other rank                              steps  <- Done

Samples are sent over the channels, gradients by collectives. A rank in a collective would wait long for a failed one:
each therefore polls its channels meanwhile, and gives up when a rank is gone or reports a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from npu_vlrl.engines.local import LocalEngine
from npu_vlrl.engines.messages import WeightsChanged
from npu_vlrl.engines.serve import HandlerFactory, Handlers
from npu_vlrl.hardware import Platform
from npu_vlrl.learner.messages import (
    BeginLearning,
    Done,
    Forget,
    Learn,
    Load,
    Logprobs,
    SampleReader,
    SampleWriter,
    Save,
    Score,
    Step,
    Supervise,
    Work,
)
from npu_vlrl.learner.optimizer import master, sharded
from npu_vlrl.learner.state import load_learner, save_learner, trained_by
from npu_vlrl.learner.trainer import Learner, LearnerError
from npu_vlrl.network.world import LEARNER, PeerError, World
from npu_vlrl.sync.transfer import guarded
from npu_vlrl.types import Sample

T = TypeVar("T")


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes of a number."""


class LearnerGroup:
    """The `Learner` of rank 0 together with those of the other learning ranks, if there are any.

    All methods raise the errors of `Learner`; PeerError when a process is gone; and LearnerError with the name of a
    rank that failed, or that has other weights afterwards.
    """

    def __init__(self, new: Callable[[], Learner], world: World | None = None) -> None:
        """Makes a learner in every rank, whose KL reference is the current policy of rank 0.

        `new` makes the learner of this rank. The other learners of `world` run the handlers of `follow`.
        """
        self._world = world
        self._channels = [world.channel(rank) for rank in world.learners if rank != LEARNER] if world else []
        self._writer = SampleWriter()
        self._answers: dict[int, Done] = {}
        """The answer of each other rank to the last work."""
        self.own = self._together(BeginLearning(), new)
        self._compare("begin")

    @property
    def skipped(self) -> list[str]:
        """Ids of the samples whose update was skipped because a value was not finite."""
        return self.own.skipped

    @property
    def updates(self) -> int:
        """Number of optimiser steps so far."""
        return self.own.updates

    @property
    def noted(self) -> dict[str, np.ndarray]:
        """Log-probabilities and entropies of the samples of all ranks, see `Learner.noted`."""
        return self.own.noted

    @property
    def tokens_referenced(self) -> float:
        """Number of sample tokens that went through the layers of all ranks so far, each pass counted."""
        return self.own.meter.counts.tokens_referenced + sum(done.tokens_referenced for done in self._answers.values())

    @property
    def tokens_computed(self) -> float:
        """Number of these tokens when a prefix shared by samples of a micro-batch counts once."""
        return self.own.meter.counts.tokens_computed + sum(done.tokens_computed for done in self._answers.values())

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """See `Learner.score`."""
        return self._together(Score(), partial(self.own.score, samples), samples)

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> dict[str, np.ndarray]:
        """See `Learner.logprobs`."""
        work = partial(self.own.logprobs, samples, temperature)
        return self._together(Logprobs(temperature), work, samples)

    def step(self, samples: Sequence[Sample], version: int | None = None, note: bool = False) -> dict[str, float]:
        """See `Learner.step`."""
        work = partial(self.own.step, samples, version, note)
        metrics = self._together(Step(version, note), work, samples)
        self._compare("step")
        return metrics

    def supervise(self, samples: Sequence[Sample], lr: float) -> float:
        """See `Learner.supervise`."""
        loss = self._together(Supervise(lr), partial(self.own.supervise, samples, lr), samples)
        self._compare("supervise")
        return loss

    def forget_features(self) -> None:
        """See `Learner.forget_features`."""
        self._together(Forget(), self.own.forget_features)

    def save(self, folder: Path, step: int, platform: Platform, state: dict[str, Any], keep: int) -> Path:
        """Saves a checkpoint, see `save_learner`; only rank 0 writes, unless the policy is sharded."""
        work = partial(save_learner, folder, step, self.own, platform, state, keep)
        if self.own.is_divided:
            return self._together(Save(str(folder.absolute()), step, keep), work)
        if self._world is not None:
            self.forget_features()  # in the other ranks; `save_learner` does so in this one
        return work()

    def load(self, path: Path, platform: Platform) -> tuple[int, dict[str, Any]]:
        """Loads a checkpoint, see `load_learner`; every rank reads the same files."""
        state = self._together(Load(str(path.absolute())), partial(load_learner, path, self.own, platform))
        self._compare("load")
        return state

    def _together(self, asked: Work, work: Callable[[], T], samples: Sequence[Sample] = ()) -> T:
        """Does the work, while every other rank does the same on the command `asked`, and answers."""
        if self._world is None:
            return work()
        packed = self._writer.pack(samples)
        self._answers = {}
        for channel in self._channels:
            channel.send(Learn(asked, packed))
        result = guarded_work(work, self._world, self._look)
        for channel in self._channels:
            if channel.peer.rank not in self._answers:
                self._take(channel.peer.rank, self._world.timeout_s)
        return result

    def _look(self) -> None:
        """Raises errors of other ranks: first that one is gone, since others then fail because of it."""
        for channel in self._channels:
            channel.check_alive()
        for channel in self._channels:
            if channel.peer.rank not in self._answers and channel.waiting():
                self._take(channel.peer.rank)

    def _take(self, rank: int, timeout_s: float | None = None) -> None:
        assert self._world is not None
        self._answers[rank] = self._world.channel(rank).expect(Done, timeout_s, LearnerError)

    def _compare(self, what: str) -> None:
        """Raises LearnerError when a rank holds other weights than this one."""
        if self._world is None:
            return
        ours = sums_of_bits(self.own)
        for rank, answer in self._answers.items():
            for name, number, theirs in zip(ours, ours.values(), answer.sums, strict=True):
                if number != theirs:
                    raise LearnerError(
                        f"{self._world.channel(rank).peer} holds another {name} than rank 0 after {what!r}: they did "
                        "not take the same steps. Start all processes with the same release on the same kind of "
                        "device, and go on from the last checkpoint with run.if_exists=resume"
                    )


class _Follower:
    """A learner that executes the commands of rank 0."""

    def __init__(self, new: Callable[[], Learner], world: World, platform: Platform) -> None:
        self._new = new
        self._world = world
        self._platform = platform
        self._channel = world.channel(LEARNER)

    def learn(self, message: Learn) -> None:
        guarded_work(partial(self._do, message), self._world, self._look)
        counts = self._learner.meter.counts
        sums = list(sums_of_bits(self._learner).values())
        self._channel.send(Done(sums, counts.tokens_referenced, counts.tokens_computed))

    def _do(self, message: Learn) -> None:
        if isinstance(message.work, BeginLearning):
            self._learner = self._new()
            self._reader = SampleReader(self._learner.policy.special)
        samples = self._reader.unpack(message.samples)
        match message.work:
            case Score():
                self._learner.score(samples)
            case Logprobs(temperature):
                self._learner.logprobs(samples, temperature)
            case Step(version, note):
                self._learner.step(samples, version, note)
            case Supervise(lr):
                self._learner.supervise(samples, lr)
            case Forget():
                self._learner.forget_features()
            case Save(folder, step, keep):
                save_learner(Path(folder), step, self._learner, self._platform, {}, keep)
            case Load(path):
                load_learner(Path(path), self._learner, self._platform)

    def _look(self) -> None:
        if self._channel.waiting():
            self._channel.check_alive()
            raise PeerError(self._channel.peer, "gave up in the middle of an update")


def follow(new: Callable[[], Learner], platform: Platform) -> HandlerFactory:
    """Handlers of a process that learns, and may sample, see `engines.serve`; `new` makes its learner."""

    def duties(world: World, engine: LocalEngine) -> Handlers:
        def weights_changed(message: WeightsChanged) -> None:
            engine.weights_changed(message.version)

        return {Learn: _Follower(new, world, platform).learn, WeightsChanged: weights_changed}

    return duties


def guarded_work(work: Callable[[], T], world: World, look: Callable[[], None]) -> T:
    """Runs work with collectives over all ranks, see `guarded`.

    LearnerErrors and ValueErrors of the work are raised unchanged. Other errors, such as a collective that waited for
    `sync.timeout_s`, become a LearnerError.
    """
    results: list[T] = []
    refusals: list[Exception] = []

    def attempt() -> None:
        try:
            results.append(work())
        except (LearnerError, ValueError) as error:
            refusals.append(error)

    try:
        guarded(attempt, world, look, math.inf)
    except RuntimeError as error:
        if isinstance(error, (LearnerError, PeerError)):
            raise
        raise LearnerError(
            f"an update of several learners failed: {type(error).__name__}: {error}; the output of each process says "
            "more. Start the training again with run.if_exists=resume to go on from the last checkpoint"
        ) from error
    if refusals:
        raise refusals[0]
    return results[0]


def sums_of_bits(learner: Learner) -> dict[str, int]:
    """Checksum of each trained tensor of which this rank has all values, for a sharded policy in its full copy: the sum
    of its bits, read as integers. Equal weights have equal sums.
    """
    own = {name: p for name, (p, _) in trained_by(learner).items() if sharded(master(p)) is None}
    tensors = {name: p.detach() for name, p in (learner.whole.trainable() | own).items()}
    sums = [tensor.view(BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))
