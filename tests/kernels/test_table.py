"""The op table: the selected platform where it has an implementation, the reference elsewhere."""

from collections.abc import Iterator

import pytest

from npu_vlrl import kernels
from npu_vlrl.kernels import table


@pytest.fixture(autouse=True)
def clean_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(table, "_table", {name: dict(found) for name, found in table._table.items()})
    monkeypatch.setattr(table, "_platform", table.REFERENCE)
    yield


def test_both_ops_have_a_reference() -> None:
    assert kernels.active() == {"logprob_entropy": "reference", "varlen_attention": "reference"}


def test_a_platform_falls_back_op_by_op() -> None:
    @kernels.register("varlen_attention", "npu")
    def fast() -> str:
        return "fast"

    reference = kernels.op("varlen_attention")
    assert reference is not fast
    kernels.use("npu")
    assert kernels.op("varlen_attention") is fast
    assert kernels.op("varlen_attention")() == "fast"
    assert kernels.active() == {"logprob_entropy": "reference", "varlen_attention": "npu"}
    kernels.use("cuda")
    assert kernels.op("varlen_attention") is reference
    kernels.use("reference")
    assert kernels.op("varlen_attention") is reference


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
    with pytest.raises(KeyError, match="rotary"):
        kernels.op("rotary")


@pytest.mark.parametrize(
    ("name", "platform", "message"),
    [
        ("rotary", "npu", "no reference"),
        ("varlen_attention", "reference", "already registered"),
        ("varlen_attention", "tpu", "unknown kernel platform"),
    ],
)
def test_wrong_registrations(name: str, platform: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        kernels.register(name, platform)
