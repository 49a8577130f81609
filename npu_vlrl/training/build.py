"""Builds the parts of a run from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from npu_vlrl.common.registry import GENERATORS
from npu_vlrl.common.registry import load as load_named
from npu_vlrl.config import Config, ConfigError, SourceConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.data.source import TaskSource
from npu_vlrl.engines import remote
from npu_vlrl.engines.base import RoundEngine
from npu_vlrl.hardware import Platform
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.model.families import TINY, family_of_path
from npu_vlrl.model.inspect import inspect_folder
from npu_vlrl.model.load import LoadedModel, model_folder
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.network.world import World, started_processes
from npu_vlrl.training.processes import (
    config_errors,
    join_engines,
    learning_ranks,
    load,
    new_engine,
    new_learner,
    prepare,
)
from npu_vlrl.types import Environment, Task
from npu_vlrl.workflow.base import Sampling, Workflow
from npu_vlrl.workflow.environments import environments
from npu_vlrl.workflow.environments.formats import Format
from npu_vlrl.workflow.environments.visual_qa import VisualQA
from npu_vlrl.workflow.render import Renderer
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.tools import Toolbox, on_scale
from npu_vlrl.workflow.tools.forms import FORMS, ToolForm
from npu_vlrl.workflow.workflows import workflow_maker

EVALUATION_SEED = 1_000_003
"""Offset of `train.seed` for generated evaluation tasks, so that no training task is among them."""


TEXT_UNIT = 28
"""Pixels along the side of a card in generated images, for a text-only model; for a vision-language model a card is one
image token.
"""


@dataclass(frozen=True)
class Parts:
    """The parts of a run, except the learner."""

    platform: Platform
    loaded: LoadedModel
    vision: VisionFeatures
    engine: RoundEngine
    world: World | None
    """Connections to the other processes; None where this is the only process."""
    ranks: Ranks
    """The ranks that learn together; this process alone where `train.learners` is 1."""
    workflow: Workflow
    episodes: EpisodeParts
    format: Format | None
    """Format in which turns name actions; None where any text is an action."""
    train_tasks: TaskSource
    eval_tasks: list[Task]
    eval_skipped: list[str]
    """Reasons for which records of the evaluation source are left out."""
    train_sampling: Sampling
    eval_sampling: Sampling
    wrong_replies: Callable[[], int] = lambda: 0
    """Number of wrong replies of all judges and tools so far, see `WorkerPool.wrong_replies`."""


def build(config: Config, run_dir: Path, cleanup: ExitStack, draws: bool = True) -> Parts:
    """Builds all parts; processes that they start, and the other ranks, end with `cleanup`. `draws`: tasks of
    `data.train` will be drawn.

    Raises ConfigError or HardwareError, where possible before anything expensive happens; and the errors of
    `remote.RemoteEngine` when another rank cannot begin.
    """
    platform = prepare(config)
    if started_processes() == 1 and not config.model.path.startswith(TINY):
        inspect_folder(config.model.path)  # before data are read; several processes connect first
    algorithm = config.algorithm.resolved()
    algorithm.try_own()
    if algorithm.with_observations and config.workflow.export_style == "individual":
        raise ConfigError(
            "algorithm.loss_mask=false and algorithm.advantage_mask=false are about tokens between turns, and with "
            "workflow.export_style=individual a sample has one turn; set export_style=concat, or both masks to true"
        )
    check_asynchronous(config)
    rollout, evaluation = config.rollout, config.evaluation
    with config_errors("workflow"):
        new_workflow = workflow_maker(config.workflow)
    setting = make_setting(config, cleanup)
    check_setting(config, setting)
    with config_errors("data"):
        train_tasks = task_source(config.data.train, config, config.train.seed, setting.check_gold)
        if draws:
            train_tasks.try_first()  # before a model is loaded and an evaluation played
        eval_tasks, eval_skipped = evaluation_tasks(config, setting.check_gold)
    world = join_engines(config, platform, cleanup) if started_processes() > 1 else None
    ranks = learning_ranks(world)
    with config_errors("model"):
        if world is not None:
            model_folder(config.model.path, run_dir / "model", config.train.seed)  # engines may read it now
            remote.begin(world, run_dir / "model")
        loaded, vision = load(config, run_dir / "model", platform)
        episodes = EpisodeParts.of(setting, loaded)
    with config_errors("workflow"):
        workflow = new_workflow(episodes.renderer, episodes.new_environment, episodes.schemas)
    engine = new_engine(config, platform, world, loaded, vision, run_dir, cleanup)
    return Parts(
        platform,
        loaded,
        vision,
        engine,
        world,
        ranks,
        workflow,
        episodes,
        setting.format(episodes.renderer.opens_thought),
        train_tasks,
        eval_tasks,
        eval_skipped,
        Sampling(rollout.temperature, seed=config.train.seed),
        Sampling(evaluation.temperature, evaluation.top_p, evaluation.top_k, config.train.seed),
        setting.wrong_replies,
    )


@dataclass(frozen=True)
class EpisodeParts:
    """Arguments of a workflow; see `workflow.base.Workflow`."""

    renderer: Renderer
    new_environment: Callable[[], Environment]
    schemas: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, setting: Setting, loaded: LoadedModel) -> EpisodeParts:
        chat = loaded.policy.family.chat
        renderer = Renderer(loaded.tokenizer, loaded.processor, str(loaded.folder), chat=chat)
        schemas, processor, form = setting.schemas, loaded.processor, FORMS[chat.tool_calls]
        if processor is not None and processor.position_scale is not None:
            schemas = [on_scale(schema, processor.position_scale) for schema in schemas]
        return cls(renderer, lambda: setting.new_environment(processor, renderer.opens_thought, form), schemas)


def check_setting(config: Config, setting: Setting) -> None:
    """Raises ConfigError where the algorithm or the warm start needs states or solutions that the environment lacks."""
    name = config.environment.name
    algorithm = config.algorithm.resolved()
    if algorithm.estimator.component.compares_states and not setting.names_states:
        remedy = "give it a method state_key" if config.environment.is_own else "choose a game"
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} compares states, and environment.name={name} does not name "
            f"them; {remedy} or another algorithm.preset"
        )
    if config.warm_start.steps and not setting.shows_solutions:
        raise ConfigError(f"warm_start.steps: environment.name={name} shows no solutions; set warm_start.steps=0")


def check_asynchronous(config: Config) -> None:
    """Raises ConfigError where `train.staleness` has no processes that only sample, or the algorithm does not correct
    for it.
    """
    staleness = config.train.staleness
    if not staleness:
        return
    if started_processes() == 1 or config.train.learners == "all":
        raise ConfigError(
            f"train.staleness={staleness} samples while the learner learns, which takes processes that only sample; "
            "start several with torchrun and fewer train.learners, or set train.staleness=0"
        )
    algorithm = config.algorithm.resolved()
    if staleness > algorithm.tolerated_staleness:
        raise ConfigError(
            f"train.staleness={staleness} trains on tokens of earlier weights, and algorithm.loss={algorithm.loss} "
            "does not correct that here; set algorithm.correction to tis or icepop, or algorithm.loss to decoupled_ppo"
        )


def new_learners(config: Config, parts: Parts) -> LearnerGroup:
    """Makes the learners of this run, one or several, whose KL reference is the current policy."""
    new = partial(new_learner, config, parts.platform, parts.ranks, parts.loaded.policy, parts.vision)
    return LearnerGroup(new, parts.world if parts.ranks.size > 1 else None)


@dataclass(frozen=True)
class Setting:
    """The configured environment, as the rest of a run needs it."""

    new_environment: Callable[[ImageProcessor | None, bool | None, ToolForm], Environment]
    """Makes an environment from the image processor, whether the chat template opens a thought (None: no model), and
    the form of tool calls.
    """
    schemas: Sequence[Mapping[str, Any]] = ()
    """Schemas of the functions that the prompt offers to the policy."""
    names_states: bool = False
    """Whether its `state_key` identifies states."""
    shows_solutions: bool = True
    """Whether a warm start can demonstrate solutions."""
    format: Callable[[bool | None], Format | None] = lambda _: None
    """Format in which turns name actions, by whether the chat template opens a thought; None: any text is an action."""
    check_gold: Callable[[str], None] | None = None
    """Function that raises for a record's answer against which nothing can be judged."""
    wrong_replies: Callable[[], int] = lambda: 0
    """Number of wrong replies of all judges and tools so far, see `WorkerPool.wrong_replies`."""


