"""Two processes that share an update: what each ends with is what one process alone computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from npu_vlrl.config import AlgorithmConfig, CriticConfig, OptimConfig
from npu_vlrl.learner import ranks as ranks_module
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.trainer import Learner, LearnerError
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Sample
from npu_vlrl.workflow.export import export
from tests.support.learning import (
    an_image,
    assign_advantages,
    float64_inside,
    load,
    tiny_folder,
    trajectory,
    with_advantage,
)
from tests.support.ranks import fork_here

torch.set_num_threads(1)

BUDGET = 178
"""The group without images fits, and so does each with images, but no two of them."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo", "kl_coef": 0.1},
    "ppo": {"preset": "turn_ppo", "kl_coef": 0.0},
    "ppo-shared": {"preset": "trico", "kl_coef": 0.0},
    "decoupled": {"preset": "grpo", "kl_coef": 0.0, "loss": "decoupled_ppo", "updates": 2, "epochs": 2},
    "gspo-tis": {"preset": "grpo", "kl_coef": 0.0, "loss": "gspo", "correction": "tis", "entropy_coef": 0.02},
}


def groups(loaded: LoadedModel, with_images: bool = True) -> list[Sample]:
    """A large group that is text only, and two smaller ones that show images."""
    made = [trajectory(loaded, s, (24, 20), group="text", rewards=(0.0, float(s))) for s in range(3)]
    for number, name in enumerate(("one", "two")):
        shown = [an_image(number, 56, 56)] if with_images else []
        made += [trajectory(loaded, 9 + 3 * number + s, (24,), shown, group=name, rewards=(s,)) for s in range(3)]
    return export(made, "concat", "sum", 1.0, "tiny")


def new_learner(loaded: LoadedModel, name: str, ranks: Ranks | None, **algorithm: Any) -> Learner:
    settings = AlgorithmConfig(**({"max_logprob_gap": 1e6} | ALGORITHMS[name] | algorithm))
    vision = VisionFeatures(loaded.policy, loaded.processor, 1 << 24)
    optim = OptimConfig(lr=1e-3, micro_batch_tokens=BUDGET, weight_decay=0.1)
    critic = CriticConfig(lr=1e-2, backbone="shared" if name.endswith("shared") else "separate")
    return Learner(loaded.policy, vision, settings, optim, 1.0, 10, critic, ranks)


