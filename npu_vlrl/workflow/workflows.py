"""Workflows by name, and the guard around a user's own workflow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.types import (
    DataError,
    EngineSession,
    Environment,
    EpisodeStatus,
    Generation,
    SamplingParams,
    Segment,
    Task,
    Trajectory,
)
from npu_vlrl.workflow.base import Sampling, Workflow
from npu_vlrl.workflow.names import check_names
from npu_vlrl.workflow.render import Renderer
from npu_vlrl.workflow.texts import shown
from npu_vlrl.workflow.user_code import UserCode
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from npu_vlrl.workflow.workers import is_spec, load_function

WORKFLOWS = {"vision_multiturn": VisionMultiTurnAgenticWorkflow}

GIVEN = ("config", "renderer", "new_environment", "schemas")
"""Arguments of every workflow; other arguments are its options."""


MakeWorkflow = Callable[[Renderer, Callable[[], Environment], Sequence[Mapping[str, Any]]], Workflow]
"""Function of the renderer, a factory of an episode's environment, and the tools' schemas."""


def workflow_maker(config: WorkflowConfig) -> MakeWorkflow:
    """Factory of the workflow of `config.name`: a key of `WORKFLOWS`, or the user's `path/to/file.py:Class`.

    Raises ValueError for an unknown name or option, and a file without that class or function. The factory raises
    ValueError for an option that the class refuses, and DataError for anything else that it raises.
    """
    if not is_spec(config.name):
        check_names("workflow", [config.name], WORKFLOWS)
        check_names(f"option of {config.name!r}:", config.options, ())
        return partial(WORKFLOWS[config.name], config)
    make = load_function(config.name, classes=True)
    parameters = [name for name in inspect.signature(make).parameters if name not in GIVEN]
    check_names(f"option of {config.name!r}:", config.options, parameters)
    return partial(_own, config, make)


def _own(
    config: WorkflowConfig,
    make: Callable[..., Any],
    renderer: Renderer,
    new_environment: Callable[[], Environment],
    schemas: Sequence[Mapping[str, Any]],
) -> OwnWorkflow:
    code = UserCode(config.name, "workflow")
    own = code.called("", lambda: make(config, renderer, new_environment, schemas, **config.options), ValueError)
    if not inspect.iscoroutinefunction(getattr(own, "run", None)):
        raise code.wrong(
            "its run is no async method", "write `async def run(self, task, session, group, member, sampling)`"
        )
    return OwnWorkflow(code, own)


class OwnWorkflow:
    """Guard of a user's workflow, see `base.Workflow`. Its exceptions, and results that are no trajectory of their
    episode, become a trajectory of status FAILED, so that they fail a group and not the run. Errors of the engine pass.
    """

    def __init__(self, code: UserCode, own: Any) -> None:
        self._code, self._own = code, own

    async def run(self, task: Task, session: EngineSession, group: str, member: int, sampling: Sampling) -> Trajectory:
        watched = _Watched(session)
        try:
            found = await self._code.awaited(
                "run() ", lambda: self._own.run(task, watched, group, member, sampling), DataError, ValueError
            )
            return self._checked(found, task, group, member)
        except (DataError, ValueError) as error:
            if watched.error is not None:
                raise watched.error from None
            return Trajectory(task, group, member, (), EpisodeStatus.FAILED, f"{task.id}: {error}")
        finally:
            session.close()

    def _checked(self, found: Any, task: Task, group: str, member: int) -> Trajectory:
        if not isinstance(found, Trajectory):
            raise self._code.wrong(f"run() returned {shown(found)}", "return a Trajectory")
        if (found.task, found.group, found.member) != (task, group, member):
            raise self._code.wrong(
                f"run() returned the trajectory {shown(found.id)} for {group}/{member}",
                "give the trajectory the task, group and member that run() was given",
            )
        if not found.turns and found.status is not EpisodeStatus.FAILED:
            raise self._code.wrong("run() returned a trajectory without turns", "give one Turn for each ACTION")
        return found


class _Watched:
    """Session that remembers the error of its engine, which is not the workflow's fault."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self.error: Exception | None = None

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        try:
            return await self._session.generate(context, sampling)
        except Exception as error:
            self.error = error
            raise

    def close(self) -> None:
        """Does nothing: the guard closes the session when the episode is over."""
