"""The vocabulary of the whole system, in one file that imports nothing of the project.

A trajectory is an append-only list of typed `Segment`s. Every per-token array (loss mask, logprobs, weight versions)
is *derived* from the segments, never stored beside them, so arrays cannot drift apart.

Suffix letters of array names: T tokens of a sample or a micro-batch, N trained tokens, P image patches, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

import numpy as np

MAX_REWARD = 1e6
"""Limit of the absolute reward of an answer, a tool call or a move. Far above it advantages overflow, and small rewards
of the same group are lost to rounding."""


class SegmentKind(StrEnum):
    """Author of a segment: the task, the policy, or the world answering the policy."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"


class StopReason(StrEnum):
    """Reason for which the engine stopped sampling an ACTION."""

    END_OF_TURN = "end_of_turn"
    TURN_BUDGET = "turn_budget"
    CONTEXT_FULL = "context_full"
    INTERRUPTED = "interrupted"
    """An interrupted turn, whose rest the session requests again. Workflows never see it."""


class EpisodeStatus(StrEnum):
    """Reason for which an episode ended."""

    SOLVED = "solved"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    """The next observation and at least one more token did not fit into `workflow.context_tokens`."""
    IMAGE_DOES_NOT_FIT = "image_does_not_fit"
    """The next observation would have fitted without its images; images are never cut."""
    STOPPED = "stopped"
    """An unsolved answer that `workflow.retry_when` does not retry."""
    LOST = "lost"
    """The environment is over and was not solved."""
    TRUNCATED = "truncated"
    """The environment ended for want of time; its state still had a value."""
    FAILED = "failed"
    """The sample or the user's own code failed; `Trajectory.error` names it, with the reason."""


class DataError(ValueError):
    """A record, image or prompt cannot be used. The message names the sample, the field and the remedy."""


@dataclass(frozen=True, eq=False)
class Image:
    """An upright RGB image, identified by the SHA-256 of its size and pixels.

    Example: `Image(np.zeros((56, 56, 3), np.uint8)).hash[:8]`
    """

    rgb: np.ndarray
    """uint8 [height, width, 3]; treated as read-only."""

    def __post_init__(self) -> None:
        if self.rgb.dtype != np.uint8 or self.rgb.ndim != 3 or self.rgb.shape[2] != 3:
            raise ValueError(f"Image needs uint8 [height, width, 3], got {self.rgb.dtype} {list(self.rgb.shape)}")
        self.rgb.setflags(write=False)

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256(repr(self.rgb.shape).encode())
        digest.update(np.ascontiguousarray(self.rgb).data)
        return digest.hexdigest()

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, as Pillow counts."""
        return self.rgb.shape[1], self.rgb.shape[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


@dataclass(frozen=True)
class ImageInput:
    """An image as one model sees it: its pixels, and the number of patches and tokens that it becomes.

    Example: a 56x56 image for Qwen2.5-VL is `ImageInput(image, grid=(1, 4, 4), n_tokens=4)`.
    """

    image: Image
    grid: tuple[int, int, int]
    """Patches (time, height, width); the patch tensor has time*height*width rows."""
    n_tokens: int
    """Placeholder tokens: time*height*width / merge_size**2."""


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning of their own.

    Example: Qwen2.5-VL has `end_of_turn=(151645, 151643)` and `image=151655`; a text-only model has `image=None`.
    """

    end_of_turn: tuple[int, ...]
    """Ids that end an assistant turn; the first is the one that the chat template writes."""
    image: int | None = None
    video: int | None = None
    vision_start: int | None = None
    vision_end: int | None = None

    @property
    def placeholders(self) -> frozenset[int]:
        """Ids that stand for pixels. The policy must never sample one."""
        return frozenset(i for i in (self.image, self.video) if i is not None)


@dataclass(frozen=True)
class Message:
    """A chat message; `parts` holds text and images in reading order. Raises ValueError for a part of another type.

    Example: `Message("user", (image, "Which way is up?"))`
    """

    role: str
    parts: tuple[str | Image, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if not isinstance(part, (str, Image)):
                raise ValueError(f"a part of a Message is a str or an Image, not {type(part).__name__}; convert it")

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Task:
    """One problem to solve.

    Example: `Task("geo3k/11", (Message("user", (image, "Find x.")),), answer="13", data_source="geometry3k")`
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values for judges and tools, e.g. `hidden_image` for the `look` tool."""

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for message in self.messages for image in message.images)


