"""Reports the estimate of a configuration on a device: `npu-vlrl estimate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from npu_vlrl.config import Config, ConfigError
from npu_vlrl.engines.kind import engine_kind
from npu_vlrl.estimate.memory import LIBRARIES, MemoryModel, Moment, Pass, Rollout
from npu_vlrl.estimate.outline import outline_of
from npu_vlrl.estimate.timing import (
    DECODE_SHARE,
    PREFILL_SHARE,
    UPDATE_SHARE,
    decode_seconds,
    prefill_seconds,
    sync_seconds,
    update_seconds,
)
from npu_vlrl.estimate.workload import Episode, largest_episode, passes, plan_of, played
from npu_vlrl.hardware import HardwareError, Peak, Platform, published, select

REMEDIES = {
    "masters": "model.freeze_vision=true, or model.lora.rank=16, or train.shard=true over several learners",
    "moments": "model.lora.rank=16, or train.shard=true over several learners",
    "layers": "model.gradient_checkpointing=true, or a smaller optim.micro_batch_tokens",
    "vision tower": "model.freeze_vision=true, or a smaller model.max_pixels",
    "keys and values": "a smaller rollout.cache_mib",
    "keys and values between turns": "a smaller rollout.cache_mib",
    "reference": "algorithm.kl_coef=0",
    "critic": "critic.backbone=shared",
    "engine's copy": "rollout.engine=inprocess",
    "weights": "a smaller model",
}
"""Settings that make a part smaller."""


@dataclass(frozen=True)
class Device:
    name: str
    peak: Peak | None
    """Peak performance; None where the maker's numbers are unknown."""
    memory: float | None
    """Memory in bytes; None on a device without memory of its own."""


@dataclass(frozen=True)
class Role:
    """A kind of process, and its fullest moments."""

    name: str
    moments: tuple[Moment, ...]

    @property
    def needs(self) -> float:
        """Needed bytes of a device."""
        return max(moment.total for moment in self.moments) + LIBRARIES


@dataclass(frozen=True)
class Estimate:
    device: Device
    parameters: int
    trained: int
    episode: Episode
    episodes: int
    roles: tuple[Role, ...]
    seconds: dict[str, float]
    """Seconds of a step by phase; empty where no peak is known."""

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None on a device without memory of its own."""
        if self.device.memory is None:
            return None
        return all(role.needs <= self.device.memory for role in self.roles)


def named_device(name: str | None) -> Device:
    """A published device, or this machine's first. Raises ConfigError for an unknown name, and HardwareError."""
    if name is not None:
        try:
            found, peak = published(name)
        except HardwareError as error:
            raise ConfigError(f"--device: {error}") from error
        return Device(peak.called or found, peak, peak.memory)
    platform: Platform = select()
    memory = platform.memory()
    return Device(platform.device_name(), platform.peak(), None if memory is None else float(memory.total))


