"""Loss and gradient of the learner: those of the published formulas on plain transformers, however a batch is split."""

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from npu_vlrl.learner.pack import collate
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Sample
from tests.support.learning import (
    Probe,
    distance,
    float64_inside,
    load,
    make_learner,
    plain_logprobs,
    plain_model,
    samples_of,
    tiny_folder,
    with_advantage,
)
from tests.support.losses import policy_loss, token_weights
from tests.support.ranks import fork_here

torch.set_num_threads(1)

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
LOSSES = ("ppo", "gspo")
ALL_LOSSES = (*LOSSES, "decoupled_ppo", "cispo", "reinforce")
CONSTANT = 16.0


@cache
def narrow() -> LoadedModel:
    return load()


def probe(loaded: LoadedModel, mode: str, loss: str = "ppo", budget: int = 10_000, **algorithm: Any) -> Probe:
    settings: dict[str, Any] = {"aggregation": mode, "loss": loss, "entropy_coef": 0.02}
    settings |= {"loss_constant": CONSTANT} if mode == "constant" else {}
    settings |= {} if loss == "reinforce" else {"clip_low": 0.2, "clip_high": 0.3}
    settings |= algorithm
    return make_learner(loaded, settings, Probe, micro_batch_tokens=budget)


# --- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "loss"), list(itertools.product(MODES, LOSSES)))
@pytest.mark.parametrize("style", ["concat", "individual"])
def test_micro_batches_change_nothing(mode: str, loss: str, style: Any) -> None:
    loaded = narrow()
    samples = samples_of(loaded, style)
    whole = probe(loaded, mode, loss)
    expected = whole.measure(samples)
    for budget in (50, 1):  # a few micro-batches; every sample alone
        parts = probe(loaded, mode, loss, budget)
        assert distance(parts.measure(samples), expected) < 1e-6
        # terms of both signs cancel, so float32 keeps fewer digits; in float64, below, it is 1e-10
        assert parts.loss == pytest.approx(whole.loss, rel=1e-4)


def test_micro_batches_change_nothing_in_float64() -> None:
    loaded = load()
    loaded.policy.model.double()
    with float64_inside():
        for style, mode, loss in itertools.product(("concat", "individual"), MODES, ALL_LOSSES):
            samples = samples_of(loaded, style)  # type: ignore[arg-type]
            whole, alone = (probe(loaded, mode, loss, budget, kl_coef=0.1) for budget in (10_000, 1))
            assert distance(alone.measure(samples), whole.measure(samples)) < 1e-10
            assert alone.loss == pytest.approx(whole.loss, rel=1e-10)


def test_the_order_of_samples_changes_nothing() -> None:
    loaded = narrow()
    samples = samples_of(loaded)
    expected = probe(loaded, "seq-mean-token-mean", budget=50).measure(samples)
    for seed in range(3):
        shuffled = random.Random(seed).sample(samples, len(samples))
        assert distance(probe(loaded, "seq-mean-token-mean", budget=50).measure(shuffled), expected) < 1e-6


def test_the_comparison_sees_one_changed_advantage() -> None:
    loaded = narrow()
    samples = samples_of(loaded)
    changed = [*samples[:-1], with_advantage(samples[-1], 0.5625)]
    assert distance(probe(loaded, "token-mean").measure(changed), probe(loaded, "token-mean").measure(samples)) > 1e-3


# --- brute force -----------------------------------------------------------------------------------------------------


