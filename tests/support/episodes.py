"""Episodes with a script: the real workflow and engine, while judge and tools say what the test wants them to say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.rollout.collect import play
from npu_vlrl.types import (
    EngineSession,
    Generation,
    Image,
    Message,
    SamplingParams,
    Segment,
    Step,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.base import Sampling
from npu_vlrl.workflow.environments.visual_qa import VisualQA
from npu_vlrl.workflow.render import Renderer
from npu_vlrl.workflow.tools import Toolbox
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from tests.support.models import is_vision


@dataclass(frozen=True)
class Reply:
    """What the world says to a turn: feedback, or the result of a tool call with these images."""

    text: str
    images: tuple[Image, ...] | None = None


def an_image(width: int, height: int, seed: int) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def task(name: str, parts: Sequence[str | Image], *script: Reply) -> Task:
    """A task of len(script) + 1 turns, the last of which solves it."""
    return Task(name, (Message("user", tuple(parts)),), "answer", "test", {"script": script})


class _Tools(Toolbox):
    def __init__(self) -> None:
        super().__init__([])

    def run(self, call: ToolCall, ctx: Any) -> ToolResult:
        reply = ctx.task.extra["script"][call.arguments["turn"]]
        return ToolResult(reply.text, reply.images)


class _Judge:
    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        script = task.extra["script"]
        if len(history) == len(script):
            return Verdict(1.0, solved=True)
        await asyncio.sleep(0)  # a real judge answers later: turns of a round end in another order than they began
        return Verdict(0.1 * len(history), solved=False, feedback=script[len(history)].text or "no")


class _Scripted(VisualQA):
    """The tool is called where the script shows something; what a random model writes is no call, and no broken one."""

    async def step(self, text: str, history: Sequence[Turn]) -> Step:
        turn, script = len(history), self._task.extra["script"]
        calls = turn < len(script) and script[turn].images is not None
        wanted = f'<tool_call>{{"name": "show", "arguments": {{"turn": {turn}}}}}</tool_call>' if calls else ""
        return await super().step(wanted, history)


@dataclass
class RecordingEngine:
    """Notes what the engine was asked and what it returned, by the seed of the request (one for each turn)."""

    engine: InProcessEngine
    asked: dict[int, list[int]] = field(default_factory=dict)
    returned: dict[int, Generation] = field(default_factory=dict)

    def session(self) -> EngineSession:
        return _RecordingSession(self, self.engine.session())


class _RecordingSession:
    def __init__(self, recorder: RecordingEngine, session: EngineSession) -> None:
        self.recorder, self.inner = recorder, session

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        assert sampling.seed not in self.recorder.asked
        self.recorder.asked[sampling.seed] = [token for segment in context for token in segment.token_ids]
        generation = await self.inner.generate(context, sampling)
        self.recorder.returned[sampling.seed] = generation
        return generation

    def close(self) -> None:
        self.inner.close()


class Stage:
    """A loaded model with its engine and workflow."""

    def __init__(self, loaded: LoadedModel, cache_bytes: int = 2**26) -> None:
        self.loaded = loaded
        self.policy = loaded.policy
        self.vision = VisionFeatures(loaded.policy, loaded.processor, cache_bytes)
        self.engine = InProcessEngine(loaded.policy, self.vision)
        self.recorder = RecordingEngine(self.engine)
        self.renderer = Renderer(loaded.tokenizer, loaded.processor, loaded.folder.name, chat=self.policy.family.chat)

    def workflow(self, turn_tokens: int, context_tokens: int = 4000) -> VisionMultiTurnAgenticWorkflow:
        config = WorkflowConfig(
            max_turns=8, tools=("show",), turn_tokens=turn_tokens, context_tokens=context_tokens, feedback="no"
        )
        return VisionMultiTurnAgenticWorkflow(config, self.renderer, lambda: _Scripted(config, _Judge(), _Tools()))

    def play(
        self, tasks: Sequence[Task], members: int = 2, turn_tokens: int = 6, temperature: float = 1.0, seed: int = 0
    ) -> list[Trajectory]:
        """All episodes, played at once."""
        workflow, sampling = self.workflow(turn_tokens), Sampling(temperature, seed=seed)
        groups = asyncio.run(play(tasks, workflow, self.recorder, members, sampling, "test"))
        return [trajectory for group in groups for trajectory in group]


def long_episode(kind: str, turns: int = 3) -> list[Task]:
    """A task with images in the prompt and in a tool result, one without any image, and one of a single turn."""
    if not is_vision(kind):
        script = [Reply(f"no {i}") for i in range(turns - 1)]
        return [task("a", ["What?"], *script), task("b", ["Which way is up?"], *script), task("c", ["x"])]
    look = Reply("see", (an_image(56, 84, 4), an_image(30, 100, 5)))
    rest = [Reply("Try again.") for _ in range(turns - 2)]
    return [
        task("a", [an_image(60, 100, 1), "and", an_image(112, 40, 2), "?"], look, *rest),
        task("b", ["no picture here"], Reply("wrong"), *rest),
        task("c", [an_image(28, 28, 3), "x"]),
    ]


# Strategies

some_images = st.builds(an_image, st.integers(28, 112), st.integers(28, 112), st.integers(0, 2**16))
texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"]), min_size=1, max_size=8)


@st.composite
def _parts(draw: st.DrawFn, max_images: int) -> tuple[str | Image, ...]:
    images = draw(st.lists(some_images, max_size=max_images))
    words = draw(st.lists(texts, min_size=1, max_size=2))
    return tuple(draw(st.permutations([*images, *words])))


def _replies(max_images: int) -> st.SearchStrategy[Reply]:
    results = st.builds(Reply, texts, st.lists(some_images, max_size=max_images).map(tuple))
    return st.builds(Reply, texts) | results


@st.composite
def task_lists(draw: st.DrawFn, with_images: bool, max_turns: int = 5) -> list[Task]:
    """1..3 tasks of 1..max_turns turns with 0..3 images a message."""
    most = 3 if with_images else 0
    scripts = st.lists(_replies(most), max_size=max_turns - 1)
    count = draw(st.integers(1, 3))
    return [task(f"t{number}", draw(_parts(most)), *draw(scripts)) for number in range(count)]
