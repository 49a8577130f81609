"""The whole policy loss, of every kind: brute force, and one loss and gradient however a batch is split."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_vlrl.algorithms.metrics import reduce_metrics
from npu_vlrl.kernels import op
from tests.support.losses import policy_loss, token_weights

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
    return token_weights(sample_N, counts, mode, tokens, samples, 7.0, torch.float64)


# --- the whole loss --------------------------------------------------------------------------------------------------

VARIANTS: list[tuple[str, str]] = [
    ("ppo", "off"),
    ("ppo", "tis"),
    ("ppo", "icepop"),
    ("decoupled_ppo", "off"),
    ("gspo", "off"),
    ("gspo", "tis"),
    ("cispo", "off"),
    ("cispo", "icepop"),
    ("reinforce", "off"),
    ("reinforce", "tis"),
]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def token_term(kind: str, ratio: float, advantage: float, logprob: float) -> tuple[float, float]:
    """(loss, its gradient in the token's own logprob) for clip 0.2 / 0.28 and dual clip 3."""
    if kind == "reinforce":
        return -advantage * logprob, -advantage
    if kind == "cispo":
        return -clip(ratio, 0.8, 1.28) * advantage * logprob, -clip(ratio, 0.8, 1.28) * advantage
    objective = min(ratio * advantage, clip(ratio, 0.8, 1.28) * advantage)
    if advantage < 0:
        objective = max(objective, 3 * advantage)
    return -objective, -ratio * advantage if objective == ratio * advantage else 0.0


def weight_of(kind: str, correction: str, ratio: float) -> float:
    """What the disagreement of learner and engine makes of a token, for the bounds 0.5 and 2."""
    if kind == "decoupled_ppo":
        return ratio if ratio <= 2 else 0.0
    if correction == "icepop":
        return ratio if 0.5 <= ratio <= 2 else 0.0
    return min(ratio, 2.0) if correction == "tis" else 1.0


def brute_force(batch: list[dict[str, Any]], mode: str, kind: str, correction: str) -> tuple[float, list[float]]:
    """The definition of each loss and aggregation, sample by sample, and the gradient in each logprob."""
    tokens = sum(len(sample["logprobs"]) for sample in batch)
    total, gradient = 0.0, []
    for sample in batch:
        anchor = sample["behaviour"] if kind in PLAIN and correction == "off" else sample["proximal"]
        logs = [p - b for p, b in zip(sample["logprobs"], anchor, strict=True)]
        if kind == "gspo":
            logs = [sum(logs) / len(logs)] * len(logs)
        divisor = {
            "token-mean": tokens,
            "seq-mean-token-mean": len(logs) * len(batch),
            "seq-mean-token-sum": len(batch),
            "constant": 7.0 * len(batch),
        }[mode]
        for i, log in enumerate(logs):
            p, q = sample["logprobs"][i], sample["reference"][i]
            weight = weight_of(kind, correction, math.exp(sample["proximal"][i] - sample["behaviour"][i]))
            term, slope = token_term(kind, math.exp(log), sample["advantages"][i], p)
            kl = math.exp(q - p) - 1 + p - q
            total += (weight * term + 0.1 * kl - 0.03 * sample["entropy"][i]) / divisor
            gradient.append((weight * slope + 0.1 * (1 - math.exp(q - p))) / divisor)
    return total, gradient


PLAIN = ("ppo", "gspo", "cispo", "reinforce")


def make_batch(lengths: list[int], seed: int) -> list[dict[str, Any]]:
    """Tokens of a sample have advantages of their own, as those of different turns do."""
    rng = random.Random(seed)

    def draw(n: int) -> list[float]:
        return [rng.uniform(-3, 0) for _ in range(n)]

    return [
        {name: draw(n) for name in ("logprobs", "behaviour", "proximal", "reference")}
        | {"entropy": [rng.random() for _ in range(n)]}
        | {"advantages": [rng.choice([-1.5, 0.0, 1.0, 1.0]) for _ in range(n)]}
        for n in lengths
    ]


def run(
    batch: list[dict[str, Any]], split: list[list[int]], mode: str, kind: str, correction: str = "off"
) -> tuple[float, Tensor, Tensor, dict[str, float]]:
    """(loss, gradients of all logprobs and of all entropies in the order of the batch, reduced metrics)."""
    tokens = sum(len(sample["logprobs"]) for sample in batch)
    names = ("logprobs", "entropy")
    leaves = [{name: f64(sample[name], grad=True) for name in names} for sample in batch]
    total, parts = 0.0, []
    anchored = kind == "decoupled_ppo" or correction != "off"
    for micro in split:
        lengths = [len(batch[i]["logprobs"]) for i in micro]
        sample_N = torch.repeat_interleave(torch.arange(len(micro)), torch.tensor(lengths))
        fixed = {
            name: f64([x for i in micro for x in batch[i][name]])
            for name in ("behaviour", "proximal", "reference", "advantages")
        }
        loss, metrics = policy_loss(
            torch.cat([leaves[i]["logprobs"] for i in micro]),
            torch.cat([leaves[i]["entropy"] for i in micro]),
            fixed["behaviour"],
            fixed["advantages"],
            weigh(sample_N, len(micro), mode, tokens, len(batch)),
            loss=kind,
            correction=correction,
            sample_N=sample_N,
            n_samples=len(micro),
            proximal_N=fixed["proximal"] if anchored else None,
            reference_N=fixed["reference"],
            **SETTINGS,
        )
        loss.backward()  # gradients add up in the leaves, as they do in parameters
        total += loss.item()
        parts.append(metrics)
    gradients = [torch.cat([leaf[name].grad for leaf in leaves]) for name in names]  # type: ignore[misc]
    return total, *gradients, reduce_metrics(parts)  # type: ignore[return-value]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    mode=st.sampled_from(MODES),
    variant=st.sampled_from(VARIANTS),
)
def test_equals_brute_force(lengths: list[int], seed: int, mode: str, variant: tuple[str, str]) -> None:
    batch = make_batch(lengths, seed)
    loss, gradient, entropy_gradient, _ = run(batch, [list(range(len(batch)))], mode, *variant)
    expected, expected_gradient = brute_force(batch, mode, *variant)
    assert loss == pytest.approx(expected, abs=1e-12)
    assert gradient.tolist() == pytest.approx(expected_gradient, abs=1e-12)
    assert (entropy_gradient < 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_brute_force_sees_another_loss(variant: tuple[str, str]) -> None:
    """Perturbation: no two variants agree on this batch."""
    batch = make_batch([9, 1, 8, 6], seed=7)
    _, gradient, _, _ = run(batch, [[0, 1, 2, 3]], "token-mean", *variant)
    for other in VARIANTS:
        same = gradient.tolist() == pytest.approx(brute_force(batch, "token-mean", *other)[1], abs=1e-6)
        assert same == (other == variant)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[0] != "cispo" and v != ("gspo", "tis")])
