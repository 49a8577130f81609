"""The plan: every parameter lies whole, aligned and alone; two sides come to the same plan, or see that they do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_vlrl.sync import transfer
from npu_vlrl.sync.plan import ALIGNMENT, ROW_BYTES, Fact, distinct, make_plan
from npu_vlrl.sync.transfer import Checksums

dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int64"])
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def facts(draw: st.DrawFn) -> list[Fact]:
    return [Fact(f"p{i}", draw(dtypes), draw(shapes)) for i in range(draw(st.integers(0, 12)))]


@given(facts(), st.integers(1, 8 * ALIGNMENT))
def test_places_do_not_touch_and_fill_the_buckets(wanted: list[Fact], bucket_bytes: int) -> None:
    plan = make_plan(wanted, bucket_bytes)
    assert [place.fact for place in plan.places] == wanted
    taken = [bytearray(size) for size in plan.bucket_sizes]
    for place in plan.places:
        item = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}[place.fact.dtype]
        size = item * int(torch.tensor(place.fact.shape).prod())
        assert place.offset % ALIGNMENT == 0
        there = taken[place.bucket][place.offset : place.offset + size]
        assert len(there) == size and not any(there)
        taken[place.bucket][place.offset : place.offset + size] = b"x" * size
    for number, size in enumerate(plan.bucket_sizes):
        members = [place for place in plan.places if place.bucket == number]
        filled = max((p.offset + p.fact.size for p in members), default=0)
        assert size == math.ceil(filled / ROW_BYTES) * ROW_BYTES
        assert filled <= bucket_bytes or sum(p.fact.size > 0 for p in members) == 1


@given(facts().filter(len), st.data())
def test_any_difference_shows_in_the_checksum(wanted: list[Fact], data: st.DataObject) -> None:
    plan = make_plan(wanted, 4096)
    assert make_plan(list(wanted), 4096).checksum == plan.checksum
    at = data.draw(st.integers(0, len(wanted) - 1))
    old = wanted[at]
    for new in (
        Fact(old.name + "x", old.dtype, old.shape),
        Fact(old.name, "uint8", old.shape),
        Fact(old.name, old.dtype, (*old.shape, 1)),
    ):
        assert make_plan([*wanted[:at], new, *wanted[at + 1 :]], 4096).checksum != plan.checksum


def test_views_are_the_parameters() -> None:
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.bfloat16), "c": torch.tensor(7.0)}
    plan = make_plan([Fact.of(name, value) for name, value in values.items()], 1024)
    assert plan.bucket_sizes == (ROW_BYTES, ROW_BYTES)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in plan.bucket_sizes]
    for bucket, buffer in enumerate(buffers):
        for name, view in plan.views(bucket, buffer).items():
            view.copy_(values[name])
    seen = {n: v for bucket, buffer in enumerate(buffers) for n, v in plan.views(bucket, buffer).items()}
    assert all(torch.equal(seen[name], values[name]) for name in values)
    assert buffers[1][:4].view(torch.float32).item() == 7.0


def test_tied_parameters_count_once() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    found = distinct({"embed": weight, "head": weight, "other": torch.randn(4, 3), "view": weight.data[:2]})
    assert list(found) == ["embed", "other", "view"]


def checksum(words: torch.Tensor) -> list[int]:
    """Of the second of two buckets; the first is another."""
    bucket = words.view(torch.uint8)
    sums = Checksums([transfer.ROW_BYTES, len(bucket)], None)
    sums.take(0, torch.ones(transfer.ROW_BYTES, dtype=torch.uint8))
    sums.take(1, bucket)
    return sums.read()[1]


@pytest.mark.parametrize("position", [0, 1, 63, 64, 1000, 1023])
def test_the_checksum_sees_a_changed_word_and_a_swap(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ROW_BYTES", 128 * 8)
    words = torch.randint(-(2**63), 2**63 - 1, (1024,), dtype=torch.int64)
    before = checksum(words)
    changed = words.clone()
    changed[position] ^= 1
    assert checksum(changed) != before
    for distance in (1, 37, 128, 512):  # within a row, within a column, and neither
        swapped = words.clone()
        other = (position + distance) % 1024
        swapped[[position, other]] = words[[other, position]]
        assert checksum(swapped) != before


def test_the_checksum_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ROW_BYTES", 128 * 8)
    words = torch.zeros(256, dtype=torch.int64)
    words[1], words[130] = 5, 7  # row 0, column 1 and row 1, column 2
    assert checksum(words) == [5 * 1 + 7 * 2, 5 * 2 + 7 * 3]
