"""The op table's attention inside real transformers models, against the same models with torch's own attention."""

from copy import deepcopy
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from npu_vlrl.kernels import attention
from npu_vlrl.kernels.attention import ATTENTION_NAME, attention_forward
from npu_vlrl.kernels.modules import attach
from npu_vlrl.kernels.tensor_cache import OncePerTensor

torch.set_num_threads(1)

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
}
IDS: dict[str, Any] = {
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}
NAMES = ("qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3")


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **more}}


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT, **rope()))
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, **rope(), head_dim=8))
    if name == "qwen2_5_vl":
        text = TEXT | rope(mrope_section=[2, 1, 1])
        vision = VISION | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **IDS)
        )
    text = TEXT | rope(mrope_section=[2, 1, 1], mrope_interleaved=True) | {"head_dim": 8}
    vision = VISION | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **IDS)
    )


def both(name: str) -> tuple[Any, Any]:
    """(with torch's attention, with ours): the same weights, scaled up so that attention is far from uniform."""
    theirs = build(name).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    ours = deepcopy(theirs)
    attach(ours)
    return theirs, ours


def text_model(model: Any) -> nn.Module:
    return getattr(model.model, "language_model", model.model)


def positions(name: str, lengths: list[int]) -> Tensor:
    row = torch.cat([torch.arange(n) for n in lengths])
    return row.expand(3, 1, -1) if name.endswith("vl") else row[None]


def packed_logits(name: str, model: Any, ids: Tensor, lengths: list[int], mask: Any, as_tensor: bool = False) -> Tensor:
    boundaries: Any = [0, *accumulate(lengths)]
    boundaries = torch.tensor(boundaries, dtype=torch.int32) if as_tensor else boundaries
    hidden = text_model(model)(
        inputs_embeds=model.get_input_embeddings()(ids[None]),
        position_ids=positions(name, lengths),
        attention_mask=mask,
        use_cache=False,
        cu_seq_lens_q=boundaries,
        cu_seq_lens_k=boundaries,
    ).last_hidden_state[0]
    return model.lm_head(hidden)


