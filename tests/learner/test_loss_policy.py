"""Weights and the whole policy loss: brute force, and the same loss and gradient however a batch is split."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_vlrl.kernels import op
from npu_vlrl.learner.loss import policy_loss, reduce_metrics, token_weights

torch.set_num_threads(1)

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
SETTINGS: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "kl_coef": 0.1,
    "entropy_coef": 0.03,
}


def f64(values: list[float], grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def weigh(sample_N: Tensor, n: int, mode: Any, tokens: int, samples: int) -> Tensor:
    counts = torch.bincount(sample_N, minlength=n)
    return token_weights(sample_N, n, counts, mode, tokens, samples, 7.0, dtype=torch.float64)


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    """Two samples of 3 and 1 tokens, alone in the batch; then the same ones in a batch of 10 tokens and 4 samples."""
    sample_N = torch.tensor([0, 0, 0, 1])
    assert weigh(sample_N, 2, "token-mean", 4, 2).tolist() == [1 / 4] * 4
    assert weigh(sample_N, 2, "seq-mean-token-mean", 4, 2).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert weigh(sample_N, 2, "seq-mean-token-sum", 4, 2).tolist() == [1 / 2] * 4
    assert weigh(sample_N, 2, "constant", 4, 2).tolist() == pytest.approx([1 / 14] * 4)
    assert weigh(sample_N, 2, "token-mean", 10, 4).tolist() == [1 / 10] * 4
    assert weigh(sample_N, 2, "seq-mean-token-mean", 10, 4).tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 12, 1 / 4])
    assert weigh(sample_N, 2, "seq-mean-token-sum", 10, 4).tolist() == [1 / 4] * 4
    assert weigh(sample_N, 2, "constant", 10, 4).tolist() == pytest.approx([1 / 28] * 4)


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_a_batch_without_tokens_and_of_an_idle_sample(mode: str) -> None:
    assert weigh(torch.zeros(0, dtype=torch.long), 0, mode, 5, 2).shape == (0,)
    assert weigh(torch.tensor([1, 1]), 3, mode, 5, 2).isfinite().all()  # samples 0 and 2 have no trained token


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_constant_needs_a_constant(constant: float | None) -> None:
    with pytest.raises(ValueError, match="needs a positive constant"):
        token_weights(torch.tensor([0]), 1, torch.tensor([1]), "constant", 1, 1, constant)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="'mean'; choose one of token-mean, seq-mean-token-mean"):
        token_weights(torch.tensor([0]), 1, torch.tensor([1]), "mean", 1, 1)  # type: ignore[arg-type]


# --- the whole loss --------------------------------------------------------------------------------------------------


def surrogate(ratio: float, advantage: float) -> float:
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    return -(max(objective, 3 * advantage) if advantage < 0 else objective)


def brute_force(batch: list[dict[str, Any]], mode: str, sequence: bool) -> float:
    """The definition of each aggregation, sample by sample."""
    per_sample = []
    for sample in batch:
        logs = [p - b for p, b in zip(sample["logprobs"], sample["behaviour"], strict=True)]
        if sequence:
            logs = [sum(logs) / len(logs)] * len(logs)
        terms = []
        for log, p, q, entropy in zip(logs, sample["logprobs"], sample["reference"], sample["entropy"], strict=True):
            kl = math.exp(q - p) - 1 + p - q
            terms.append(surrogate(math.exp(log), sample["advantage"]) + 0.1 * kl - 0.03 * entropy)
        per_sample.append(terms)
    everything = [x for terms in per_sample for x in terms]
    if mode == "token-mean":
        return sum(everything) / len(everything)
    if mode == "seq-mean-token-mean":
        return sum(sum(terms) / len(terms) for terms in per_sample) / len(per_sample)
    if mode == "seq-mean-token-sum":
        return sum(everything) / len(per_sample)
    return sum(everything) / 7.0 / len(per_sample)


def make_batch(lengths: list[int], seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def draw(n: int) -> list[float]:
        return [rng.uniform(-3, 0) for _ in range(n)]

    return [
        {name: draw(n) for name in ("logprobs", "behaviour", "reference")}
        | {"entropy": [rng.random() for _ in range(n)], "advantage": rng.choice([-1.5, 0.0, 1.0])}
        for n in lengths
    ]


def run(
    batch: list[dict[str, Any]], split: list[list[int]], mode: str, ratio: Any
) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient of all logprobs and entropies in the order of the batch, reduced metrics)."""
    tokens = sum(len(sample["logprobs"]) for sample in batch)
    names = ("logprobs", "entropy")
    leaves = [{name: f64(sample[name], grad=True) for name in names} for sample in batch]
    total, parts = 0.0, []
    for micro in split:
        lengths = [len(batch[i]["logprobs"]) for i in micro]
        sample_N = torch.repeat_interleave(torch.arange(len(micro)), torch.tensor(lengths))
        loss, metrics = policy_loss(
            torch.cat([leaves[i]["logprobs"] for i in micro]),
            torch.cat([leaves[i]["entropy"] for i in micro]),
            f64([x for i in micro for x in batch[i]["behaviour"]]),
            f64([batch[i]["advantage"] for i in micro])[sample_N],
            weigh(sample_N, len(micro), mode, tokens, len(batch)),
            ratio=ratio,
            sample_N=sample_N,
            n_samples=len(micro),
            reference_N=f64([x for i in micro for x in batch[i]["reference"]]),
            **SETTINGS,
        )
        loss.backward()  # gradients add up in the leaves, as they do in parameters
        total += loss.item()
        parts.append(metrics)
    gradient = torch.cat([leaf[name].grad for leaf in leaves for name in names])  # type: ignore[arg-type, misc]
    return total, gradient, reduce_metrics(parts)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    mode=st.sampled_from(MODES),
    ratio=st.sampled_from(["token", "sequence"]),
)
def test_equals_brute_force(lengths: list[int], seed: int, mode: str, ratio: str) -> None:
    batch = make_batch(lengths, seed)
    loss, _, _ = run(batch, [list(range(len(batch)))], mode, ratio)
    assert loss == pytest.approx(brute_force(batch, mode, ratio == "sequence"), abs=1e-12)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_any_split_gives_the_same_loss_and_gradient(mode: str, ratio: str) -> None:
    batch = make_batch([5, 1, 3, 2, 7, 1, 1, 4], seed=3)
    loss, gradient, metrics = run(batch, [list(range(8))], mode, ratio)
    for split in ([[i] for i in range(8)], [[4], [7, 0, 2], [6, 5, 1, 3]], [[0, 1, 2, 3], [4, 5, 6, 7]]):
        split_loss, split_gradient, split_metrics = run(batch, split, mode, ratio)
        assert abs(split_loss - loss) < 1e-12
        assert (split_gradient - gradient).abs().max() < 1e-12
        assert split_metrics == pytest.approx(metrics, abs=1e-12)


