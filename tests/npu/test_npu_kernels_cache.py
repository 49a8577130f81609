"""Attention over kept keys and values by torch_npu, over the stand-in for CANN: the op, and the engine that decodes.

16 bits go to the attention made for inference, float32 to the one made for training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.config import ModelConfig
from npu_vlrl.kernels import npu, reference
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.model.load import load_model
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.types import Segment
from tests.host_cann import counted
from tests.support.episodes import Stage
from tests.support.models import KINDS, is_vision, tiny_folder
from tests.support.rounds import LOOKS, continued, params, prompt, run

DEVICE = torch.device("npu", 0)
HEADS, KEY_HEADS, WIDTH = 6, 2, 16
HALVES = (torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of values up to 2: half a unit in the last place, and in float32 the same sums in another order."""
LENGTHS = (140, 3, 200)


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    kernels.use("npu")
    yield
    kernels.use("reference")


def inputs(news: tuple[int, ...], room: int, dtype: torch.dtype) -> list[Tensor]:
    """q as layers make it, tokens first in memory; keys and values of all rows, large beyond their lengths."""
    generator = torch.Generator().manual_seed(room + sum(news))
    shapes = ((sum(news), HEADS, WIDTH), *[(len(news), room, KEY_HEADS, WIDTH)] * 2)
    q, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    for row, length in enumerate(LENGTHS):
        keys[row, length:] = values[row, length:] = 30
    return [q.transpose(0, 1), keys, values]


def compare(news: tuple[int, ...], room: int, dtype: torch.dtype, host: bool = True) -> Counter[str]:
    """With the definition in float64; returns what ran on the device."""
    q, keys, values = inputs(news, room, dtype)

    def rows(device: Any) -> CacheRows:
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        return CacheRows.of(lengths, news, room, max(LENGTHS), LENGTHS if host else ())

    expected = reference.decode_attention(q.double(), keys.double(), values.double(), rows("cpu"), 0.25)
    with counted() as ran:
        found = npu.decode_attention(*(x.to(DEVICE) for x in (q, keys, values)), rows(DEVICE), 0.25)
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=TOLERANCES[dtype])
    assert not [name for name in ran if name.startswith(("fallback::", "copied::"))]
    return ran


def attention(ran: Counter[str]) -> dict[str, int]:
    return {name.rstrip("V0123456789"): times for name, times in ran.items() if "Attention" in name}


INFERENCE, TRAINING = {"aclnnFusedInferAttentionScore": 1}, {"aclnnFlashAttentionScore": 1}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("news", "room"), [((1, 1, 1), 256), ((1, 1, 1), 217), ((30, 1, 77), 256), ((2, 2, 2), 256)])
def test_halves_go_to_the_attention_for_inference(news: tuple[int, ...], room: int, dtype: torch.dtype) -> None:
    assert attention(compare(news, room, dtype)) == INFERENCE


@pytest.mark.parametrize("news", [(1, 1, 1), (30, 1, 77)])
def test_float32_goes_to_the_attention_for_training(news: tuple[int, ...]) -> None:
    assert attention(compare(news, 256, torch.float32)) == TRAINING


