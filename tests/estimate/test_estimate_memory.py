"""What the estimate says a pass leaves behind, against what autograd keeps, where ops keep what fused kernels do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.config import LoraConfig, ModelConfig, OptimConfig, load_config
from npu_vlrl.estimate.memory import MemoryModel, Pass, Plan, Rollout
from npu_vlrl.estimate.outline import outline_of
from npu_vlrl.estimate.report import estimate, named_device
from npu_vlrl.kernels import reference, table
from npu_vlrl.kernels.modules import attach
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner.optimizer import new_optimizer
from npu_vlrl.model.load import arranged, outline
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.types import Image, ImageInput, SpecialTokens

TOKENS = 24
TREE = Tree(starts=(0, 8, 16), ends=(24, 16, 24))
"""A beginning of 8 tokens that two sequences have, which go on for 8 more each."""
PATH = 8 + 16 + 16
SPECIAL = SpecialTokens(end_of_turn=(0,))


def keeping(define: Callable[..., Tensor], kept: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """An op that keeps for its backward pass what the fused implementation keeps."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            out = define(*inputs).contiguous()
            ctx.save_for_backward(*kept(out, *inputs))
            return out

    return Kept.apply


def attention(q_HTD: Tensor, k_KSD: Tensor, v_KSD: Tensor, tree: Tree, scale: float) -> Tensor:
    path = tree.path
    return packed(q_HTD, k_KSD[:, path], v_KSD[:, path], tuple(tree.bounds), tuple(tree.path_bounds), True, scale)


packed = keeping(
    reference.varlen_attention,
    lambda out, q, k, v, *_: (q, k, v, out, torch.zeros(q.shape[:2])),  # the last is the log-sum-exp
)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = table._platform
    kernels.use("cuda")
    swiglu = keeping(reference.swiglu, lambda out, gate, up: (gate, up))
    norm = keeping(reference.rms_norm, lambda out, x, weight, epsilon: (x, weight))
    ours = {"rms_norm": norm, "swiglu": swiglu, "tree_attention": attention, "varlen_attention": packed}
    for name, implementation in ours.items():
        monkeypatch.setitem(table._table[name], "cuda", implementation)
    yield
    kernels.use(before)


def made(
    kind: str, folder: Path, layers: int = 2, depth: int = 2, lora: bool = False, dtype: torch.dtype = torch.float32
) -> Policy:
    """On the CPU, attached to the ops."""
    where = write_tiny_model(kind, folder / f"{kind}{layers}{depth}", 0, layers=layers)
    settings = json.loads((where / "config.json").read_text())
    settings["vision_config"]["depth"] = depth
    (where / "config.json").write_text(json.dumps(settings))
    model = outline(where, dtype, "cpu")
    attach(model)
    lora_config = LoraConfig(rank=4) if lora else None
    model = arranged(model, ModelConfig(path="m", lora=lora_config)).train()
    return Policy(model, SPECIAL, 64, 2)


