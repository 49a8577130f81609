"""TRL's GRPO update on the tokens, pictures, advantages and logprobs of our samples.

The trainer is TRL's own, and so are its loss, its log-probabilities and its optimiser; only the rollouts are handed to
it, as its generation would: one group in a micro-batch, responses padded to the longest, a copy of the picture for each
member. Attention is transformers' sdpa, as installed, or the fused attention that our update uses.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from benchmarks import setup
from npu_vlrl import kernels
from npu_vlrl.hardware import Platform
from npu_vlrl.kernels import op, table
from npu_vlrl.kernels.tensor_cache import OncePerTensor
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.tiny import tiny_tokenizer
from npu_vlrl.types import Sample

FUSED = "benchmark_flash"
"""A name with "flash" in it: vision towers then hand over the bounds of their windows, and texts their 2D mask."""
SAME = 0.999
"""Smallest cosine of gradients that belong to the same update."""


class Peer:
    """A trainer of TRL with its optimiser."""

    def __init__(self, model: setup.Model, groups: int, group: int, folder: str, on: Platform) -> None:
        self.model = model
        self.hf: Any = model.policy.model
        # here, so that what needs neither works without them
        trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
        config = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=group,
            num_generations=group,
            gradient_accumulation_steps=groups,
            loss_type="dapo",  # the mean over all tokens
            beta=0.0,
            temperature=1.0,
            max_grad_norm=1.0,
            learning_rate=1e-6,
            optim="adamw_torch_fused",
            bf16=False,  # the weights are what they are; autocast would only add casts
            gradient_checkpointing=self.hf.is_gradient_checkpointing,
            use_cpu=on.device().type == "cpu",
            report_to="none",
            save_strategy="no",
        )
        self.trainer = trl.GRPOTrainer(
            model=self.hf,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["unused"] * group}),
            processing_class=tiny_tokenizer(FAMILIES["qwen2_5_vl"]),
        )
        self.optimizer = self.trainer.create_optimizer()
        self.hf.train()

    def backward(self, parts: Sequence[dict[str, Any]]) -> float:
        """The loss of all parts, which leave their gradients in the parameters."""
        self.trainer.current_gradient_accumulation_steps = self.trainer.args.steps_per_generation
        total = 0.0
        for batch in parts:
            loss = self.trainer.compute_loss(self.hf, batch)
            loss.backward()
            total += loss.item()
        return total

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.hf.parameters(), self.trainer.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def update(self, parts: Sequence[dict[str, Any]]) -> float:
        loss = self.backward(parts)
        self.step()
        return loss


def batches(samples: Sequence[Sample], model: setup.Model) -> list[dict[str, Any]]:
    """What a trainer is given for an update: one batch a group, on the device."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    trained = torch.tensor(sum(sample.n_trained for sample in samples), device=model.policy.device)
    return [inputs(members, model, trained) for members in groups.values()]


def inputs(members: Sequence[Sample], model: setup.Model, trained: Tensor) -> dict[str, Any]:
    """What TRL's `_generate_and_score_completions` returns for a group; `trained`: tokens of the whole update."""
    device, special = model.policy.device, model.policy.special
    prompt = torch.tensor([sample.segments[0].token_ids for sample in members], device=device)
    answers = [sample.segments[1] for sample in members]

    def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)

    completion = padded([answer.token_ids for answer in answers], torch.long)
    images = [image for sample in members for image in sample.images]
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": padded([[1] * len(answer) for answer in answers], torch.long),
        "old_per_token_logps": padded([answer.logprobs for answer in answers], torch.float32),
        "advantages": torch.tensor([_advantage(sample) for sample in members], dtype=torch.float32, device=device),
        "num_items_in_batch": trained,
        "pixel_values": torch.cat([model.processor.patches(image) for image in images]).to(device),
        "image_grid_thw": torch.tensor([image.grid for image in images], device=device),
        "num_images": [len(sample.images) for sample in members],
        "mm_token_type_ids": torch.eq(torch.cat([prompt, completion], 1), special.image or -1).int(),
    }


def _advantage(sample: Sample) -> float:
    assert sample.credit is not None and len(set(sample.credit.advantages_N.tolist())) == 1
    return float(sample.credit.advantages_N[0])


# --- attention -------------------------------------------------------------------------------------------------------


def use_attention(model: Any, name: str) -> None:
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = name