def make_setting(config: Config, cleanup: ExitStack) -> Setting:
    """Makes the environment's setting; its worker processes end with `cleanup`. Raises ConfigError where it cannot."""
    if config.environment.is_judged:
        return _visual_qa(config, cleanup)
    with config_errors("environment"):
        made = environments(config.environment)
    if made.is_game:
        with config_errors("data"):
            config.check_seeds(True)
    return Setting(
        lambda _, opened, form: made.new(opened),
        names_states=made.names_states,
        shows_solutions=made.is_game,
        format=made.format,
    )


def _visual_qa(config: Config, cleanup: ExitStack) -> Setting:
    reward, workflow = config.reward, config.workflow
    with config_errors("reward"):
        judge = make_judge(reward.rule, reward.options, reward.workers, reward.deadline_s, reward.memory_mib)
    cleanup.callback(judge.close)
    with config_errors("workflow.tools"):
        limits = workflow.tool_workers, workflow.tool_deadline_s, workflow.tool_memory_mib
        toolbox = Toolbox(workflow.tools, *limits)
    cleanup.callback(toolbox.close)
    return Setting(
        lambda processor, _, form: VisualQA(workflow, judge, toolbox, reward.failed_reward, processor, form),
        toolbox.schemas() if workflow.describe_tools else (),
        check_gold=judge.check_gold,
        wrong_replies=lambda: judge.wrong_replies + toolbox.wrong_replies,
    )


def task_source(
    config: SourceConfig, whole: Config, seed: int, check_answer: Callable[[str], None] | None = None
) -> TaskSource:
    """Makes the tasks of one source of the `whole` configuration.

    `check_answer` raises for unusable gold answers of records; those of generated tasks are right by construction.
    """
    if config.generator is not None:
        family = family_of_path(whole.model.path)
        unit = family.vision.token_side if family is not None and family.vision is not None else TEXT_UNIT
        return TaskSource.generated(load_named(GENERATORS, config.generator).generated(whole, seed, unit))
    assert config.path is not None
    if not Path(config.path).exists():
        raise ConfigError(
            f"data: {config.path} does not exist (for the sample problems run `npu-vlrl data geo3k --out DIR` first); "
            "correct the path"
        )
    return TaskSource.from_records(
        Path(config.path),
        seed,
        shuffle=config.shuffle,
        max_skip_share=config.max_skip_share,
        check_answer=check_answer,
        columns=config.columns,
    )


def evaluation_tasks(config: Config, check_answer: Callable[[str], None] | None) -> tuple[list[Task], list[str]]:
    """The first `evaluation.tasks` tasks of `data.eval`, or of the training source where there is none.

    Also returns the reasons for which records between them were left out.
    """
    seed = config.train.seed + EVALUATION_SEED
    source = task_source(config.data.eval or config.data.train, config, seed, check_answer)
    tasks = list(islice(source.all(), config.evaluation.tasks or None))
    return tasks, list(source.skipped.values())
