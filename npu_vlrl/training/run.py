"""One run: its parts, its folder, its reports and its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from npu_vlrl.algorithms import GroupRewards
from npu_vlrl.algorithms.selection import has_spread
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.export.run import export_end
from npu_vlrl.hardware import software
from npu_vlrl.learner.checkpoint import CheckpointError, has_checksums, latest, steps_done
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.learner.schedule import rate_jump
from npu_vlrl.learner.state import needed
from npu_vlrl.report.absolute_paths import rooted
from npu_vlrl.report.console import ConsoleReport
from npu_vlrl.report.counters import Counters
from npu_vlrl.report.evaluated import means_by_source
from npu_vlrl.report.fingerprints import Inputs
from npu_vlrl.report.metrics import rollout_metrics, throughput
from npu_vlrl.report.run_folder import RunFolder
from npu_vlrl.report.sinks import Opening, Sinks, check_installed
from npu_vlrl.report.token_values import token_values
from npu_vlrl.report.troubles import Troubles, wrong_replies_message
from npu_vlrl.rollout.collect import Rollout, collect
from npu_vlrl.rollout.probe import Probe
from npu_vlrl.rollout.schedule import Schedule
from npu_vlrl.rollout.stream import Episodes, InTurn, Stream
from npu_vlrl.training.build import Parts, build, new_learners
from npu_vlrl.training.evaluation import Evaluation
from npu_vlrl.training.guard import EngineGuard
from npu_vlrl.types import Sample, Trajectory
from npu_vlrl.workflow.export import export, outcome
from npu_vlrl.workflow.rewards import lowest_reward


class Run:
    """The state of a run that the training loop and the evaluation share; `cleanup` ends its parts."""

    def __init__(self, config: Config, cleanup: ExitStack, draws: bool = True) -> None:
        """`draws`: tasks of `data.train` will be drawn."""
        self.config = config
        check_installed(config.run.sinks)
        self.folder = RunFolder(config, cleanup)
        absolute = rooted(config)  # before a game may change the working directory
        self.inputs = Inputs(config, absolute, draws)
        if self.folder.resumed:
            self.inputs.check()
        self.parts: Parts = build(absolute, self.folder.path, cleanup, draws)
        self.folder.format = self.parts.format
        self._absolute = absolute
        self.algorithm = absolute.algorithm.resolved()
        workflow = config.workflow
        self.group_rewards = GroupRewards(
            self.algorithm.reward_of_groups,
            lambda trajectory: outcome(trajectory, workflow.reward_mode, workflow.turn_discount),
        )
        self.console = ConsoleReport(config.train.steps, config.run.log_every)
        self.sinks = cleanup.enter_context(Sinks(config.run.sinks, self._opening, self.console.line))
        self.folder.begin()
        self.inputs.record()
        cleanup.enter_context(self.console)
        platform = self.parts.platform
        self.console.line(f"{platform.name}: {platform.describe()}; run folder {config.run.dir}")
        if (world := self.parts.world) is not None:
            duties = {"learning": world.learners, "sampling": world.engines}
            for peer in world.peers[1:]:
                own = [duty for duty, ranks in duties.items() if peer.rank in ranks]
                self.console.line(f"{' and '.join(own)} in {peer}")
        for message in self.inputs.messages:
            self.console.trouble(message)
        for message in self.parts.eval_skipped:
            self.console.line(f"evaluation: skipped {message}")
        self.evaluations: dict[str, dict[str, float]] = {}
        """Results of the evaluations `baseline` and `final`; a resumed run restores them."""
        self.troubles = Troubles(config.workflow, self.parts.train_tasks, self.parts.wrong_replies)
        if config.environment.is_judged:
            lowest = lowest_reward(config.reward.rule, config.reward.options)
            for message in self.troubles.failing_pays(lowest, "reward.rule"):
                self.console.line(message)
        self._counters = Counters(self.parts.engine, self.parts.vision)
        self._began = time.monotonic()
        self._seconds_before = 0.0
        """Seconds of earlier processes of this run, until their checkpoint."""

    def _opening(self, sink: str) -> Opening:
        folder = self.folder
        first = steps_done(folder.checkpoints)
        return Opening.of(folder.path, sink, self.config.model_dump(mode="json"), first, folder.resumed)

    def new_learner(self) -> LearnerGroup:
        """Makes the learners, see `build.new_learners`."""
        return new_learners(self._absolute, self.parts)

    def resume(self, learner: LearnerGroup) -> int:
        """Restores the newest checkpoint; returns the steps done, 0 for a new run.

        Raises ConfigError when it has done more than `train.steps`, and CheckpointError when it does not fit.
        """
        step, counted = 0, {}
        newest = latest(self.folder.checkpoints)
        if newest is not None:
            step, state = learner.load(newest, self.parts.platform)
            if step > self.config.train.steps:
                raise ConfigError(
                    f"train.steps: {newest} has done {step} steps already, more than {self.config.train.steps}; "
                    "ask for at least as many, or start a new run with another run.dir"
                )
            try:
                self.parts.train_tasks.load_state_dict(needed(newest, state, "tasks", dict))
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"checkpoint {newest}: {error}") from error
            self.evaluations = needed(newest, state, "evaluations", dict)
            # earlier releases wrote neither
            self._seconds_before, counted = state.get("seconds", 0.0), state.get("counters", {})
            self.troubles.told_before(learner)
            self.console.line(f"resumed from {newest} after {step} steps")
            if not has_checksums(newest):
                self.console.trouble(f"{newest} is of an earlier release and has no checksums: damage may go unnoticed")
            if (before := self.folder.before) is not None and (jump := rate_jump(before, self.config, learner.updates)):
                self.console.trouble(jump)
        elif self.folder.resumed:
            self.console.trouble(f"{self.folder.checkpoints} holds no checkpoint: the training begins anew at step 0")
        self._counters.begin(learner, counted)
        self.folder.rewind(step)
        return step

    def guard(self, learner: LearnerGroup) -> EngineGuard:
        """Makes the check of the engines after each update of the weights."""
        parts, room = self.parts, self.config.workflow.context_tokens
        return EngineGuard(parts.engine, learner, Probe(parts.loaded, parts.episodes.renderer, room))

    def rollouts(self, step: int) -> InTurn | Stream:
        """Makes the source of groups for the steps from `step` on."""
        config, parts = self.config, self.parts
        if not config.train.staleness:
            return InTurn(self.rollout, parts.train_tasks, parts.engine)
        assert parts.world is not None, "`build` lets no other run be asynchronous"
        episodes = Episodes(
            parts.workflow,
            parts.engine,
            config.rollout.group_size,
            parts.train_sampling,
            config.rollout.max_failed_share,
            self.has_spread,
            self.algorithm.selection.extra_groups,
        )
        schedule = Schedule(config.rollout.groups, config.train.staleness, config.train.steps, step)
        return Stream(episodes, parts.train_tasks, schedule, parts.world.enter_thread)

    def has_spread(self, group: Sequence[Trajectory]) -> bool:
        """Whether the outcomes of a group differ."""
        return has_spread(self.export(group))

    async def rollout(self, step: int) -> Rollout:
        """Plays the groups of a step."""
        config, parts = self.config, self.parts
        played = await collect(
            parts.train_tasks.next,
            config.rollout.groups,
            parts.workflow,
            parts.engine,
            config.rollout.group_size,
            parts.train_sampling,
            f"step{step}",
            config.rollout.max_failed_share,
            self.has_spread,
            self.algorithm.selection.extra_groups,
        )
        parts.engine.sleep()  # the learner needs the memory now
        return played

    def export(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """Samples of complete groups, with their group rewards."""
        workflow = self.config.workflow
        return export(
            self.group_rewards.added(trajectories),
            workflow.export_style,
            workflow.reward_mode,
            workflow.turn_discount,
            str(self.parts.loaded.folder),
        )

    async def evaluate(self, name: str, step: int, between: Callable[[str], None] = lambda _: None) -> dict[str, float]:
        """Evaluates, shows and records; returns the means over all tasks. `between` batches may end it by raising."""
        evaluation = Evaluation(self.config, self.parts, f"{name}{step}")
        while evaluation.missing:
            between("an evaluation" if name == "evaluation" else f"the {name} evaluation")
            played = await evaluation.play()
            if self.config.run.record_every:
                self.folder.trajectories(step, played, {})
        self.console.evaluation(f"{name}, step {step}", means_by_source(evaluation.results))
        return self.record(evaluation, step)

    def record(self, evaluation: Evaluation, step: int) -> dict[str, float]:
        """Writes the metrics of a finished evaluation; returns the means over all tasks."""
        found = means_by_source(evaluation.results)
        flat = {f"eval/{source}/{key}": v for source, values in found.items() for key, v in values.items()}
        self.folder.metrics(step, flat)
        self.sinks.scalars(step, flat)
        for error in evaluation.errors[:3]:
            self.console.line(f"evaluation skipped {error}")
        for message in (*wrong_replies_message(self.troubles.new_wrong_replies()), *evaluation.judgements.messages()):
            self.console.line(f"evaluation: {message}")
        return found["all"]

    def records(self, step: int) -> bool:
        """Whether the trajectories of a step are written."""
        every = self.config.run.record_every
        return bool(every) and step % every == 0

    def report(
        self, step: int, rollout: Rollout, samples: Sequence[Sample], metrics: dict[str, float], learner: LearnerGroup
    ) -> None:
        """Shows and records a finished step."""
        run, trajectories = self.config.run, rollout.trajectories
        metrics = rollout_metrics(trajectories, samples, self.config.workflow) | metrics
        metrics |= throughput(trajectories, metrics["seconds"])
        metrics |= {
            "failed_groups": len(rollout.failed),
            "replaced_groups": rollout.replaced,
            "wrong_replies": (wrong_replies := self.troubles.new_wrong_replies()),
            "skipped_records": len(self.parts.train_tasks.skipped),
            **self._counters.values(learner),
            "peak_memory_gib": self.parts.platform.peak_memory_bytes() / 2**30,
        }
        self.folder.metrics(step, metrics)
        self.sinks.scalars(step, metrics)
        if self.records(step):
            advantages = {sample.id: sample.turn_advantages for sample in samples}
            failed = [trajectory for group in rollout.failed for trajectory in group]
            values = token_values(samples, learner.noted)
            self.folder.trajectories(step, [*trajectories, *failed], advantages, values)
        for message in (*wrong_replies_message(wrong_replies), *self.troubles.of_step(rollout, learner)):
            self.console.trouble(f"step {step}: {message}")
        if run.show_every and step % run.show_every == 0:
            self.console.trajectory(trajectories[0])
            self.sinks.trajectory(step, trajectories[0])
        self.console.step(step, metrics, trajectories[0])

    def save(self, steps: int, learner: LearnerGroup, tasks: dict[str, Any]) -> Path:
        """Writes a checkpoint. `tasks` is the state of the source of tasks, from which another thread may draw."""
        self.parts.engine.forget_features()  # as `learner.save` does with the learner's
        state = {"tasks": tasks, "evaluations": self.evaluations, "seconds": self.seconds}
        state["counters"] = self._counters.values(learner)
        keep = self.config.run.keep_checkpoints
        return learner.save(self.folder.checkpoints, steps, self.parts.platform, state, keep)

    @property
    def seconds(self) -> float:
        """Seconds of the training so far; in a resumed one without the time that was lost after its checkpoint."""
        return self._seconds_before + time.monotonic() - self._began

    def finish(self) -> dict[str, Any]:
        """Writes the model as a Hugging Face folder and the summary, and shows it."""
        summary = {
            **self.evaluations,
            "steps": self.config.train.steps,
            "train_seconds": round(self.seconds, 1),
            "platform": self.parts.platform.name,
            "versions": software.versions(self.parts.platform),
        }
        export_end(self.parts.loaded, self.config, self.folder.path, summary)
        self.folder.summary(summary)
        self.console.summary(self.evaluations, self.folder.path)
        return summary
