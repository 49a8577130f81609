"""What `attach` does to a model, shown on the CPU with a platform whose implementations are counting references."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as theirs

from npu_vlrl import kernels
from npu_vlrl.kernels import modules, table
from npu_vlrl.kernels.modules import attach
from tests.kernels.test_attach import NAMES, build, packed_logits, some_pixels

PARTS = ("rms_norm", "swiglu", "patch_embed", "add_at", "rotary")
REPLACED = {
    # 2 layers of text with 2 norms each and one at the end, q and k norms in Qwen3; 3 vision blocks and a merger
    "qwen2": {"forward": 5 + 2},
    "qwen3": {"forward": 9 + 2},
    "qwen2_5_vl": {"forward": 5 + 2 + 7 + 3 + 1},
    "qwen3_vl": {"forward": 9 + 2 + 1, "_deepstack_process": 1},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each op was called; the ops are registered for a platform, which is selected."""
    counter: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def run(*args: Any) -> Any:
            counter[name] += 1
            return table.reference_of(name)(*args)

        return run

    kernels.use("cuda")
    for name in PARTS:
        monkeypatch.setitem(table._table[name], "cuda", counting(name))
    yield counter
    kernels.use("reference")


def replaced(model: nn.Module) -> Counter[str]:
    names = ("forward", "_deepstack_process")
    return Counter(name for module in model.modules() for name in names if name in vars(module))


def rotations(model: nn.Module) -> dict[str, Any]:
    """The functions of the model's file that apply rotary positions, by name."""
    return {name: value for name, value in vars(file_of(model)).items() if name in modules._ROTATIONS}


def file_of(model: nn.Module) -> Any:
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_replaced_where_the_reference_runs(name: str) -> None:
    model = build(name)
    before = rotations(model)
    attach(model)
    assert not replaced(model) and rotations(model) == before


@pytest.mark.parametrize("name", NAMES)
def test_what_is_replaced(name: str, calls: Counter[str]) -> None:
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    parameters = [name for name, _ in model.named_parameters()]
    attach(model)
    attach(model)  # a second time changes nothing
    assert replaced(model) == REPLACED[name]
    assert [type(module) for module in model.modules()] == kinds
    assert [name for name, _ in model.named_parameters()] == parameters
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_computes_the_same_by_the_ops(name: str, calls: Counter[str]) -> None:
    kernels.use("reference")
    plain = build(name)
    attach(plain)
    kernels.use("cuda")
    ours = build(name)
    attach(ours)
    ids, lengths = torch.randint(60, (20,)), [9, 11]
    expected, found = (packed_logits(name, model, ids, lengths, None) for model in (plain, ours))
    assert calls == {"rms_norm": 9 if "qwen3" in name else 5, "swiglu": 2}  # rotary stays what it is on a CPU
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    if name.endswith("vl"):
        calls.clear()
        pixels, grids = some_pixels(name, [[1, 4, 4], [1, 6, 10]])
        expected, found = (model.model.visual(pixels, grid_thw=grids).pooler_output for model in (plain, ours))
        assert calls == ({"rms_norm": 7, "swiglu": 3, "patch_embed": 1} if "2_5" in name else {"patch_embed": 1})
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_selection_of_a_later_moment_holds(calls: Counter[str]) -> None:
    model = build("qwen3")
    attach(model)
    kernels.use("reference")
    packed_logits("qwen3", model, torch.arange(6), [6], None)
    assert not calls


