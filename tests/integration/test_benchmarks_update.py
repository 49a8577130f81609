"""The benchmark of one update: what it counts, that a lever taken away changes no result, and what a peer is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks import setup, update_peer, update_step
from benchmarks.update_floor import Work, floor
from npu_vlrl import kernels
from npu_vlrl.hardware import CpuPlatform
from npu_vlrl.kernels import reference, table
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import Image, ImageInput, Sample

CPU = torch.device("cpu")
ON = CpuPlatform()
TINY = update_step.SHAPES["tiny"]
PROMPT = 4 + 1 + 12 + 1 + 4
"""Text, the opening mark, a picture of 112x84 pixels in squares of 28, the closing mark, text."""
PATCHES = 8 * 6
"""Of such a picture, in squares of 14."""


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    before = table._platform
    yield
    kernels.use(before)


def tiny(**options: bool) -> setup.Model:
    model = setup.model("tiny", CPU, torch.float32, **options)
    model.policy.forbidden_V.zero_()
    return model


@pytest.fixture(scope="module")
def frozen() -> list[Sample]:
    """3 prompts x 3."""
    return update_step.rollouts(tiny(), TINY, 3, 3)


def distinct_prefixes(samples: list[Sample], placeholder: int) -> int:
    """How many tokens are left when equal beginnings, pictures included, stand there once."""
    found = set()
    for sample in samples:
        hashes = iter([image.image.hash for image in sample.images for _ in range(image.n_tokens)])
        keys = tuple(next(hashes) if token == placeholder else token for token in sample.token_ids)
        found |= {keys[: i + 1] for i in range(len(keys))}
    return len(found)


# --- the whole command -----------------------------------------------------------------------------------------------


def test_counts_of_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "b1.json"
    update_step.main(["--size", "tiny", "--prompts", "4", "--ablate", "--repeats", "1", "--out", str(out)])
    results = json.loads(out.read_text())
    samples = update_step.rollouts(tiny(), TINY, 4, 8)
    trained = sum(sample.n_trained for sample in samples)
    assert results["work"] == {
        "referenced": 32 * PROMPT + trained,
        "tokens": 4 * PROMPT + trained,
        "trained": trained,
        "patches": 4 * PATCHES,
    }
    assert results["work"]["tokens"] == distinct_prefixes(samples, tiny().policy.special.image or 0)
    rows = {row.pop("name"): row for row in results["rows"]}
    assert list(rows) == [
        "ours",
        "without prefix sharing",
        "without image dedupe",
        "without fused vision attention",
        "without checkpointing",
    ]
    for name, row in rows.items():
        assert row["tokens"] == (32 if name == "without prefix sharing" else 4) * PROMPT + trained, name
        assert row["patches"] == PATCHES * row["images"], name
        assert row["seconds"] > 0
    assert 4 < rows.pop("without prefix sharing")["images"] < 32  # a group is spread over micro-batches
    assert rows.pop("without image dedupe")["images"] == 32
    assert {row["images"] for row in rows.values()} == {4}
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == 6 and "| out of memory |" not in printed
    assert results["platform"] == "cpu" and results["versions"]["torch"] == version("torch")
    assert results["options"]["micro_batch_tokens"] is None and results["kernels"]["rms_norm"] == "reference"


def test_a_frozen_tower_has_kept_its_features(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--size", "tiny", "--prompts", "2", "--group", "2", "--repeats", "2"]
    results = update_step.main([*few, "--ablate", "--freeze-vision", "--no-checkpointing"])
    assert [row["name"] for row in results["rows"]] == ["ours", "without prefix sharing", "with checkpointing"]
    assert {(row["images"], row["patches"]) for row in results["rows"]} == {(0, 0)}
    assert results["floor"]["tower_tflop"] == 0
    assert "ours" in capsys.readouterr().out


# --- levers ----------------------------------------------------------------------------------------------------------


def result(samples: list[Sample], lever: str | None) -> tuple[float, dict[str, torch.Tensor], setup.Counts]:
    """Loss, gradients and counts of a new model's first update."""
    model = tiny(checkpointing=True)
    ours = update_step.learner(model, 256)
    with setup.gradients(model.policy, update_step.COMPARED) as found, setup.counted(model.policy) as counts:
        if lever is None:
            metrics = update_step.update(ours, samples)
        else:
            with update_step.without(lever, model, samples) as chosen:
                metrics = update_step.update(ours, chosen)
    return metrics["pg_loss"], found, counts