def test_the_gradient_is_that_of_finite_differences(variant: tuple[str, str]) -> None:
    """gspo where the tokens of a sample have one advantage and one weight; cispo's ratio has no gradient by design."""
    n = 6
    generator = torch.Generator().manual_seed(2)
    logprobs, entropy, behaviour, proximal, reference = -3 * torch.rand(5, n, generator=generator, dtype=torch.float64)
    sample_N = torch.tensor([0, 0, 0, 1, 1, 2])
    advantages = f64([1.0, -1.5, 0.5])[sample_N]
    weights = f64([0.3, 0.3, 0.3, 0.2, 0.2, 0.7])

    def function(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
        settings = SETTINGS | {"proximal_N": proximal, "n_samples": 3}
        settings |= {"loss": variant[0], "correction": variant[1]}
        arguments = (logprobs_N, entropy_N, behaviour, advantages, weights)
        return policy_loss(*arguments, sample_N=sample_N, reference_N=reference, **settings)[0]

    assert torch.autograd.gradcheck(function, (logprobs.requires_grad_(), entropy.requires_grad_()))


def test_the_value_of_cispo_is_not_what_its_gradient_belongs_to() -> None:
    """Perturbation of the check above: it does fail where a ratio is held fixed."""

    def function(logprobs_N: Tensor) -> Tensor:
        one = torch.ones(1, dtype=torch.float64)
        return policy_loss(logprobs_N, 0 * one, -one, one, one, loss="cispo", clip_low=0.5, clip_high=0.5)[0]

    assert not torch.autograd.gradcheck(function, (f64([-1.1], grad=True),), raise_exception=False)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_any_split_gives_the_same_loss_and_gradient(mode: str, variant: tuple[str, str]) -> None:
    batch = make_batch([5, 1, 3, 2, 7, 1, 1, 4], seed=3)
    loss, *gradients, metrics = run(batch, [list(range(8))], mode, *variant)
    for split in ([[i] for i in range(8)], [[4], [7, 0, 2], [6, 5, 1, 3]], [[0, 1, 2, 3], [4, 5, 6, 7]]):
        split_loss, *split_gradients, split_metrics = run(batch, split, mode, *variant)
        assert abs(split_loss - loss) < 1e-12
        for found, expected in zip(split_gradients, gradients, strict=True):
            assert (found - expected).abs().max() < 1e-12
        assert split_metrics == pytest.approx(metrics, abs=1e-12)
    bounded = {"clip_low", "clip_high"} & {name for name in metrics if metrics[name] > 0}
    assert len(bounded) == (0 if variant[0] == "reinforce" else 2)


def test_a_sample_cut_in_two_would_not_do_for_gspo() -> None:
    """Perturbation: the ratio of half a sample is another ratio."""
    batch = make_batch([4], seed=1)
    batch[0]["advantages"] = [1.0] * 4
    halves = [{name: values[part] for name, values in batch[0].items()} for part in (slice(0, 2), slice(2, 4))]
    whole, cut = (run(b, [list(range(len(b)))], "token-mean", "gspo")[0] for b in (batch, halves))
    assert abs(whole - cut) > 1e-3


def test_counts_of_one_micro_batch_would_not_do() -> None:
    """Perturbation: dividing by local counts, then averaging, weighs the tokens of short micro-batches more."""
    batch = make_batch([5, 1], seed=3)
    loss = run(batch, [[0, 1]], "token-mean", "ppo")[0]
    local = sum(run([sample], [[0]], "token-mean", "ppo")[0] for sample in batch) / 2
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
        "anchor_kl": (2 - 1 - logs[0] + 0.5 - 1 - logs[2] + 4 - 1 - logs[3]) / 4,
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
    assert reduce_metrics([part(1.0, 0)]) == {"tokens": 0.0}  # no mean and no maximum of nothing


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_micro_batch_without_tokens(variant: tuple[str, str]) -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    loss, metrics = policy_loss(
        logprobs,
        nothing,
        nothing,
        nothing,
        nothing,
        loss=variant[0],
        correction=variant[1],
        proximal_N=nothing,
        reference_N=nothing,
        sample_N=torch.zeros(0, dtype=torch.long),
        n_samples=0,
        **SETTINGS,
    )
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None
    assert all(value.item() == 0 for value in metrics.values())


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", ["logprobs", "advantages", "behaviour"])
def test_nan_is_not_hidden(name: str, kind: str) -> None:
    values = {key: torch.full((2,), -1.0) for key in ("logprobs", "behaviour", "advantages")}
    values[name] = torch.tensor([-1.0, torch.nan])
    loss, metrics = policy_loss(
        values["logprobs"],
        torch.zeros(2),
        values["behaviour"],
        values["advantages"],
        torch.ones(2),
        loss=kind,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
        sample_N=torch.zeros(2, dtype=torch.long),
        n_samples=1,
    )
    assert loss.isnan() or (name, kind) == ("behaviour", "reinforce")  # which does not look at it
    assert name == "advantages" or metrics["gap_max"].isnan()


def test_half_precision_logprobs_are_compared_in_float32() -> None:
    one = torch.ones(1, dtype=torch.float64)
    logprobs = torch.tensor([-1.0], dtype=torch.bfloat16)
    loss, metrics = policy_loss(logprobs, one, -1.001 * one, one, one.float(), clip_low=0.2, clip_high=0.2)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(-math.exp(0.001), abs=1e-6)
    assert metrics["gap_max"].item() == pytest.approx(0.001, rel=1e-3)


def test_kl_needs_a_reference() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match=r"kl_coef is 0.1, which needs the logprobs of a reference"):
        policy_loss(zeros, zeros, zeros, zeros, zeros, clip_low=0.2, clip_high=0.2, kl_coef=0.1)
