"""The whole configuration as one typed schema. Every field is read somewhere; a test checks it."""

from __future__ import annotations

import os.path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from npu_vlrl.algorithms import AlgorithmConfig
from npu_vlrl.common.fields import Count, CountOrOff, Earned, NonNegative, Positive, Section, Share, expand_home
from npu_vlrl.common.registry import GENERATORS
from npu_vlrl.config.training import CriticConfig, OptimConfig, TrainConfig, WarmStartConfig
from npu_vlrl.types import MAX_REWARD


class RunConfig(Section):
    """Where a run writes."""

    dir: str = "runs/latest"
    """Folder of the run. Relative paths start where the command is started."""
    if_exists: Literal["raise", "resume"] = "raise"
    """What to do when the folder holds a run already: refuse, or go on from its last checkpoint."""
    if_changed: Literal["raise", "accept"] = "raise"
    """What to do when a reward, tool or game of your own is no longer what a resumed run began with: refuse, or go on
    with it and record that in `inputs.json`. Model and data must be the same."""
    log_every: Count = 1
    """Steps between lines of progress."""
    show_every: CountOrOff = 10
    """Steps between sampled trajectories on the screen; 0 disables."""
    record_every: CountOrOff = 1
    """Steps between steps whose trajectories are written to `trajectories.jsonl`; 0 disables."""
    checkpoint_every: CountOrOff = 0
    """Steps between checkpoints; 0 writes only the last one."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept; older ones are removed."""
    sinks: tuple[Literal["tensorboard", "wandb", "swanlab", "trackio"], ...] = ()
    """Where metrics, pictures and the configuration go besides the run folder; see docs/live.md."""

    _home = expand_home("dir")


class LoraConfig(Section):
    """Low-rank adapters through peft."""

    rank: Count = 16
    """Rank of the adapters' matrices."""
    alpha: Positive = 32.0
    """What the adapters say is multiplied by `alpha` / `rank`."""
    targets: tuple[str, ...] | None = None
    """Names of language-model layers; each must match at least one. null takes those of attention and MLP."""


class ModelConfig(Section):
    path: str
    """A Hugging Face folder, or `tiny:` and a model type, such as `tiny:qwen2_5_vl`: a model with random weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights. With `bfloat16` the optimiser steps copies in float32."""
    freeze_vision: bool = False
    """Leaves the vision tower and its projector as they are; features of an image are then computed once."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass: less memory, more time."""
    lora: LoraConfig | None = None
    """Trains adapters instead of the weights; null trains the weights."""
    min_pixels: Count | None = None
    """Images with fewer pixels are enlarged; null takes the number of the model folder."""
    max_pixels: Count | None = None
    """Images with more pixels are made smaller; null takes the number of the model folder."""

    _home = expand_home("path")


class ColumnsConfig(Section):
    """Which columns of a file hold what, where they have not the names of verl's schema (docs/data.md)."""

    prompt: str = "prompt"
    """A list of messages, or a text, which is one message of the user."""
    images: str | None = None
    """Pictures, or one. Without an `<image>` in the prompt they come before its text. Not set: those of `images`."""
    answer: str | None = None
    """The right answer. Not set: `reward_model.ground_truth`."""


class SourceConfig(Section):
    """Where tasks come from: records in a file, or an endless seeded generator."""

    path: str | None = None
    """Parquet, JSON lines, or a Hugging Face dataset folder."""
    generator: str | None = None
    """`photo`, `arrow`, or `episodes`: new seeds for a game or an environment of your own."""
    columns: ColumnsConfig | None = None
    """For a file whose rows are not in verl's schema."""
    shuffle: bool = True
    """Takes the records of a file in another order in each epoch, which `train.seed` decides."""
    max_skip_share: Share = 0.1
    """Share of unusable records (counted and reported) above which the run ends."""

    _home = expand_home("path")

    @field_validator("generator")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in GENERATORS:
            raise ValueError(f"there is no generator {name!r}; choose one of {', '.join(GENERATORS)}")
        return name

    @model_validator(mode="after")
    def _one_source(self) -> SourceConfig:
        if (self.path is None) == (self.generator is None):
            both = "" if self.path is None else "; of two that are given set one to null, as in data.train.path=null"
            raise ValueError(f"give either `path` or `generator`{both}")
        if self.columns is not None and self.path is None:
            raise ValueError("`columns` are those of a file, and a generator has none; remove them")
        return self