LEVERS = ("prefix sharing", "image dedupe", "fused vision attention", "checkpointing")


@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_changes_no_result(frozen: list[Sample], lever: str) -> None:
    loss, gradients, counts = result(frozen, None)
    other_loss, others, other_counts = result(frozen, lever)
    assert len(gradients) == len(update_step.COMPARED)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))
    assert (counts == other_counts) is (lever not in ("prefix sharing", "image dedupe"))


def test_a_lever_is_back_afterwards(frozen: list[Sample]) -> None:
    model = tiny(checkpointing=True)
    config, hf = model.policy.base.config.vision_config, model.policy.model
    used = config._attn_implementation
    with update_step.without("fused vision attention", model, frozen):
        assert config._attn_implementation == "sdpa"
    assert config._attn_implementation == used != "sdpa"
    with update_step.without("checkpointing", model, frozen):
        assert not hf.is_gradient_checkpointing
    assert hf.is_gradient_checkpointing
    with update_step.without("prefix sharing", model, frozen) as chosen:
        assert {sample.group for sample in chosen} == {sample.id for sample in frozen}
        assert update_step.pack.share is update_step.unshared
    assert update_step.pack.share is not update_step.unshared


def test_fused_ops_are_replaced_by_their_definition(frozen: list[Sample]) -> None:
    model = tiny()

    def fused(*_: Any) -> None: ...

    assert not update_step.applies("fused logprob", model.policy)
    with patch.dict(table._table["logprob_entropy"], {"npu": fused}), patch.object(table, "_platform", "npu"):
        assert update_step.applies("fused logprob", model.policy)
        with update_step.without("fused logprob", model, frozen):
            assert kernels.op("logprob_entropy") is reference.logprob_entropy
        assert kernels.op("logprob_entropy") is fused


# --- rollouts --------------------------------------------------------------------------------------------------------


def test_rollouts_repeat_and_are_those_of_the_policy(frozen: list[Sample]) -> None:
    again = update_step.rollouts(tiny(), TINY, 3, 3)
    assert [sample.segments for sample in again] == [sample.segments for sample in frozen]
    other = update_step.rollouts(tiny(), TINY, 3, 3, seed=1)
    assert all(a.token_ids != b.token_ids for a, b in zip(other, frozen, strict=True))
    lengths = {sample.n_trained for sample in frozen}
    assert len(lengths) > 3 and min(lengths) >= TINY.shortest and max(lengths) <= TINY.longest
    metrics = update_step.update(update_step.learner(tiny(), 256), frozen)
    assert 0 < metrics["gap"] < update_step.DRIFT  # the mean of |x| is 0.8 standard deviations
    assert metrics["logprob_gap"] < 5 * update_step.DRIFT
    advantages = np.array([sample.credit.advantages_N[0] for sample in frozen if sample.credit]).reshape(3, 3)
    assert np.abs(advantages.mean(1)).max() < 1e-6 and advantages.std(1).min() > 0.5


# --- probes ----------------------------------------------------------------------------------------------------------


def test_cosines_tell_gradients_apart() -> None:
    a = {"w": torch.tensor([[3.0, 4.0]]), "v": torch.tensor([1.0])}
    assert setup.cosines(a, a) == pytest.approx({"w": 1.0, "v": 1.0})
    assert setup.cosines(a, a | {"w": torch.tensor([[4.0, 3.0]])})["w"] == pytest.approx(24 / 25)
    with pytest.raises(AssertionError, match="nothing to compare"):
        setup.cosines(a, {"w": a["w"]})