def test_counts_of_one_micro_batch_would_not_do() -> None:
    """Perturbation: dividing by local counts, then averaging, weighs the tokens of short micro-batches more."""
    batch = make_batch([5, 1], seed=3)
    loss, _, _ = run(batch, [[0, 1]], "token-mean", "token")
    local = sum(run([sample], [[0]], "token-mean", "token")[0] for sample in batch) / 2
    assert abs(local - loss) > 1e-3


def test_the_split_reaches_the_weights_of_a_model() -> None:
    """1 x 8 = 8 x 1 through the fused log-probabilities, down to the gradient of the vocabulary matrix."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4, 2, 5, 1, 2, 6]
    n = sum(lengths)
    hidden = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(9, (n,), generator=generator)
    behaviour = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    start = torch.randn(9, 4, generator=generator, dtype=torch.float64)

    def gradient(split: list[list[int]]) -> Tensor:
        weight = start.clone().requires_grad_()
        for micro in split:
            rows = torch.cat([(owner == i).nonzero()[:, 0] for i in micro])
            sample_N = torch.tensor([micro.index(int(owner[row])) for row in rows])
            logprobs, entropy = op("logprob_entropy")(hidden[rows], weight, targets[rows], 1.0, None, 3)
            loss, _ = policy_loss(
                logprobs,
                entropy,
                behaviour[rows],
                advantages[owner[rows]],
                weigh(sample_N, len(micro), "seq-mean-token-mean", n, 8),
                reference_N=behaviour[rows],
                **SETTINGS,
            )
            loss.backward()
        assert weight.grad is not None
        return weight.grad

    whole = gradient([list(range(8))])
    assert whole.abs().max() > 1e-3
    assert (gradient([[i] for i in range(8)]) - whole).abs().max() < 1e-12


def test_no_advantage_anywhere_still_pulls_towards_the_reference() -> None:
    logprobs = f64([-1.0, -2.0, -3.0], grad=True)
    reference = f64([-1.5, -2.0, -2.5])
    loss, metrics = policy_loss(
        logprobs, torch.zeros(3), logprobs.detach(), torch.zeros(3), f64([1.0] * 3), reference_N=reference, **SETTINGS
    )
    loss.backward()
    # d k3 / d logprob = 1 - exp(reference - logprob)
    expected = [0.1 * (1 - math.exp(-0.5)), 0.0, 0.1 * (1 - math.exp(0.5))]
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(expected)
    assert metrics["kl_sum"].item() == pytest.approx(math.exp(-0.5) - 1 + 0.5 + math.exp(0.5) - 1 - 0.5)


def test_metrics_by_hand() -> None:
    """Ratios 2, 1, 0.5, 4 with advantages +, +, -, -: one token cut at the top, one at the bottom, one by dual clip."""
    behaviour = f64([-2.0] * 4)
    logs = [math.log(2), 0.0, -math.log(2), math.log(4)]
    entropy = f64([0.1, 0.2, 0.3, 0.4], grad=True)
    _, metrics = policy_loss(
        behaviour + f64(logs),
        entropy,
        behaviour,
        f64([1.0, 1.0, -1.0, -1.0]),
        f64([1.0] * 4),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    assert not any(value.requires_grad for value in metrics.values())
    expected = {
        "tokens": 4,
        "ratio": 7.5 / 4,
        "ratio_max": 4,
        "clip_low": 1 / 4,
        "clip_high": 1 / 4,
        "dual_clip": 1 / 4,
        "pg_loss": (-1.2 - 1 + 0.8 + 3) / 4,
        "entropy": 0.25,
        "gap": 4 * math.log(2) / 4,
        "gap_max": math.log(4),
        "behaviour_kl": (2 - 1 - logs[0] + 0.5 - 1 - logs[2] + 4 - 1 - logs[3]) / 4,
    }
    assert reduce_metrics([metrics]) == pytest.approx(expected)


def test_maxima_and_means_over_micro_batches() -> None:
    def part(ratio: float, n: int) -> dict[str, Tensor]:
        behaviour = f64([-1.0] * n)
        return policy_loss(
            behaviour + math.log(ratio), behaviour, behaviour, behaviour, behaviour, clip_low=0.2, clip_high=0.2
        )[1]

    reduced = reduce_metrics([part(2.0, 1), part(1.0, 3), part(1.0, 0)])
    assert reduced["tokens"] == 4 and reduced["ratio"] == pytest.approx(5 / 4)
    assert reduced["ratio_max"] == pytest.approx(2)
    assert reduce_metrics([]) == {"tokens": 0.0}
    assert reduce_metrics([part(1.0, 0)])["ratio"] == 0


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_micro_batch_without_tokens(ratio: Any) -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    loss, metrics = policy_loss(
        logprobs,
        nothing,
        nothing,
        nothing,
        nothing,
        reference_N=nothing,
        ratio=ratio,
        sample_N=torch.zeros(0, dtype=torch.long),
        n_samples=0,
        **SETTINGS,
    )
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None
    assert all(value.item() == 0 for value in metrics.values())


@pytest.mark.parametrize("name", ["logprobs", "advantages", "behaviour"])
def test_nan_is_not_hidden(name: str) -> None:
    values = {key: torch.full((2,), -1.0) for key in ("logprobs", "behaviour", "advantages")}
    values[name] = torch.tensor([-1.0, torch.nan])
    loss, metrics = policy_loss(
        values["logprobs"],
        torch.zeros(2),
        values["behaviour"],
        values["advantages"],
        torch.ones(2),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    assert loss.isnan()
    assert name == "advantages" or metrics["gap_max"].isnan()


def test_kl_needs_a_reference() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match=r"kl_coef is 0.1, which needs the logprobs of a reference"):
        policy_loss(zeros, zeros, zeros, zeros, zeros, clip_low=0.2, clip_high=0.2, kl_coef=0.1)
