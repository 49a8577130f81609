"""The package's workflow: policy and environment alternate until one of them ends the episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.types import (
    DataError,
    EngineSession,
    Environment,
    EpisodeStatus,
    Generation,
    Message,
    Segment,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from npu_vlrl.workflow.base import Sampling, action_segment
from npu_vlrl.workflow.render import Conversation, Renderer
from npu_vlrl.workflow.texts import mended
from npu_vlrl.workflow.tools.describe import describe_tools


class VisionMultiTurnAgenticWorkflow:
    """Workflow of up to `max_turns` turns, each episode in an environment of its own; see `base.Workflow`.

    `schemas` describe the functions that the policy may call.
    """

    def __init__(
        self,
        config: WorkflowConfig,
        renderer: Renderer,
        new_environment: Callable[[], Environment],
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.config = config
        self.renderer = renderer
        self.new_environment = new_environment
        self._schemas = list(schemas)
        self._native_tools = bool(self._schemas) and self._template_shows_tools()

    async def run(self, task: Task, session: EngineSession, group: str, member: int, sampling: Sampling) -> Trajectory:
        """Plays one episode. A sample that cannot be used gives a trajectory of status FAILED with the message."""
        turns: list[Turn] = []
        try:
            status = await self._play(task, session, group, member, sampling, turns)
            return Trajectory(task, group, member, tuple(turns), status)
        except (DataError, ValueError) as error:
            message = f"{task.id}: {error}"
            return Trajectory(task, group, member, tuple(turns), EpisodeStatus.FAILED, message)
        finally:
            session.close()

    @asynccontextmanager
    async def opened(self, task: Task) -> AsyncIterator[tuple[Environment, Conversation]]:
        """Opens environment and conversation before the first turn; closes the environment in any case.

        Raises DataError or ValueError for a task that cannot be played.
        """
        environment = self.new_environment()
        try:
            yield environment, await self._begun(environment, task)
        except BaseException:
            with suppress(DataError):  # what came first says more
                await environment.close()
            raise
        await environment.close()

    async def _begun(self, environment: Environment, task: Task) -> Conversation:
        opening = self._opening(await environment.reset(task))
        conversation = self.renderer.open(opening, self._schemas if self._native_tools else None)
        if self._room(conversation) < 1:
            raise DataError(
                f"the prompt has {conversation.n_tokens} tokens and does not fit into workflow.context_tokens="
                f"{self.config.context_tokens}; raise it, shorten the prompt or lower model.max_pixels"
            )
        return conversation

    async def _play(
        self, task: Task, session: EngineSession, group: str, member: int, sampling: Sampling, turns: list[Turn]
    ) -> EpisodeStatus:
        async with self.opened(task) as (environment, conversation):
            while True:
                budget = min(self.config.turn_tokens, self._room(conversation))
                params = sampling.for_turn(group, member, len(turns), budget)
                generation = await session.generate(conversation.context, params)
                state = environment.state_key()
                text = conversation.opened_thought + self._text(generation)
                step = await environment.step(text, turns)
                action = self._action(generation, step.reward, budget)
                turns.append(_turn(conversation, action, text, step, state))  # feedback only once it is told
                if step.status is not None:
                    return step.status
                if len(turns) >= self.config.max_turns:
                    return EpisodeStatus.MAX_TURNS
                new = self.renderer.tool_messages(step.tool_results) if step.tool_results else list(step.messages)
                following = self.renderer.reply(conversation, turns[-1].action, new)
                if self._room(following) < 1:
                    return self._why_full(conversation, following)
                turns[-1] = replace(turns[-1], feedback="\n".join(m.text for m in step.messages) or None)
                conversation = following

    def _text(self, generation: Generation) -> str:
        if generation.logprobs is None or None in generation.logprobs:
            raise ValueError("the engine returned no logprob for some of its tokens; make it return one for each")
        return mended(self.renderer.decode(generation.token_ids))  # a tokenizer in Python may decode half a pair

    def _action(self, generation: Generation, reward: float, budget: int) -> Segment:
        stop = generation.stop_reason
        if stop is StopReason.TURN_BUDGET and budget < self.config.turn_tokens:
            stop = StopReason.CONTEXT_FULL
        return action_segment(
            generation, self.renderer.special, reward - self._overlong(len(generation.token_ids)), stop
        )

    def _overlong(self, tokens: int) -> float:
        """Soft overlong penalty of DAPO (arXiv 2503.14476, equation 13), for one turn."""
        buffer = self.config.overlong_tokens
        if not buffer:
            return 0.0
        over = tokens - (self.config.turn_tokens - buffer)
        return self.config.overlong_penalty * min(1.0, max(0.0, over / buffer))

    def _why_full(self, before: Conversation, after: Conversation) -> EpisodeStatus:
        new_images = sum(i.n_tokens for s in after.context for i in s.images)
        new_images -= sum(i.n_tokens for s in before.context for i in s.images)
        fits_without = self._room(after) + new_images >= 1
        return EpisodeStatus.IMAGE_DOES_NOT_FIT if new_images and fits_without else EpisodeStatus.CONTEXT_FULL

    def _room(self, conversation: Conversation) -> int:
        return self.config.context_tokens - conversation.n_tokens

    def _opening(self, reset: Sequence[Message]) -> list[Message]:
        messages = list(reset)
        system = self.config.system_prompt
        if system is not None:
            messages = [Message("system", (system,)), *_without_system(messages)]
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


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Messages of the task without those that `workflow.system_prompt` replaces. Raises DataError where it would
    replace an image, or all messages.
    """
    remedy = "write it as a message of the user, or set workflow.system_prompt=null"
    images = sum(len(message.images) for message in messages if message.role == "system")
    if images:
        raise DataError(f"workflow.system_prompt replaces the system message, which holds {images} images; {remedy}")
    others = [message for message in messages if message.role != "system"]
    if not others:
        raise DataError(f"workflow.system_prompt replaces the system message, which is the whole prompt; {remedy}")
    return others


def _turn(conversation: Conversation, action: Segment, text: str, step: Step, state: str | None) -> Turn:
    return Turn(
        conversation.context,
        action,
        text,
        step.verdict,
        step.tool_calls,
        step.tool_results,
        judge_error=step.judge_error,
        state=state,
        invalid=step.invalid,
    )