def test_memory_that_runs_out_is_a_result() -> None:
    model = tiny()
    weight = model.policy.head_weight
    weight.grad = torch.ones_like(weight)

    def too_large() -> None:
        raise torch.OutOfMemoryError("no room")

    row = setup.measure("large", too_large, ON, model.policy, 2)
    assert row == {"name": "large", "images": 0, "patches": 0, "tokens": 0, "seconds": None, "peak_gib": None}
    assert weight.grad is None
    results = {
        "rows": [{**row, "seconds": 2.0}, row],
        "work": {"trained": 5, "referenced": 1000},
        "floor": {"seconds": 1.0, "seconds_with_recomputation": 1.6},
        "options": {"checkpointing": False},
    }
    lines = update_step.shown(results).splitlines()
    assert lines[2] == "| large | 0 | 0 | 0 | 5 | 2 | 500 |  | 1 | 2 |"
    assert lines[3] == "| large | 0 | 0 | 0 | 5 | out of memory |  |  |  |  |"


def test_sizes_and_pictures() -> None:
    with pytest.raises(ValueError, match="unknown size '7b'; choose one of 3b, tiny"):
        setup.model("7b", CPU, torch.float32)
    first, second = setup.pictures(2, 112, 84)
    assert first.size == (112, 84) and first != second and first == setup.pictures(1, 112, 84)[0]
    reached = setup.limits(ON, torch.float32)
    assert reached.flops > 1e8 and reached.bandwidth > 1e7


# --- the floor -------------------------------------------------------------------------------------------------------


def test_work_by_hand() -> None:
    image = ImageInput(Image(np.zeros((56, 56, 3), np.uint8)), (1, 4, 4), 4)
    work = Work([3, 2], [[1, 2], [2]], [image])
    assert (work.trained, work.tokens, work.referenced, work.patches) == (5, 10, 4 + 5 + 4, 16)
    # group 0: prompt 1+2+3, then 4, then 4+5; group 1: prompt 1+2, then 3+4
    assert work.pairs == (6 + 4 + 9) + (3 + 7)


def test_floor_of_the_3b_by_hand() -> None:
    built = setup._qwen_3b(torch.device("meta"), torch.bfloat16)
    policy = Policy(built, setup.QWEN_SPECIAL, setup.QWEN_IDS, 2)
    n_parameters = sum(p.numel() for p in built.parameters())
    assert n_parameters == 3_754_622_976, "what Qwen publishes for Qwen2.5-VL-3B"
    image = ImageInput(Image(np.zeros((480, 640, 3), np.uint8)), (1, 34, 46), 391)
    work = Work([400], [[100, 50]], [image])
    found = floor(policy, work, setup.Limits(flops=1e15, bandwidth=4e12))
    layers = 36 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    pairs = 400 * 401 // 2 + 100 * 400 + 5050 + 50 * 400 + 1275
    layers_forward = 2 * 550 * layers + 4 * 2048 * 36 * pairs
    assert found["layers_tflop"] == pytest.approx(3 * layers_forward / 1e12)
    head_forward = 2 * 150 * 151936 * 2048
    assert found["head_tflop"] == pytest.approx(3 * head_forward / 1e12)
    # windows of 8 patches: 34 is 4 of them and 2 left, 46 is 5 and 6 left
    windows = (4 * 64 + 4) * (5 * 64 + 36)
    blocks = 32 * (4 * 1280 * 1280 + 3 * 1280 * 3420)
    embedding = 2 * 1564 * 1280 * 3 * 2 * 14 * 14
    inside = 2 * 1564 * blocks + 2 * 391 * (5120 * 5120 + 5120 * 2048)
    inside += 4 * 1280 * (4 * 1564**2 + 28 * windows)
    assert found["tower_tflop"] == pytest.approx((3 * inside + 2 * embedding) / 1e12)
    products = (3 * layers_forward + 3 * head_forward + 3 * inside + 2 * embedding) / 1e15
    optimizer = 30 * n_parameters / 4e12
    assert found["seconds"] == pytest.approx(products + optimizer)
    again = (layers_forward + head_forward + inside + embedding) / 1e15
    assert found["seconds_with_recomputation"] == pytest.approx(products + again + optimizer)