def test_a_copy_computes_with_its_own_weights(calls: Counter[str]) -> None:
    """As the KL reference of a run is made."""
    model = build("qwen3")
    attach(model)
    copy = deepcopy(model)
    ids = torch.arange(6)
    before = packed_logits("qwen3", copy, ids, [6], None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert replaced(copy) == REPLACED["qwen3"]
    assert torch.equal(packed_logits("qwen3", copy, ids, [6], None), before) and before.any()


def test_adapters_on_the_inner_layers_work(calls: Counter[str]) -> None:
    model = build("qwen2_5_vl")
    attach(model)
    config = LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    ids = torch.arange(6)
    output = packed_logits("qwen2_5_vl", adapted.get_base_model(), ids, [6], None)
    with adapted.disable_adapter():
        plain = packed_logits("qwen2_5_vl", adapted.get_base_model(), ids, [6], None)
    assert calls["swiglu"] == 4 and not torch.allclose(output, plain)
    output.square().sum().backward()
    gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad and ".visual." not in name}
    assert len(gradients) == 2 * 3 * 2 and all(g is not None and g.any() for g in gradients.values())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_saved_model_is_a_plain_one(name: str, calls: Counter[str], tmp_path: Path) -> None:
    model = build(name)
    attach(model)
    model.save_pretrained(tmp_path)
    again, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not replaced(again)
    assert type(again) is type(model)
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_deep_features_are_added_in_order(calls: Counter[str]) -> None:
    model = build("qwen3_vl")
    attach(model)
    hidden, rows = torch.randn(1, 5, 32), torch.randn(2, 32)
    mask = torch.tensor([[False, True, False, True, False]])
    found = model.model.language_model._deepstack_process(hidden, mask, rows)
    expected = type(model.model.language_model)._deepstack_process(model.model.language_model, hidden, mask, rows)
    assert calls == {"add_at": 1} and torch.equal(found, expected)


