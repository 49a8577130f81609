"""Times log-probability and entropy on a CUDA device: the Triton kernel, the chunked reference, and all logits at once.

    python -m benchmarks.logprob_entropy [--rows 2048] [--ids 151936] [--width 2048] [--dtype bfloat16]
        [--tiles ROWS,IDS,WIDTH,num_warps,num_stages]...

Prints JSON: milliseconds and peak memory of a forward pass and of forward and backward, the share of the rate that one
large product reaches in the same run, and how far the results are from the reference's. `--tiles` adds rows with other
tile sizes of the Triton kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from npu_vlrl.kernels import reference, triton_logprob

Op = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def all_at_once(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax((hidden @ weight.T).float(), 1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def milliseconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The median of single runs, after three to warm up."""
    times = []
    for run in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if run >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def rate_of_a_product(dtype: torch.dtype, size: int = 8192) -> float:
    """Multiplications and additions a second."""
    square = torch.randn(size, size, device="cuda", dtype=dtype)
    return 2 * size**3 / (milliseconds(lambda: square @ square) / 1e3)


def measure(op: Op, inputs: tuple[Tensor, Tensor, Tensor], rate: float) -> tuple[dict[str, Any], list[Tensor]]:
    """The numbers, and the outputs and gradients. `rate`: as of `rate_of_a_product`."""

    def forward() -> None:
        with torch.no_grad():
            op(*inputs)

    def both() -> list[Tensor]:
        outputs = op(*inputs)
        return [*outputs, *torch.autograd.grad(outputs[0].sum() + 0.1 * outputs[1].sum(), inputs[:2])]

    flops = 2 * len(inputs[0]) * inputs[1].numel()
    found: dict[str, Any] = {}
    for name, function, products in (("forward", forward, 1), ("forward_backward", both, 3)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        found[f"{name}_peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        found[f"{name}_ms"] = round(time := milliseconds(function), 3)
        found[f"{name}_share_of_limit"] = round(products * flops / rate / (time / 1e3), 3)
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
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(options.rows, options.width, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(options.ids, options.width, device="cuda", dtype=dtype) * 0.05).requires_grad_()
    inputs = hidden, weight, torch.randint(options.ids, (options.rows,), device="cuda")
    rate = rate_of_a_product(dtype)
    table: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{name: getattr(options, name) for name in ("rows", "ids", "width", "dtype")},
        "limit_tflops": round(rate / 1e12, 1),
    }
    table["reference"], wanted = measure(reference.logprob_entropy, inputs, rate)
    kinds: list[tuple[str, Op, triton_logprob.Tiles | None]] = [
        ("all_at_once", all_at_once, None),
        ("triton", triton_logprob.logprob_entropy, None),
    ]
    for text in options.tiles:
        rows, ids, width, warps, stages = map(int, text.split(","))
        tiles = triton_logprob.Tiles(rows, ids, width, {"num_warps": warps, "num_stages": stages})
        kinds.append((f"triton {text}", triton_logprob.logprob_entropy, tiles))
    for name, op, tiles in kinds:
        with patch.object(triton_logprob, "tiles_for", (lambda *_, t=tiles: t) if tiles else triton_logprob.tiles_for):
            table[name], found = measure(op, inputs, rate)
        table[name]["largest_difference"] = [
            float((a - b).abs().max()) for a, b in zip(found[:2], wanted, strict=False)
        ]
        table[name]["gradient_cosine"] = [cosine(a, b) for a, b in zip(found[2:], wanted[2:], strict=True)]
        del found
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
