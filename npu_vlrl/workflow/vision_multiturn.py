"""The episode: generate, judge, feed back, retry; or call a tool and look at what it returns."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.data.processor import ImageProcessor, padded
from npu_vlrl.types import (
    DataError,
    EngineSession,
    EpisodeStatus,
    Generation,
    Image,
    Judge,
    JudgeError,
    Message,
    SamplingParams,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.render import Conversation, Renderer
from npu_vlrl.workflow.tools import Frame, Toolbox, ToolContext
from npu_vlrl.workflow.tools.describe import describe_tools
from npu_vlrl.workflow.tools.hermes import ParsedCalls, parse_tool_calls


@dataclass(frozen=True)
class Sampling:
    """How the turns of a rollout are drawn; each turn has its own seed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def for_turn(self, group: str, member: int, turn: int, max_new_tokens: int) -> SamplingParams:
        key = f"{self.seed}/{group}/{member}/{turn}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7])
        return SamplingParams(max_new_tokens, self.temperature, self.top_p, self.top_k, seed)


class VisionMultiTurnAgenticWorkflow:
    """Runs episodes of up to `max_turns` turns.

    A turn with a tool call gets the tool's text and images as observation. Any other turn is an answer: the judge
    scores it, and an answer that `retry_when` selects gets feedback and another try. Tools take positions in the pixels
    that `processor` makes of a picture; without one (a text-only model), in those of the picture itself.
    """

    def __init__(
        self,
        config: WorkflowConfig,
        renderer: Renderer,
        judge: Judge,
        toolbox: Toolbox,
        failed_reward: float = 0.0,
        processor: ImageProcessor | None = None,
    ) -> None:
        self.config = config
        self.renderer = renderer
        self.judge = judge
        self.toolbox = toolbox
        self.failed_reward = failed_reward
        self.processor = processor
        self._schemas = toolbox.schemas() if config.describe_tools else []
        self._native_tools = bool(self._schemas) and self._template_shows_tools()

    async def run(self, task: Task, session: EngineSession, group: str, member: int, sampling: Sampling) -> Trajectory:
        """One episode. A sample that cannot be used gives a trajectory of status FAILED that carries the message."""
        turns: list[Turn] = []
        try:
            status = await self._play(task, session, group, member, sampling, turns)
            return Trajectory(task, group, member, tuple(turns), status)
        except (DataError, ValueError) as error:
            message = f"{task.id}: {error}"
            return Trajectory(task, group, member, tuple(turns), EpisodeStatus.FAILED, message)
        finally:
            session.close()

    async def _play(
        self, task: Task, session: EngineSession, group: str, member: int, sampling: Sampling, turns: list[Turn]
    ) -> EpisodeStatus:
        opening = self._opening(task)
        conversation = self.renderer.open(opening, self._schemas if self._native_tools else None)
        images = [image for message in opening for image in message.images]
        if self._room(conversation) < 1:
            raise DataError(
                f"the prompt has {_size(conversation)} tokens and does not fit into workflow.context_tokens="
                f"{self.config.context_tokens}; raise it, shorten the prompt or lower model.max_pixels"
            )
        while True:
            budget = min(self.config.turn_tokens, self._room(conversation))
            params = sampling.for_turn(group, member, len(turns), budget)
            generation = await session.generate(conversation.context, params)
            turn = await self._take(task, conversation, generation, budget, tuple(images), turns)
            turns.append(turn)
            images += [image for result in turn.tool_results for image in result.images]
            ended = self._end(turn, len(turns))
            if ended is not None:
                return ended
            following = self.renderer.reply(conversation, turn.action, self._answer_to(turn))
            if self._room(following) < 1:
                return self._why_full(conversation, following)
            conversation = following

    async def _take(
        self,
        task: Task,
        conversation: Conversation,
        generation: Generation,
        budget: int,
        images: tuple[Image, ...],
        history: Sequence[Turn],
    ) -> Turn:
        """Makes a turn out of a generation: runs its tools, or has it judged."""
        if generation.logprobs is None or None in generation.logprobs:
            raise ValueError("the engine returned no logprob for some of its tokens; make it return one for each")
        text = self.renderer.decode(generation.token_ids)
        stop = generation.stop_reason
        if stop is StopReason.TURN_BUDGET and budget < self.config.turn_tokens:
            stop = StopReason.CONTEXT_FULL
        parsed = parse_tool_calls(text) if self.config.tools else ParsedCalls((), ())
        results: tuple[ToolResult, ...] = ()
        verdict, problem, feedback = None, None, None
        if parsed.calls or parsed.errors:
            results = await asyncio.to_thread(self._run_tools, task, parsed, images)
            failed = any(result.error for result in results)
            reward = self.config.tool_error_reward if failed else self.config.tool_call_reward
        else:
            verdict, problem = await self._judge(task, text, history)
            reward = verdict.reward
            feedback = verdict.feedback or self.config.feedback
        action = Segment(
            SegmentKind.ACTION,
            generation.token_ids,
            self.renderer.special,
            logprobs=generation.logprobs,
            weight_versions=generation.weight_versions,
            stop_reason=stop,
            reward=reward,
        )
        return Turn(conversation.context, action, text, verdict, parsed.calls, results, feedback, problem)

    def _run_tools(self, task: Task, parsed: ParsedCalls, images: tuple[Image, ...]) -> tuple[ToolResult, ...]:
        results = []
        for call in parsed.calls:
            frames = () if self.processor is None else tuple(seen_frame(self.processor, image) for image in images)
            result = self.toolbox.run(call, ToolContext(task, images, frames))
            results.append(result)
            images = (*images, *result.images)
        return (*results, *(ToolResult(error, error=True) for error in parsed.errors))

    async def _judge(self, task: Task, text: str, history: Sequence[Turn]) -> tuple[Verdict, str | None]:
        try:
            return await self.judge.judge(task, text, history), None
        except JudgeError as error:
            return Verdict(self.failed_reward, solved=False), f"{task.id}: {error}"

    def _end(self, turn: Turn, n_turns: int) -> EpisodeStatus | None:
        if turn.verdict is not None:
            below = self.config.retry_below
            if turn.verdict.solved and below is None:
                return EpisodeStatus.SOLVED
            if below is not None and turn.verdict.reward >= below:
                return EpisodeStatus.SOLVED if turn.verdict.solved else EpisodeStatus.STOPPED
        return EpisodeStatus.MAX_TURNS if n_turns >= self.config.max_turns else None

    def _answer_to(self, turn: Turn) -> list[Message]:
        if turn.tool_results:
            return self.renderer.tool_messages(turn.tool_results)
        assert turn.feedback is not None
        return [Message("user", (turn.feedback,))]

    def _why_full(self, before: Conversation, after: Conversation) -> EpisodeStatus:
        new_images = sum(i.n_tokens for s in after.context for i in s.images)
        new_images -= sum(i.n_tokens for s in before.context for i in s.images)
        fits_without = self._room(after) + new_images >= 1
        return EpisodeStatus.IMAGE_DOES_NOT_FIT if new_images and fits_without else EpisodeStatus.CONTEXT_FULL

    def _room(self, conversation: Conversation) -> int:
        return self.config.context_tokens - _size(conversation)

    def _opening(self, task: Task) -> list[Message]:
        messages = list(task.messages)
        system = self.config.system_prompt
        if system is not None:
            messages = [Message("system", (system,)), *(m for m in messages if m.role != "system")]
        if self._schemas and not self._native_tools:
            described = describe_tools(self._schemas)
            if messages[0].role == "system":
                messages[0] = Message("system", (*messages[0].parts, f"\n\n{described}"))
            else:
                messages.insert(0, Message("system", (described,)))
        return messages

    def _template_shows_tools(self) -> bool:
        probe = [Message("user", ("x",))]
        return self.renderer.open(probe, self._schemas).text != self.renderer.open(probe).text


def seen_frame(processor: ImageProcessor, image: Image) -> Frame:
    """How a picture looks to the model of `processor`."""
    _, rows, columns = processor.describe(image).grid
    return Frame(image.size, padded(*image.size), (columns * processor.patch_size, rows * processor.patch_size))


def _size(conversation: Conversation) -> int:
    return sum(map(len, conversation.context))