class DataConfig(Section):
    train: SourceConfig
    eval: SourceConfig | None = None
    """Where evaluation tasks come from; null takes them from `data.train`, a generator with other seeds."""


ANSWERS = (
    *("feedback", "retry_when", "tools", "describe_tools"),
    *("tool_error_reward", "tool_call_reward", "tool_workers", "tool_deadline_s", "tool_memory_mib"),
)
"""Fields of `workflow` that only `visual_qa` has a use for."""


class WorkflowConfig(Section):
    """What happens in an episode."""

    name: str = "vision_multiturn"
    """`vision_multiturn`, or `path/to/file.py:Class` of your own, see docs/environments.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a workflow of your own."""
    max_turns: Count = 3
    """Turns of the policy in an episode; a tool call is a turn."""
    turn_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """γ of the episode's reward: turn k, from 0, counts `turn_discount`^k times."""
    reward_mode: Literal["best", "last", "sum"] = "best"
    """Reward of an episode: its best answer, its last one, or the sum; what tool calls earned and long turns cost is
    added."""
    export_style: Literal["concat", "individual"] = "concat"
    """One sample an episode, or one a turn with all that came before it as context."""
    retry_when: Annotated[str, Field(pattern=r"^(unsolved|reward_below: *-?\d+(\.\d+)?)$")] = "unsolved"
    """`unsolved`, or `reward_below: X` to retry any answer that scored less than X."""
    feedback: str = "Your answer is not right. Look again, find the mistake and try again."
    """What the model is told after an answer that is retried, unless the judge gives its own feedback."""
    system_prompt: str | None = None
    """Replaces the system message of the task, which must hold no image; null keeps it."""
    tools: tuple[str, ...] = ()
    """Registered names, or `path/to/file.py:function`."""
    describe_tools: bool = True
    """Puts the tools' schemas in the system message."""
    tool_error_reward: Earned = 0.0
    """Reward of a turn whose tool call failed."""
    tool_call_reward: Earned = 0.0
    """Reward of a turn whose tool calls all worked."""
    tool_workers: Count = 1
    """Processes of each tool from a file of your own."""
    tool_deadline_s: Positive = 10.0
    """Seconds after which a call of such a tool is stopped and told to the model as an error."""
    tool_memory_mib: CountOrOff = 4096
    """Resident memory of such a process and of those that it starts, in MiB; one that takes more is stopped, and the
    call is told to the model as an error. 0 disables."""
    turn_tokens: Count = 512
    """Tokens the policy may sample in one turn."""
    overlong_tokens: CountOrOff = 0
    """The last tokens of `turn_tokens`, over which a penalty rises from 0 to `overlong_penalty`; 0 disables."""
    overlong_penalty: Annotated[float, Field(ge=0, le=MAX_REWARD)] = 1.0
    """Taken from the reward of a turn that uses up its `turn_tokens`, and from its episode's."""
    context_tokens: Annotated[int, Field(ge=2)] = 4096
    """Tokens of a whole episode, images included."""

    _home = expand_home("name")

    @field_validator("tools")
    @classmethod
    def _tools_at_home(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(os.path.expanduser, tools))

    @property
    def retry_below(self) -> float | None:
        """The X of `reward_below: X`; None means that unsolved answers are retried."""
        return None if self.retry_when == "unsolved" else float(self.retry_when.partition(":")[2])