def one_by_one_logits(name: str, model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat(
        [
            model.lm_head(
                text_model(model)(
                    inputs_embeds=model.get_input_embeddings()(part[None]),
                    position_ids=positions(name, [len(part)]),
                    use_cache=False,
                ).last_hidden_state[0]
            )
            for part in ids.split(lengths)
        ]
    )


def gradients(model: Any, output: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    model.zero_grad()
    (output * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5 * float(theirs[name].abs().max() + 1), rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_inside_is_switched_and_none_outside(name: str) -> None:
    theirs, ours = both(name)
    configs = [ours.config, *(getattr(ours.config, key) for key in ours.config.sub_configs)]
    assert [config._attn_implementation for config in configs] == [ATTENTION_NAME] * len(configs)
    assert theirs.config._attn_implementation == "sdpa"


def test_a_model_without_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no transformers configuration"):
        attach(nn.Linear(2, 2))


@pytest.mark.parametrize("mask", [None, {"full_attention": None}], ids=["none", "dict"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_text_equals_one_by_one(name: str, mask: Any) -> None:
    theirs, ours = both(name)
    ids, lengths = torch.randint(60, (26,)), [7, 1, 11, 7]
    packed = packed_logits(name, ours, ids, lengths, mask, as_tensor=mask is None)
    single = one_by_one_logits(name, theirs, ids, lengths)
    torch.testing.assert_close(packed, single, atol=1e-5, rtol=1e-5)
    if mask is None:
        assert_same_gradients(gradients(ours, packed), gradients(theirs, single))


@pytest.mark.parametrize("name", NAMES)
def test_packed_text_sees_its_own_past_and_nothing_else(name: str) -> None:
    _, ours = both(name)
    ids, lengths = torch.randint(60, (20,)), [9, 11]
    before = packed_logits(name, ours, ids, lengths, None)
    ids[2] = (ids[2] + 1) % 60
    moved = (packed_logits(name, ours, ids, lengths, None) - before).abs().amax(1) > 1e-6
    assert moved.tolist() == [False] * 2 + [True] * 7 + [False] * 11


@pytest.mark.parametrize("name", NAMES)
def test_a_boolean_mask_of_padded_rows(name: str) -> None:
    """Left-padded rows, whose padding queries may look at nothing, equal the rows alone."""
    theirs, ours = both(name)
    lengths, width = [5, 8], 8
    ids = torch.randint(60, (sum(lengths),))
    rows = torch.zeros(2, width, dtype=torch.long)
    valid = torch.zeros(2, width, dtype=torch.bool)
    place = torch.zeros(2, width, dtype=torch.long)
    for row, part in enumerate(ids.split(lengths)):
        rows[row, width - len(part) :], valid[row, width - len(part) :] = part, True
        place[row, width - len(part) :] = torch.arange(len(part))
    mask = torch.ones(width, width, dtype=torch.bool).tril()[None, None] & valid[:, None, None, :]
    hidden = text_model(ours)(
        inputs_embeds=ours.get_input_embeddings()(rows),
        position_ids=place.expand(3, 2, width) if name.endswith("vl") else place,
        attention_mask=mask,
        use_cache=False,
    ).last_hidden_state
    assert hidden.isfinite().all()
    logits = ours.lm_head(hidden[valid])
    torch.testing.assert_close(logits, one_by_one_logits(name, theirs, ids, lengths), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", [None, torch.ones(1, 6, dtype=torch.long)], ids=["none", "all-ones"])
def test_a_call_without_boundaries_is_refused(name: str, mask: Tensor | None) -> None:
    _, ours = both(name)
    with pytest.raises(ValueError, match="needs cu_seq_lens_q"):
        ours(input_ids=torch.randint(60, (1, 6)), attention_mask=mask)


def some_pixels(name: str, grids: list[list[int]]) -> tuple[Tensor, Tensor]:
    size = 14 if name == "qwen2_5_vl" else 16
    n_patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n_patches, 3 * 2 * size * size, generator=generator), torch.tensor(grids)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_vision_tower_equals_the_loop(name: str) -> None:
    theirs, ours = both(name)
    pixels, grids = some_pixels(name, [[1, 4, 4], [1, 6, 10], [1, 2, 4], [1, 4, 4]])
    expected = theirs.model.visual(pixels, grid_thw=grids).pooler_output
    found = ours.model.visual(pixels, grid_thw=grids).pooler_output
    scale = float(expected.detach().abs().max())
    assert (found - expected).abs().max() <= 1e-6 * max(scale, 1)
    assert_same_gradients(gradients(ours.model.visual, found), gradients(theirs.model.visual, expected))
    pixels[16:76] += 1  # the second image
    moved = (ours.model.visual(pixels, grid_thw=grids).pooler_output - found).abs().amax(1) > 1e-4 * scale
    assert moved.tolist() == [False] * 4 + [True] * 15 + [False] * 6


def test_boundaries_are_copied_to_the_host_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = both("qwen2_5_vl")
    pixels, grids = some_pixels("qwen2_5_vl", [[1, 8, 8]])
    copies: list[list[int]] = []

    def copy(boundaries: Tensor) -> list[int]:
        copies.append(boundaries.tolist())
        return copies[-1]

    monkeypatch.setattr(attention, "_to_host", OncePerTensor(copy))
    ours.model.visual(pixels, grid_thw=grids)
    assert sorted(copies) == [[0, 16, 32, 48, 64], [0, 64]]  # four windows, one full attention; three layers


class Layer(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def test_causality_comes_from_the_call_then_the_module() -> None:
    q, k, v = (torch.randn(1, 2, 4, 3) for _ in range(3))
    packed: dict[str, Any] = {"cu_seq_lens_q": [0, 4], "cu_seq_lens_k": [0, 4]}

    def run(module: nn.Module, **more: Any) -> Tensor:
        return attention_forward(module, q, k, v, None, **packed, **more)[0]

    causal, full = run(Layer(True)), run(Layer(False))
    assert causal.shape == (1, 4, 2, 3) and not torch.allclose(causal, full)
    assert torch.equal(run(nn.Module()), causal)
    assert torch.equal(run(Layer(True), is_causal=False), full)
    assert torch.equal(run(Layer(False), is_causal=True), causal)
    assert not torch.allclose(run(Layer(False), scaling=2.0), full)


@pytest.mark.parametrize(
    ("batch", "more", "message"),
    [
        (2, {"cu_seq_lens_q": [0, 4], "cu_seq_lens_k": [0, 4]}, "a batch of 2"),
        (1, {"cu_seq_lens_q": [0, 4]}, "needs cu_seq_lens_q and cu_seq_lens_k"),
        (1, {"attention_mask": torch.zeros(1, 1, 4, 4)}, "boolean attention_mask"),
        (1, {"attention_mask": torch.ones(1, 4, dtype=torch.bool)}, "boolean attention_mask"),
        (1, {"cu_seq_lens_q": [0, 4], "cu_seq_lens_k": [0, 4], "sliding_window": 2}, "no sliding window"),
        (1, {"cu_seq_lens_q": [0, 4], "cu_seq_lens_k": [0, 4], "dropout": 0.1}, "no dropout"),
    ],
)
def test_what_is_not_said_is_not_guessed(batch: int, more: dict[str, Any], message: str) -> None:
    q, k, v = (torch.randn(batch, 2, 4, 3) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        attention_forward(Layer(True), q, k, v, **{"attention_mask": None, **more})
