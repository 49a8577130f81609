"""Times attention over shared beginnings: packed flash calls that are merged, flex attention, and nothing shared.

    python -m benchmarks.tree_attention [--groups 8] [--members 8] [--prompt 520] [--answer 300] [--out FILE]

Needs a device that flash and flex attention run on. Prints milliseconds of a forward pass, and of forward and backward,
of one layer with the heads of Qwen2.5-VL-3B in bfloat16; the error of the gradients against float32; and how long flex
attention compiles, which it does again for other shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.logprob_entropy import milliseconds
from npu_vlrl import kernels
from npu_vlrl.hardware import Platform, select
from npu_vlrl.kernels import reference
from npu_vlrl.kernels.cuda import packed_lengths
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.kernels.tree_parts import tree_attention as merged

HEADS, KEY_HEADS, WIDTH = 16, 2, 128
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def tree_of(groups: int, members: int, prompt: int, answer: int) -> Tree:
    """Answers of a half to three halves of `answer` tokens behind a prompt, group after group."""
    starts, ends, at = [], [], 0
    for _ in range(groups):
        lengths = [answer // 2 + answer * m // max(members - 1, 1) for m in range(members)]
        starts.append(at)
        ends.append(at + prompt + sum(lengths))
        at += prompt
        for length in lengths:
            starts.append(at)
            at += length
            ends.append(at)
    return Tree(tuple(starts), tuple(ends))


def flex(tree: Tree, device: torch.device) -> tuple[Attention, float]:
    """The function, and the seconds that its first call takes."""
    last_T = torch.empty(tree.bounds[-1], dtype=torch.long, device=device)
    for node, end in zip(tree.nodes, tree.ends, strict=True):
        last_T[node] = end
    length = tree.bounds[-1]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < last_T[k])

    mask = create_block_mask(sees, None, None, length, length, device=device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q[None], k[None], v[None], block_mask=mask, scale=WIDTH**-0.5, enable_gqa=True)
        return out[0].transpose(0, 1)

    began = time.perf_counter()
    run(attention, drawn(length, device))
    torch.get_device_module(device).synchronize()
    return attention, time.perf_counter() - began


def drawn(length: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [
        torch.randn(length, h, WIDTH, generator=generator, device=device, dtype=torch.bfloat16)
        .transpose(0, 1)
        .requires_grad_()
        for h in heads
    ]


def run(attention: Attention, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    out = attention(*inputs)
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


class Flash:
    """See `tree_parts.Fused`. The kernel's statistics are [H, T]."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        lengths = packed_lengths(tuple(cu_q), tuple(cu_k), q.device)
        found = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
        return found[0], found[1].T

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_q: list[int],
        cu_k: list[int],
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = packed_lengths(tuple(cu_q), tuple(cu_k), q.device)
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read with dropout only
        given = (grad.contiguous(), q, k, v, out, lse.T.contiguous(), *lengths, 0.0, causal, random, random)
        found = torch.ops.aten._flash_attention_backward(*given, scale=scale)
        return found[0], found[1], found[2]


def measure(
    attention: Attention, inputs: list[Tensor], wanted: tuple[Tensor, ...] | None, on: Platform
) -> dict[str, Any]:
    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    found = run(attention, inputs)
    result: dict[str, Any] = {
        "forward_ms": round(milliseconds(forward, on), 3),
        "both_ms": round(milliseconds(lambda: run(attention, inputs), on), 3),
    }
    if wanted is not None:
        errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
        result["gradient_error"] = round(max(errors), 5)
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("groups", 8), ("members", 8), ("prompt", 520), ("answer", 300)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    platform = select()
    kernels.use(platform.kernels)
    device, scale = platform.device(), WIDTH**-0.5
    tree = tree_of(options.groups, options.members, options.prompt, options.answer)
    inputs = drawn(tree.bounds[-1], device)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    wanted = run(lambda *x: reference.tree_attention(*x, tree, scale), wide)
    compiled, seconds = flex(tree, device)
    report = {
        "device": platform.describe(),
        "torch": torch.__version__,
        "tokens": tree.bounds[-1],
        "tokens_unshared": int(sum(b - a for a, b in zip(tree.path_bounds, tree.path_bounds[1:], strict=False)))
        - options.groups * options.prompt,
        "flex_first_call_s": round(seconds, 1),
        "one packed call over gathered keys": measure(
            lambda *x: kernels.op("tree_attention")(*x, tree, scale), inputs, wanted, platform
        ),
        "packed calls, merged": measure(lambda *x: merged(*x, tree, scale, Flash()), inputs, wanted, platform),
        "flex attention": measure(compiled, inputs, wanted, platform),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