def kept_bytes(policy: Policy, work: Callable[[], object]) -> int:
    """Of all memory that autograd keeps when `work` is done, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()
    assert result is not None
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def through_layers(policy: Policy) -> Tensor:
    ids_T, positions_3T = torch.arange(TOKENS) % 50, torch.arange(TOKENS).expand(3, -1)
    return policy.hidden_packed(ids_T, positions_3T, TREE, [])


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_layer_keeps_what_is_said(kind: str, lora: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    few, more = (made(kind, tmp_path, layers=layers, lora=lora, dtype=dtype) for layers in (2, 3))
    for policy in (few, more):
        policy.base.get_input_embeddings().weight.requires_grad_(True)  # else the first layer keeps less than others
    found = kept_bytes(more, lambda: through_layers(more)) - kept_bytes(few, lambda: through_layers(few))
    one = Pass(TOKENS, PATH, pairs=0, scored=1)
    assert MemoryModel(few).saved_by_layer(one) == found


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_block_of_the_tower_keeps_what_is_said(kind: str, tmp_path: Path) -> None:
    side = 8
    few, more = (made(kind, tmp_path, depth=depth) for depth in (2, 3))
    pixels = few.vision.patch_values
    patches_PD = torch.randn(side * side, pixels)

    def work(policy: Policy) -> int:
        return kept_bytes(policy, lambda: policy.encode(patches_PD, [(1, side, side)]))

    assert MemoryModel(few).saved_by_block(side * side) == work(more) - work(few)


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", 18), ("float32", 16)])
def test_the_bytes_of_a_trained_parameter(dtype: str, each: int) -> None:
    """As docs/architecture.md has them: at the end of an update all of them are there at once."""
    config = ModelConfig.model_validate({"path": "tiny:qwen2_5_vl", "dtype": dtype})
    policy = outline_of(config).policy
    parameters = sum(p.numel() for p in policy.model.parameters())
    seen = ImageInput(Image(np.zeros((28, 28, 3), np.uint8)), (1, 2, 2), 1)
    fullest = MemoryModel(policy).update([Pass(1, 1, 1, 1, [seen])] * 2)
    found = sum(fullest.parts[name] for name in ("weights", "masters", "moments", "gradients") if name in fullest.parts)
    waiting = policy.head_weight.numel() * policy.dtype.itemsize  # for the embedding's gradient: the two are tied
    assert found == pytest.approx(each * parameters + waiting, rel=1e-3)


def test_the_state_of_a_real_optimiser_is_what_is_said(tmp_path: Path) -> None:
    config = ModelConfig(path="tiny:qwen2_5_vl", dtype="bfloat16", freeze_vision=True)
    model = arranged(outline(write_tiny_model("qwen2_5_vl", tmp_path / "m", 0), torch.bfloat16, "cpu"), config)
    policy = Policy(model, SPECIAL, 64, 2)
    optimizer = new_optimizer(policy.trainable(), OptimConfig())
    for weight in policy.trainable().values():
        weight.sum().backward()
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
    masters = [t for group in optimizer.param_groups for t in group["params"]]
    base = MemoryModel(outline_of(config).policy).base()
    assert base["masters"] == sum(t.numel() * 4 for t in masters)
    assert base["moments"] == pytest.approx(sum(t.numel() * 4 for t in tensors), rel=0.01)
    assert base["weights"] == sum(p.numel() * 2 for p in policy.model.parameters())


def test_what_makes_it_smaller() -> None:
    work = [Pass(4096, 8192, 10**6, 2048)] * 3

    def needs(plan: Plan | None = None, **changes: Any) -> float:
        given = ModelConfig.model_validate({"path": "Qwen2.5-VL-3B-Instruct", "dtype": "bfloat16", **changes})
        return MemoryModel(outline_of(given).policy, plan or Plan()).update(work).total

    usual = needs()
    assert needs(gradient_checkpointing=True) < needs(freeze_vision=True) < usual
    assert needs(lora={"rank": 8}) < usual / 2
    divided = needs(Plan(learners=8, shard=True))
    assert needs(Plan(learners=8, shard=True, offload=True)) < divided < needs(Plan(learners=2, shard=True)) < usual
    assert needs(Plan(reference=True)) - usual == pytest.approx(3.7545e9 * 2, rel=1e-3)
    assert needs(Plan(reference=True), lora={"rank": 8}) == needs(lora={"rank": 8}), "an adapter is switched off"
    assert needs(Plan(separate_critic=True)) > usual + 17 * 3.7545e9


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen2.5-VL-3B-Instruct", 3.75e9),
        ("Qwen2.5-VL-7B-Instruct", 8.29e9),
        ("Qwen3-VL-4B-Instruct", 4.44e9),
        ("Qwen3-VL-8B-Instruct", 8.77e9),
    ],
)
def test_known_models_have_their_published_number_of_parameters(name: str, published: float) -> None:
    policy = outline_of(ModelConfig(path=f"somewhere/{name}", dtype="bfloat16")).policy
    assert sum(p.numel() for p in policy.model.parameters()) == pytest.approx(published, rel=0.002)


def test_a_rollout_counts_keys_and_values_once_and_within_its_limit() -> None:
    policy = outline_of(ModelConfig(path="Qwen2.5-VL-3B-Instruct", dtype="bfloat16")).policy
    token = 36 * 2 * 2 * 128 * 2  # layers, keys and values, heads, width, bytes
    play = Rollout(rows=64, room=2048, kept=64 * 2000, kept_before=64 * 1500, prefill=16384)
    parts = MemoryModel(policy, Plan(learners=0)).rollout(play).parts
    assert parts["keys and values"] == 64 * 2048 * token
    assert parts["keys and values between turns"] == 64 * (2000 + 1500) * token
    limit = 10 * 2048 * token + 5
    small = MemoryModel(policy, Plan(learners=0, cache_bytes=limit)).rollout(replace(play, prefill=0)).parts
    assert small["keys and values"] == 10 * 2048 * token
    assert small["keys and values between turns"] == 2 * limit
    assert "masters" not in parts and "moments" not in parts


def test_what_sleeps_is_not_there_during_an_update() -> None:
    """vLLM beside a learner: awake its copy of the weights and its keys and values stay; asleep only the rollout has
    them. The copy is as large as the weights."""
    file = Path(__file__).parents[2] / "configs/photo_tiny.yaml"
    words = ["model.path=tiny:qwen3", "train.learners=all", "train.shard=true", "rollout.engine=vllm"]
    awake, asleep = (
        estimate(load_config(file, [*words, f"rollout.sleep={sleep}"]), named_device("H200"), 2, (64, 64)).roles[0]
        for sleep in ("false", "true")
    )
    update, rollout = (moment.parts for moment in asleep.moments)
    assert "engine's copy" not in update and "keys and values" not in update
    assert rollout["engine's copy"] == rollout["weights"] and "keys and values" in rollout
    assert awake.moments[1].parts == rollout
    assert awake.moments[0].parts["engine's copy"] == rollout["weights"] and "keys and values" in awake.moments[0].parts