class EnvironmentConfig(Section):
    """The world of an episode; all but `name` and `options` is for games."""

    name: str = "visual_qa"
    """`visual_qa`, a registered game, or `path/to/file.py:function` that makes a game or an environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the game or environment itself."""
    format: Literal["no_think", "free_think", "grounding", "worldmodeling", "grounding_worldmodeling"] = "free_think"
    """Form of an answer, see docs/environments.md."""
    answer_tag: Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")] = "answer"
    """Tag around the actions."""
    end_token: str = ""
    """What stands after the answer in the format, e.g. `<eoa>`."""
    max_actions: Count = 3
    """Actions that count in a turn."""
    separator: Annotated[str, Field(min_length=1)] = ","
    """What stands between actions."""
    format_reward: Earned = 0.5
    """Reward of a turn in the right format that names only actions of the game."""
    explain: bool = True
    """Tells rules, actions and format at the start; a warm start can teach them instead."""

    _home = expand_home("name")

    @property
    def is_judged(self) -> bool:
        """The section `reward` judges answers, and the policy may call `workflow.tools`."""
        return self.name == "visual_qa"

    @property
    def is_own(self) -> bool:
        """A file of the user's makes it: a game or an environment, which only the file can tell."""
        return ".py:" in self.name


class RewardConfig(Section):
    rule: str = "math_verify"
    """A registered rule, or `path/to/file.py:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the rule itself, see docs/rewards.md."""
    workers: Count = 1
    """Judge processes."""
    deadline_s: Positive = 5.0
    """Seconds after which a judge is killed; the answer scores `failed_reward` and is counted."""
    memory_mib: CountOrOff = 4096
    """Resident memory of a judge process and of those that it starts, in MiB; one that takes more is killed as a late
    one is. 0 disables."""
    failed_reward: Earned = 0.0
    """Reward of an answer whose judge failed or was killed."""

    _home = expand_home("rule")


class RolloutConfig(Section):
    engine: Literal["inprocess", "vllm"] = "inprocess"
    """`inprocess` samples with the learner's own code; `vllm` has vLLM sample, from a copy of the weights."""
    tensor_parallel: Count = 1
    """Devices over which vLLM splits the model; each engine process has as many."""
    sleep: bool = False
    """vLLM beside a learner gives its memory back while that computes."""
    groups: Count = 16
    """Tasks a step."""
    group_size: Count = 4
    """Trajectories a task."""
    temperature: Positive = 1.0
    """Divides the logits when sampling for training; the learner divides by it, too."""
    feature_cache_mib: CountOrOff = 256
    """Memory for vision features, in MiB; 0 disables."""
    cache_mib: Count = 16384
    """Memory for the keys and values of the turns that are decoded together, in MiB, and again for those that are kept
    between turns. What finds no room waits, or is computed again."""
    graphs: bool = True
    """Captures a decode step as a graph and replays it, where the device can: a launch takes longer than its work."""
    router_replay: bool = True
    """A mixture of experts learns through the experts that sampled, which the in-process engine records."""
    max_failed_share: Share = 0.5
    """Share of failed groups in a step, or of answers that could not be judged, above which the run ends."""


