"""Counts tokens that meet other experts in the learner than in the engine, without and with router replay.

    python -m benchmarks.router_replay [--size 30b-a3b] [--rows 32] [--context 512] [--new 128] [--out results.json]

A Qwen3-VL-MoE with random weights in bfloat16, in the shapes of the published 30B-A3B (48 layers, 128 experts, 8 for a
token), samples from random texts; the learner's forward pass packs the same tokens. `--size tiny` is for a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from benchmarks.decode import Workload, play, samples_of, timed, words
from benchmarks.setup import QWEN_IDS, QWEN_SPECIAL, environment, peak_gib, platform, reset_peak, seconds, table, write
from npu_vlrl.config import ModelConfig
from npu_vlrl.engines.base import Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.hardware import Platform
from npu_vlrl.kernels.modules import attach
from npu_vlrl.kernels.table import op
from npu_vlrl.learner.pack import MicroBatch, collate
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.load import load_model
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.routing import Routing, attach_routers
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import SamplingParams

WORKLOADS = {"30b-a3b": Workload((32,), 512, 128, 0), "tiny": Workload((8,), 40, 12, 0)}
CHUNK = 1024
"""Rows of logits at once."""


def model(size: str, device: torch.device) -> Policy:
    """Random weights in bfloat16, the same ones at every call."""
    if size == "tiny":
        with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
            return load_model(ModelConfig(path="tiny:qwen3_vl_moe", dtype="bfloat16"), Path(folder), 0, device).policy
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": QWEN_SPECIAL.end_of_turn[0],
        "pad_token_id": QWEN_SPECIAL.end_of_turn[1],
    }
    vision = {"depth": 1, "deepstack_visual_indexes": [], "out_hidden_size": 2048}  # no image is looked at
    names = ("image", "video", "vision_start", "vision_end")
    tokens = {f"{name}_token_id": getattr(QWEN_SPECIAL, name) for name in names}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    usual = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        built = Qwen3VLMoeForConditionalGeneration(config)
    torch.set_default_dtype(usual)
    family = FAMILIES["qwen3_vl_moe"]
    attach(built, family.unlike)
    attach_routers(built, family)
    return Policy(built, QWEN_SPECIAL, QWEN_IDS, merge_size=2)


def new_engine(policy: Policy, on: Platform, record_routes: bool) -> InProcessEngine:
    """An engine whose turns are never cut short: their end is an id that is never drawn."""
    assert policy.special.image is not None
    endless = Policy(
        policy.model,
        replace(policy.special, end_of_turn=(policy.special.image,)),
        policy.n_tokens,
        policy.merge_size,
    )
    vision = VisionFeatures(endless, None, 0)
    return InProcessEngine(endless, vision, new_capture=on.graph_capture, record_routes=record_routes)


def requests(policy: Policy, workload: Workload) -> list[Request]:
    random = np.random.default_rng(0)
    return [
        Request(row, words(policy, workload.context, random), (), SamplingParams(workload.new, seed=row))
        for row in range(workload.batches[0])
    ]


@torch.no_grad()
def logprobs(policy: Policy, batch: MicroBatch, routing: Routing | None) -> Tensor:
    """Log-probabilities [N] of the sampled tokens."""
    hidden_TH = policy.hidden_packed(batch.token_ids_T, batch.position_ids_3T, batch.tree, [], routing)
    scored: tuple[Tensor, Tensor] = op("logprob_entropy")(
        hidden_TH[batch.before_N], policy.head_weight, batch.target_ids_N, 1.0, policy.forbidden_V, CHUNK
    )
    return scored[0]


@contextmanager
def chosen_experts(policy: Policy) -> Iterator[list[Tensor]]:
    """Experts [T, k] that each layer is asked for, recorded in front of the experts."""
    found: list[Tensor] = []
    assert policy.family.mixture is not None
    hooks = [
        layer.get_submodule(policy.family.mixture.experts).register_forward_pre_hook(
            lambda _, arguments: found.append(arguments[1].to(torch.int16))
        )
        for layer in policy.text.layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def measure(size: str, workload: Workload, repeats: int = 3) -> dict[str, Any]:
    """Counts and gaps of the learner's pass without and with replay, and what recording and replaying take."""
    on = platform()
    policy = model(size, on.device())
    asked = requests(policy, workload)
    reset_peak(on)
    steps = {}
    for record in (False, True):
        engine = new_engine(policy, on, record)
        _, steps[record] = timed(partial(play, engine, asked), workload.new, on, repeats)
    batch = collate(samples_of(asked, play(engine, asked, workload.new), policy.special), policy)
    assert batch.routes_TLk is not None
    engine_TLk = batch.routes_TLk.to(policy.device)
    known_T = engine_TLk[:, 0, 0] >= 0
    rows = []
    for name, routing in (("without replay", None), ("with replay", Routing(engine_TLk))):
        with chosen_experts(policy) as found:
            gap_N = (logprobs(policy, batch, routing) - batch.behaviour_N).abs()
        differs_TL = (torch.stack(found, 1).sort(-1).values != engine_TLk.sort(-1).values).any(-1)[known_T]
        rows.append(
            {
                "learner": name,
                "tokens": int(known_T.sum()),
                "other experts, of token and layer": float(differs_TL.float().mean()),
                "tokens with other experts": float(differs_TL.any(1).float().mean()),
                "mean gap, nats": float(gap_N.mean()),
                "largest gap, nats": float(gap_N.max()),
                "pass, s": seconds(partial(logprobs, policy, batch, routing), on, repeats),
            }
        )
    about = {"size": size, "rows": workload.batches[0], "context": workload.context, "new": workload.new}
    step_ms = {"without recording": 1e3 * steps[False], "with recording": 1e3 * steps[True]}
    routes_bytes = engine_TLk[0].numel() * engine_TLk.element_size()
    return {
        **environment(on),
        **about,
        "replay": rows,
        "decode step, ms": step_ms,
        "bytes a token": routes_bytes,
        "peak, GiB": peak_gib(on),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=WORKLOADS, default="30b-a3b")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    usual = WORKLOADS[given.size]
    batches = (given.rows,) if given.rows else usual.batches
    workload = replace(usual, batches=batches, context=given.context or usual.context, new=given.new or usual.new)
    results = measure(given.size, workload)
    print(f"{results['device']}: {workload.batches[0]} rows of {workload.context} + {workload.new} tokens, bfloat16")
    print(table(results["replay"]))
    print(f"a decode step: {results['decode step, ms']}")
    write(given.out, results)


if __name__ == "__main__":
    main()
