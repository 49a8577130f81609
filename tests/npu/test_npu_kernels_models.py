"""Whole tiny models on the device, by the op table, against plain transformers on the CPU; and what ran how often."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from npu_vlrl import kernels
from npu_vlrl.config import LoraConfig, ModelConfig
from npu_vlrl.engines.inprocess.kv_cache import KeyValues
from npu_vlrl.kernels import npu
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Message
from npu_vlrl.workflow.render import Renderer
from tests.host_cann import counted
from tests.support.episodes import an_image
from tests.support.models import KINDS, VISION_KINDS, is_vision, plain_model, plain_patches, tiny_folder

DEVICE = torch.device("npu", 0)
LAYERS = BLOCKS = 2
"""Of the tiny models: layers of text, blocks of vision. In Qwen2.5-VL one block sees windows, the other all."""

IMAGES = ([(60, 90), (30, 30)], [], [(112, 56)])
TEXTS = ("up?", "Which way?", "and this one")


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    kernels.use("npu")
    yield
    kernels.use("reference")


def load(kind: str, **settings: Any) -> LoadedModel:
    folder = tiny_folder(kind)
    return load_model(ModelConfig(path=str(folder), **settings), folder, 0, DEVICE)


class Batch:
    """Three prompts of unequal lengths, with two images, none and one."""

    def __init__(self, model: LoadedModel, kind: str) -> None:
        self.policy = model.policy
        renderer = Renderer(model.tokenizer, model.processor, template_name="tiny")
        sizes = IMAGES if is_vision(kind) else ([],) * 3
        images = [[an_image(*size, seed) for seed, size in enumerate(part)] for part in sizes]
        self.segments = [
            renderer.open([Message("user", (*shown, text))]).context[0]
            for shown, text in zip(images, TEXTS, strict=True)
        ]
        self.lengths = [len(segment) for segment in self.segments]
        assert len(set(self.lengths)) == 3
        self.tree = Tree.of_sequences([0, *accumulate(self.lengths)])
        self.vision = VisionFeatures(model.policy, model.processor, 0)

    def hidden(self) -> Tensor:
        images = [image for segment in self.segments for image in segment.images]
        ids = torch.tensor([token for segment in self.segments for token in segment.token_ids])
        positions = [
            torch.from_numpy(rotary_positions(s.token_ids, s.images, self.policy.special.image, 2))
            for s in self.segments
        ]
        return self.policy.hidden_packed(
            ids.to(DEVICE), torch.cat(positions, 1).to(DEVICE), self.tree, self.vision.differentiable(images)
        )

    def expected(self, model: Any, folder: Path) -> Tensor:
        """Logits by the untouched model, one prompt at a time. It finds positions and masks by itself."""
        logits = []
        for segment in self.segments:
            ids = torch.tensor([segment.token_ids])
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if segment.images:
                inputs |= plain_patches(folder, [image.image.rgb for image in segment.images])
                inputs["mm_token_type_ids"] = torch.eq(ids, self.policy.special.image or -1).int()
            logits.append(model(**inputs, use_cache=False).logits[0])
        return torch.cat(logits)


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape).to(logits.device)
    (logits * weights).sum().backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest over all tensors, each measured by its largest value."""
    assert found.keys() == expected.keys() and found
    return max(
        float((value - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-3))
        for name, value in found.items()
    )


