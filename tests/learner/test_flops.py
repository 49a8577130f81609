"""Operations by the formulas, against those that torch counts while plain transformers and the learner compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from npu_vlrl.hardware import Peak, select
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.learner import meter as meter_module
from npu_vlrl.learner.flops import ModelFlops, seen_pairs
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Sample, Segment, SegmentKind
from tests.support.learning import (
    SMALL_LORA,
    an_image,
    context_segment,
    load,
    make_learner,
    plain_model,
    samples_of,
    tiny_folder,
)
from tests.support.models import plain_patches
from tests.support.trees import grown, last_seer

torch.set_num_threads(1)

PRODUCTS = ("mm", "addmm", "convolution", "convolution_backward")
"""All that the learner multiplies but attention."""

# --- one model -------------------------------------------------------------------------------------------------------


def shown(loaded: LoadedModel) -> Segment:
    """Windows of Qwen2.5-VL are 4 x 4 patches here; those of the first image are cut on both sides."""
    images = [an_image(1, 140, 84), an_image(2, 56, 28)] if loaded.policy.vision is not None else []
    return context_segment(loaded, SegmentKind.PROMPT, "Which way is the top? " * 3, images)


def counted_by_torch(kind: str, loaded: LoadedModel, train: bool, frozen: bool) -> int:
    """Of plain transformers, whose eager attention multiplies every token with every other. A product over groups of
    rows counts as one of all rows with a weight, so experts multiply one by one.
    """
    model, segment = plain_model(tiny_folder(kind)), shown(loaded)
    model.set_attn_implementation("eager")
    if loaded.policy.family.mixture is not None:
        model.set_experts_implementation("eager")
    ids = torch.tensor([segment.token_ids])
    inputs: dict[str, Any] = {}
    if segment.images:
        facts = loaded.policy.family.vision
        assert facts is not None
        for root in facts.roots:
            model.get_submodule(root).requires_grad_(not frozen)
        inputs = dict(plain_patches(tiny_folder(kind), [image.image.rgb for image in segment.images]))
        if facts.positions == "grid":
            inputs["mm_token_type_ids"] = torch.eq(ids, loaded.policy.special.image or -1).int()
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.bmm: without_outer_products})
    with counter, torch.set_grad_enabled(train):
        logits = model(input_ids=ids, **inputs).logits
        if train:
            logits.sum().backward()
    return counter.get_total_flops()


def without_outer_products(a_BMK: Sequence[int], b_BKN: Sequence[int], *_: Any, **__: Any) -> int:
    """transformers 5.10 multiplies positions and frequencies as matrices of one column and of one row."""
    batch, rows, inner = a_BMK
    return 0 if inner == 1 else 2 * batch * rows * inner * b_BKN[-1]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("kind", "frozen"),
    [(kind, frozen) for kind, family in FAMILIES.items() for frozen in ((False, True) if family.vision else (False,))],
)
def test_formulas_give_what_torch_counts(kind: str, frozen: bool, train: bool) -> None:
    loaded = load(kind, freeze_vision=frozen)
    model, segment = ModelFlops(loaded.policy), shown(loaded)
    tokens = len(segment)
    found = model.layers(tokens, tokens**2, train) + model.head(tokens, train) + model.tower(segment.images, train)
    assert found == counted_by_torch(kind, loaded, train, frozen)


def test_an_adapter_has_no_gradient_of_the_weights_beside_it() -> None:
    whole, adapted = (ModelFlops(load(lora=lora).policy) for lora in (None, SMALL_LORA))
    forward = adapted.layers(10, 0, train=False)
    inside = forward - whole.layers(10, 0, train=False)  # of the adapter's own matrices
    assert 0 < inside < 0.2 * forward
    assert adapted.layers(10, 0, train=True) == 2 * forward + inside
    assert whole.layers(10, 0, train=True) == 3 * whole.layers(10, 0, train=False)


@pytest.mark.parametrize("seed", range(8))
def test_pairs_are_those_of_tokens_and_what_they_see(seed: int) -> None:
    tree = grown(seed)
    seer = last_seer(tree)
    places = range(len(seer))
    assert seen_pairs(tree) == sum(key <= query < seer[key] for key in places for query in places)


# --- a whole update --------------------------------------------------------------------------------------------------


def step_under_counter(learner: Learner, samples: Sequence[Sample]) -> tuple[dict[str, float], float]:
    """The metrics of a step, and the products that torch saw."""
    with FlopCounterMode(display=False) as counter:
        metrics = learner.step(samples)
    seen = counter.get_flop_counts()["Global"]
    return metrics, sum(count for operator, count in seen.items() if str(operator).split(".")[1] in PRODUCTS)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_tells_what_torch_counts_but_attention_and_recomputation(kind: str, frozen: bool) -> None:
    loaded = load(kind, freeze_vision=frozen)
    samples = samples_of(loaded, with_images=kind != "qwen3")
    learner = make_learner(loaded, {"kl_coef": 0.1}, micro_batch_tokens=80)
    model = ModelFlops(loaded.policy)
    scored = learner.score(samples)
    batches = learner._micro_batches(samples)
    attention = sum(model.layers(0, seen_pairs(batch.tree), train=True) for batch in batches)
    again = model.head(sum(sample.n_trained for sample in samples), train=False)  # the logits are not kept
    for _ in range(2):
        metrics, seen = step_under_counter(learner, scored)
        images = [image for batch in batches for image in batch.images]
        towers = 0.0 if frozen else sum(model.tower([image], True) - products_only(loaded, image) for image in images)
        assert metrics["update/tflop"] * 1e12 - attention - towers == pytest.approx(seen - again, rel=1e-9)
        assert metrics["update/images_encoded"] == (0 if frozen else len(images))
        assert metrics["update/images_referenced"] == len(images)


def products_only(loaded: LoadedModel, image: Any) -> float:
    """The tower without its attention, by its own parameters: forward, and backward but for the patches' gradient."""
    patches = image.grid[0] * image.grid[1] * image.grid[2]
    total = 0.0
    assert loaded.policy.vision is not None
    for name, parameter in loaded.policy.vision.roots[0].named_parameters():
        if parameter.dim() > 1 and "pos_embed" not in name:
            rows = patches // 4 if "merger" in name else patches
            total += 2.0 * rows * parameter.numel() * (2 if "patch_embed" in name else 3)
    return total