@dataclass(frozen=True)
class Segment:
    """A run of token ids by one author. Only an ACTION carries logprobs, versions, a stop reason and a reward.

    Raises ValueError when the arrays disagree in length, when the placeholder tokens are not exactly what the images
    expand to, or when an ACTION contains a placeholder.

    Example: `Segment(SegmentKind.ACTION, (7, 8), special, logprobs=(-0.1, -0.2), weight_versions=(3, 3), ...)`
    """

    kind: SegmentKind
    token_ids: tuple[int, ...]
    special: InitVar[SpecialTokens]
    images: tuple[ImageInput, ...] = ()
    logprobs: tuple[float, ...] = ()
    """ACTION only: log-probability of each id under the distribution it was sampled from, in nats."""
    weight_versions: tuple[int, ...] = ()
    """ACTION only: version of the weights that produced each id."""
    stop_reason: StopReason | None = None
    reward: float = 0.0
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """ACTION only, of a mixture of experts: see `Generation.routes`."""

    def __post_init__(self, special: SpecialTokens) -> None:
        if self.kind is SegmentKind.ACTION:
            self._check_action(special)
        elif self.logprobs or self.weight_versions or self.stop_reason or self.reward or self.routes is not None:
            raise ValueError(f"a {self.kind} segment carries no logprobs, versions, stop reason, reward or routes")
        expected = sum(image.n_tokens for image in self.images)
        placeholders = special.placeholders
        found = sum(token in placeholders for token in self.token_ids)
        if expected != found:
            raise ValueError(
                f"a {self.kind} segment has {found} image placeholder tokens, but its {len(self.images)} images "
                f"expand to {expected}"
            )

    def _check_action(self, special: SpecialTokens) -> None:
        sizes = (len(self.token_ids), len(self.logprobs), len(self.weight_versions))
        if len(set(sizes)) != 1:
            raise ValueError(f"an ACTION has {sizes[0]} ids, {sizes[1]} logprobs and {sizes[2]} weight versions")
        if self.stop_reason is None or self.images:
            raise ValueError("an ACTION needs a stop reason and has no images")
        if not all(math.isfinite(logprob) for logprob in self.logprobs):
            raise ValueError("an ACTION has a logprob that is not finite")
        if not math.isfinite(self.reward):
            raise ValueError(f"an ACTION has the reward {self.reward}, which is not finite")
        if self.routes is not None and (self.routes.ndim != 3 or len(self.routes) < len(self)):
            raise ValueError(
                f"an ACTION of {len(self)} ids has routes {list(self.routes.shape)}, not [tokens, layers, k]"
            )
        if not special.placeholders.isdisjoint(self.token_ids):
            raise ValueError("an ACTION contains an image or video placeholder id; the sampler must suppress these")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of an ACTION. `temperature=0` is greedy; `top_p=1` and `top_k=0` switch the filters off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """The result of an engine for one turn. The lengths are checked when it becomes a `Segment`.

    `logprobs` belong to the distribution that was sampled from, after temperature, filters and suppression; a greedy
    choice is reported at temperature 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    stop_reason: StopReason
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """int16 [tokens, L, k], of a mixture of experts: the k experts in each of L layers that the engine sent tokens to.
    The last row is that of the last token but one, whose output the last one was drawn from; the first row is that of
    the first token that no earlier turn of the session has a row of, or an earlier one."""


class EngineSession(Protocol):
    """One episode's session in an engine: a later turn can reuse the KV cache of the earlier ones."""

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        """Continues `context`; tokens in, tokens out."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """An engine, which samples from the policy."""

    def session(self) -> EngineSession:
        """Opens an episode; `close` it in any case, since the engine waits for open sessions to fill a batch."""
        ...


@dataclass(frozen=True)
class Verdict:
    """A judge's opinion on one answer. `solved` is its own signal: a reward may hold bonuses and penalties.

    Example: `Verdict(reward=0.9, solved=True, terms={"accuracy": 0.9, "format": 0.0})`
    """

    reward: float
    solved: bool
    feedback: str | None = None
    """Feedback to the model in place of `workflow.feedback`."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The weighted terms that add up to `reward`. A term of `checks` has its own reward here, which is not added."""
    checks: Mapping[str, bool | str] = field(default_factory=dict)
    """Terms of weight 0: whether each found the answer solved, or why it failed."""


