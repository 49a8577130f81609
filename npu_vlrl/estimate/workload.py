"""Maximum work of a configuration's step: its episodes, its micro-batches, and the load of its engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npu_vlrl.config import Config, ConfigError
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.engines.inprocess.engine import PREFILL_TOKENS
from npu_vlrl.estimate.memory import Pass, Plan, Rollout
from npu_vlrl.types import Image, ImageInput

TEXT = 256
"""Tokens of a task's text, system message included, where there is room for as many."""
REPLY = 32
"""Tokens of text that answer a turn."""


@dataclass(frozen=True)
class Episode:
    """The largest episode. All episodes are assumed to be as large, so an estimate is an upper bound."""

    opening: int
    """Tokens before the first turn, which the members of a group share."""
    turns: int
    sampled: int
    """Tokens that the policy samples in a turn."""
    reply: int
    """Tokens of the environment's reply between two turns."""
    first_image: ImageInput | None
    later_image: ImageInput | None
    """Image of each reply."""

    @property
    def own(self) -> int:
        """Number of tokens of one member alone."""
        return self.turns * self.sampled + (self.turns - 1) * self.reply

    @property
    def tokens(self) -> int:
        return self.opening + self.own


def largest_episode(
    config: Config,
    processor: ImageProcessor | None,
    image_size: tuple[int, int],
    turns: int | None,
    sampled: int | None,
) -> Episode:
    """Largest episode of a configuration. `image_size` is (width, height) in pixels. An episode that would not fit into
    `workflow.context_tokens` has fewer turns. Where not even one turn fits beside `TEXT`, the turns are as many as fit
    beside `REPLY`, and the text is the rest.

    Raises ConfigError when not even one turn fits.
    """
    workflow = config.workflow
    width, height = image_size
    image = None if processor is None else processor.describe(Image(np.zeros((height, width, 3), np.uint8)))
    later = image if workflow.tools or not config.environment.is_judged else None
    seen = image.n_tokens + 2 if image else 0
    sampled = min(sampled or workflow.turn_tokens, workflow.turn_tokens)
    reply, turns = REPLY + (seen if later else 0), min(turns or workflow.max_turns, workflow.max_turns)
    text, room = TEXT, workflow.context_tokens - seen - sampled
    if room < TEXT:
        later_turns = min(turns - 1, max(0, room - REPLY) // (sampled + reply))
        text = max(REPLY, room - later_turns * (sampled + reply))
    opening, room = text + seen, room - text
    if room < 0:
        raise ConfigError(
            f"workflow.context_tokens={workflow.context_tokens} has no room for {text} tokens of text, an image of "
            f"{seen} and a turn of {sampled}; raise it, or lower model.max_pixels or workflow.turn_tokens"
        )
    fitting = 1 + room // (sampled + reply)
    return Episode(opening, min(turns, fitting), sampled, reply, image, later)


def passes(config: Config, episode: Episode, learners: int) -> list[Pass]:
    """The micro-batches of one learner. The common beginning of a group's members is computed once."""
    room, members = config.optim.micro_batch_tokens, config.rollout.group_size
    group = episode.opening + members * episode.own
    episodes = -(-config.rollout.groups * members // learners)
    if group <= room:
        groups, together = min(room // group, config.rollout.groups), members
    else:
        groups, together = 1, max(1, (room - episode.opening) // episode.own)
    together = min(together, episodes)
    groups = max(1, min(groups, episodes // together))
    return [_pass(episode, groups, together)] * -(-episodes // (groups * together))


def _pass(episode: Episode, groups: int, members: int) -> Pass:
    opening, own = episode.opening, episode.own
    images = [episode.first_image] * groups
    images += [episode.later_image] * (groups * members * (episode.turns - 1))
    return Pass(
        tokens=groups * (opening + members * own),
        path=groups * (opening + members * (opening + own)),
        pairs=groups * (opening * (opening + 1) // 2 + members * (own * opening + own * (own + 1) // 2)),
        scored=groups * members * episode.turns * episode.sampled,
        images=[image for image in images if image],
    )


def played(config: Config, episode: Episode, engines: int) -> Rollout:
    """Load of each of the engines."""
    rollout = config.rollout
    rows = -(-rollout.groups * rollout.group_size // engines)
    groups = -(-rollout.groups // engines)
    first, later = episode.first_image, episode.later_image
    openings = min(groups * episode.opening, max(PREFILL_TOKENS, episode.opening))
    replies = min(rows * episode.reply, max(PREFILL_TOKENS, episode.reply)) if episode.turns > 1 else 0
    patches = max(
        _patches(first) * -(-openings // episode.opening),
        _patches(later) * -(-replies // episode.reply),
    )
    image_tokens = groups * (first.n_tokens if first else 0)
    image_tokens += rows * (episode.turns - 1) * (later.n_tokens if later else 0)
    room = -(-episode.tokens // 128) * 128
    before = rows * (episode.tokens - episode.sampled - episode.reply) if episode.turns > 1 else 0
    return Rollout(rows, room, rows * episode.tokens, before, max(openings, replies), patches, image_tokens)


def _patches(image: ImageInput | None) -> int:
    return image.grid[0] * image.grid[1] * image.grid[2] if image else 0


def plan_of(config: Config, learners: int) -> Plan:
    """Distribution of the configured work. `learners`: how many processes learn; 0 for a process that only samples."""
    return Plan(
        learners,
        shard=config.train.shard and learners > 0,
        offload=config.train.offload,
        reference=config.algorithm.needs_reference,
        separate_critic=config.algorithm.needs_critic and config.critic.backbone == "separate",
        feature_bytes=config.rollout.feature_cache_mib * 2**20,
        cache_bytes=config.rollout.cache_mib * 2**20,
    )
