"""Questions with error recovery: an answer is judged, and retried with feedback if it is wrong; or a tool is called."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.data.images import padded
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.types import (
    Environment,
    EpisodeStatus,
    Image,
    Judge,
    JudgeError,
    Message,
    Step,
    Task,
    ToolResult,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.thought import UNFINISHED_FEEDBACK, split_thought
from npu_vlrl.workflow.tools import Frame, Toolbox, ToolContext
from npu_vlrl.workflow.tools.forms import HERMES, ToolForm
from npu_vlrl.workflow.tools.hermes import ParsedCalls


class VisualQA(Environment):
    """Environment of judged answers and tools, see `types.Environment`.

    Tools take positions in the pixels of an image resized by `processor`, or on its `position_scale`; without one (a
    text-only model), in the pixels of the image itself. The judge scores texts without a tool call, and `retry_when`
    selects the answers that are retried. Calls are read outside of thoughts. A thought that never ends is cut off
    before the judge sees the text; where nothing is left, the feedback says why.
    """

    def __init__(
        self,
        config: WorkflowConfig,
        judge: Judge,
        toolbox: Toolbox,
        failed_reward: float = 0.0,
        processor: ImageProcessor | None = None,
        form: ToolForm = HERMES,
    ) -> None:
        self.config = config
        self.judge = judge
        self.toolbox = toolbox
        self.failed_reward = failed_reward
        self.processor = processor
        self.form = form
        self._images: tuple[Image, ...] = ()

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task = task
        self._images = task.images
        return task.messages

    async def step(self, text: str, history: Sequence[Turn]) -> Step:
        parsed = self.form.parse(text) if self.config.tools else ParsedCalls((), ())
        if not parsed.calls and not parsed.errors:
            return await self._judge(text, history)
        results = await asyncio.to_thread(self._run_tools, parsed)
        self._images += tuple(image for result in results for image in result.images)
        failed = any(result.error for result in results)
        reward = self.config.tool_error_reward if failed else self.config.tool_call_reward
        return Step(reward, tool_calls=parsed.calls, tool_results=results)

    async def _judge(self, text: str, history: Sequence[Turn]) -> Step:
        problem = None
        split = split_thought(text)
        try:
            verdict = await self.judge.judge(self._task, split.finished_text, history)
        except JudgeError as error:
            verdict, problem = Verdict(self.failed_reward, solved=False), f"{self._task.id}: {error}"
        feedback = UNFINISHED_FEEDBACK if split.holds_nothing else verdict.feedback or self.config.feedback
        told = Message("user", (feedback,))
        return Step(verdict.reward, (told,), self._end(verdict), verdict, judge_error=problem)

    def _end(self, verdict: Verdict) -> EpisodeStatus | None:
        below = self.config.retry_below
        if verdict.solved and below is None:
            return EpisodeStatus.SOLVED
        if below is not None and verdict.reward >= below:
            return EpisodeStatus.SOLVED if verdict.solved else EpisodeStatus.STOPPED
        return None

    def _run_tools(self, parsed: ParsedCalls) -> tuple[ToolResult, ...]:
        images, results = self._images, []
        for call in parsed.calls:
            frames = () if self.processor is None else tuple(seen_frame(self.processor, image) for image in images)
            result = self.toolbox.run(call, ToolContext(self._task, images, frames))
            results.append(result)
            images = (*images, *result.images)
        return (*results, *(ToolResult(error, error=True) for error in parsed.errors))


def seen_frame(processor: ImageProcessor, image: Image) -> Frame:
    """Coordinate frame of an image for the model of `processor`."""
    _, rows, columns = processor.describe(image).grid
    seen = (columns * processor.patch_size, rows * processor.patch_size)
    return Frame(image.size, padded(*image.size), seen, processor.position_scale)
