"""The benchmarks of sampling and of whole steps, on tiny models: what they count, and what they compare it with."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import decode, grpo_step, rollout, router_replay, setup, transformers_peer
from benchmarks.setup import QWEN_SPECIAL, Limits, Model
from npu_vlrl import kernels
from npu_vlrl.hardware import Platform, select
from npu_vlrl.learner.flops import ModelFlops
from npu_vlrl.model.routing import Routing
from npu_vlrl.model.tokens import special_tokens
from npu_vlrl.types import Segment, SpecialTokens
from npu_vlrl.workflow.render import Renderer

CPU = torch.device("cpu")
LIMITS = Limits(flops=1e9, bandwidth=1e8)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    for module in (decode, rollout, grpo_step):
        monkeypatch.setattr(module, "limits", lambda *_: LIMITS)
    yield
    kernels.use("reference")


@pytest.fixture
def on() -> Platform:
    return select()


@pytest.fixture(scope="module")
def made() -> Model:
    return setup.model("tiny", CPU, torch.float32)


# --- decode ----------------------------------------------------------------------------------------------------------

SMALL = decode.Workload(batches=(3, 2), context=20, new=4, side=56)


def test_decode_reports_each_batch_and_compares_both_kinds_of_prompts() -> None:
    found = decode.measure("tiny", SMALL, with_peer=True, repeats=1)
    rows = found["decode"]
    assert [(row["prompts"], row["batch"]) for row in rows] == [("text", 3), ("text", 2), ("picture", 3)]
    for row in rows:
        assert row["tokens/s"] == pytest.approx(row["batch"] / (row["step, ms"] / 1e3))
        assert row["over limit"] == pytest.approx(row["step, ms"] / row["limit, ms"])
    assert [row["generate, ms"] is None for row in rows] == [False, False, True]
    assert rows[0]["generate over ours"] == pytest.approx(rows[0]["generate, ms"] / rows[0]["step, ms"])
    assert [(row["prompts"], row["rows"]) for row in found["exactness"]] == [("text", 3), ("picture", 3)]
    assert all(0 < row["mean gap"] <= row["largest gap"] < 1e-5 for row in found["exactness"])


def test_without_the_peer_nothing_is_made_of_it() -> None:
    rows = decode.measure("tiny", SMALL, with_peer=False, repeats=1)["decode"]
    assert {row["generate, ms"] for row in rows} == {row["generate over ours"] for row in rows} == {None}


@pytest.mark.parametrize("with_pictures", [False, True])
def test_requests_are_distinct_and_have_the_wanted_length(made: Model, with_pictures: bool) -> None:
    asked = decode.requests(made, 3, SMALL, with_pictures)
    assert [one.session for one in asked] == [0, 1, 2]
    assert [len(one.token_ids) for one in asked] == [20] * 3
    assert len({one.prompt() for one in asked}) == 3
    special = made.policy.special
    # 56 x 56 pixels are 4 x 4 patches, 2 x 2 tokens
    assert [one.token_ids.count(special.image or -1) for one in asked] == [4 * with_pictures] * 3
    control = {*special.end_of_turn, special.video}
    assert not control.intersection(token for one in asked for token in one.token_ids)


def test_a_picture_that_does_not_fit_is_refused(made: Model) -> None:
    with pytest.raises(ValueError, match="6 tokens leaves no room in --context 6"):
        decode.requests(made, 1, replace(SMALL, context=6), with_pictures=True)


def test_no_turn_ends_early_and_the_policy_keeps_its_control_tokens(made: Model, on: Platform) -> None:
    before = made.policy.special
    engine = decode.new_engine(made, on)
    asked = decode.requests(made, 2, SMALL, with_pictures=False)
    # so many tokens of a small vocabulary that ends of turns are among them
    told = decode.play(engine, asked, 300)
    assert [len(one.token_ids) for one in told] == [300, 300]
    assert set(before.end_of_turn).intersection(token for one in told for token in one.token_ids)
    assert made.policy.special == before
    assert before.image not in {token for one in told for token in one.token_ids}


def test_what_a_row_failed_with_is_raised(on: Platform) -> None:
    own = setup.model("tiny", CPU, torch.float32)
    with torch.no_grad():
        own.policy.head_weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        decode.play(decode.new_engine(own, on), decode.requests(own, 1, SMALL, with_pictures=False), 2)


def test_the_gap_is_that_of_a_wrong_logprob_and_of_other_weights(made: Model, on: Platform) -> None:
    asked = decode.requests(made, 2, SMALL, with_pictures=True)
    told = decode.play(decode.new_engine(made, on), asked, 4)
    wrong = [told[0], replace(told[1], logprobs=(told[1].logprobs[0] - 0.5, *told[1].logprobs[1:]))]
    largest, mean = decode.logprob_gap(made, asked, wrong)
    assert largest == pytest.approx(0.5, abs=1e-5)
    assert mean == pytest.approx(0.5 / 8, abs=1e-5)
    other = setup.model("tiny", CPU, torch.float32)
    with torch.no_grad():
        other.policy.vision.patches.weight.mul_(2)
    assert decode.logprob_gap(other, asked, told)[0] > 1e-3


def test_the_limit_of_the_published_shapes() -> None:
    """36 layers; 16 heads of 128 for queries, 2 for keys; 3.086e9 parameters; bfloat16."""
    of = decode.sizes(setup.model("3b", torch.device("meta"), torch.bfloat16).policy)
    layer = 2048 * (2048 + 2 * 256) + 2048 * 2048 + 3 * 2048 * 11008
    assert of.weights == 36 * layer + 151936 * 2048 == pytest.approx(3.086e9, rel=1e-3)
    assert (of.kept, of.attention, of.width) == (36864, 4 * 36 * 2048, 2)
    reached = Limits(flops=8e14, bandwidth=4.3e12)
    assert decode.step_limit(of, 64, 1200, reached) == pytest.approx(
        (2 * 3.086e9 + 64 * 1200 * 36864) / 4.3e12, rel=1e-3
    )
    # with so many rows the products take longer than reading
    products = 4096 * (2 * of.weights + 4 * 36 * 2048) / 8e14
    assert decode.step_limit(of, 4096, 1, reached) == pytest.approx(products)


def test_a_step_is_what_more_tokens_take(monkeypatch: pytest.MonkeyPatch, on: Platform) -> None:
    taken = {1: 5.0, 9: 9.0}
    monkeypatch.setattr(decode, "seconds", lambda work, *_: taken[work()])
    assert decode.timed(lambda new: new, 9, on, 1) == (5.0, 0.5)


# --- the peer --------------------------------------------------------------------------------------------------------


def test_the_peer_has_the_same_weights_and_nothing_of_ours(made: Model, on: Platform) -> None:
    with transformers_peer.as_installed("tiny", on, torch.float32) as plain:
        theirs = plain.policy.model.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in made.policy.model.state_dict().items())
        named = {m.config._attn_implementation for m in plain.policy.model.modules() if hasattr(m, "config")}
        assert named == {"sdpa"}


def test_our_ops_come_back_after_the_peer(monkeypatch: pytest.MonkeyPatch, on: Platform) -> None:
    used: list[str] = []
    monkeypatch.setattr(kernels, "use", used.append)
    with pytest.raises(KeyError), transformers_peer.as_installed("tiny", on, torch.float32):
        assert used == ["reference"]
        raise KeyError
    assert used == ["reference", on.kernels]


def test_contexts_are_padded_on_the_left_and_come_with_their_pictures(
    made: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    special, given = made.policy.special, {}

    def generate(**named: Any) -> torch.Tensor:
        given.update(named)
        return torch.cat([named["input_ids"], torch.full((2, 3), 7)], dim=1)

    monkeypatch.setattr(made.policy.base, "generate", generate)
    wide, small = (made.processor.describe(setup.pictures(1, width, 56)[0]) for width in (112, 56))
    contexts = [((5, *decode.shown(special, wide)), [wide]), ((6, *decode.shown(special, small), 8), [small])]
    assert transformers_peer.generate(made, contexts, 3) == [[7] * 3] * 2
    image, pad = special.image, special.end_of_turn[-1]
    start, end = special.vision_start, special.vision_end
    assert given["input_ids"].tolist() == [[5, start, *[image] * 8, end], [pad] * 3 + [6, start, *[image] * 4, end, 8]]
    assert given["attention_mask"].tolist() == [[1] * 11, [0] * 3 + [1] * 8]
    assert given["mm_token_type_ids"].tolist() == (given["input_ids"] == image).long().tolist()
    assert given["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4]]
    assert torch.equal(given["pixel_values"][:32], made.processor.patches(wide))
    assert (given["max_new_tokens"], given["min_new_tokens"], given["do_sample"], given["top_k"]) == (3, 3, True, 0)


def test_work_tells_reading_decoding_and_training_apart(on: Platform) -> None:
    with transformers_peer.as_installed("tiny", on, torch.float32) as plain:
        work = transformers_peer.Work(plain.policy.base)
        image = plain.processor.describe(setup.pictures(1, 56, 56)[0])
        ids = decode.shown(plain.policy.special, image)
        transformers_peer.generate(plain, [(ids, [image]), ((1, 2), [])], 3)
        assert (work.images, work.prefilled, work.decoded, work.trained) == (1, 2 * 6, 2 * 2, 0)
        plain.policy.model(input_ids=torch.tensor([[1, 2, 3]]))
        assert (work.images, work.prefilled, work.decoded, work.trained) == (1, 2 * 6, 2 * 2, 3)


# --- rollout ---------------------------------------------------------------------------------------------------------

EPISODES = rollout.Workload(episodes=3, turns=3, new=4, sides=(56, 112), words=5)


def said(told: list[list[Segment]]) -> list[list[int]]:
    return [[len(segment) for segment in script] for script in told]


def test_scripts_are_seeded_and_no_picture_comes_twice(made: Model) -> None:
    told = rollout.scripts(made, EPISODES, seed=0)
    assert told == rollout.scripts(made, EPISODES, seed=0) != rollout.scripts(made, EPISODES, seed=1)
    assert [[segment.kind.value for segment in script] for script in told] == [
        ["prompt", "observation", "observation"]
    ] * 3
    images = rollout.pictures_of(told)
    assert len({image.image.hash for image in images}) == 9
    assert all(56 <= side <= 112 for image in images for side in image.image.size)
    assert len({image.image.size for image in images}) > 1
    assert all(len(segment) == 5 + 2 + segment.images[0].n_tokens for script in told for segment in script)


def test_both_play_the_same_episodes_and_count_what_they_compute(made: Model) -> None:
    ours, peer = rollout.measure("tiny", EPISODES, peer_episodes=3)["rollout"]
    lengths = said(rollout.scripts(made, EPISODES, seed=0))
    contexts = [[sum(own[: turn + 1]) + 4 * turn for turn in range(3)] for own in lengths]
    assert ours["images encoded"] == 3 * 3
    assert ours["tokens requested"] == peer["tokens requested"] == sum(map(sum, contexts))
    # a turn's last token was drawn, not read: it comes with the next observation
    assert ours["tokens prefilled"] == sum(map(sum, lengths)) + 3 * 2
    assert peer["images encoded"] == 3 * (1 + 2 + 3)
    assert peer["tokens prefilled"] == sum(3 * max(own[turn] for own in contexts) for turn in range(3))
    assert ours["tokens sampled"] == peer["tokens sampled"] == 3 * 3 * 4
    assert ours["times as long"] == 1
    assert peer["times as long"] == pytest.approx(peer["seconds"] / ours["seconds"])


def test_a_share_of_the_episodes_is_compared_by_the_episode() -> None:
    ours, peer = rollout.measure("tiny", EPISODES, peer_episodes=2)["rollout"]
    assert (ours["episodes"], peer["episodes"]) == (3, 2)
    assert peer["images encoded"] == 2 * (1 + 2 + 3)
    assert peer["times as long"] == pytest.approx(peer["seconds"] / 2 / (ours["seconds"] / 3))
    assert len(rollout.measure("tiny", EPISODES, peer_episodes=None)["rollout"]) == 1


def test_every_turn_continues_its_own_episode(made: Model, on: Platform) -> None:
    told = rollout.scripts(made, EPISODES, seed=0)
    episodes = asyncio.run(rollout.play(decode.new_engine(made, on), told, 4))
    for script, episode in zip(told, episodes, strict=True):
        assert episode[::2] == script
        assert [(segment.kind.value, len(segment)) for segment in episode[1::2]] == [("action", 4)] * 3
    with transformers_peer.as_installed("tiny", on, torch.float32) as plain:
        theirs = rollout.loop(plain, told, 4)
    for (ids, images), script, lengths in zip(theirs, told, said(told), strict=True):
        assert len(ids) == sum(lengths) + 3 * 4
        assert images == [segment.images[0] for segment in script]
        assert ids[: lengths[0]] == list(script[0].token_ids)


def test_the_floor_reads_every_token_of_the_world_once(made: Model) -> None:
    told, of, flops = rollout.scripts(made, EPISODES, seed=0), decode.sizes(made.policy), ModelFlops(made.policy)
    tokens = pairs = 0
    for lengths in said(told):
        place = 0
        for length in lengths:
            tokens += length
            pairs += sum(place + i + 1 for i in range(length))
            place += length + 4
    products = flops.layers(tokens, pairs, train=False) + flops.head(9, train=False)
    products += flops.tower(rollout.pictures_of(told), train=False)
    contexts = [np.mean([sum(own[: turn + 1]) + 4 * turn + 2 for own in said(told)]) for turn in range(3)]
    steps = sum(3 * decode.step_limit(of, 3, float(context), LIMITS) for context in contexts)
    assert rollout.floor(made.policy, told, 4, LIMITS) == pytest.approx(products / 1e9 + steps)


def test_pictures_are_cut_before_the_clock_starts(made: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    told = rollout.scripts(made, EPISODES, seed=0)
    patient, _ = rollout.with_patches(made, told)
    monkeypatch.setattr(type(made.processor), "_encode", lambda *_: pytest.fail("a picture is cut again"))
    for image in rollout.pictures_of(told):
        patient.processor.patches(image)


# --- grpo_step -------------------------------------------------------------------------------------------------------

STEP = grpo_step.Workload(prompts=2, members=3, new=5, side=56, text="Which way?")


def distinct_beginnings(samples: list[list[int]]) -> int:
    return len({tuple(ids[:end]) for ids in samples for end in range(1, len(ids) + 1)})


def test_a_step_samples_and_trains_and_counts_both(made: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    step = grpo_step.Learner.step
    monkeypatch.setattr(grpo_step.Learner, "step", lambda self, samples: seen.append(samples) or step(self, samples))
    found = grpo_step.measure("tiny", STEP, steps=2, peer_steps=None)
    (row,) = found["step"]
    assert [len(samples) for samples in seen] == [6, 6, 6]  # one step to warm up
    prompt = len(seen[0][0].segments[0])
    assert row["images encoded"] == 2 * 2  # for the rollout, and again with a graph
    assert row["tokens, rollout"] == 2 * prompt + 6 * 4
    keys = [[keys_of(sample, made.policy.special) for sample in samples] for samples in seen[1:]]
    assert row["tokens, update"] == sum(map(distinct_beginnings, keys)) // 2
    assert row["seconds"] == pytest.approx(row["rollout, s"] + row["update, s"], rel=0.5)
    assert row["largest logprob gap"] < 1e-4
    assert all(any(sample.credit.advantages_N) for sample in seen[0])
    assert len({sample.images[0].image.hash for samples in seen for sample in samples}) == 3 * 2


def keys_of(sample: Any, special: SpecialTokens) -> list[Any]:
    """Token ids, in which a placeholder tells its picture."""
    (image,) = sample.images
    return [(token, image.image.hash) if token == special.image else token for token in sample.token_ids]


def test_responses_are_seeded_and_a_step_changes_the_weights(on: Platform) -> None:
    own = setup.model("tiny", CPU, torch.float32, checkpointing=True)
    asked = grpo_step.prompts(Renderer(grpo_step.tokenizer("tiny"), own.processor), STEP, seed=0)
    engine = decode.new_engine(own, on)
    learner = grpo_step.new_learner(own, engine, steps=1)
    first, again = (asyncio.run(grpo_step.sample(engine, asked, STEP, step=0)) for _ in range(2))
    assert [s.segments for s in first] == [s.segments for s in again]
    assert len({s.segments[1].token_ids for s in first}) == 6
    assert [s.group for s in first] == ["0/0"] * 3 + ["0/1"] * 3
    assert len({s.reward for s in first}) == 6
    before = {name: weight.clone() for name, weight in own.policy.model.state_dict().items()}
    _, metrics = grpo_step.train(engine, learner, asked, STEP, 0, on)
    assert metrics["grad_norm"] > 0
    after = own.policy.model.state_dict()
    for part in ("visual.patch_embed", "visual.merger", "layers.1.mlp.down_proj"):
        names = [name for name in before if part in name]
        assert names and all(not torch.equal(before[name], after[name]) for name in names), part
    assert engine.weight_version == 1


def test_the_floor_of_a_step(made: Model) -> None:
    asked = grpo_step.prompts(Renderer(grpo_step.tokenizer("tiny"), made.processor), STEP, seed=0)
    flops, of, n = ModelFlops(made.policy), decode.sizes(made.policy), len(asked[0])
    images = [prompt.images[0] for prompt in asked]
    read = flops.tower(images, train=False) + 2 * flops.layers(n, sum(range(n + 1)), train=False)
    read += 2 * flops.head(1, train=False)
    rollout_s, update_s = grpo_step.floor(made.policy, asked, STEP, LIMITS)
    assert rollout_s == pytest.approx(read / 1e9 + 4 * decode.step_limit(of, 6, n + 2.5, LIMITS))
    tokens, pairs = 2 * n + 30, 2 * sum(range(n + 1)) + 6 * sum(n + i + 1 for i in range(5))
    trained = flops.tower(images, True) + flops.layers(tokens, pairs, True) + flops.head(30, True)
    again = flops.tower(images, False) + flops.layers(tokens, pairs, False) + flops.head(30, False)
    adamw = 30 * sum(p.numel() for p in made.policy.model.parameters()) / 1e8
    assert update_s == pytest.approx((trained + again) / 1e9 + adamw)


def test_the_tokenizer_has_the_ids_of_the_published_model() -> None:
    words = grpo_step.tokenizer("3b")
    assert special_tokens(words, with_images=True, owner="the tokenizer") == QWEN_SPECIAL
    ids = words.encode("Which way is up?\nÄ", add_special_tokens=False)
    assert words.decode(ids) == "Which way is up?\nÄ"
    assert words.decode([*ids, 151664]) == "Which way is up?\nÄ"  # ids of the head that no token has


@pytest.mark.parametrize("size", setup.SIZES)
def test_transformers_makes_the_same_prompt_and_the_same_patches(size: str) -> None:
    settings = setup.ImageProcessor() if size == "3b" else setup.model("tiny", CPU, torch.float32).processor
    words = grpo_step.tokenizer(size)
    prompt = grpo_step.prompts(Renderer(words, settings), replace(STEP, prompts=1, side=168), seed=3)[0]
    (image,) = prompt.images
    parts = [{"type": "image", "image": image.image.rgb}, {"type": "text", "text": STEP.text}]
    given = grpo_step.peer_processor(settings, words).apply_chat_template(
        [[{"role": "user", "content": parts}]], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert given["input_ids"] == [list(prompt.token_ids)]
    assert np.asarray(given["image_grid_thw"]).tolist() == [list(image.grid)]
    np.testing.assert_allclose(np.asarray(given["pixel_values"]), settings.patches(image).numpy(), atol=1e-6)


def test_the_peer_needs_trl(monkeypatch: pytest.MonkeyPatch, on: Platform) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match="--peer needs requirements-bench.txt .*without --peer"):
        grpo_step.peer("tiny", STEP, 1, on)


def test_steps_of_trl_are_timed_after_the_first(monkeypatch: pytest.MonkeyPatch, on: Platform) -> None:
    """TRL is not among the requirements of the tests: a trainer that generates and trains as it does stands in."""
    calls: dict[str, Any] = {}

    class Trainer:
        def __init__(self, model: Any, reward: Any, settings: Any, data: Any, *, processing_class: Any, callbacks: Any):
            self.model, self.reward, self.settings, self.data = model, reward, settings, data
            self.clock = callbacks[0]
            calls["processor"] = processing_class

        def remove_callback(self, kind: Any) -> None:
            calls["removed"] = kind

        def train(self) -> None:
            for _ in range(self.settings.max_steps):
                self.clock.on_step_begin()
                with torch.no_grad():
                    self.model(input_ids=torch.ones(6, 30, dtype=torch.long))
                    self.model(input_ids=torch.ones(6, 1, dtype=torch.long))
                self.model(input_ids=torch.ones(6, 35, dtype=torch.long))
                calls["rewards"] = self.reward(completions=["a"] * 6)
                self.clock.on_step_end()

    trl, datasets = ModuleType("trl"), ModuleType("datasets")
    trl.GRPOConfig = lambda **named: SimpleNamespace(**named)  # type: ignore[attr-defined]
    trl.GRPOTrainer = Trainer  # type: ignore[attr-defined]
    datasets.Dataset = SimpleNamespace(from_list=list)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    ours, row = grpo_step.measure("tiny", STEP, steps=1, peer_steps=2)["step"]
    assert (row["tokens, rollout"], row["tokens, update"]) == (6 * 30 + 6, 6 * 35)
    assert row["times as long"] == pytest.approx(row["seconds"] / ours["seconds"])
    assert list(row) == list(ours)
    assert len(calls["rewards"]) == 6 and len(set(calls["rewards"])) == 6


def test_the_clock_takes_each_step(monkeypatch: pytest.MonkeyPatch, on: Platform) -> None:
    times = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(grpo_step.time, "perf_counter", lambda: next(times))
    clock = grpo_step.StepClock(on)
    for _ in range(2):
        clock.on_step_begin()
        clock.on_step_end()
    assert clock.taken == [2.0, 0.5]


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "arguments", "key", "told"),
    [
        (decode, "--batch 2 --context 9 --new 3", "decode", "3 tokens after 9"),
        (rollout, "--episodes 2 --turns 2 --new 2 --peer --peer-episodes 1", "rollout", "1 of 2"),
        (grpo_step, "--prompts 1 --members 2 --new 2 --steps 1", "step", "2 responses of 2 tokens"),
    ],
    ids=["decode", "rollout", "grpo_step"],
)
def test_a_command_prints_a_table_and_writes_what_it_found(
    module: ModuleType,
    arguments: str,
    key: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "deep" / "results.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--size", "tiny", *arguments.split(), "--out", str(out)])
    module.main()
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert told in printed
    assert "| " + " | ".join(written[key][0]) + " |" in printed
    assert (written["platform"], written["size"]) == ("cpu", "tiny")
    if module is rollout:
        assert "it is not compared" in printed


# --- router replay ---------------------------------------------------------------------------------------------------


def test_replay_is_measured_at_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that is given the experts of another token is found out."""
    workload = decode.Workload(batches=(2,), context=20, new=4, side=0)
    without, replayed = router_replay.measure("tiny", workload, repeats=1)["replay"]
    for row in (without, replayed):
        assert row["tokens"] == 2 * (20 + 4 - 1)
        assert 0 <= row["mean gap, nats"] <= row["largest gap, nats"] < 0.5
    assert replayed["other experts, of token and layer"] == replayed["tokens with other experts"] == 0

    choose = Routing.choose
    monkeypatch.setattr(Routing, "choose", lambda routing, layer, own_Tk: choose(routing, layer, own_Tk).roll(1, 0))
    _, wrong = router_replay.measure("tiny", workload, repeats=1)["replay"]
    assert wrong["other experts, of token and layer"] > 0.5
