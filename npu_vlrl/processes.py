"""What each process of a run is made of: its device, its model, its engine, its learner."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from npu_vlrl import kernels
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.hardware import Platform, select
from npu_vlrl.learner.algorithm import resolve
from npu_vlrl.learner.group import follow
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.rollout import remote
from npu_vlrl.rollout.free import FreeEngine
from npu_vlrl.rollout.inprocess import InProcessEngine
from npu_vlrl.rollout.rounds import RoundEngine
from npu_vlrl.rollout.serve import serve
from npu_vlrl.rollout.vllm import VllmEngine, import_vllm
from npu_vlrl.sync.world import PeerError, World, join, local_rank, started_processes
from npu_vlrl.types import DataError


def run_engine(config: Config) -> None:
    """The whole life of a process that rank 0 tells what to do: it samples, and learns if `train.learners` is `all`.

    It writes nothing but the model of a `tiny:` path on a machine of its own.

    Raises what `serve` raises.
    """
    platform = prepare(config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the learner still needs this one
    world = join(platform, config.sync.timeout_s)
    ranks = learning_ranks(config, world)

    def new_engine(scratch: Path) -> InProcessEngine:
        own = scratch if scratch.is_dir() else scratch.with_name(f"{scratch.name}.{world.rank}")
        loaded, vision = load(config, own, platform)
        return own_engine(config, platform, loaded, vision)

    if config.train.learners == "all":
        serve(world, new_engine, follow(partial(new_learner, config, platform, ranks), platform))
    else:
        serve(world, new_engine)
    world.close()


def new_learner(config: Config, platform: Platform, ranks: Ranks, policy: Policy, vision: VisionFeatures) -> Learner:
    """One rank's; it begins with the policy of rank 0."""
    ranks.share(policy.trainable().values())
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
    )


def prepare(config: Config) -> Platform:
    """Makes this process ready for models, each process on a device of its own."""
    platform = select()
    platform.set_device(local_rank())
    kernels.use(platform.kernels)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.train.seed)
    if config.rollout.engine == "vllm":
        if started_processes() > 1:
            raise ConfigError("rollout.engine=vllm samples in the learner's process; start one process, not several")
        import_vllm()
    return platform


def load(config: Config, scratch: Path, platform: Platform) -> tuple[LoadedModel, VisionFeatures]:
    loaded = load_model(config.model, scratch, config.train.seed, platform.device(local_rank()))
    return loaded, VisionFeatures(loaded.policy, loaded.processor, config.rollout.feature_cache_mib * 2**20)


def new_engine(
    config: Config,
    platform: Platform,
    world: World | None,
    loaded: LoadedModel,
    vision: VisionFeatures,
    cleanup: ExitStack,
) -> RoundEngine:
    """What this run samples from: this process's engine, or one whose rounds are shared out to other processes.

    Raises what `remote.RemoteEngine` raises when another process cannot begin.
    """
    if world is not None and config.train.learners == "all":
        return remote.LearnersEngine(world, own_engine(config, platform, loaded, vision))
    if world is not None:
        remote_engine = FreeEngine if config.train.staleness else remote.RemoteEngine
        return remote_engine(world, loaded.policy.trainable(), config.sync.bucket_mib * 2**20)
    if config.rollout.engine == "vllm":
        return vllm_engine(config, platform, loaded, cleanup)
    return own_engine(config, platform, loaded, vision)


def own_engine(config: Config, platform: Platform, loaded: LoadedModel, vision: VisionFeatures) -> InProcessEngine:
    new_recorder = platform.recorder if config.rollout.record else lambda: None
    return InProcessEngine(loaded.policy, vision, config.rollout.cache_mib * 2**20, new_recorder)


def learning_ranks(config: Config, world: World | None) -> Ranks:
    """All processes call it as soon as they have met."""
    return Ranks(world.new_group() if world is not None and config.train.learners == "all" else None)


def vllm_engine(config: Config, platform: Platform, loaded: LoadedModel, cleanup: ExitStack) -> VllmEngine:
    """It ends with `cleanup`."""
    with blaming("rollout.engine=vllm"):
        engine = VllmEngine(
            loaded.policy,
            loaded.processor,
            loaded.folder,
            context_tokens=config.workflow.context_tokens,
            cache_bytes=config.rollout.cache_mib * 2**20,
            record=config.rollout.record and platform.recorder() is not None,
            seed=config.train.seed,
        )
    cleanup.callback(engine.close)
    return engine


def join_engines(config: Config, platform: Platform, cleanup: ExitStack) -> World:
    """The engine processes end with `cleanup`."""
    world = join(platform, config.sync.timeout_s)
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
