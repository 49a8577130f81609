"""The update: packed micro-batches through the policy, one loss, one optimiser."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.kernels.table import op
from npu_vlrl.learner.algorithm import Algorithm
from npu_vlrl.learner.loss import policy_loss, reduce_metrics, token_weights
from npu_vlrl.learner.pack import collate, split
from npu_vlrl.learner.schedule import learning_rate
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import MicroBatch, Sample


class LearnerError(RuntimeError):
    """The update would be wrong, e.g. learner and engine disagree about the policy."""


class Learner:
    """Owns the optimiser of a policy, and the frozen reference that KL is measured against."""

    def __init__(
        self,
        policy: Policy,
        vision: VisionFeatures,
        config: AlgorithmConfig,
        algorithm: Algorithm,
        optim: OptimConfig,
        temperature: float,
        total_steps: int,
    ) -> None:
        """`temperature` is that of the rollouts; `total_steps` is the number of calls of `step` in the whole run."""
        self.policy = policy
        self.vision = vision
        self.config = config
        self.algorithm = algorithm
        self.optim = optim
        self.temperature = temperature
        self.total_updates = total_steps * config.updates * config.epochs
        self.updates = 0
        self.skipped: list[str] = []
        """Samples whose update was left out because something was not finite."""
        self.parameters = policy.trainable()
        self.optimizer = new_optimizer(self.parameters, optim)
        self.reference: Policy | None = None
        self._reference_vision = vision
        if algorithm.kl_coef and policy.has_adapter:
            self.reference = policy
        elif algorithm.kl_coef:
            self.reference = Policy(_frozen_copy(policy), policy.special, policy.n_tokens, policy.merge_size)
            if not policy.vision_is_frozen:  # a frozen tower gives both the same features
                self._reference_vision = VisionFeatures(self.reference, vision.processor, vision.cache_bytes)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Trains on a batch with advantages: `updates` mini-batches of whole groups, `epochs` times.

        Raises LearnerError, with the weights untouched, when the engine's logprobs of the first mini-batch are not the
        learner's.
        """
        self.policy.model.train()
        reference = {} if self.reference is None else self._reference_logprobs(samples)
        groups = list(dict.fromkeys(sample.group for sample in samples))
        parts = [set(groups[i :: self.config.updates]) for i in range(self.config.updates)]
        metrics: list[dict[str, Tensor]] = []
        extra: dict[str, float] = {"skipped_updates": 0.0}
        for _ in range(self.config.epochs):
            for part in parts:
                chosen = [sample for sample in samples if sample.group in part]
                if not chosen:
                    continue
                new, norm = self._update(chosen, reference, check_gap=not metrics)
                if not metrics:
                    extra["logprob_gap"] = reduce_metrics(new)["gap_max"]
                metrics += new
                extra["skipped_updates"] += norm is None
                extra["grad_norm"] = norm if norm is not None else float("nan")
        extra["lr"] = self.optimizer.param_groups[0]["lr"]
        return reduce_metrics(metrics) | extra

    def supervise(self, samples: Sequence[Sample], lr: float) -> float:
        """One step of maximum likelihood on the trained tokens; returns the mean loss a token, in nats."""
        self.policy.model.train()
        tokens = sum(sample.n_trained for sample in samples)
        total = 0.0
        for batch in self._micro_batches(samples):
            logprobs_N, _ = self._score(batch, self.policy, self.vision, 1.0)
            loss = -logprobs_N.sum() / tokens
            loss.backward()
            total += loss.item()
        self._apply(lr)
        return total

    def forget_features(self) -> None:
        """Empties the caches of vision features, as they are when a run is resumed.

        The last bits of a feature depend on the pictures that went through the tower with it.
        """
        for vision in (self.vision, self._reference_vision):
            vision.forget()

    def _update(
        self, samples: Sequence[Sample], reference: dict[str, Tensor], check_gap: bool
    ) -> tuple[list[dict[str, Tensor]], float | None]:
        """Metrics of each micro-batch, and the gradient's norm; None when the update was skipped."""
        trained = {sample.id: sample.n_trained for sample in samples}
        metrics: list[dict[str, Tensor]] = []
        bad: list[str] = []
        total = 0.0
        for batch in self._micro_batches(samples):
            logprobs_N, entropy_N = self._score(batch, self.policy, self.vision, self.temperature)
            weights_N = token_weights(
                batch.sample_N,
                len(batch.sample_ids),
                torch.tensor([trained[i] for i in batch.sample_ids], device=logprobs_N.device),
                self.algorithm.aggregation,
                global_tokens=sum(trained.values()),
                global_samples=len(samples),
                constant=self.config.loss_constant,
            )
            reference_N = torch.cat([reference[i] for i in batch.sample_ids]) if reference else None
            loss, new = policy_loss(
                logprobs_N,
                entropy_N,
                batch.behaviour_logprobs_N,
                batch.advantages_N,
                weights_N,
                clip_low=self.algorithm.clip_low,
                clip_high=self.algorithm.clip_high,
                dual_clip=self.algorithm.dual_clip,
                ratio=self.config.ratio,
                sample_N=batch.sample_N,
                n_samples=len(batch.sample_ids),
                reference_N=reference_N,
                kl_coef=self.algorithm.kl_coef,
                kl_kind=self.config.kl_kind,
                entropy_coef=self.config.entropy_coef,
            )
            finite_N = torch.isfinite(logprobs_N) & torch.isfinite(batch.advantages_N)
            if reference_N is not None:
                finite_N &= torch.isfinite(reference_N)
            bad += [batch.sample_ids[i] for i in batch.sample_N[~finite_N].unique().tolist()]
            loss.backward()
            total += loss.item()
            metrics.append(new)
        if check_gap:
            self._check_gap(metrics)
        lr = learning_rate(self.optim, self.updates, self.total_updates)
        # the gradient of a loss that is not finite may well be: a clamp passes none of it on
        norm = self._apply(lr, skip=bool(bad) or not math.isfinite(total))
        self.updates += 1
        if norm is None:
            self.skipped += bad or [sample.id for sample in samples]
        return metrics, norm

    def _apply(self, lr: float, skip: bool = False) -> float | None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.optim.max_grad_norm)
        usable = not skip and bool(torch.isfinite(norm))
        if usable:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm) if usable else None

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        bins = split([len(sample) for sample in samples], self.optim.micro_batch_tokens)
        return [collate([samples[i] for i in sorted(indices)], self.policy) for indices in bins]

    def _score(
        self, batch: MicroBatch, policy: Policy, vision: VisionFeatures, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [N] of the trained tokens."""
        features = vision.differentiable(batch.images)
        hidden_TH = policy.hidden_packed(
            batch.token_ids_T, batch.position_ids_3T, batch.lengths, [features[i] for i in batch.image_order]
        )
        return op("logprob_entropy")(
            hidden_TH[batch.trained_N],
            policy.head_weight,
            batch.target_ids_N,
            temperature,
            policy.forbidden_V,
            self.optim.logprob_chunk,
        )

    @torch.no_grad()
    def _reference_logprobs(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """[N] of each sample, under the reference policy."""
        assert self.reference is not None
        found: dict[str, Tensor] = {}
        with self.policy.without_adapter() if self.policy.has_adapter else nullcontext():
            for batch in self._micro_batches(samples):
                logprobs_N, _ = self._score(batch, self.reference, self._reference_vision, self.temperature)
                counts = torch.bincount(batch.sample_N, minlength=len(batch.sample_ids)).tolist()
                found |= dict(zip(batch.sample_ids, logprobs_N.split(counts), strict=True))
        return found

    def _check_gap(self, metrics: Sequence[dict[str, Tensor]]) -> None:
        # not max() over all: NaN would hide the gap of another micro-batch; an update with NaN is skipped later
        gap = max((g for part in metrics if (g := float(part["gap_max"])) > self.config.max_logprob_gap), default=0.0)
        if gap:
            self.optimizer.zero_grad(set_to_none=True)
            raise LearnerError(
                f"the learner's log-probability of a token differs by {gap:.3g} from the engine's, more than "
                f"algorithm.max_logprob_gap={self.config.max_logprob_gap}: engine and learner do not hold the same "
                "weights, images or tokens, or their precision is too low"
            )


def new_optimizer(parameters: dict[str, torch.nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )


def _frozen_copy(policy: Policy) -> torch.nn.Module:
    return copy.deepcopy(policy.model).requires_grad_(False).eval()
