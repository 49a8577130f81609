"""From a configuration to the parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from npu_vlrl import kernels
from npu_vlrl.config import Config, ConfigError, SourceConfig
from npu_vlrl.data.source import TaskSource
from npu_vlrl.data.synthetic import arrow_task, load_photos, photo_task
from npu_vlrl.hardware import Platform, select
from npu_vlrl.learner.algorithm import Algorithm, resolve
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.rollout.inprocess import InProcessEngine
from npu_vlrl.types import DataError, Task
from npu_vlrl.workflow.render import Renderer
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.tools import Toolbox
from npu_vlrl.workflow.vision_multiturn import Sampling, VisionMultiTurnAgenticWorkflow

EVALUATION_SEED = 1_000_003
"""Added to `train.seed` for generated evaluation tasks, so that no training task is among them."""


@dataclass(frozen=True)
class Parts:
    """Everything a run is made of, but the learner."""

    platform: Platform
    loaded: LoadedModel
    vision: VisionFeatures
    engine: InProcessEngine
    workflow: VisionMultiTurnAgenticWorkflow
    algorithm: Algorithm
    train_tasks: TaskSource
    eval_tasks: list[Task]
    eval_skipped: list[str]
    """Why records of the evaluation source are left out."""
    train_sampling: Sampling
    eval_sampling: Sampling


def build(config: Config, run_dir: Path, cleanup: ExitStack) -> Parts:
    """Builds all parts; processes that they start end with `cleanup`.

    Raises ConfigError or HardwareError before anything expensive happens, as far as that can be known.
    """
    platform = select()
    kernels.use(platform.kernels)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.train.seed)
    algorithm = resolve(config.algorithm)
    rollout, evaluation, reward = config.rollout, config.evaluation, config.reward
    with _blaming("reward"):
        judge = make_judge(reward.rule, reward.options, workers=reward.workers, deadline_s=reward.deadline_s)
    cleanup.callback(judge.close)
    with _blaming("workflow.tools"):
        toolbox = Toolbox(config.workflow.tools)
    with _blaming("data"):
        train_tasks = task_source(config.data.train, config.train.seed, config.model.path, judge.check_gold)
        eval_tasks, eval_skipped = evaluation_tasks(config, judge.check_gold)
    with _blaming("model"):
        loaded = load_model(config.model, run_dir / "model", config.train.seed, platform.device())
        renderer = Renderer(loaded.tokenizer, loaded.processor, template_name=str(loaded.folder))
    vision = VisionFeatures(loaded.policy, loaded.processor, rollout.feature_cache_mib * 2**20)
    workflow = VisionMultiTurnAgenticWorkflow(config.workflow, renderer, judge, toolbox, reward.failed_reward)
    return Parts(
        platform,
        loaded,
        vision,
        InProcessEngine(loaded.policy, vision),
        workflow,
        algorithm,
        train_tasks,
        eval_tasks,
        eval_skipped,
        Sampling(rollout.temperature, rollout.top_p, rollout.top_k, config.train.seed),
        Sampling(evaluation.temperature, evaluation.top_p, evaluation.top_k, config.train.seed),
    )


def task_source(
    config: SourceConfig, seed: int, model_path: str, check_answer: Callable[[str], None] | None = None
) -> TaskSource:
    """`check_answer` refuses gold answers of records; those of generated tasks are right by construction."""
    if config.generator is not None:
        return TaskSource.generated(_generator(config.generator, seed, model_path))
    assert config.path is not None
    if not Path(config.path).exists():
        raise ConfigError(
            f"data: {config.path} does not exist (for the sample problems run `npu-vlrl data geo3k --out DIR` first)"
        )
    return TaskSource.from_records(
        Path(config.path),
        seed,
        shuffle=config.shuffle,
        max_skip_share=config.max_skip_share,
        check_answer=check_answer,
    )


def evaluation_tasks(config: Config, check_answer: Callable[[str], None]) -> tuple[list[Task], list[str]]:
    """The first `evaluation.tasks` tasks of `data.eval`, or of the training source where there is none.

    Also returns why the records between them were left out.
    """
    source = task_source(
        config.data.eval or config.data.train, config.train.seed + EVALUATION_SEED, config.model.path, check_answer
    )
    tasks = list(islice(source.all(), config.evaluation.tasks or None))
    return tasks, list(source.skipped.values())


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """What a part refuses to be made of is the fault of the configuration's `key`; a DataError names its culprit."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _generator(name: str, seed: int, model_path: str) -> Callable[[int], Task]:
    # one merged patch is 28 pixels for Qwen2.5-VL and 32 for Qwen3-VL; the picture is 2 x 2 of them
    unit = 32 if "qwen3_vl" in model_path else 28
    if name == "arrow":
        return lambda index: arrow_task(seed, index, size=2 * unit, card=unit)
    photos = load_photos()
    return lambda index: photo_task(seed, index, photos, size=2 * unit, card=unit)
