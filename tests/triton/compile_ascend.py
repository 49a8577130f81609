"""Compiles the kernels for Ascend910B2 as `triton_logprob` would launch them there. Needs no NPU and no CANN.

Run as a program, since Triton's interpreter and its compiler do not share a process:
`python -m tests.triton.compile_ascend '[{"dtype": "bfloat16", "rows": 2048, "ids": 151936, "width": 2048}]'` prints a
list of `Outcome`s, two for each case: the kernel of the forward pass and that of the backward pass.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ascendnpuir
import torch
from triton._C.libtriton import ir
from triton.backends.ascend import compiler as ascend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from npu_vlrl.kernels import triton_kernels, triton_logprob

TARGET = "Ascend910B2"
COMPILER = Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile"
# What triton-ascend passes for this chip.
OPTIONS = (
    f"--target={TARGET}",
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
# CANN's own compiler makes the binary from the last IR. All that comes before has passed when only it is missing.
WITHOUT_CANN = re.compile(r"hivmc|Failed to run BiShengIR pipeline")


@dataclass(frozen=True)
class Outcome:
    """Example: Outcome("row_statistics", (16, 12), True, "", "mix", 1)"""

    kernel: str
    grid: tuple[int, ...]
    accepted: bool
    errors: str
    cores: str
    """"mix": the matrix cores and the vector cores."""
    products: int
    """Matrix products in the code that the compiler was given."""


def launches(case: dict[str, Any]) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """The kernel, grid and arguments of each launch of a forward and a backward pass, on tensors without data."""
    seen: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.append((self.kernel, grid, arguments, constants))

    n_rows, n_ids, width, dtype = case["rows"], case["ids"], case["width"], getattr(torch, case["dtype"])
    tiles = triton_logprob.Tiles(*case["tiles"]) if "tiles" in case else triton_logprob.tiles_for("npu", dtype)
    triton_logprob.tiles_for = lambda device, dtype: tiles
    kernels = triton_kernels.row_statistics, triton_kernels.logit_gradients
    triton_kernels.row_statistics, triton_kernels.logit_gradients = map(Recorder, kernels)
    try:
        hidden = torch.empty(n_rows, width, dtype=dtype, device="meta", requires_grad=True)
        weight = torch.empty(n_ids, width, dtype=dtype, device="meta", requires_grad=True)
        forbidden = torch.empty(n_ids, dtype=torch.bool, device="meta") if case.get("forbidden") else None
        targets = torch.empty(n_rows, dtype=torch.int64, device="meta")
        sum(triton_logprob.logprob_entropy(hidden, weight, targets, 0.7, forbidden)).sum().backward()
    finally:
        triton_kernels.row_statistics, triton_kernels.logit_gradients = kernels
    return seen


def lower(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[str, str]:
    """Triton source -> the text that the NPU's compiler reads, and the kind of cores it is for."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: type_name(value) for name, value in zip(names, arguments, strict=True)}
    backend = ascend.AscendBackend(GPUTarget("npu", TARGET, 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, constants, None)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": kernel.__name__, "target": backend.target, **options.__dict__}
    module = ascend.make_ttir(module, metadata, options)
    text = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    text, metadata = ascend._parse_linalg_metadata(text, metadata)
    return text, metadata["mix_mode"]


def type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        known = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        return "*" + (known | {torch.int32: "i32", torch.int8: "i8"})[value.dtype]
    return {int: "i32", float: "fp32"}[type(value)]


def compile_linalg(text: str) -> str:
    """The errors of the NPU's compiler, "" where it accepts the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.mlir"
        file.write_text(text)
        command = [str(COMPILER), str(file), *OPTIONS, "-o", f"{folder}/kernel.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
    errors = [line for line in lines if not WITHOUT_CANN.search(line)]
    if done.returncode and not errors and "External hivmc run fails" not in done.stderr:
        errors = [f"exit code {done.returncode}: {done.stderr or done.stdout}"]
    return "\n".join(errors)


def outcomes(case: dict[str, Any]) -> list[Outcome]:
    found = []
    for kernel, grid, arguments, constants in launches(case)[:2]:  # further ones differ only in the first id
        text, cores = lower(kernel, arguments, constants)
        errors = compile_linalg(text)
        found.append(Outcome(kernel.__name__, grid, not errors, errors, cores, text.count("linalg.matmul")))
    return found


def in_a_child(*cases: dict[str, Any]) -> list[list[Outcome]]:
    """For each case, its two outcomes. Called by tests, which run under the interpreter."""
    command = [sys.executable, "-m", "tests.triton.compile_ascend", json.dumps(cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr
    return [[Outcome(**{**one, "grid": tuple(one["grid"])}) for one in case] for case in json.loads(done.stdout)]


if __name__ == "__main__":
    print(json.dumps([[asdict(one) for one in outcomes(case)] for case in json.loads(sys.argv[1])]))
