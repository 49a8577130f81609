"""The update: packed micro-batches through the policy, one loss, one optimiser; the same for a critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from npu_vlrl.algorithms import AlgorithmConfig
from npu_vlrl.algorithms.aggregation import token_weights
from npu_vlrl.algorithms.component import SCORES
from npu_vlrl.algorithms.metrics import reduce_metrics
from npu_vlrl.algorithms.policy_loss import policy_loss
from npu_vlrl.algorithms.value import reduce_value_metrics
from npu_vlrl.config import CriticConfig, OptimConfig
from npu_vlrl.hardware import Platform, select
from npu_vlrl.kernels.table import op
from npu_vlrl.learner.critic import Critic, backbone
from npu_vlrl.learner.gap import LearnerError, allowed_gap, check_gap, logprob_gap
from npu_vlrl.learner.meter import Meter
from npu_vlrl.learner.optimizer import new_optimizer, step_or_skip
from npu_vlrl.learner.pack import MicroBatch, batches_of_rank
from npu_vlrl.learner.per_token import PerToken
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.schedule import learning_rate
from npu_vlrl.learner.shard import ShardedPolicy
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.routing import Routing
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Sample, Scores

__all__ = ["Learner", "LearnerError"]

Metrics = list[dict[str, Tensor]]


class Learner:
    """Trains a policy: has its optimiser, and the frozen reference of the KL divergence."""

    def __init__(
        self,
        policy: Policy,
        vision: VisionFeatures,
        algorithm: AlgorithmConfig,
        optim: OptimConfig,
        temperature: float,
        total_steps: int,
        critic: CriticConfig | None = None,
        ranks: Ranks | None = None,
        platform: Platform | None = None,
        divide: Callable[[Policy], ShardedPolicy] | None = None,
    ) -> None:
        """`temperature` is that of the rollouts; `total_steps` is the number of calls of `step` in the whole run.

        Each of several `ranks` gets all samples, computes its share, and ends with the results of all. `platform` is
        that of the policy's device; None: the selected one. With `divide`, which shards a policy, a `ShardedPolicy`
        learns, and `policy` stays its full copy.
        """
        self.whole = policy
        self.policy: Policy = divide(policy.copy()) if divide else policy
        own: Callable[[Policy], Policy] = divide or (lambda made: made)
        self.vision = vision
        self.algorithm = algorithm = algorithm.resolved()
        self._terms, self._weights = algorithm.policy_terms(), algorithm.weights
        self._needs, self._with_observations = algorithm.needs, algorithm.with_observations
        self.optim = optim
        self.ranks = ranks or Ranks()
        self.meter = Meter(platform or select(), self.ranks, optim.micro_batch_tokens)
        self.temperature = temperature
        self._in_step = algorithm.updates * algorithm.epochs
        self.total_updates = total_steps * self._in_step
        self.updates = 0
        self.skipped: list[str] = []
        """Ids of the samples whose update was skipped because a value was not finite."""
        self.noted: dict[str, np.ndarray] = {}
        """Log-probability and entropy of each sample's tokens in their first pass of the last step, float32 [2, N]."""
        self._notes: PerToken | None = None
        self._routing: Routing | None = None
        """Replay of the last pass, where routes were recorded."""
        self.parameters = self.policy.trainable()
        self.optimizer = new_optimizer(self.parameters, optim)
        self.reference: Policy | None = None
        self._reference_vision = vision
        if algorithm.needs_reference and policy.has_adapter:
            self.reference = self.policy
        elif algorithm.needs_reference:
            copied = policy.copy()
            copied.model.requires_grad_(False).eval()
            self.reference = own(copied)
            if not policy.vision_is_frozen:  # a frozen tower gives both the same features
                self._reference_vision = VisionFeatures(self.reference, vision.processor, vision.cache_bytes)
        critic = critic or CriticConfig()
        self.critic: Critic | None = None
        if algorithm.needs_critic:
            self.critic = Critic(self.policy, vision, critic, optim, self._hidden, lambda: own(backbone(policy)))
        self._critic_warmup = critic.warmup_steps * self._in_step

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the scores of reference, critic and current policy that the algorithm needs.

        Raises LearnerError when ranks have different samples.
        """
        self._check_ranks(samples)
        self.policy.model.train()
        if self._with_observations:
            samples = [replace(sample, with_observations=True) for sample in samples]
        asked = self._asked()
        if not asked or not samples:
            return list(samples)
        found = PerToken(samples, len(asked))
        for batch in self._in_turn(samples):
            found.add(batch, self._scores(batch))
        rows = found.gathered(self.ranks)
        return [replace(s, scores=Scores(**dict(zip(asked, rows[s.id], strict=True)))) for s in samples]

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], temperature: float) -> dict[str, np.ndarray]:
        """Log-probabilities of each sample's scored tokens under the current policy, float32 [N], by sample.

        The passes do not count, and leave nothing but cached features of images. Raises the errors of `score`.
        """
        self._check_ranks(samples)
        found = PerToken(samples, 1)
        with self.meter.paused(), self.vision.uncounted():
            for batch in self._in_turn(samples):
                found.add(batch, self._score(batch, self.policy, self.vision, temperature)[0][None])
        return {name: values_1N[0] for name, values_1N in found.gathered(self.ranks).items()}

    def step(self, samples: Sequence[Sample], version: int | None = None, note: bool = False) -> dict[str, float]:
        """Trains on a batch with advantages: `updates` mini-batches of whole groups, `epochs` times.

        `version` is that of the weights: `logprob_gap` is over the `logprob_gap_tokens` tokens of that version, and
        left out where there are none. None: tokens of all versions. `note` fills `noted`.
        Raises LearnerError, with the weights unchanged, when the engine's logprobs of the first mini-batch differ from
        the learner's, and when ranks have different samples.
        """
        self._check_ranks(samples)
        self.meter.begin()
        self.policy.model.train()
        if any(getattr(sample.scores, name) is None for sample in samples for name in self._asked()):
            samples = self.score(samples)
        groups = list(dict.fromkeys(sample.group for sample in samples))
        parts = [set(groups[i :: self.algorithm.updates]) for i in range(self.algorithm.updates)]
        metrics: Metrics = []
        critic: Metrics = []
        extra: dict[str, float] = {"skipped_updates": 0.0}
        self._notes = PerToken(samples, 2) if note else None
        for _ in range(self.algorithm.epochs):
            for part in parts:
                chosen = [sample for sample in samples if sample.group in part]
                if not chosen:
                    continue
                new, new_critic, norms = self._update(chosen, version, first=not metrics)
                if not metrics:
                    extra |= logprob_gap(new)
                metrics += new
                critic += new_critic
                extra["skipped_updates"] += None in norms.values()
                extra |= {name: math.nan if norm is None else norm for name, norm in norms.items()}
        extra |= {f"critic/{name}": value for name, value in reduce_value_metrics(critic).items() if critic}
        self.publish()
        self.noted, self._notes = self._notes.gathered(self.ranks) if self._notes else {}, None
        extra["lr"] = self.optimizer.param_groups[0]["lr"]
        return reduce_metrics(metrics) | extra | self.meter.metrics()

    def supervise(self, samples: Sequence[Sample], lr: float) -> float:
        """Takes one step of maximum likelihood on the trained tokens; returns the mean loss a token, in nats."""
        self._check_ranks(samples)
        self.policy.model.train()
        tokens = sum(sample.n_trained for sample in samples)
        total = 0.0
        for batch in self._in_turn(samples):
            logprobs_N, _ = self._score(batch, self.policy, self.vision, 1.0)
            loss = -logprobs_N.sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.ranks.sum_gradients(self.optimizer)
        self._apply(lr)
        self.publish()
        return float(self.ranks.sum(torch.tensor(total, dtype=torch.float64)))

    @property
    def is_divided(self) -> bool:
        """Whether the policy is sharded, see `ShardedPolicy`."""
        return isinstance(self.policy, ShardedPolicy)

    def publish(self) -> None:
        """Copies the weights of a sharded policy to its full copy; every rank calls it."""
        if isinstance(self.policy, ShardedPolicy):
            self.policy.write_into(self.whole)

    def forget_features(self) -> None:
        """Empties the caches of vision features, so that their state equals that of a resumed run.

        The last bits of a feature depend on the images that went through the tower with it.
        """
        for vision in (self.vision, self._reference_vision):
            vision.forget()

    def _update(
        self, samples: Sequence[Sample], version: int | None, first: bool
    ) -> tuple[Metrics, Metrics, dict[str, float | None]]:
        """Takes an optimiser step. Returns the metrics of all ranks' micro-batches, of policy and critic, and the norms
        of the gradients, None for a skipped step. While the critic warms up the policy takes no step.
        """
        learns = self.updates >= self._critic_warmup or self.critic is None
        metrics, critic_metrics, bad = Metrics(), Metrics(), set[str]()
        total = critic_total = 0.0
        tokens = sum(sample.n_trained if self.algorithm.loss_mask else sample.n_scored for sample in samples)
        states = sum(int(sample.credit.critic_N.sum()) for sample in samples if sample.credit is not None)
        for batch in self._in_turn(samples):
            with torch.set_grad_enabled(learns):
                hidden_NH = self._hidden(batch, self.policy, self.vision)
                loss, new, finite_N = self._policy_loss(batch, hidden_NH, tokens, len(samples), version)
                new |= self._routing_metrics()
            broken = batch.sample_N[~finite_N].unique().tolist()  # type: ignore[no-untyped-call]
            bad |= {batch.sample_ids[i] for i in broken}
            total += loss.item()
            metrics.append(new)
            together = self.critic is not None and self.critic.shared
            if learns and not together:
                loss.backward()  # type: ignore[no-untyped-call]
            if self.critic is not None:
                value_loss, new = self.critic.loss(batch, hidden_NH, states)
                critic_total += value_loss.item()
                critic_metrics.append(new)
                (loss + value_loss if learns and together else value_loss).backward()  # type: ignore[no-untyped-call]
        metrics, critic_metrics = self.ranks.gather_metrics(metrics), self.ranks.gather_metrics(critic_metrics)
        if first:
            try:
                check_gap(metrics, allowed_gap(self.algorithm, self.policy.dtype))
            except LearnerError:
                self.optimizer.zero_grad(set_to_none=True)
                self.policy.model.zero_grad(set_to_none=True)
                raise
        # a step that is not finite on one rank is skipped on all
        told = [total, critic_total, *(float(sample.id in bad) for sample in samples)]
        total, critic_total, *flags = self.ranks.sum(torch.tensor(told, dtype=torch.float64)).tolist()
        named = [sample.id for sample, flag in zip(samples, flags, strict=True) if flag]
        # the gradient of a loss that is not finite may be finite: a clamp passes none of it on
        skip = bool(named) or not math.isfinite(total)
        norms: dict[str, float | None] = {}
        if self.critic is not None:
            self.ranks.sum_gradients(self.critic.optimizer)
            norms["critic/grad_norm"] = self.critic.apply(skip or not math.isfinite(critic_total), self.ranks.sum)
        if learns:
            self.ranks.sum_gradients(self.optimizer)
            rate = learning_rate(self.optim, self.updates, self.total_updates, self._in_step)
            norms["grad_norm"] = self._apply(rate, skip)
        self.updates += 1
        if None in norms.values():
            self.skipped += named or [sample.id for sample in samples]
        return metrics, critic_metrics, norms

    def _policy_loss(
        self, batch: MicroBatch, hidden_NH: Tensor, tokens: int, samples: int, version: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Returns the loss, its metrics, and whether each scored token is finite. `tokens` and `samples` count those of
        the update.
        """
        algorithm = self.algorithm
        logprobs_N, entropy_N = self._logprobs(batch, self.policy, hidden_NH, self.temperature)
        if self._notes is not None:
            self._notes.add(batch, torch.stack([logprobs_N, entropy_N]))
        # without observations every scored token is trained, and none needs to be selected
        pick = batch.sampled_N if self._with_observations and algorithm.loss_mask else slice(None)
        n_samples = len(batch.sample_ids)
        sample_N = batch.sample_N[pick]
        trained_S = torch.bincount(sample_N, minlength=n_samples).to(torch.float32)
        loss, metrics = policy_loss(
            logprobs_N[pick],
            entropy_N[pick],
            batch.behaviour_N[pick],
            batch.advantages_N[pick],
            token_weights(self._weights, sample_N, trained_S, tokens, samples),
            self._terms,
            sample_N=sample_N,
            n_samples=n_samples,
            proximal_N=None if batch.proximal_N is None else batch.proximal_N[pick],
            reference_N=None if batch.reference_N is None else batch.reference_N[pick],
            sampled_N=batch.sampled_N[pick],
            current_N=batch.is_of(version)[pick],
        )
        finite_N = torch.isfinite(logprobs_N) & torch.isfinite(batch.advantages_N)
        if batch.reference_N is not None:
            finite_N &= torch.isfinite(batch.reference_N)
        return loss, metrics, finite_N

    def _routing_metrics(self) -> dict[str, Tensor]:
        """`router_changed`: the share of layers in which a token's router would have chosen other experts."""
        if self.policy.routes_shape is None:
            return {}
        nothing = torch.zeros((), device=self.policy.device)
        changed, tokens = (nothing, nothing) if self._routing is None else self._routing.changed()
        return {"router_changed_sum": changed, "router_changed_tokens": tokens}

    def _apply(self, lr: float, skip: bool = False) -> float | None:
        return step_or_skip(self.optimizer, self.optim.max_grad_norm, lr, skip, self.ranks.sum)

    def _in_turn(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        """The micro-batches of this rank; sharded policies are resharded after each."""
        used = (self.policy, self.reference, self.critic.policy if self.critic else None)
        for batch in self._micro_batches(samples):
            yield batch
            for policy in used:
                if policy is not None:
                    policy.divide()

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of this rank; every rank has equally many."""
        ranks = self.ranks.rank, self.ranks.size
        cost = partial(self.meter.cost, self.policy)
        batches = batches_of_rank(samples, self.optim.micro_batch_tokens, self.policy, ranks, cost)
        lengths = {sample.id: len(sample) for sample in samples}
        self.meter.planned(batches, sum(lengths[name] for batch in batches for name in batch.sample_ids))
        return batches

    def _hidden(self, batch: MicroBatch, policy: Policy, vision: VisionFeatures) -> Tensor:
        """Hidden states [N, hidden] that predict the scored tokens."""

        def work() -> Tensor:
            before = vision.referenced, vision.encoded
            found = vision.differentiable(batch.images, policy)
            self.meter.layers(policy, batch, vision, before)
            features = [found[i] for i in batch.image_order]
            if batch.images_elsewhere and isinstance(policy, ShardedPolicy) and policy.tower_is_divided:
                features = [policy.no_picture()]
            self._routing = None if batch.routes_TLk is None else Routing(batch.routes_TLk.to(policy.device))
            hidden_TH = policy.hidden_packed(
                batch.token_ids_T, batch.position_ids_3T, batch.tree, features, self._routing
            )
            return hidden_TH[batch.before_N]

        return policy.gathered(work)

    def _logprobs(
        self, batch: MicroBatch, policy: Policy, hidden_NH: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [N] of the scored tokens.

        Sampled tokens are scored without the forbidden ids. Observations may contain any id, placeholders of images
        included, so their tokens are scored under the model's full distribution.
        """

        def of(at: Tensor | slice, forbidden_V: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden, targets = hidden_NH[at], batch.target_ids_N[at]
            if not len(targets):  # kernels need a row; the result still depends on the layers and the head
                nothing = (hidden + policy.head_weight[:0]).sum(1)
                return nothing, nothing
            chunk = self.optim.logprob_chunk
            score: Callable[..., tuple[Tensor, Tensor]] = op("logprob_entropy")
            return score(hidden, policy.head_weight, targets, temperature, forbidden_V, chunk)

        self.meter.head(policy, len(batch.target_ids_N))

        if not self._with_observations:
            return of(slice(None), policy.forbidden_V)
        sampled, said = of(batch.sampled_N, policy.forbidden_V), of(~batch.sampled_N, None)
        order = torch.cat([batch.sampled_N.nonzero(), (~batch.sampled_N).nonzero()])[:, 0].argsort()
        return torch.cat([sampled[0], said[0]])[order], torch.cat([sampled[1], said[1]])[order]

    def _score(
        self, batch: MicroBatch, policy: Policy, vision: VisionFeatures, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return self._logprobs(batch, policy, self._hidden(batch, policy, vision), temperature)

    def _asked(self) -> list[str]:
        """Names of the `Scores` that the algorithm needs."""
        return [name for name in SCORES if name in self._needs]

    @torch.no_grad()
    def _scores(self, batch: MicroBatch) -> Tensor:
        """Scores of a micro-batch, float32: a row [N] for each of `_asked`."""
        found = []
        for name in self._asked():
            if name == "proximal_N":
                found.append(self._score(batch, self.policy, self.vision, self.temperature)[0])
            elif name == "reference_N":
                assert self.reference is not None
                with self.policy.without_adapter() if self.policy.has_adapter else nullcontext():
                    found.append(self._score(batch, self.reference, self._reference_vision, self.temperature)[0])
            else:
                assert self.critic is not None
                found.append(self.critic.values(batch))
        return torch.stack([values.float() for values in found])

    def _check_ranks(self, samples: Sequence[Sample]) -> None:
        if not self.ranks.same_samples(samples):
            raise LearnerError(
                f"rank {self.ranks.rank} of {self.ranks.size} was given other samples or advantages than another rank; "
                "play the episodes once, and give all ranks the same samples"
            )
