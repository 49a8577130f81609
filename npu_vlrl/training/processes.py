"""Set-up of each process of a run: its device, its model, its engine, its learner."""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from npu_vlrl import kernels
from npu_vlrl.common.atomic_files import sha256
from npu_vlrl.common.user_file import is_spec
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.engines import remote
from npu_vlrl.engines.asynchronous import AsyncEngine
from npu_vlrl.engines.base import RoundEngine
from npu_vlrl.engines.kind import EngineProcess, Placement, engine_kind
from npu_vlrl.engines.local import LocalEngine
from npu_vlrl.engines.serve import HandlerFactory, serve, weights_by_transfer, weights_from_disk
from npu_vlrl.hardware import Platform, select
from npu_vlrl.learner.group import follow
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.shard import ShardedPolicy
from npu_vlrl.learner.trainer import Learner, LearnerError
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.network.world import PeerError, World, join, leave, own_device, started_processes
from npu_vlrl.sync import files as disk
from npu_vlrl.types import DataError


def run_engine(config: Config) -> None:
    """Runs a process that follows rank 0: it samples, or learns, or both (`train.learners`).

    It writes nothing but the model of a `tiny:` path on another machine than rank 0's.

    Raises the errors of `serve`. After SIGTERM, by which launchers end it, no folders and no workers are left.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        _engine(config)
    except _Terminated as end:
        leave(end.code)


class _Terminated(SystemExit):
    code: int


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # the process is ending already
    raise _Terminated(128 + number)  # the exit code of shells


def _engine(config: Config) -> None:
    platform = prepare(config)
    for number in (signal.SIGINT, signal.SIGHUP):  # both reach every process; the learner still needs this one
        signal.signal(number, signal.SIG_IGN)
    world = join(platform, config.sync.timeout_s, device=device_number(config), learners=learners(config))
    ranks = learning_ranks(world)

    def own_folder(scratch: Path) -> Path:
        return scratch if scratch.is_dir() else scratch.with_name(f"{scratch.name}.{world.rank}")

    with ExitStack() as cleanup:

        def learning(scratch: Path) -> tuple[LocalEngine, HandlerFactory]:
            loaded, vision = load(config, own_folder(scratch), platform)
            learn = partial(new_learner, config, platform, ranks, loaded.policy, vision)
            return engine_of_learner(config, platform, world, loaded, vision, cleanup), follow(learn, platform)

        def sampling(scratch: Path) -> tuple[LocalEngine, HandlerFactory]:
            folder, vision = own_folder(scratch), None
            if engine_kind(config.rollout.engine).has_own_weights:
                loaded = load_model(config.model, folder, config.train.seed, torch.device("meta"))
            else:
                loaded, vision = load(config, folder, platform)
            return local_engine(config, platform, loaded, vision, Placement.ENGINE, cleanup), receiver(config)

        serve(world, learning if world.rank in world.learners else sampling)
        world.close()


def receiver(config: Config) -> HandlerFactory:
    """Makes the handlers by which an engine process gets its weights."""
    return weights_from_disk if config.sync.through == "disk" else weights_by_transfer


def new_learner(config: Config, platform: Platform, ranks: Ranks, policy: Policy, vision: VisionFeatures) -> Learner:
    """Makes the learner of a rank; it begins with the policy of rank 0."""
    gc.collect()  # an earlier learner: FSDP's modules have reference cycles
    _check_own_loss(config, ranks)
    ranks.share(policy.trainable().values())
    shard = partial(ShardedPolicy, ranks=ranks, offload=config.train.offload) if config.train.shard else None
    return Learner(
        policy,
        vision,
        config.algorithm,
        config.optim,
        config.rollout.temperature,
        config.train.steps,
        config.critic,
        ranks,
        platform,
        shard,
    )


def _check_own_loss(config: Config, ranks: Ranks) -> None:
    """Raises LearnerError where a loss from the user's own file is not the same file on every rank."""
    name = config.algorithm.loss
    if name is None or not is_spec(name):
        return
    file = Path(name.rpartition(":")[0]).expanduser().absolute()
    if not ranks.agree(int(sha256(file)[:15], 16)):
        raise LearnerError(f"algorithm.loss: {file} differs between machines; put the same file there for all learners")


