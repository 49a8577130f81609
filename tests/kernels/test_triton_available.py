"""Where the Triton kernels are used and where not. Needs no Triton: folders stand in for an installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_vlrl.kernels import cuda, reference, triton_logprob


def run_beside(folder: Path, code: str) -> str:
    """Runs code in a process that finds the packages in `folder` first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def install(folder: Path, *backends: str) -> None:
    """A package "triton" that must not be imported."""
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text("raise RuntimeError('triton was imported')")
    for backend in backends:
        (folder / "triton" / "backends" / backend).mkdir(parents=True)


@pytest.mark.parametrize("backends", [(), ("nvidia",), ("ascend",), ("amd", "nvidia")])
def test_a_backend_is_available_where_its_folder_is(tmp_path: Path, backends: tuple[str, ...]) -> None:
    install(tmp_path, *backends)
    code = "from npu_vlrl.kernels.triton_logprob import available as a; print(a('nvidia'), a('ascend'))"
    assert run_beside(tmp_path, code) == f"{'nvidia' in backends} {'ascend' in backends}"


def test_nothing_is_available_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not triton_logprob.available("nvidia") and not triton_logprob.available("ascend")


@pytest.mark.parametrize(("backend", "active"), [("nvidia", "cuda"), ("ascend", "reference")])
def test_cuda_uses_the_kernel_only_where_it_can_run(tmp_path: Path, backend: str, active: str) -> None:
    install(tmp_path, backend)
    code = (
        "import npu_vlrl.kernels as k, npu_vlrl.kernels.cuda; k.use('cuda'); print(k.active()['logprob_entropy']); "
        "print(k.op('logprob_entropy').__module__)"
    )
    module = "npu_vlrl.kernels." + active
    assert run_beside(tmp_path, code).splitlines() == [active, module]


def test_what_the_kernel_cannot_do_goes_to_the_reference() -> None:
    hidden, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    targets = torch.tensor([0, 4, 2])
    found = cuda.logprob_entropy(hidden, weight, targets, 0.7)
    assert found[0].dtype == torch.float64
    assert all(map(torch.equal, found, reference.logprob_entropy(hidden, weight, targets, 0.7)))
    empty = cuda.logprob_entropy(hidden[:0].float(), weight.float(), targets[:0])
    assert [len(x) for x in empty] == [0, 0]


def test_float32_goes_to_the_reference_because_that_is_faster() -> None:
    hidden, weight, targets = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])
    found = cuda.logprob_entropy(hidden, weight, targets, 0.7)
    assert all(map(torch.equal, found, reference.logprob_entropy(hidden, weight, targets, 0.7)))


def test_what_the_kernel_can_do_goes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(triton_logprob, "logprob_entropy", lambda *arguments: seen.append(arguments))
    for dtype in (torch.float16, torch.bfloat16):
        cuda.logprob_entropy(torch.ones(3, 4, dtype=dtype), torch.ones(5, 4, dtype=dtype), torch.zeros(3), 0.7)
    assert [arguments[0].dtype for arguments in seen] == [torch.float16, torch.bfloat16]


def test_bad_input_is_refused_before_triton_is_needed() -> None:
    hidden, weight, targets = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logprob_entropy: temperature is -1, it must be positive"):
        triton_logprob.logprob_entropy(hidden, weight, targets, -1)
    with pytest.raises(AssertionError):
        triton_logprob.logprob_entropy(hidden, weight.bfloat16(), targets)
    with pytest.raises(AssertionError):
        triton_logprob.logprob_entropy(hidden, weight, targets[:2])
