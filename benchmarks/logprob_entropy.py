"""Times log-probability and entropy: the chunked reference, all logits at once, the Triton kernel if it is there.

    python -m benchmarks.logprob_entropy [--rows 2048] [--ids 151936] [--width 2048] [--dtype bfloat16]
        [--tiles ROWS,IDS,WIDTH,num_warps,num_stages]...

Runs on the device that `NPU_VLRL_PLATFORM` names, else on the first that is usable; a CPU wants smaller sizes.

Prints JSON: milliseconds and peak memory of a forward pass and of forward and backward, the share of the rate that one
large product reaches in the same run, and how far the results are from the reference's. A CPU has no peak memory.
`--tiles` adds rows with other tile sizes of the Triton kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.setup import seconds
from npu_vlrl.hardware import Platform, select
from npu_vlrl.kernels import reference, triton_logprob

Op = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

TRITON = {"cuda": "nvidia", "npu": "ascend"}
"""What Triton calls its backend, by platform."""


def all_at_once(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax((hidden @ weight.T).float(), 1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def milliseconds(function: Callable[[], object], platform: Platform) -> float:
    """The median of 10 runs, after three to warm up."""
    return 1e3 * seconds(function, platform, repeats=10, warm_up=3)


def rate_of_a_product(dtype: torch.dtype, platform: Platform) -> float:
    """Multiplications and additions a second."""
    size = 1024 if platform.memory() is None else 8192
    square = torch.randn(size, size, device=platform.device(), dtype=dtype)
    return 2 * size**3 / (milliseconds(lambda: square @ square, platform) / 1e3)


def peak_mib(function: Callable[[], object], platform: Platform) -> int:
    """What a call takes on top of what is there, on a device with memory of its own."""
    memory = torch.get_device_module(platform.device())  # torch.cuda, torch.npu: the same names
    platform.synchronize()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    function()
    platform.synchronize()
    return round((memory.max_memory_allocated() - before) / 2**20)


def measure(
    op: Op, inputs: tuple[Tensor, Tensor, Tensor], rate: float, platform: Platform
) -> tuple[dict[str, Any], list[Tensor]]:
    """The numbers, and the outputs and gradients. `rate`: as of `rate_of_a_product`."""

    def forward() -> None:
        with torch.no_grad():
            op(*inputs)

    def both() -> list[Tensor]:
        logprobs, entropy = op(*inputs)
        gradients = torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), inputs[:2])
        return [logprobs.detach(), entropy.detach(), *gradients]

    flops = 2 * len(inputs[0]) * inputs[1].numel()
    found: dict[str, Any] = {}
    for name, function, products in (("forward", forward, 1), ("forward_backward", both, 3)):
        if platform.memory() is not None:
            found[f"{name}_peak_mib"] = peak_mib(function, platform)
        found[f"{name}_ms"] = round(taken := milliseconds(function, platform), 3)
        found[f"{name}_share_of_limit"] = round(products * flops / rate / (taken / 1e3), 3)
    return found, both()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--ids", type=int, default=151936)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tiles", action="append", default=[], metavar="ROWS,IDS,WIDTH,WARPS,STAGES")
    options = parser.parse_args(arguments)
    platform = select()
    with_triton = platform.name in TRITON and triton_logprob.available(TRITON[platform.name])
    if options.tiles and not with_triton:
        parser.error(f"--tiles: there is no Triton for the platform {platform.name} here")
    dtype, device = getattr(torch, options.dtype), platform.device()
    torch.manual_seed(0)
    hidden = torch.randn(options.rows, options.width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(options.ids, options.width, device=device, dtype=dtype) * 0.05).requires_grad_()
    inputs = hidden, weight, torch.randint(options.ids, (options.rows,), device=device)
    rate = rate_of_a_product(dtype, platform)
    table: dict[str, Any] = {
        "device": platform.device_name(),
        "torch": torch.__version__,
        **{name: getattr(options, name) for name in ("rows", "ids", "width", "dtype")},
        "limit_tflops": round(rate / 1e12, 3),
    }
    table["reference"], wanted = measure(reference.logprob_entropy, inputs, rate, platform)
    kinds: list[tuple[str, Op, triton_logprob.Tiles | None]] = [("all_at_once", all_at_once, None)]
    if with_triton:
        kinds.append(("triton", triton_logprob.logprob_entropy, None))
    for text in options.tiles:
        rows, ids, width, warps, stages = map(int, text.split(","))
        chosen = triton_logprob.Tiles(rows, ids, width, {"num_warps": warps, "num_stages": stages})
        kinds.append((f"triton {text}", triton_logprob.logprob_entropy, chosen))
    for name, op, tiles in kinds:
        with patch.object(triton_logprob, "tiles_for", (lambda *_, t=tiles: t) if tiles else triton_logprob.tiles_for):
            table[name], found = measure(op, inputs, rate, platform)
        table[name]["largest_difference"] = [
            float((a - b).abs().max()) for a, b in zip(found[:2], wanted, strict=False)
        ]
        table[name]["gradient_cosine"] = [cosine(a, b) for a, b in zip(found[2:], wanted[2:], strict=True)]
        del found
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
