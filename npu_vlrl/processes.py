"""What each process of a run is made of: its device, its model, its engine, its learner."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from npu_vlrl import kernels
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.hardware import Platform, select
from npu_vlrl.kernels.recording import records
from npu_vlrl.learner.algorithm import resolve
from npu_vlrl.learner.group import follow
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.shard import ShardedPolicy
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.families import family_of_path
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.rollout import remote
from npu_vlrl.rollout.free import FreeEngine
from npu_vlrl.rollout.inprocess import InProcessEngine
from npu_vlrl.rollout.local import LocalEngine
from npu_vlrl.rollout.rounds import RoundEngine
from npu_vlrl.rollout.serve import Duties, serve, weights_by_transfer, weights_from_disk
from npu_vlrl.rollout.vllm import VllmEngine, import_vllm
from npu_vlrl.sync import disk
from npu_vlrl.sync.world import PeerError, World, join, leave, own_device, started_processes
from npu_vlrl.types import DataError


def run_engine(config: Config) -> None:
    """The whole life of a process that rank 0 tells what to do: it samples, or learns, or both (`train.learners`).

    It writes nothing but the model of a `tiny:` path on a machine of its own.

    Raises what `serve` raises. SIGTERM, by which launchers end it, leaves no folders and no workers behind.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        _engine(config)
    except _Terminated as end:
        leave(end.code)


class _Terminated(SystemExit):
    code: int


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # the end is under way
    raise _Terminated(128 + number)  # as a shell would say


def _engine(config: Config) -> None:
    platform = prepare(config)
    for number in (signal.SIGINT, signal.SIGHUP):  # both reach every process; the learner still needs this one
        signal.signal(number, signal.SIG_IGN)
    world = join(platform, config.sync.timeout_s, device=device_number(config), learners=learners(config))
    ranks = learning_ranks(world)

    def own_folder(scratch: Path) -> Path:
        return scratch if scratch.is_dir() else scratch.with_name(f"{scratch.name}.{world.rank}")

    with ExitStack() as cleanup:

        def learning(scratch: Path) -> tuple[LocalEngine, Duties]:
            loaded, vision = load(config, own_folder(scratch), platform)
            learn = partial(new_learner, config, platform, ranks, loaded.policy, vision)
            return engine_of_learner(config, platform, world, loaded, vision, cleanup), follow(learn, platform)

        def sampling(scratch: Path) -> tuple[LocalEngine, Duties]:
            if config.rollout.engine != "vllm":
                return own_engine(config, platform, *load(config, own_folder(scratch), platform)), receiver(config)
            outline = load_model(config.model, own_folder(scratch), config.train.seed, torch.device("meta"))
            workers = config.rollout.tensor_parallel
            return vllm_engine(config, platform, outline, cleanup, workers), receiver(config)

        serve(world, learning if world.rank in world.learners else sampling)
        world.close()


def receiver(config: Config) -> Duties:
    """How an engine process gets its weights."""
    return weights_from_disk if config.sync.through == "disk" else weights_by_transfer


def new_learner(config: Config, platform: Platform, ranks: Ranks, policy: Policy, vision: VisionFeatures) -> Learner:
    """One rank's; it begins with the policy of rank 0."""
    gc.collect()  # one of before: what FSDP makes of modules refers to itself
    ranks.share(policy.trainable().values())
    divide = partial(ShardedPolicy, ranks=ranks, offload=config.train.offload) if config.train.shard else None
    return Learner(
        policy,
        vision,
        config.algorithm,
        resolve(config.algorithm),
        config.optim,
        config.rollout.temperature,
        config.train.steps,
        config.critic,
        ranks,
        platform,
        divide,
    )


def learners(config: Config) -> int:
    """How many processes learn. Raises ConfigError when that leaves none to sample."""
    number, size = config.train.learners, started_processes()
    if number == "all":
        return size
    if number > 1 and number >= size:
        raise ConfigError(
            f"train.learners={number} leaves none of {size} started processes to sample for the learners; start more "
            "than that, or set train.learners=all"
        )
    return number


def prepare(config: Config) -> Platform:
    """Makes this process ready for models, each process on a device of its own."""
    learners(config)
    platform = select()
    platform.set_device(device_number(config))
    kernels.use(platform.kernels)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.train.seed)
    if config.rollout.engine == "vllm":
        _check_vllm(config, platform)
        import_vllm()
    return platform


def _check_vllm(config: Config, platform: Platform) -> None:
    rollout = config.rollout
    family = family_of_path(config.model.path)
    if family is not None and not family.vllm:
        raise ConfigError(
            f"rollout.engine=vllm: nobody has compared vLLM with the learner for {family.title}; set "
            "rollout.engine=inprocess"
        )
    if problem := platform.against_vllm(config.model.dtype):
        raise ConfigError(f"rollout.engine=vllm {problem}")
    several, all_learn = started_processes() > 1, config.train.learners == "all"
    if several and all_learn and rollout.tensor_parallel > 1:
        raise ConfigError(
            f"rollout.tensor_parallel={rollout.tensor_parallel} takes devices that only sample, and with "
            "train.learners=all each process has one device for both; leave one of the two out"
        )
    if several and not all_learn and rollout.sleep:
        raise ConfigError("rollout.sleep is for vLLM beside a learner; set train.learners=all, or leave it out")
    if rollout.sleep and (problem := platform.against_sleep()):
        raise ConfigError(f"rollout.sleep: {problem}")
    if config.model.lora is not None and config.model.dtype == "float32" and platform.device().type != "cpu":
        raise ConfigError(
            f"model.lora with rollout.engine=vllm: on the platform {platform.name} vLLM computes adapters in 16 bits "
            "only; set model.dtype=bfloat16, or rollout.engine=inprocess"
        )