class Rotary:
    """A stand-in for a tensor on a device: `device.type` is all that decides where a call goes."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)


def test_rotary_goes_to_the_op_only_on_a_device(calls: Counter[str]) -> None:
    original = modules._dispatching(lambda *args, **more: ("theirs", more), lambda x, cos, sin: "ours")
    anything: Any = None
    assert original(Rotary("meta"), anything, anything, anything) == ("ours", "ours")
    assert original(Rotary("cpu"), anything, anything, anything) == ("theirs", {})
    assert original(Rotary("meta"), anything, anything, anything, unsqueeze_dim=2) == ("theirs", {"unsqueeze_dim": 2})
    kernels.use("reference")
    assert original(Rotary("meta"), anything, anything, anything) == ("theirs", {})


def test_rotary_hands_sections_on(calls: Counter[str]) -> None:
    """As transformers 5.10 gives them: behind the others."""
    original: Any = modules._dispatching(lambda *args: ("theirs", *args[4:]), lambda x, cos, sin, sections: sections)
    anything: Any = None
    assert original(Rotary("meta"), anything, anything, anything, [1, 2, 1]) == ([1, 2, 1], [1, 2, 1])
    assert original(Rotary("cpu"), anything, anything, anything, [1, 2, 1]) == ("theirs", [1, 2, 1])


def test_layers_that_only_look_alike_are_left_alone(calls: Counter[str]) -> None:
    """A gated layer with another activation, and a convolution whose patches overlap."""
    model = build("qwen2_5_vl")
    model.model.language_model.layers[0].mlp.act_fn = nn.GELU()
    model.model.visual.patch_embed.proj = nn.Conv3d(3, 32, (2, 14, 14), stride=(2, 7, 7))
    attach(model)
    assert replaced(model) == {"forward": REPLACED["qwen2_5_vl"]["forward"] - 2}


def test_an_odd_inner_width_is_padded_where_no_adapter_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated layers of a tower that is 37 wide; not those of the text, and not one whose parts are wrapped."""
    kernels.use("cuda")
    seen: list[int] = []

    def counting(x: Tensor, gate: Any, up: Any, down: Any) -> Tensor:
        seen.append(len(gate[0]))
        return table.reference_of("gated_mlp")(x, gate, up, down)

    monkeypatch.setitem(table._table["gated_mlp"], "cuda", counting)
    try:
        model, plain = (build("qwen2_5_vl") for _ in range(2))
        for one in (model, plain):
            torch.manual_seed(0)
            for block in one.model.visual.blocks:
                hidden = block.mlp.gate_proj.in_features
                block.mlp.gate_proj, block.mlp.up_proj = nn.Linear(hidden, 37), nn.Linear(hidden, 37)
                block.mlp.down_proj = nn.Linear(37, hidden)
        wrapped = model.model.visual.blocks[1].mlp
        wrapped.up_proj = type("Wrapped", (nn.Linear,), {"forward": nn.Linear.forward})(wrapped.up_proj.in_features, 37)
        wrapped.up_proj.load_state_dict(plain.model.visual.blocks[1].mlp.up_proj.state_dict())
        attach(model)
        for ours, theirs_ in zip(model.model.visual.blocks, plain.model.visual.blocks, strict=True):
            x = torch.randn(6, hidden)
            torch.testing.assert_close(ours.mlp(x), theirs_.mlp(x))
        assert seen == [37] * (len(plain.model.visual.blocks) - 1)
    finally:
        kernels.use("reference")


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_rotates_by_a_function_that_is_replaced(
    name: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this release of transformers calls it."""
    model = build(name)
    for function, original in rotations(model).items():
        monkeypatch.setattr(file_of(model), function, original)  # so that it is put back
    monkeypatch.setattr(modules, "_patched_files", set())
    seen: Counter[str] = Counter()

    def counted(original: Any, rotate: Any) -> Any:
        def run(*arguments: Any, **more: Any) -> Any:
            seen[rotate.__name__] += 1
            return original(*arguments, **more)

        return run

    monkeypatch.setattr(modules, "_dispatching", counted)
    attach(model)
    packed_logits(name, model, torch.arange(6), [6], None)
    assert sum(seen.values()) == 2
    if name.endswith("vl"):
        seen.clear()
        model.model.visual(some_pixels(name, [[1, 4, 4]])[0], grid_thw=torch.tensor([[1, 4, 4]]))
        assert seen == {"_rotate_vision": len(model.model.visual.blocks)}


def test_rotary_by_sections_by_hand() -> None:
    """Halves of 1, 2 and 1 channels turn by time, height and width."""
    x, angles = torch.randn(1, 2, 3, 8), torch.randn(3, 1, 3, 4)
    found = modules._rotate_by_sections(
        x, *(torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin)), [1, 2, 1]
    )
    points, turned = torch.complex(x[..., :4], x[..., 4:]), torch.complex(found[..., :4], found[..., 4:])
    for channel, axis in enumerate((0, 1, 1, 2)):
        turn = torch.polar(torch.ones(3), angles[axis, 0, :, channel])
        torch.testing.assert_close(turned[..., channel], points[..., channel] * turn)


@pytest.mark.skipif(not hasattr(qwen2_5_vl, "apply_multimodal_rotary_pos_emb"), reason="transformers 5.10 has it")
def test_rotary_by_sections_is_that_of_transformers() -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    cos, sin = torch.randn(3, 2, 3, 8), torch.randn(3, 2, 3, 8)
    expected = qwen2_5_vl.apply_multimodal_rotary_pos_emb(q, k, cos, sin, [1, 2, 1])
    for x, rotated in zip((q, k), expected, strict=True):
        assert torch.equal(modules._rotate_by_sections(x, cos, sin, [1, 2, 1]), rotated)


def test_rotary_takes_what_transformers_gives() -> None:
    """`_rotate_text` and `_rotate_vision` take what transformers' own functions take."""
    q, cos, sin = torch.randn(2, 4, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    text, _ = theirs.apply_rotary_pos_emb(q, q, cos, sin)
    assert torch.equal(modules._rotate_text(q, cos, sin), text)
    vision, _ = theirs.apply_rotary_pos_emb_vision(q[0].transpose(0, 1), q[0].transpose(0, 1), cos[0], sin[0])
    found: Tensor = modules._rotate_vision(q[0].transpose(0, 1), cos[0], sin[0])
    assert torch.equal(found, vision)