def estimate(
    config: Config,
    device: Device,
    processes: int,
    image_size: tuple[int, int],
    turns: int | None = None,
    sampled: int | None = None,
) -> Estimate:
    """Estimates a run of `processes` processes, each with a device of its own. `image_size` is (width, height) in
    pixels; `turns` and `sampled` tokens of a turn are the configured limits where they are None.

    Raises ConfigError for a configuration that cannot run.
    """
    number = config.train.learners
    learners = processes if number == "all" else number
    if number != "all" and number > 1 and number >= processes:
        raise ConfigError(f"train.learners={number} needs more processes than that; give --devices, or set it to all")
    apart = processes > learners
    engines = processes - learners if apart else learners
    outline = outline_of(config.model)
    episode = largest_episode(config, outline.processor, image_size, turns, sampled)
    play, work = played(config, episode, engines), passes(config, episode, learners)
    vllm = engine_kind(config.rollout.engine).has_own_weights
    beside = {"vllm": vllm and not apart, "sleep": config.rollout.sleep and not apart}
    learning = MemoryModel(outline.policy, replace(plan_of(config, learners), **beside))
    alone = replace(plan_of(config, 0), vllm=vllm, split=config.rollout.tensor_parallel)
    sampling = MemoryModel(outline.policy, alone) if apart else learning
    seconds: dict[str, float] = {}
    if device.peak is not None:
        groups = -(-config.rollout.groups // engines)
        seconds = {
            "reading": prefill_seconds(sampling, episode, groups, play.rows, device.peak),
            "sampling": decode_seconds(sampling, episode, play, device.peak),
            "update": config.algorithm.epochs * update_seconds(learning, work, device.peak, _scorings(config)),
            "new weights": sync_seconds(learning, apart),
        }
    return Estimate(
        device,
        parameters=sum(p.numel() for p in outline.policy.model.parameters()),
        trained=sum(p.numel() for p in outline.policy.trainable().values()),
        episode=episode,
        episodes=config.rollout.groups * config.rollout.group_size,
        roles=_roles(config, learning, sampling, work, play),
        seconds=seconds,
    )


def _roles(
    config: Config, learning: MemoryModel, sampling: MemoryModel, work: Sequence[Pass], play: Rollout
) -> tuple[Role, ...]:
    """One role where every process learns and samples; else two."""
    kept = learning.features(play) if learning.policy.vision_is_frozen else {}
    if sampling is learning:
        cache = {} if learning.plan.sleep else learning.cache(play)
        return (Role("process", (learning.update(work, cache | kept), learning.rollout(play))),)
    travelling = {"weights that travel": 2.0 * config.sync.bucket_mib * 2**20}
    engine = sampling.rollout(play)
    # vLLM is handed a version as a whole
    received = {"weights that travel": learning.base()["weights"]} if sampling.plan.vllm else travelling
    return (
        Role("learner", (learning.update(work, kept | travelling),)),
        Role("engine", (Moment(engine.name, {**engine.parts, **received}),)),
    )


def _scorings(config: Config) -> int:
    """Number of passes without gradients before an update: for the KL reference, a critic, a proximal policy."""
    return len(config.algorithm.needs)


def lines(found: Estimate, processes: int) -> Iterator[str]:
    """Lines of the report."""
    device, episode = found.device, found.episode
    yield f"model: {found.parameters / 1e9:.2f}e9 parameters, {found.trained / 1e9:.3g}e9 trained"
    facts = f", {device.memory / 1e9:.0f} GB" if device.memory else ""
    if device.peak is not None:
        facts += f", {device.peak.flops / 1e12:.0f} TFLOP/s, {device.peak.bandwidth / 1e12:.2f} TB/s"
        facts += f" ({device.peak.source})"
    yield f"devices: {processes} x {device.name}{facts}"
    image = episode.first_image
    yield (
        f"a step: {found.episodes} episodes of {episode.tokens} tokens: {episode.turns} turns of {episode.sampled}"
        + (f", images of {image.n_tokens}" if image else "")
    )
    for role in found.roles:
        yield ""
        yield from _memory(role)
    yield ""
    if found.seconds:
        yield f"seconds of a step: {sum(found.seconds.values()):.1f}"
        yield from (f"  {name:<32} {value:>9.1f}" for name, value in found.seconds.items())
        yield (
            f"  (assumed: {UPDATE_SHARE:.0%} and {PREFILL_SHARE:.0%} of the peak's operations for updates and reading, "
            f"{DECODE_SHARE:.0%} of its bandwidth for sampling; judges and tools take no time)"
        )
    yield from _verdict(found)


def _memory(role: Role) -> Iterator[str]:
    names = list(dict.fromkeys(name for moment in role.moments for name in moment.parts))
    yield f"{'GB on each ' + role.name:<34}" + "".join(f"{moment.name:>22}" for moment in role.moments)
    for name in names:
        sizes = [moment.parts.get(name, 0.0) / 1e9 for moment in role.moments]
        if max(sizes) >= 0.05:
            yield f"  {name:<32}" + "".join(f"{size:>22.1f}" for size in sizes)
    yield f"  {'driver and libraries':<32}" + f"{LIBRARIES / 1e9:>22.1f}" * len(role.moments)
    totals = [(moment.total + LIBRARIES) / 1e9 for moment in role.moments]
    yield f"  {'together':<32}" + "".join(f"{total:>22.1f}" for total in totals)


def _verdict(found: Estimate) -> Iterator[str]:
    memory = found.device.memory
    if memory is None:
        yield "this device has no memory of its own; name another with --device, e.g. --device H200"
        return
    for role in found.roles:
        who = f"{'an' if role.name.startswith('e') else 'a'} {role.name}"
        needs = f"{who} needs {role.needs / 1e9:.1f} of {memory / 1e9:.0f} GB"
        if role.needs <= memory:
            yield f"fits: {needs}"
            continue
        yield f"does not fit: {needs}; what takes most can be made smaller:"
        fullest = max(role.moments, key=lambda moment: moment.total)
        largest = sorted(fullest.parts, key=lambda name: -fullest.parts[name])
        yield from (f"  {name}: {REMEDIES[name]}" for name in [n for n in largest if n in REMEDIES][:3])