def train(name: str, ranks: Ranks | None, **changes: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The metrics of two steps, and the weights after them: a step without images is the second."""
    loaded = load(**changes)
    wide = name in ("grpo", "decoupled")
    with float64_inside() if wide else nullcontext():
        if wide:
            loaded.policy.model.double()
        learner = new_learner(loaded, name, ranks)
        metrics = []
        for with_images in (True, False):
            scored = learner.score(groups(loaded, with_images))
            metrics.append(learner.step(assign_advantages(scored, learner.algorithm)))
    weights = dict(learner.parameters)
    if learner.critic is not None:
        weights |= learner.critic.parameters
    return metrics, {key: p.detach().clone() for key, p in weights.items()}


def plan_of(ranks: Ranks) -> list[dict[str, Any]]:
    loaded = load()
    learner = new_learner(loaded, "grpo", ranks)
    return [
        {"samples": batch.sample_ids, "images": len(batch.images), "tokens": len(batch.token_ids_T)}
        for batch in learner._micro_batches(groups(loaded))
    ]


def skipped(ranks: Ranks) -> dict[str, Any]:
    """A number that is not finite, in a sample that one rank has."""
    loaded = load()
    learner = new_learner(loaded, "grpo", ranks, kl_coef=0.0)
    samples = assign_advantages(groups(loaded), learner.algorithm)
    before = {key: p.detach().clone() for key, p in learner.parameters.items()}
    bad = [with_advantage(s, math.nan) if s.id == "two/13" else s for s in samples]
    first = learner.step(bad)
    stayed = all(torch.equal(p, before[key]) for key, p in learner.parameters.items())
    second = learner.step(samples)
    moved = not any(torch.equal(p, before[key]) for key, p in learner.parameters.items() if "weight" in key)
    return {
        "skipped": learner.skipped,
        "counts": [first["skipped_updates"], second["skipped_updates"]],
        "norms": [first["grad_norm"], second["grad_norm"]],
        "stayed": stayed,
        "moved": moved,
    }


def refused(ranks: Ranks) -> list[str]:
    """What ranks say when engine and learner disagree on a token of one rank, and when they hold other samples."""
    loaded = load()
    samples = groups(loaded)
    said = []
    for settings, given in (
        ({"max_logprob_gap": 6.0}, [far_off(loaded, s) if s.id == "one/10" else s for s in samples]),
        ({}, samples[1:] if ranks.rank else samples[:-1]),
        ({}, [with_advantage(s, 1.0 + ranks.rank) for s in samples]),
    ):
        learner = new_learner(loaded, "grpo", ranks, kl_coef=0.0, **settings)
        with pytest.raises(LearnerError) as caught:
            learner.step(given if given[0].credit else [with_advantage(s, 1.0) for s in given])
        said.append(str(caught.value))
    return said


def far_off(loaded: LoadedModel, sample: Sample) -> Sample:
    action = sample.segments[sample.trained[0]]
    wrong = replace(action, special=loaded.policy.special, logprobs=(-40.0, *action.logprobs[1:]))
    return replace(sample, segments=tuple(wrong if s is action else s for s in sample.segments))


def reduced(ranks: Ranks) -> dict[str, Any]:
    """Gradients by hand, in buckets of four numbers: on both ranks, on one, on the other, on none, and a large one."""
    shapes = [(2,), (3, 1), (1,), (2, 2), (5,)]
    owners = [(0, 1), (0,), (1,), (), (0, 1)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, (parameter, own) in enumerate(zip(parameters, owners, strict=True)):
        if ranks.rank in own:
            parameter.grad = torch.full(shapes[number], 10.0**number * (ranks.rank + 1))
    calls: list[int] = []

    def count(tensor: Tensor, **options: Any) -> None:
        calls.append(tensor.numel())
        original(tensor, **options)

    original = dist.all_reduce
    with mock.patch.object(ranks_module, "BUCKET_BYTES", 16), mock.patch.object(dist, "all_reduce", count):
        ranks.sum_gradients(torch.optim.SGD(parameters, lr=1.0))
    return {"gradients": [None if p.grad is None else p.grad.flatten().tolist() for p in parameters], "calls": calls}


@contextmanager
def nothing_summed() -> Iterator[None]:
    with mock.patch.object(Ranks, "sum_gradients", lambda *_: None):
        yield


def supervised(ranks: Ranks | None) -> list[float]:
    """Losses of two steps of maximum likelihood."""
    loaded = load()
    learner = new_learner(loaded, "grpo", ranks, kl_coef=0.0)
    return [learner.supervise(groups(loaded), 1e-3) for _ in range(2)]


def noted(ranks: Ranks | None) -> dict[str, list[list[float]]]:
    """What the first of two epochs saw of each token."""
    loaded = load()
    learner = new_learner(loaded, "grpo", ranks, kl_coef=0.0, updates=2, epochs=2)
    learner.step([with_advantage(sample, 1.0) for sample in groups(loaded)], note=True)
    return {name: values.tolist() for name, values in learner.noted.items()}


SCENARIOS: dict[str, Callable[[Ranks], Any]] = {
    "noted": noted,
    "plan": plan_of,
    "skipped": skipped,
    "refused": refused,
    "reduced": reduced,
    "supervised": supervised,
}


def _one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks = Ranks(dist.group.WORLD)
    told: dict[str, Any] = {name: scenario(ranks) for name, scenario in SCENARIOS.items()}
    for name in ALGORITHMS:
        told[name], weights = train(name, ranks)
        save_file(weights, Path(folder) / f"{name}{rank}.safetensors")
    told["frozen"], _ = train("ppo", ranks, freeze_vision=True)
    with nothing_summed():
        _, weights = train("grpo", ranks)
    save_file(weights, Path(folder) / f"apart{rank}.safetensors")
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_folder()  # before ranks exist: only one of them would write the model
    fork_here(_one_of_two, 2, folder)
    return folder


def told(both: Path, name: str) -> list[Any]:
    """What each rank says."""
    return [json.loads((both / f"{rank}.json").read_text())[name] for rank in range(2)]


@cache
def alone(name: str, **changes: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return train(name, None, **changes)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight, in steps: a step moves it by 1e-3 at most."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in found) / 1e-3


# --- one update ------------------------------------------------------------------------------------------------------


def test_one_rank_has_no_image_and_less_to_do(both: Path) -> None:
    text, images = told(both, "plan")
    assert len(text) == len(images) == 2
    assert [batch["images"] for batch in text] == [0, 0] and [batch["images"] for batch in images] == [1, 1]
    assert [len(batch["samples"]) for batch in text] == [3, 0] and text[1]["tokens"] == 1
    assert [len(batch["samples"]) for batch in images] == [3, 3]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_take_the_steps_of_one_process(both: Path, name: str) -> None:
    weights = [load_file(both / f"{name}{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    metrics, expected = alone(name)
    wide = weights[0]["model.language_model.norm.weight"].dtype == torch.float64
    # Adam divides by the root of a square: a gradient that is all rounding moves its weight as far as any other
    assert apart(weights[0], expected) < (1e-6 if wide else 0.1)
    first, second = told(both, name)
    for step, one, other in zip(metrics, first, second, strict=True):
        assert step.keys() == one.keys()
        assert one == other
        for key, value in step.items():
            if not key.startswith("update/"):
                assert one[key] == pytest.approx(value, rel=1e-6 if wide else 2e-4, abs=1e-6), key


def test_the_comparison_sees_gradients_that_are_not_summed(both: Path) -> None:
    _, expected = alone("grpo")
    for rank in range(2):
        assert apart(load_file(both / f"apart{rank}.safetensors"), expected) > 1


def test_counts_are_those_of_all_ranks(both: Path) -> None:
    (here, _), _ = alone("grpo")
    (there, _), _ = told(both, "grpo")
    same = ("tokens_useful", "images_referenced", "images_encoded", "tokens_shared")
    assert [there[f"update/{name}"] for name in same] == pytest.approx([here[f"update/{name}"] for name in same])
    assert there["update/tokens_computed"] == here["update/tokens_computed"] + 1  # the idle one
    assert there["update/micro_batches"] == 4 and here["update/micro_batches"] == 3
    assert there["update/padding"] == 1 / there["update/tokens_computed"] and here["update/padding"] == 0
    assert there["update/fill"] == there["update/tokens_computed"] / (4 * BUDGET)


def test_supervised_steps(both: Path) -> None:
    first, second = told(both, "supervised")
    assert first == second == pytest.approx(supervised(None), rel=1e-5)


def test_each_rank_notes_the_tokens_of_all(both: Path) -> None:
    first, second = told(both, "noted")
    expected = noted(None)
    assert first == second and first.keys() == expected.keys() and len(expected) == 9
    for name, values in expected.items():
        assert torch.allclose(torch.tensor(first[name]), torch.tensor(values), atol=1e-3)  # updates round otherwise
        assert min(values[1]) > 1 and max(values[0]) < 0


def test_a_frozen_tower(both: Path) -> None:
    metrics, _ = alone("ppo", freeze_vision=True)
    for step, one in zip(metrics, told(both, "frozen")[0], strict=True):
        assert one["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)
    assert metrics[0]["update/images_encoded"] == 0  # scoring has encoded them, and the features stay


# --- what one rank meets, all of them do -----------------------------------------------------------------------------


def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_of_both(both: Path) -> None:
    for found in told(both, "skipped"):
        assert found["skipped"] == ["two/13"] and found["counts"] == [1, 0]
        assert math.isnan(found["norms"][0]) and math.isfinite(found["norms"][1])
        assert found["stayed"] and found["moved"]


def test_an_engine_that_disagrees_with_one_rank_and_other_samples_stop_both(both: Path) -> None:
    for gap, samples, advantages in told(both, "refused"):
        assert "algorithm.max_logprob_gap=6.0: engine and learner" in gap
        assert "was given other samples or advantages than another rank" in samples
        assert "was given other samples or advantages than another rank" in advantages


def test_gradients_are_summed_in_buckets_and_none_is_made_up(both: Path) -> None:
    for found in told(both, "reduced"):
        assert found["gradients"] == [[3.0] * 2, [10.0] * 3, [200.0], None, [30000.0] * 5]
        # who has which; 2 numbers, as 3 more would be 5; 3 and 1; the large one
        assert found["calls"] == [5, 2, 4, 5]


# --- alone -----------------------------------------------------------------------------------------------------------


def test_alone_nothing_is_said() -> None:
    ranks = Ranks()
    values = torch.tensor([1.0, math.nan])
    assert ranks.size == 1 and ranks.rank == 0 and ranks.sum(values) is values and ranks.gather(values) == [values]
    assert ranks.same_samples([]) and ranks.gather_metrics([]) == []
    parameter = nn.Parameter(torch.zeros(2))
    ranks.sum_gradients(torch.optim.SGD([parameter], lr=1.0))
    assert parameter.grad is None
