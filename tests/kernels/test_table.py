"""The op table: the selected platform where it has an implementation, the reference elsewhere."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_vlrl import kernels
from npu_vlrl.hardware import HardwareError
from npu_vlrl.kernels import cuda, npu, table  # noqa: F401  (they fill the table before the fixture puts a copy there)
from tests.kernels.test_triton_available import install, run_beside

OPS = (
    "add_at",
    "add_product",
    "gated_mlp",
    "decode_attention",
    "logprob_entropy",
    "masked_attention",
    "patch_embed",
    "rms_norm",
    "rotary",
    "swiglu",
    "tree_attention",
    "varlen_attention",
)


@pytest.fixture(autouse=True)
def clean_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(table, "_table", {name: dict(found) for name, found in table._table.items()})
    monkeypatch.setattr(table, "_platform", table.REFERENCE)
    monkeypatch.setattr(table, "_turned_off", frozenset())
    yield


def test_every_op_has_a_reference() -> None:
    assert kernels.active() == dict.fromkeys(OPS, "reference")
    assert all(kernels.op(name) is table.reference_of(name) for name in OPS)


def test_what_an_npu_computes_itself() -> None:
    kernels.use("npu")
    fused = {name for name, platform in kernels.active().items() if platform == "npu"}
    assert fused == set(OPS) - {"add_product", "gated_mlp", "logprob_entropy"}  # those need MindSpeed and triton-ascend
    assert kernels.op("rms_norm") is npu.rms_norm
    assert kernels.op("logprob_entropy") is table.reference_of("logprob_entropy")


def test_a_platform_falls_back_op_by_op() -> None:
    @kernels.register("patch_embed", "cuda")
    def fast() -> str:
        return "fast"

    reference = kernels.op("patch_embed")
    assert reference is not fast
    kernels.use("cuda")
    assert kernels.op("patch_embed") is fast and kernels.op("patch_embed")() == "fast"
    assert kernels.active()["patch_embed"] == "cuda" and kernels.active()["add_at"] == "reference"
    assert table.reference_of("patch_embed") is reference
    kernels.use("reference")
    assert kernels.op("patch_embed") is reference


@pytest.mark.parametrize(("platform", "other"), [("cuda", "npu"), ("npu", "cuda")])
def test_only_the_selected_platform_is_imported(platform: str, other: str) -> None:
    code = f"""
import sys
from npu_vlrl import kernels
mine, others = "npu_vlrl.kernels.{platform}", "npu_vlrl.kernels.{other}"
assert mine not in sys.modules and others not in sys.modules
kernels.use("{platform}")
assert mine in sys.modules and others not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_triton_for_ascend_is_used_where_it_is_installed(tmp_path: Path) -> None:
    install(tmp_path, "ascend")
    code = """
import torch
from npu_vlrl import kernels
from npu_vlrl.kernels import reference, triton_logprob
kernels.use("npu")
print(kernels.active()["logprob_entropy"])
triton_logprob.logprob_entropy = lambda hidden, *rest: print("triton", hidden.dtype)
inputs = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
kernels.op("logprob_entropy")(*inputs)
wide = [x.double() for x in inputs[:2]] + [inputs[2]]
assert torch.equal(kernels.op("logprob_entropy")(*wide)[0], reference.logprob_entropy(*wide)[0])
"""
    assert run_beside(tmp_path, code).splitlines() == ["npu", "triton torch.float32"]


def test_a_new_op_enters_through_its_reference() -> None:
    @kernels.register("twice")
    def twice(x: int) -> int:
        return 2 * x

    assert kernels.op("twice")(4) == 8
    assert kernels.active()["twice"] == "reference"


def test_unknown_platform_is_refused_and_changes_nothing() -> None:
    kernels.use("npu")
    with pytest.raises(ValueError, match=r"'tpu'.*reference, cuda, npu"):
        kernels.use("tpu")
    assert table._platform == "npu"


def test_unknown_op() -> None:
    with pytest.raises(KeyError, match="conv"):
        kernels.op("conv")


@pytest.mark.parametrize(
    ("name", "platform", "message"),
    [
        ("conv", "npu", "no reference"),
        ("varlen_attention", "reference", "already registered"),
        ("varlen_attention", "tpu", "unknown kernel platform"),
    ],
)
def test_wrong_registrations(name: str, platform: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        kernels.register(name, platform)


def test_ops_are_turned_off_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.use("npu")
    assert kernels.active()["rms_norm"] == "npu"
    monkeypatch.setenv("NPU_VLRL_REFERENCE_OPS", " rms_norm,swiglu ")
    kernels.use("npu")
    assert kernels.op("rms_norm") is table.reference_of("rms_norm")
    assert {kernels.active()[name] for name in ("rms_norm", "swiglu")} == {"reference"}
    assert kernels.active()["rotary"] == "npu"


def test_a_name_that_is_no_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_REFERENCE_OPS", "rms_norm,softmax")
    with pytest.raises(HardwareError, match="names softmax, and the ops are add_at, .*write their names with commas"):
        kernels.use("reference")