class EvalConfig(Section):
    every: CountOrOff = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    tasks: CountOrOff = 64
    """Tasks evaluated; 0 takes all of a file."""
    answers: Count = 1
    """Times that each task is played; more than one needs a temperature above 0."""
    temperature: NonNegative = 0.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples from the likeliest tokens that together have this probability; 1 disables."""
    top_k: CountOrOff = 0
    """Samples from this many of the likeliest tokens; 0 disables."""


class SyncConfig(Section):
    """How processes talk, where several were started."""

    through: Literal["collective", "disk"] = "collective"
    """How new weights reach engines: a broadcast, or files in the run folder, which every machine must then see."""

    bucket_mib: Count = 256
    """Weights travel to engines in buckets of this many MiB. Learner and engine hold two; an engine process of
    vLLM holds all that is sent."""
    timeout_s: Positive = 1800.0
    """Longest wait for a round of turns, a transfer of weights, or another learner. A process that ended is noticed at
    once."""


class RayConfig(Section):
    """Ray starts the processes, on this machine or on several."""

    processes: CountOrOff = 0
    """Processes of the run, each on a device of its own; 0 leaves Ray out: this process, or those of torchrun."""
    address: Annotated[str, Field(pattern=r"^(local|auto|[^/\s]+:\d+)$")] = "local"
    """`local` starts a cluster of this machine; `auto` or HOST:PORT joins one that runs."""
    cpus: Count = 1
    """Cores that Ray keeps for each process, and its threads where OMP_NUM_THREADS is not set."""
    restarts: CountOrOff = 0
    """Times that all processes are started again from the last checkpoint after one has failed."""


class Config(Section):
    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    train: TrainConfig = TrainConfig()
    workflow: WorkflowConfig = WorkflowConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    optim: OptimConfig = OptimConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvalConfig = EvalConfig()
    sync: SyncConfig = SyncConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.rollout.group_size == 1 and self.train.steps:
            raise ValueError(
                "rollout.group_size=1 gives every trajectory the advantage zero; use at least 2 (or train.steps=0)"
            )
        if self.workflow.turn_tokens >= self.workflow.context_tokens:
            raise ValueError(
                "workflow.turn_tokens must be smaller than workflow.context_tokens; lower it, or raise the other"
            )
        if not self.workflow.overlong_tokens and "overlong_penalty" in self.workflow.changed():
            raise ValueError(
                "workflow.overlong_penalty has no effect without workflow.overlong_tokens; set that, or leave it out"
            )
        if self.warm_start.steps and self.data.train.generator is None:
            raise ValueError("warm_start needs data.train.generator: files show no solutions; set warm_start.steps=0")
        if self.warm_start.steps and self.model.lora is not None:
            raise ValueError("warm_start trains a whole model, no adapter; set warm_start.steps=0 or model.lora=null")
        if self.train.shard and self.train.learners == 1:
            raise ValueError(
                "train.shard divides a learner over several processes, and train.learners=1 has it in one; set "
                "train.learners to their number or to all, or leave train.shard out"
            )
        if self.train.offload and not self.train.shard:
            raise ValueError("train.offload moves what train.shard divides; set train.shard=true, or leave it out")
        if self.evaluation.tasks == 0 and (self.data.eval or self.data.train).generator is not None:
            raise ValueError("evaluation.tasks=0 means all of a file, and a generator is endless; give a number")
        if self.evaluation.answers > 1 and self.evaluation.temperature == 0:
            raise ValueError(
                f"evaluation.answers={self.evaluation.answers} are all the same at evaluation.temperature=0; set a "
                "temperature above 0, or evaluation.answers=1"
            )
        if self.algorithm.updates > self.rollout.groups:
            raise ValueError(
                "algorithm.updates cannot exceed rollout.groups: a mini-batch holds whole groups; lower it, or raise "
                "rollout.groups"
            )
        return self

    @model_validator(mode="after")
    def _one_world(self) -> Config:
        """Nothing is set that the environment has no use for, and the tasks are of its kind."""
        name, judged = self.environment.name, self.environment.is_judged
        if judged:
            idle = [f"environment.{key}" for key in self.environment.changed()]
        else:
            idle = [f"reward.{key}" for key in self.reward.changed()]
            idle += [f"workflow.{key}" for key in self.workflow.changed() if key in ANSWERS]
        if idle:
            raise ValueError(f"environment.name={name} has no use for {', '.join(idle)}; leave that out")
        if not self.environment.is_own:
            self.check_seeds(not judged)
        return self

    def check_seeds(self, needed: bool) -> None:
        """Raises ValueError where tasks are seeds, the generator `episodes`, and must not be, or the reverse."""
        for kind, source in (("train", self.data.train), ("eval", self.data.eval)):
            if source is not None and (source.generator == "episodes") != needed:
                needs, remedy = ("needs", "set it") if needed else ("cannot use", "name another generator or a path")
                raise ValueError(
                    f"environment.name={self.environment.name} {needs} data.{kind}.generator=episodes; {remedy}"
                )