@dataclass(frozen=True)
class ToolCall:
    """Example: `ToolCall("rotate", {"image": 0, "angle": 90})`"""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call, for the model; the model reads an error as text."""

    text: str = ""
    images: tuple[Image, ...] = ()
    error: bool = False


@dataclass(frozen=True)
class Step:
    """Answer of an environment to a turn of the policy.

    Example: `Step(-0.1, (Message("user", (image, "Your move?")),), verdict=Verdict(-0.1, solved=False))`
    """

    reward: float
    """Reward of the turn, finite and at most ±`MAX_REWARD`."""
    messages: tuple[Message, ...] = ()
    """The next observation of the policy; results of tools are in `tool_results` instead."""
    status: EpisodeStatus | None = None
    """SOLVED, LOST, TRUNCATED or STOPPED where the episode is over; None while it goes on."""
    verdict: Verdict | None = None
    """Verdict on the turn; None when the turn was no answer and no move, such as a tool call. An environment of the
    user's own may leave it out: `reward` is then the verdict, solved where the status is SOLVED."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    judge_error: str | None = None
    invalid: bool = False
    """The text was no action of the environment; counted in the metric `invalid_turns`."""


@dataclass(frozen=True)
class Turn:
    """One ACTION, its context, and its results: verdict, tool results, feedback."""

    context: tuple[Segment, ...]
    action: Segment
    text: str
    """The decoded action, behind the `<think>` that the template opened for it, if it did; never encoded again."""
    verdict: Verdict | None = None
    """Verdict on the answer; None when the turn was a tool call."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    feedback: str | None = None
    """Text of the feedback that followed; None where the episode ended, or tools answered."""
    judge_error: str | None = None
    """Reason for which the judge gave no verdict; the answer then scored `reward.failed_reward`."""
    state: str | None = None
    """The environment's `state_key` before the turn."""
    invalid: bool = False
    """The text was no action of the environment."""


@dataclass(frozen=True)
class Trajectory:
    """An episode. Its tokens are the last turn's context and action, as long as no template rewrote history."""

    task: Task
    group: str
    """Trajectories of one task in one step share a group."""
    member: int
    turns: tuple[Turn, ...]
    status: EpisodeStatus
    error: str | None = None

    @property
    def id(self) -> str:
        return f"{self.group}/{self.member}"

    @property
    def solved(self) -> bool:
        return any(turn.verdict is not None and turn.verdict.solved for turn in self.turns)

    @property
    def solved_first_try(self) -> bool:
        """The first judged answer was right (turns that only called a tool do not count as tries)."""
        verdicts = [turn.verdict for turn in self.turns if turn.verdict is not None]
        return bool(verdicts) and verdicts[0].solved

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        return tuple(turn.action.reward for turn in self.turns)

    def rewritten_turn(self) -> int | None:
        """Index of the first turn whose context does not continue the turn before it, or None."""
        for index, (before, turn) in enumerate(zip(self.turns, self.turns[1:], strict=False), start=1):
            kept = (*before.context, before.action)
            if turn.context[: len(kept)] != kept:
                return index
        return None


@dataclass(frozen=True, eq=False)
class Scores:
    """Results of models that are fixed during an update for a sample's N scored tokens, float32 [N] each.

    None where neither the estimator nor the loss needs them.
    """

    proximal_N: np.ndarray | None = None
    """Log-probabilities under the policy as it is before the first update on the sample, in nats."""
    reference_N: np.ndarray | None = None
    """Log-probabilities under the policy that KL is measured against."""
    values_N: np.ndarray | None = None
    """The critic's value of the state before each token."""


@dataclass(frozen=True, eq=False)
class Credit:
    """Result of an advantage estimator for N scored tokens."""

    advantages_N: np.ndarray
    """float64"""
    returns_N: np.ndarray
    """float64: the target values of the critic."""
    critic_N: np.ndarray
    """bool: whether the critic is trained on the token."""