def register_fused(varlen: Callable[..., Tensor]) -> None:
    """Enters `varlen`, an implementation of the op `varlen_attention`, as transformers' attention `FUSED`."""
    on_host = OncePerTensor(Tensor.tolist)
    unpad = OncePerTensor(_unpad)

    def attention(
        module: nn.Module,
        q_BHTD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        cu_seq_lens_q: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if cu_seq_lens_q is not None:  # windows of the vision tower
            bounds = on_host(cu_seq_lens_q)
            return varlen(q_BHTD[0], k_BKSD[0], v_BKSD[0], bounds, bounds, False, scaling)[None], None
        rows, length = q_BHTD.shape[0], q_BHTD.shape[2]
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BKSD, v_BKSD)]
        if attention_mask is None:
            bounds = list(range(0, (rows + 1) * length, length))
            out = varlen(*(x.transpose(0, 1) for x in flat), bounds, bounds, True, scaling)
        else:
            kept, bounds = unpad(attention_mask)
            found = varlen(*(x[kept].transpose(0, 1) for x in flat), bounds, bounds, True, scaling)
            out = found.new_zeros(rows * length, *found.shape[1:]).index_copy(0, kept, found)
        return out.unflatten(0, (rows, length)), None

    AttentionInterface.register(FUSED, attention)
    AttentionMaskInterface.register(FUSED, flash_attention_mask)


def _unpad(mask_BT: Tensor) -> tuple[Tensor, list[int]]:
    """Which rows of the flattened batch are no padding, and where its sequences end among them."""
    ends = mask_BT.sum(1).cumsum(0).tolist()
    return mask_BT.flatten().nonzero()[:, 0], [0, *ends]


# --- the runs --------------------------------------------------------------------------------------------------------


@contextmanager
def peer_of(options: argparse.Namespace, on: Platform, dtype: torch.dtype) -> Iterator[Peer]:
    """Within it models are as transformers wrote them."""
    selected = on.kernels
    register_fused(op("varlen_attention"))
    kernels.use(table.REFERENCE)
    model = setup.model(options.size, on.device(), dtype, options.freeze_vision, options.checkpointing)
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        yield Peer(model, options.prompts, options.group, folder, on)
    kernels.use(selected)


def run(options: argparse.Namespace, on: Platform, dtype: torch.dtype, samples: Sequence[Sample]) -> list[Any]:
    """TRL's rows, for the same samples."""
    with peer_of(options, on, dtype) as peer:
        whole = batches(samples, peer.model)
        use_attention(peer.hf, FUSED)
        row = setup.measure("TRL, fused attention", lambda: peer.update(whole), on, peer.model.policy, options.repeats)
        installed = as_installed(peer, whole, min(options.peer_groups, len(whole)), on)
    return [row, installed | {name: row[name] for name in ("images", "patches", "tokens")}]


def check(options: argparse.Namespace, on: Platform, ours: Any) -> dict[str, Any]:
    """Losses and cosines of gradients in float32: with ours (`update_step.Exact`), and of TRL's two attentions."""
    found: dict[str, dict[str, Tensor]] = {}
    losses = {"ours": ours.loss}
    with peer_of(options, on, torch.float32) as peer:
        parts = batches(ours.samples, peer.model)
        for name in (FUSED, "sdpa"):
            use_attention(peer.hf, name)
            with setup.gradients(peer.model.policy, tuple(ours.gradients)) as own:
                losses[name] = peer.backward(parts)
            peer.hf.zero_grad(set_to_none=True)
            found[name] = {key: gradient.cpu() for key, gradient in own.items()}
    cosines = setup.cosines(ours.gradients, found[FUSED])
    return {
        "loss": losses,
        "same update": min(cosines.values()) >= SAME,
        "gradient cosine, ours and TRL with fused attention": cosines,
        "gradient cosine, ours and TRL with sdpa": setup.cosines(ours.gradients, found["sdpa"]),
        "gradient cosine, TRL with fused attention and with sdpa": setup.cosines(found[FUSED], found["sdpa"]),
    }


def as_installed(peer: Peer, whole: Sequence[dict[str, Any]], share: int, on: Platform) -> dict[str, Any]:
    """With sdpa: the first `share` micro-whole are timed once, after one to warm up, and stand for the others."""
    use_attention(peer.hf, "sdpa")
    peer.backward(whole[:1])
    name = "TRL as installed (sdpa)" + (f", from {share} of {len(whole)} groups" if share < len(whole) else "")
    row = setup.measure(name, lambda: peer.backward(whole[:share]), on, peer.model.policy, 0)
    if row["seconds"] is not None:
        optimizer = setup.seconds(peer.step, on, repeats=1, warm_up=0)
        row["seconds"] = row["seconds"] * len(whole) / share + optimizer
    return row