def learners(config: Config) -> int:
    """Number of processes that learn. Raises ConfigError when that leaves none to sample."""
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
    """Prepares this process for models: its device, kernels, threads and seed. Raises ConfigError."""
    learners(config)
    platform = select()
    platform.set_device(device_number(config))
    kernels.use(platform.kernels)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.train.seed)
    kind = engine_kind(config.rollout.engine)
    for problem in kind.problems(config, platform, several=started_processes() > 1):
        raise ConfigError(problem)
    kind.prepare()
    return platform


def device_number(config: Config) -> int:
    """Number of this process's device on its machine."""
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
    """Makes the engine of this run: this process's engine, or one whose rounds are distributed over other processes.

    Raises the errors of `remote.RemoteEngine` when another process cannot begin.
    """
    if world is not None and world.all_learn:
        return remote.LearnersEngine(world, engine_of_learner(config, platform, world, loaded, vision, cleanup))
    if world is not None:
        folder = run_dir / disk.FOLDER if config.sync.through == "disk" else None
        if folder is not None:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)  # they are not needed after the run
        remote_engine = AsyncEngine if config.train.staleness else remote.RemoteEngine
        return remote_engine(world, loaded.policy.trainable(), config.sync.bucket_mib * 2**20, folder)
    return local_engine(config, platform, loaded, vision, Placement.ONLY, cleanup)


def engine_of_learner(
    config: Config, platform: Platform, world: World, loaded: LoadedModel, vision: VisionFeatures, cleanup: ExitStack
) -> LocalEngine:
    """The engine of one of several learners. A learner that does not sample has one for its probe and features only."""
    name = None if world.all_learn else "inprocess"
    return local_engine(config, platform, loaded, vision, Placement.LEARNER, cleanup, name)


def local_engine(
    config: Config,
    platform: Platform,
    loaded: LoadedModel,
    vision: VisionFeatures | None,
    placement: Placement,
    cleanup: ExitStack,
    name: str | None = None,
) -> LocalEngine:
    """The engine of this process, of the kind `name`, or else `rollout.engine`. It ends with `cleanup`. Raises
    ConfigError.
    """
    name = name or config.rollout.engine
    process = EngineProcess(config, platform, device_number(config), loaded, vision, placement, cleanup)
    with config_errors(f"rollout.engine={name}"):
        return engine_kind(name).new(process)


def learning_ranks(world: World | None) -> Ranks:
    """The ranks that learn together with this process. All processes call it as soon as they are connected."""
    return Ranks(world.learners_group() if world is not None and len(world.learners) > 1 else None)


def join_engines(config: Config, platform: Platform, cleanup: ExitStack) -> World:
    """Joins the other processes, which end with `cleanup`."""
    world = join(platform, config.sync.timeout_s, device=device_number(config), learners=learners(config))
    cleanup.callback(remote.stop, world)

    def terminated(number: int, frame: object) -> None:
        """Ends the learner with the name of a dead process: torchrun ends all processes as soon as one has failed,
        possibly before the learner has noticed which.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = "it was terminated"
        for channel in remote.channels(world):
            try:
                channel.check_alive()
            except PeerError as error:
                reason = str(error)
        raise SystemExit(f"npu-vlrl: the run failed: {reason}")

    signal.signal(signal.SIGTERM, terminated)
    cleanup.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # the process is ending, and has more to report
    return world


@contextmanager
def config_errors(key: str) -> Iterator[None]:
    """Context in which a ValueError or OSError of a part becomes a ConfigError that names the configuration's `key`."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error