@dataclass(frozen=True)
class Sample:
    """A sequence to train on: `segments[i]` is trained when `i in trained`; everything else is context.

    Example: a two-turn trajectory exported as `concat` is one Sample with `trained=(1, 3)`.
    """

    id: str
    group: str
    segments: tuple[Segment, ...]
    trained: tuple[int, ...]
    reward: float
    """The reward that an estimator over samples compares within a group."""
    outcome: float
    """The reward of the whole episode; the same in all samples of one."""
    episode: str
    """Id of the trajectory. The samples of one trajectory are adjacent, in the order of their turns."""
    first_turn: int = 0
    """Index in the episode of the first trained turn."""
    states: tuple[str | None, ...] = ()
    """The environment's `state_key` before each trained turn."""
    with_observations: bool = False
    """Whether observations between the trained turns are scored as well, for estimators and losses without a mask."""
    scores: Scores = Scores()
    """Set by the learner, before the estimator needs it."""
    credit: Credit | None = None
    """Set by the estimator."""

    def __post_init__(self) -> None:
        for index in self.trained:
            if self.segments[index].kind is not SegmentKind.ACTION:
                raise ValueError(f"sample {self.id}: segment {index} is trained but was not sampled by the policy")

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def loss_mask(self) -> list[bool]:
        """[T]: True exactly on the ids that the policy sampled and that are trained."""
        return [i in self.trained for i, segment in enumerate(self.segments) for _ in segment.token_ids]

    @property
    def scored(self) -> tuple[int, ...]:
        """Indices of the segments whose tokens are scored: the trained ones, maybe with those between them."""
        between = self.with_observations and self.trained
        return tuple(range(self.trained[0], self.trained[-1] + 1)) if between else self.trained

    @property
    def sampled_mask(self) -> list[bool]:
        """[N]: whether each scored token is trained."""
        return [i in self.trained for i in self.scored for _ in self.segments[i].token_ids]

    @property
    def n_trained(self) -> int:
        """Number of True in `loss_mask`."""
        return sum(len(self.segments[i]) for i in self.trained)

    @property
    def n_scored(self) -> int:
        """N"""
        return sum(len(self.segments[i]) for i in self.scored)

    @property
    def behaviour_logprobs(self) -> list[float]:
        """[N]: one value for each scored token, in order; NaN for tokens that the policy did not sample."""
        return [
            value
            for i in self.scored
            for value in (self.segments[i].logprobs if i in self.trained else [math.nan] * len(self.segments[i]))
        ]

    @property
    def weight_versions(self) -> list[int]:
        """One value for each True in `loss_mask`, in order."""
        return [value for i in self.trained for value in self.segments[i].weight_versions]

    @property
    def routes(self) -> np.ndarray | None:
        """int16 [T, L, k]: the experts that sampled; -1 where no engine said, as for the last token. None where no
        segment has routes. Of a token that was computed twice the first experts count, which sampled it; but
        where the weights have changed the last ones do, which the newest tokens have seen.
        """
        parts = [(i, segment.routes) for i, segment in enumerate(self.segments) if segment.routes is not None]
        if not parts:
            return None
        ends = np.cumsum([len(segment) for segment in self.segments])
        routes = np.full((len(self), *parts[0][1].shape[1:]), -1, np.int16)
        version = None
        for i, rows in parts:
            span = slice(ends[i] - 1 - len(rows), ends[i] - 1)
            assert span.start >= 0, f"sample {self.id}: segment {i} has routes of tokens that are not in the sample"
            before, version = version, self.segments[i].weight_versions[-1]
            kept_T11 = (routes[span, :1, :1] >= 0) & (before == version)
            routes[span] = np.where(kept_T11, routes[span], rows)
        return routes

    @property
    def turn_advantages(self) -> list[float]:
        """Mean advantage of each trained turn's tokens; empty before an estimator set them."""
        if self.credit is None:
            return []
        ends = np.cumsum([len(self.segments[i]) for i in self.scored])[:-1]
        parts = zip(self.scored, np.split(self.credit.advantages_N, ends), strict=True)
        return [float(part.mean()) for i, part in parts if i in self.trained]

    @property
    def images(self) -> tuple[ImageInput, ...]:
        return tuple(image for segment in self.segments for image in segment.images)

    def __len__(self) -> int:
        return sum(map(len, self.segments))


class Judge(Protocol):
    """Scores an answer. `history` holds the earlier turns of the episode."""

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict: ...


class Environment(Protocol):
    """World of one episode: `reset` once, then `step` for each turn of the policy, then `close` once.

    It must be deterministic: in episodes of one task, the same turns lead to the same observations and rewards. A class
    that inherits from Environment needs `reset` and `step` only.

    Example: docs/environments.md has one of 30 lines.
    """

    async def reset(self, task: Task) -> Sequence[Message]:
        """Opening messages: texts and images of the roles system, user and assistant, at least one message.

        `task.extra["seed"]` is an int where `data.train.generator` is `episodes`. Raises DataError for a task that
        cannot be played.
        """
        ...

    async def step(self, text: str, history: Sequence[Turn]) -> Step:
        """Answers a turn; `text` as in `Turn`, `history` holds the earlier turns. Any text is possible: for one that is
        no action, return a `Step` with `invalid`, and do not raise.
        """
        ...

    def state_key(self) -> str | None:
        """Names the state, equal exactly for states that are the same to the policy's future; None: not known."""
        return None

    async def close(self) -> None:
        """Frees what `reset` took, also where that raised; called once for each episode."""
        return None  # a body, so that subclasses need not write one


class JudgeError(RuntimeError):
    """A judge raised, hung, or returned something that is not a verdict; the answer scores 0 and is counted."""