def test_features_that_are_kept_cost_nothing() -> None:
    loaded = load(freeze_vision=True)
    samples = samples_of(loaded)
    learner = make_learner(loaded)
    first, second = (learner.step(samples) for _ in range(2))
    assert (first["update/images_encoded"], second["update/images_encoded"]) == (3, 0)
    (batch,) = learner._micro_batches(samples)
    tower = ModelFlops(loaded.policy).tower(batch.images, train=False)
    assert (first["update/tflop"] - second["update/tflop"]) * 1e12 == pytest.approx(tower, rel=1e-6)


def test_checkpointing_changes_no_count() -> None:
    counts = []
    for checkpointing in (False, True):
        loaded = load(gradient_checkpointing=checkpointing)
        counts.append(step_under_counter(make_learner(loaded), samples_of(loaded)))
    assert counts[0][0]["update/tflop"] == counts[1][0]["update/tflop"]
    assert counts[0][1] < counts[1][1]  # though it did compute more


# --- rates -----------------------------------------------------------------------------------------------------------


def test_rates_are_counts_over_seconds_and_the_published_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    samples = samples_of(loaded)
    now = iter([0.0, 10.0, 14.0])
    monkeypatch.setattr(meter_module, "perf_counter", lambda: next(now))
    platform = CpuPlatform()
    monkeypatch.setattr(CpuPlatform, "peaks", {platform.device_name(): Peak(1e9, 1.0, "a test")})
    learner = make_learner(loaded, micro_batch_tokens=80)
    metrics = learner.step(samples)
    batches = learner._micro_batches(samples)
    computed = sum(len(batch.token_ids_T) for batch in batches)
    assert metrics["update/seconds"] == 4.0
    assert metrics["update/tokens_useful"] == sum(map(len, samples)) and metrics["update/tokens_computed"] == computed
    assert metrics["update/useful_tokens_per_second"] == sum(map(len, samples)) / 4
    assert metrics["update/computed_tokens_per_second"] == computed / 4
    assert metrics["update/tokens_shared"] == 1 - computed / sum(map(len, samples))
    assert metrics["update/micro_batches"] == len(batches) > 1
    assert metrics["update/fill"] == computed / (80 * len(batches)) and metrics["update/padding"] == 0
    assert metrics["update/mfu"] == pytest.approx(metrics["update/tflop"] * 1e12 / (4 * 1e9))


def test_a_device_without_a_published_peak_has_no_utilisation() -> None:
    loaded = load("qwen3")
    assert select().peak() is None
    assert "update/mfu" not in make_learner(loaded).step(samples_of(loaded, with_images=False))