# --- the peer --------------------------------------------------------------------------------------------------------


def plain_loss(model: setup.Model, batch: dict[str, Any]) -> torch.Tensor:
    """The clipped loss of one group by plain transformers, from whole logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    logits = model.policy.model(
        input_ids=ids,
        attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        pixel_values=batch["pixel_values"],
        image_grid_thw=batch["image_grid_thw"],
        mm_token_type_ids=batch["mm_token_type_ids"],
        use_cache=False,
    ).logits
    answers = batch["completion_ids"]
    logprobs = logits[:, -answers.shape[1] - 1 : -1].log_softmax(-1).gather(2, answers[..., None])[..., 0]
    ratio = (logprobs - batch["old_per_token_logps"]).exp()
    advantages = batch["advantages"][:, None]
    term = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(term * batch["completion_mask"]).sum() / batch["num_items_in_batch"]


@pytest.mark.parametrize("attention", [update_peer.FUSED, "sdpa"])
def test_the_peer_gets_the_same_update(frozen: list[Sample], attention: str) -> None:
    loss, gradients, _ = result(frozen, None)
    model = tiny()
    update_peer.register_fused(kernels.op("varlen_attention"))
    update_peer.use_attention(model.policy.model, attention)
    batches = update_peer.batches(frozen, model)
    assert len(batches) == 3
    with setup.gradients(model.policy, update_step.COMPARED) as found, setup.counted(model.policy) as counts:
        losses = [plain_loss(model, batch) for batch in batches]
        sum(losses, torch.zeros(())).backward()
    assert sum(part.item() for part in losses) == pytest.approx(loss, rel=1e-5)
    assert min(setup.cosines(gradients, found).values()) > 0.99999
    longest = [max(s.n_trained for s in frozen if s.group == group) for group in ("g0", "g1", "g2")]
    assert counts == setup.Counts(9, 9 * PATCHES, 3 * (3 * PROMPT + sum(longest)))


def test_another_advantage_is_another_update(frozen: list[Sample]) -> None:
    """The comparison can fail: one advantage of nine with the other sign."""
    _, gradients, _ = result(frozen, None)
    model = tiny()
    batches = update_peer.batches(frozen, model)
    batches[1]["advantages"][0] *= -1
    update_peer.use_attention(model.policy.model, "sdpa")
    with setup.gradients(model.policy, update_step.COMPARED) as found:
        for batch in batches:
            plain_loss(model, batch).backward()
    assert max(setup.cosines(gradients, found).values()) < 0.999


def test_inputs_of_a_group(frozen: list[Sample]) -> None:
    model = tiny()
    members = [sample for sample in frozen if sample.group == "g1"]
    batch = update_peer.batches(frozen, model)[1]
    longest = max(sample.n_trained for sample in members)
    assert batch["prompt_ids"].shape == (3, PROMPT) and batch["completion_ids"].shape == (3, longest)
    for row, sample in enumerate(members):
        length, action = sample.n_trained, sample.segments[1]
        assert tuple(batch["prompt_ids"][row].tolist()) == sample.segments[0].token_ids
        assert tuple(batch["completion_ids"][row, :length].tolist()) == action.token_ids
        assert batch["completion_mask"][row].tolist() == [1] * length + [0] * (longest - length)
        np.testing.assert_allclose(batch["old_per_token_logps"][row, :length].numpy(), action.logprobs, rtol=1e-6)
        patches = batch["pixel_values"][row * PATCHES : (row + 1) * PATCHES]
        assert torch.equal(patches, model.processor.patches(sample.images[0]))
    assert batch["mm_token_type_ids"].sum(1).tolist() == [12, 12, 12]
    assert batch["num_images"] == [1, 1, 1] and batch["image_grid_thw"].tolist() == [[1, 6, 8]] * 3
    assert int(batch["num_items_in_batch"]) == sum(sample.n_trained for sample in frozen)


def test_padding_is_left_out() -> None:
    kept, bounds = update_peer._unpad(torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]))
    assert kept.tolist() == [0, 1, 3, 4, 5, 6] and bounds == [0, 2, 5, 6]
