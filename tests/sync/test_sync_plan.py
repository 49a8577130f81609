"""The plan: every parameter lies whole, aligned and alone; two sides come to the same plan, or see that they do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.sync import transfer
from npu_vlrl.sync.plan import ALIGNMENT, Fact, distinct, make_plan
from npu_vlrl.sync.transfer import WORDS, Checksums

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
        assert size == math.ceil(filled / ALIGNMENT) * ALIGNMENT
        left = sum(-(-p.fact.size // ALIGNMENT) * ALIGNMENT for p in plan.places if p.bucket >= number)
        limit = bucket_bytes // 8 if number == 0 else min(bucket_bytes, max(left / 2, bucket_bytes // 8))
        assert filled <= limit or sum(p.fact.size > 0 for p in members) == 1


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
    assert plan.bucket_sizes == (512,) * 3
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in plan.bucket_sizes]
    for bucket, buffer in enumerate(buffers):
        for name, view in plan.views(bucket, buffer).items():
            view.copy_(values[name])
    seen = {n: v for bucket, buffer in enumerate(buffers) for n, v in plan.views(bucket, buffer).items()}
    assert all(torch.equal(seen[name], values[name]) for name in values)
    assert buffers[2][:4].view(torch.float32).item() == 7.0


def test_tied_parameters_count_once() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    found = distinct({"embed": weight, "head": weight, "other": torch.randn(4, 3), "view": weight.data[:2]})
    assert list(found) == ["embed", "other", "view"]


def checksum(words: torch.Tensor) -> int:
    """Of the second of two buckets; the first is another."""
    sums = Checksums(2, None)
    sums.take(0, torch.ones(512, dtype=torch.uint8))
    sums.take(1, words.view(torch.uint8))
    return sums.read()[1]


@given(st.integers(1, 3 * WORDS), st.data())
@settings(max_examples=50)
def test_the_checksum_sees_a_changed_word_and_words_moved_by_a_power_of_two(n_words: int, data: st.DataObject) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (n_words,), dtype=torch.int64)
    at = data.draw(st.integers(0, n_words - 1))
    before = checksum(words)
    changed = words.clone()
    changed[at] ^= 1
    assert checksum(changed) != before
    for distance in (2**power for power in range(15)):
        if at + distance < n_words:
            swapped = words.clone()
            swapped[[at, at + distance]] = words[[at + distance, at]]
            assert checksum(swapped) != before


def test_the_checksum_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "WORDS", 100)
    words = torch.zeros(256, dtype=torch.int64)
    words[1], words[102], words[255] = 5, 7, 11  # columns 1 and 2 of whole rows, column 55 of the last
    assert checksum(words) == 5 * 2 + 7 * 3 + 11 * 56