@cache
def truth(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients by plain transformers on the CPU."""
    folder = tiny_folder(kind)
    model = plain_model(folder)
    logits = Batch(load(kind), kind).expected(model, folder)
    return logits.detach(), gradients(model, logits)


def compare(kind: str) -> tuple[float, float, Counter[str]]:
    """(error of the logits, error of the gradients, what ran)"""
    model = load(kind)
    batch = Batch(model, kind)
    with counted() as ran:
        logits = batch.hidden() @ model.policy.head_weight.T
        found = gradients(model.policy.model, logits)
    expected, expected_gradients = truth(kind)
    error = (logits.detach().cpu() - expected).abs().max() / expected.abs().max()
    return float(error), difference(found, expected_gradients), ran


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_all_gradients_are_those_of_plain_transformers(kind: str) -> None:
    forward, backward, ran = compare(kind)
    assert forward < 1e-5 and backward < 2e-4
    blocks = BLOCKS if is_vision(kind) else 0
    norms = {"qwen2_5_vl": 2 * LAYERS + 1 + 2 * BLOCKS + 1, "qwen3_vl": 4 * LAYERS + 1, "qwen3": 4 * LAYERS + 1}[kind]
    gated = LAYERS + (BLOCKS if kind == "qwen2_5_vl" else 0)
    assert ran["aclnnFlashAttentionVarLenScore"] == ran["aclnnFlashAttentionUnpaddingScoreGrad"] == LAYERS + blocks
    assert ran["aclnnRmsNorm"] == ran["aclnnRmsNormGrad"] == norms
    assert ran["aclnnRotaryPositionEmbedding"] == ran["aclnnRotaryPositionEmbeddingGrad"] == 2 * (LAYERS + blocks)
    assert ran["aclnnSwiGlu"] == ran["aclnnSwiGluGrad"] == gated
    assert ran["aten::index_add"] == (1 if kind == "qwen3_vl" else 0)
    unwanted = ("fallback::", "aten::conv", "aten::index_put", "aten::masked_", "aclnnFlashAttentionScore")
    assert not [name for name in ran if name.startswith(unwanted)]


def test_the_weights_of_the_patch_embedding_are_trained() -> None:
    _, expected = truth("qwen3_vl")
    names = [name for name in expected if "patch_embed" in name]
    assert len(names) == 2 and all(expected[name].abs().max() > 1e-3 for name in names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("_fused", lambda real: lambda *args, **options: real(*args, **options | {"atten_mask": None})),
        ("_fused", lambda real: lambda *args, **options: real(*args, **options | {"scale": options["scale"] * 1.1})),
        ("_packing", lambda real: lambda cu_q, cu_k, *rest: real((0, cu_q[-1]), (0, cu_k[-1]), *rest)),
    ],
    ids=["no mask", "scale", "no boundaries"],
)
def test_a_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch, kind: str, part: str, wrong: Any) -> None:
    monkeypatch.setattr(npu, part, wrong(getattr(npu, part)))
    forward, backward, _ = compare(kind)
    assert forward > 1e-3 and backward > 1e-3


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "swiglu", "patch_embed", "add_at"])
def test_a_part_that_is_slightly_wrong_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = "qwen3_vl"
    right = kernels.table._table[name]["npu"]
    monkeypatch.setitem(kernels.table._table[name], "npu", lambda *args: right(*args) * 1.01)
    forward, backward, _ = compare(kind)
    assert forward > 1e-4 and backward > 1e-3


class ToHost(TorchDispatchMode):
    """Counts what waits for the device: copies to the host, numbers read, shapes that depend on values."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        first = next((x for x in args if isinstance(x, Tensor)), None)
        if first is not None and (first.device.type == "npu" or name == "copy_"):
            source = args[1] if name == "copy_" else first
            copied = isinstance(result, Tensor) and result.device.type == "cpu" and source.device.type == "npu"
            self.count += copied or name in self.WAITING
        return result


def deep_model(kind: str, depth: int, folder: Path) -> LoadedModel:
    """A model with `depth` layers of text and as many blocks of vision."""
    write_tiny_model(kind, folder, seed=0, hidden=32, layers=depth)
    settings = json.loads((folder / "config.json").read_text())
    settings["vision_config"]["depth"] = depth
    name = "fullatt_block_indexes" if kind == "qwen2_5_vl" else "deepstack_visual_indexes"
    settings["vision_config"][name] = list(range(depth - 1))
    (folder / "config.json").write_text(json.dumps(settings))
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return load_model(ModelConfig(path=str(folder)), folder, 0, DEVICE)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_the_device_is_waited_for_as_often_in_a_deep_model(kind: str, tmp_path: Path) -> None:
    """Lengths and positions of images are found once a batch, not once a layer."""
    waits, attention = [], []
    for depth in (2, 5):
        batch = Batch(deep_model(kind, depth, tmp_path / str(depth)), kind)
        batch.hidden()  # the causal mask is made
        with counted() as ran, ToHost() as copies:
            batch.hidden().square().sum().backward()
        waits.append(copies.count)
        attention.append(ran["aclnnFlashAttentionVarLenScore"])
    assert attention == [4, 10] and waits[0] == waits[1] > 0


def test_a_copy_in_every_layer_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What plain attention functions of transformers do."""
    monkeypatch.setattr("npu_vlrl.kernels.attention._to_host", Tensor.tolist)
    waits = []
    for depth in (2, 5):
        batch = Batch(deep_model("qwen2_5_vl", depth, tmp_path / str(depth)), "qwen2_5_vl")
        with ToHost() as copies:
            batch.hidden()
        waits.append(copies.count)
    assert waits[1] == waits[0] + 3 * 2  # of queries and of keys


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_decoding_with_kept_keys(kind: str) -> None:
    """Rows that go on from kept keys see what they see in one forward pass, one fused call a layer."""
    model = load(kind)
    batch = Batch(model, kind)
    whole = batch.hidden().split(batch.lengths)
    kv = KeyValues(model.policy, 3, max(batch.lengths) + 2)
    found: list[list[Tensor]] = []
    with counted() as ran:
        for cut in (2, 1, 0):
            news = [length - cut if cut == 2 else 1 for length in batch.lengths]
            lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=DEVICE) - cut
            rows = CacheRows.of(lengths, news, kv.room, max(batch.lengths) - cut)
            ids: list[int] = []
            places = []
            for segment, length, new in zip(batch.segments, batch.lengths, news, strict=True):
                part = slice(length - cut - new, length - cut)
                ids += segment.token_ids[part]
                everything = rotary_positions(
                    segment.token_ids, segment.images, model.policy.special.image, model.policy.merge_size
                )
                places.append(torch.from_numpy(everything[:, part]))
            images = [image for segment in batch.segments for image in segment.images] if cut == 2 else []
            hidden = model.policy.hidden_continued(
                torch.tensor(ids).to(DEVICE), torch.cat(places, 1).to(DEVICE), kv.kept(rows), batch.vision.fixed(images)
            )
            found.append([part[-1] for part in hidden.split(news)])
    ours = torch.stack([torch.stack(rows_) for rows_ in found], 1).cpu()
    expected = torch.stack([rows_[-3:] for rows_ in whole]).cpu()
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
    assert ran["aclnnFlashAttentionScore"] == 3 * LAYERS


def test_adapters_checkpointing_and_a_frozen_tower() -> None:
    """Recomputation repeats the forward operators of the layers, and gradients reach the adapters alone."""
    lora = LoraConfig(rank=2, alpha=4, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = load("qwen2_5_vl", lora=lora, freeze_vision=True, gradient_checkpointing=checkpointing)
        with torch.no_grad():
            for name, parameter in model.policy.trainable().items():
                parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel(), device=DEVICE).view_as(parameter))
                assert "lora_" in name
        model.policy.model.train()
        batch = Batch(model, "qwen2_5_vl")
        with counted() as ran:
            found = gradients(model.policy.model, batch.hidden())
        results.append((found, ran))
    (plain, once), (recomputed, twice) = results
    assert len(plain) == LAYERS * 4 * 2 and difference(recomputed, plain) < 1e-5
    assert once["aclnnFlashAttentionUnpaddingScoreGrad"] == twice["aclnnFlashAttentionUnpaddingScoreGrad"] == LAYERS
    assert once["aclnnFlashAttentionVarLenScore"] == LAYERS + BLOCKS
    assert twice["aclnnFlashAttentionVarLenScore"] == 2 * LAYERS + BLOCKS


def test_a_frozen_copy_is_independent() -> None:
    model = load("qwen3")
    copy = deepcopy(model.policy.model)
    batch = Batch(model, "qwen3")
    before = batch.hidden().detach().cpu()
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    assert torch.equal(batch.hidden().detach().cpu(), before)


def test_plain_models_on_the_host_stay_right_beside_one_on_the_device() -> None:
    """Rotary is replaced for whole files of transformers; what is on the host goes its own way."""
    load("qwen2_5_vl")
    folder = tiny_folder("qwen2_5_vl")
    model = plain_model(folder)
    ids = torch.arange(5, 12)[None]
    with torch.no_grad(), counted() as ran:
        found = model(input_ids=ids, use_cache=False).logits
    assert not ran and found.isfinite().all()
    cache = DynamicCache()
    with torch.no_grad():
        stepwise = [model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(7)]
    torch.testing.assert_close(torch.cat(stepwise, 1), found, atol=1e-5, rtol=1e-4)


def test_bfloat16_is_close_to_float32() -> None:
    """A sanity bound, not a proof: eight bits through two layers."""
    for kind in KINDS:
        model = load(kind, dtype="bfloat16")
        logits = (Batch(model, kind).hidden() @ model.policy.head_weight.T).detach().float().cpu()
        expected, _ = truth(kind)
        assert float((logits - expected).abs().mean() / expected.abs().mean()) < 0.05