def device_number(config: Config) -> int:
    """Of this process, on its machine."""
    return own_device(learners(config), config.rollout.tensor_parallel)


def load(config: Config, scratch: Path, platform: Platform) -> tuple[LoadedModel, VisionFeatures]:
    loaded = load_model(config.model, scratch, config.train.seed, platform.device(device_number(config)))
    return loaded, VisionFeatures(loaded.policy, loaded.processor, config.rollout.feature_cache_mib * 2**20)


def new_engine(
    config: Config,
    platform: Platform,
    world: World | None,
    loaded: LoadedModel,
    vision: VisionFeatures,
    run_dir: Path,
    cleanup: ExitStack,
) -> RoundEngine:
    """What this run samples from: this process's engine, or one whose rounds are shared out to other processes.

    Raises what `remote.RemoteEngine` raises when another process cannot begin.
    """
    if world is not None and world.all_learn:
        return remote.LearnersEngine(world, engine_of_learner(config, platform, world, loaded, vision, cleanup))
    if world is not None:
        folder = run_dir / disk.FOLDER if config.sync.through == "disk" else None
        if folder is not None:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)  # nobody needs them after the run
        remote_engine = FreeEngine if config.train.staleness else remote.RemoteEngine
        return remote_engine(world, loaded.policy.trainable(), config.sync.bucket_mib * 2**20, folder)
    if config.rollout.engine == "vllm":
        workers = config.rollout.tensor_parallel
        return vllm_engine(config, platform, loaded, cleanup, workers if workers > 1 else 0)
    return own_engine(config, platform, loaded, vision)


def engine_of_learner(
    config: Config, platform: Platform, world: World, loaded: LoadedModel, vision: VisionFeatures, cleanup: ExitStack
) -> LocalEngine:
    """Of one of several. Where it samples, vLLM's worker is a process of its own: in this one are groups already."""
    if config.rollout.engine == "vllm" and world.all_learn:
        return vllm_engine(config, platform, loaded, cleanup, workers=1)
    return own_engine(config, platform, loaded, vision)


def own_engine(config: Config, platform: Platform, loaded: LoadedModel, vision: VisionFeatures) -> InProcessEngine:
    policy = loaded.policy
    record = config.rollout.record and records(platform, policy.device, policy.dtype)
    new_recorder = platform.recorder if record else lambda: None
    return InProcessEngine(loaded.policy, vision, config.rollout.cache_mib * 2**20, new_recorder)


def learning_ranks(world: World | None) -> Ranks:
    """Those that learn with this process. All processes call it as soon as they have met."""
    return Ranks(world.learners_group() if world is not None and len(world.learners) > 1 else None)


def vllm_engine(
    config: Config, platform: Platform, loaded: LoadedModel, cleanup: ExitStack, workers: int
) -> VllmEngine:
    """It ends with `cleanup`. `workers`: see `VllmEngine`; they see this process's devices only."""
    first = device_number(config)
    memory = platform.memory(first)
    if workers and platform.visible_devices_variable is not None:
        own = [platform.physical_id(first + number) for number in range(workers)]
        os.environ[platform.visible_devices_variable] = ",".join(own)
    with blaming("rollout.engine=vllm"):
        engine = VllmEngine(
            loaded.policy,
            loaded.processor,
            loaded.folder,
            device=platform.device(first),
            context_tokens=config.workflow.context_tokens,
            cache_bytes=config.rollout.cache_mib * 2**20,
            record=config.rollout.record and platform.recorder() is not None,
            seed=config.train.seed,
            workers=workers,
            sleeps=config.rollout.sleep,
            device_bytes=None if memory is None else memory.total,
        )
    cleanup.callback(engine.close)
    return engine


def join_engines(config: Config, platform: Platform, cleanup: ExitStack) -> World:
    """The engine processes end with `cleanup`."""
    world = join(platform, config.sync.timeout_s, device=device_number(config), learners=learners(config))
    cleanup.callback(remote.stop, world)

    def terminated(number: int, frame: object) -> None:
        """Torchrun ends all processes as soon as one has failed, maybe before the learner has noticed which."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = "it was terminated"
        for channel in remote.channels(world):
            try:
                channel.check_alive()
            except PeerError as error:
                reason = str(error)
        raise SystemExit(f"npu-vlrl: the run failed: {reason}")

    signal.signal(signal.SIGTERM, terminated)
    cleanup.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # the process ends anyway, and has more to say
    return world


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """What a part refuses to be made of is the fault of the configuration's `key`; a DataError names its culprit."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error