def surrogate(ratio: Tensor, advantage: float) -> Tensor:
    """PPO with a clip of 0.2 below and 0.3 above, and the presets' dual clip of 3; one token."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
    return objective if advantage >= 0 else torch.maximum(objective, torch.tensor(3.0 * advantage))


def estimate_kl(logprob: Tensor, reference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return logprob - reference
    if kind == "k2":
        return 0.5 * (logprob - reference) ** 2
    return torch.exp(reference - logprob) - 1 - (reference - logprob)


def brute_force(
    loaded: LoadedModel, model: Any, reference: Any, samples: list[Sample], mode: str, kind: str, kl: tuple[str, float]
) -> Tensor:
    """The loss, sample by sample and token by token, through padded plain transformers."""
    with torch.no_grad():
        references = plain_logprobs(reference, loaded, samples)
    per_sample = []
    for sample, (logprobs, entropies), (fixed, _) in zip(
        samples, plain_logprobs(model, loaded, samples), references, strict=True
    ):
        assert sample.credit is not None
        advantage = sample.credit.advantages_N[0]
        behaviour = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
        mean_ratio = torch.exp((logprobs - behaviour).mean())
        terms = []
        for i in range(len(behaviour)):
            r = torch.exp(logprobs[i] - behaviour[i]) if kind == "ppo" else mean_ratio
            penalty = kl[1] * estimate_kl(logprobs[i], fixed[i], kl[0])
            terms.append(-surrogate(r, advantage) + penalty - 0.02 * entropies[i])
        per_sample.append(terms)
    sums = torch.stack([torch.stack(terms).sum() for terms in per_sample])
    lengths = torch.tensor([len(terms) for terms in per_sample])
    return {
        "token-mean": sums.sum() / lengths.sum(),
        "seq-mean-token-mean": (sums / lengths).mean(),
        "seq-mean-token-sum": sums.mean(),
        "constant": (sums / CONSTANT).mean(),
    }[mode]


def wide_pair(kind: str) -> tuple[LoadedModel, Any, Any]:
    """Our model and plain ones in float64: policy and reference. Weights: what is on disk, and that with noise."""
    loaded = load(kind)
    loaded.policy.model.double()
    policy, reference = plain_model(tiny_folder(kind)).double(), plain_model(tiny_folder(kind)).double()
    return loaded, policy, reference


def disturb(model: torch.nn.Module, scale: float) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=scale)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_loss_and_gradient_are_those_of_plain_transformers(kind: str) -> None:
    """No weight here is rounded: counts of tokens and samples are powers of two, other inputs multiples of 1/64."""
    with float64_inside():
        loaded, policy, reference = wide_pair(kind)
        samples = samples_of(loaded, with_images=kind != "qwen3")
        cases = list(itertools.product(MODES, LOSSES)) if kind == "qwen2_5_vl" else [("token-mean", "ppo")]
        for number, (mode, name) in enumerate(cases):
            kl_kind = ("k1", "k2", "k3")[number % 3]
            learner = probe(loaded, mode, name, 50, kl_coef=0.1, kl_kind=kl_kind)
            disturbed = (loaded.policy.model, policy) if number == 0 else ()
            for model in disturbed:  # after the learner has taken its reference
                disturb(model, 0.02)
            if number:
                assert learner.reference is not None
                learner.reference.model.load_state_dict(reference.state_dict())
            found = learner.measure(samples)
            policy.zero_grad()
            loss = brute_force(loaded, policy, reference, samples, mode, name, (kl_kind, 0.1))
            loss.backward()
            expected = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
            assert learner.loss == pytest.approx(loss.item(), rel=1e-10)
            assert distance(found, expected) < 1e-10


def test_brute_force_covers_every_bound_of_the_surrogate() -> None:
    loaded = narrow()
    learner = make_learner(loaded, {"dual_clip": 1.5}, Probe)
    metrics = learner.step(samples_of(loaded))
    assert min(metrics[name] for name in ("clip_low", "clip_high", "dual_clip")) > 0
    assert max(metrics[name] for name in ("clip_low", "clip_high", "dual_clip")) < 1


# --- ranks -----------------------------------------------------------------------------------------------------------


def _one_of_two_ranks(rank: int, folder: str) -> None:
    """Gradients of half of the samples, under the counts of all of them, summed over both ranks."""
    torch.set_num_threads(1)
    loaded = load()  # before ranks exist: only rank 0 would write the model
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    everything = samples_of(loaded)
    mine = everything[:1] if rank else everything[1:]
    for mode in MODES:
        learner = probe(loaded, mode)
        batch = collate(mine, loaded.policy)
        logprobs, entropy = learner._score(batch, loaded.policy, learner.vision, 1.0)
        counts = torch.bincount(batch.sample_N)
        weights = token_weights(batch.sample_N, counts, mode, 32, 4, CONSTANT)
        behaviour, advantages = batch.behaviour_N, batch.advantages_N
        bounds: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "entropy_coef": 0.02}
        loss, _ = policy_loss(logprobs, entropy, behaviour, advantages, weights, **bounds)
        loss.backward()
        total = {}
        for name, parameter in learner.parameters.items():
            total[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            dist.all_reduce(total[name])
        loaded.policy.model.zero_grad()
        if rank == 0:
            save_file(total, Path(folder) / f"{mode}.safetensors")
    dist.destroy_process_group()


def test_two_ranks_add_up_to_one(tmp_path: Path) -> None:
    fork_here(_one_of_two_ranks, 2, tmp_path)
    loaded = narrow()
    for mode in MODES:
        alone = probe(loaded, mode).measure(samples_of(loaded))
        together = load_file(tmp_path / f"{mode}.safetensors")
        assert together.keys() >= alone.keys()
        assert distance({name: together[name] for name in alone}, alone) < 1e-6