def test_what_the_attention_for_inference_does_not_take_goes_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several queries: places that make no blocks, lengths that the host does not know, too many sequences."""
    assert attention(compare((30, 1, 77), 217, torch.bfloat16)) == TRAINING
    assert attention(compare((30, 1, 77), 256, torch.bfloat16, host=False)) == TRAINING
    monkeypatch.setattr(npu, "MOST_INFERRED", 2)
    assert attention(compare((30, 1, 77), 256, torch.bfloat16)) == TRAINING


@pytest.mark.parametrize(
    ("news", "spoil"),
    [
        ((1, 1, 1), lambda options: options | {"atten_mask": options["atten_mask"].roll(1, 3)}),
        ((1, 1, 1), lambda options: options | {"atten_mask": torch.zeros_like(options["atten_mask"])}),
        ((1, 1, 1), lambda options: options | {"actual_seq_lengths_kv": [199]}),
        ((30, 1, 77), lambda options: options | {"actual_seq_lengths_kv": (141, 3, 200)}),
        ((30, 1, 77), lambda options: options | {"block_table": options["block_table"].flip(0)}),
        ((30, 1, 77), lambda options: options | {"sparse_mode": 0, "atten_mask": None}),
    ],
)
def test_a_wrong_call_is_found(
    monkeypatch: pytest.MonkeyPatch, news: tuple[int, ...], spoil: Callable[..., Any]
) -> None:
    inferred = npu._inferred
    monkeypatch.setattr(npu, "_inferred", lambda *args, **options: inferred(*args, **spoil(options)))
    with pytest.raises(AssertionError, match="not close"):
        compare(news, 256, torch.bfloat16)


CLOSE = 0.01
"""Nats. The stand-in rounds alike in both attentions: it gave 5e-7, and 0.26 with a mask that is one place off."""


# --- the engine ------------------------------------------------------------------------------------------------------


def by_the_learner(stage: Stage, contexts: list[list[Segment]], answers: list[Any]) -> list[Tensor]:
    """Log-probabilities of the answers' tokens, packed as the learner does it."""
    policy, images, places, ids = stage.policy, [], [], []
    for context, answer in zip(contexts, answers, strict=True):
        tokens = [token for segment in context for token in segment.token_ids] + list(answer.token_ids)
        shown = [image for segment in context for image in segment.images]
        places.append(torch.from_numpy(rotary_positions(tokens, shown, policy.special.image, policy.merge_size)))
        images += shown
        ids.append(torch.tensor(tokens))
    with torch.no_grad():
        tree = Tree.of_sequences([0, *accumulate(map(len, ids))])
        hidden = policy.hidden_packed(
            torch.cat(ids).to(DEVICE), torch.cat(places, 1).to(DEVICE), tree, stage.vision.differentiable(images)
        )
        logprobs = kernels.op("logprob_entropy")(
            hidden, policy.head_weight, torch.cat(ids).roll(-1).to(DEVICE), 1.0, policy.forbidden_V, 64
        )[0]
    parts = logprobs.cpu().split([len(one) for one in ids])
    return [part[-len(answer.token_ids) - 1 : -1] for part, answer in zip(parts, answers, strict=True)]


def play(kind: str, dtype: str) -> tuple[float, Counter[str], int]:
    """Two turns of three sessions, the second over what the first left behind: the largest gap in nats, what the
    engine ran on the device, and how many tokens were compared."""
    stage = Stage(load_model(ModelConfig(path=str(tiny_folder(kind)), dtype=dtype), tiny_folder(kind), 0, DEVICE))
    contexts = [prompt(stage, *(LOOKS[:n] if is_vision(kind) else ()), "up?" + " x" * n) for n in (0, 1, 2)]
    sessions = [stage.engine.session() for _ in contexts]
    gaps: list[float] = []
    ran: Counter[str] = Counter()
    for turn in range(2):
        requests = zip(sessions, contexts, strict=True)
        with counted() as count:
            answers = run(*(one.generate(context, params(9 * turn + i)) for i, (one, context) in enumerate(requests)))
        ran += count
        ours = [torch.tensor(answer.logprobs) for answer in answers]
        gaps += (
            torch.cat([a - b for a, b in zip(ours, by_the_learner(stage, contexts, answers), strict=True)])
            .abs()
            .tolist()
        )
        contexts = [continued(stage, *pair, "no, again") for pair in zip(contexts, answers, strict=True)]
    for session in sessions:
        session.close()
    return max(gaps), ran, len(gaps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_and_the_learner_agree_in_bfloat16(kind: str) -> None:
    gap, ran, tokens = play(kind, "bfloat16")
    assert tokens > 15 and gap < CLOSE
    assert ran["aclnnFusedInferAttentionScoreV3"] + ran["aclnnFusedInferAttentionScoreV2"] > 10
    assert not ran["aclnnFlashAttentionScore"] or is_vision(kind)  # windows of the towers
    assert not [name for name in ran if name.startswith(("fallback::", "copied::"))]


def test_the_engine_and_the_learner_agree_in_float32_by_the_attention_for_training() -> None:
    gap, ran, _ = play("qwen3", "float32")
    assert gap < 1e-5
    assert ran["aclnnFlashAttentionScore"] > 10 and not [name for name in ran if "Infer" in name]


def test_a_wrong_mask_opens_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    inferred = npu._inferred

    def spoilt(*args: Any, **options: Any) -> Tensor:
        if "block_table" not in options:
            options["atten_mask"] = options["atten_mask"].roll(-1, 3)  # no query sees its own token
        return inferred(*args, **options)

    monkeypatch.setattr(npu, "_inferred", spoilt)
    assert play("qwen3", "bfloat16")[0] > 10 * CLOSE
