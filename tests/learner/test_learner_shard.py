"""Two processes that each hold a part of the learner: what they end with is what one process alone computes."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from npu_vlrl.hardware import select
from npu_vlrl.learner import checkpoint
from npu_vlrl.learner.checkpoint import CheckpointError
from npu_vlrl.learner.group import sums_of_bits
from npu_vlrl.learner.optimizer import master, stepped
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.state import load_learner, load_policy, save_learner, trained_by
from npu_vlrl.learner.trainer import Learner
from tests.learner.test_learner_ranks import groups
from tests.support.learning import assign_advantages, load, tiny_folder, with_advantage
from tests.support.ranks import fork_here
from tests.support.shards import CASES, Result, differences, keep, kept, new_learner, step, train

torch.set_num_threads(1)


def skipped(ranks: Ranks) -> dict[str, Any]:
    """A number that is not finite, in a sample that one rank has."""
    learner = new_learner("whole", ranks)
    samples = assign_advantages(learner.score(groups(load())), learner.algorithm)
    before = [master(p).detach().clone() for p in learner.parameters.values()]
    found = learner.step([with_advantage(s, math.nan) if s.id == "two/13" else s for s in samples])
    stayed = all(torch.equal(master(p), b) for p, b in zip(learner.parameters.values(), before, strict=True))
    left = [p.grad is None and master(p).grad is None for p in learner.parameters.values()]
    return {"skipped": learner.skipped, "norm": str(found["grad_norm"]), "stayed": stayed, "clean": all(left)}


def held(ranks: Ranks) -> dict[str, Any]:
    """Numbers that this rank holds of the weights, and in its optimiser; and whether the copies are the same."""
    learner = new_learner("whole", ranks)
    step(learner, "whole")
    tensors = stepped(learner.optimizer)
    return {
        "weights": sum(tensor.numel() for tensor in tensors),
        "moments": sum(learner.optimizer.state[tensor]["exp_avg"].numel() for tensor in tensors if tensor.numel()),
        "sums": sums_of_bits(learner),
    }


def wrongly_summed(ranks: Ranks) -> list[float]:
    original = FSDPModule.set_gradient_divide_factor
    with mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda module, _: original(module, 2.0)):
        return [line["grad_norm"] for line in train("whole", ranks)[0]]


def resumed(ranks: Ranks, folder: Path) -> bool:
    """Whether a learner that reads what these ranks wrote goes on bit by bit."""
    learner = new_learner("offload", ranks)
    step(learner, "offload")
    path = save_learner(folder / "pieces", 1, learner, select(), {}, keep=2)
    again = new_learner("offload", ranks)
    load_learner(path, again, select())
    same = step(learner, "offload") == step(again, "offload")
    weights = [(master(p), master(q)) for (p, _), (q, _) in zip(*map(trained, (learner, again)), strict=True)]
    return same and all(torch.equal(p, q) for p, q in weights)


def trained(learner: Learner) -> list[Any]:
    return list(trained_by(learner).values())


def copied(ranks: Ranks, source: Path, folder: Path) -> None:
    """Reads a checkpoint, and writes what was read."""
    learner = new_learner("offload", ranks)
    load_learner(source, learner, select())
    save_learner(folder, 1, learner, select(), {}, keep=2)
    save_file({name: p.detach().clone() for name, p in learner.whole.trainable().items()}, folder / f"{ranks.rank}")


def _one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet2", rank=rank, world_size=2)
    ranks = Ranks(dist.group.WORLD)
    told: dict[str, Any] = {}
    for case in CASES:
        keep(Path(folder), case, rank, train(case, ranks))
    told |= {"skipped": skipped(ranks), "held": held(ranks), "wrongly summed": wrongly_summed(ranks)}
    told["resumed"] = resumed(ranks, Path(folder))
    copied(ranks, Path(folder) / "one" / "step-00000001", Path(folder) / "one in two")
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _one_of_three(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet3", rank=rank, world_size=3)
    copied(Ranks(dist.group.WORLD), Path(folder) / "pieces" / "step-00000001", Path(folder) / "two in three")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for kind in {kind for kind, _, _ in CASES.values()}:
        tiny_folder(kind)  # before ranks exist: only one of them would write the model
    learner = new_learner("offload", None)
    moments(learner)
    save_learner(folder / "one", 1, learner, select(), {}, keep=2)
    fork_here(_one_of_two, 2, folder)
    fork_here(_one_of_three, 3, folder)
    return folder


def moments(learner: Learner) -> None:
    """Gives a learner that took no step what a step leaves, all numbers different; autograd must not run yet."""
    generator = torch.Generator().manual_seed(3)
    for parameter, optimizer in trained(learner):
        state = {name: torch.randn(parameter.shape, generator=generator) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {**state, "step": torch.tensor(4.0)}


def told(both: Path, name: str) -> list[Any]:
    """What each rank says."""
    return [json.loads((both / f"{rank}.json").read_text())[name] for rank in range(2)]


@cache
def alone(case: str) -> Result:
    return train(case, None)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_divided_learner_takes_the_steps_of_one_process(both: Path, case: str) -> None:
    first, second = (kept(both, case, rank) for rank in range(2))
    assert first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    # a weight that is rounded may fall to the other side
    assert differences(alone(case), first, 2e-4, 0.1, 2**-8 if case == "bfloat16" else 0.0) == []


def test_the_comparison_sees_gradients_of_another_size(both: Path) -> None:
    for found, expected in zip(told(both, "wrongly summed")[0][:1], alone("whole")[0], strict=False):
        assert found == pytest.approx(expected["grad_norm"] / 2, rel=1e-4)


def test_each_rank_holds_about_half_and_all_see_the_same_weights(both: Path) -> None:
    total = sum(tensor.numel() for tensor in alone("whole")[1].values())
    found = told(both, "held")
    assert sum(rank["weights"] for rank in found) == sum(rank["moments"] for rank in found) == total
    assert all(abs(rank["weights"] / total - 0.5) < 0.01 for rank in found)
    assert found[0]["sums"] == found[1]["sums"] and len(found[0]["sums"]) == len(alone("whole")[1])


def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_of_both(both: Path) -> None:
    for found in told(both, "skipped"):
        assert found == {"skipped": ["two/13"], "norm": "nan", "stayed": True, "clean": True}


# --- checkpoints -----------------------------------------------------------------------------------------------------


def same(one: Path, other: Path) -> bool:
    first, second = (checkpoint.load(path / "step-00000001") for path in (one, other))
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in ((first.weights, second.weights), (first.optimizer, second.optimizer))
    )


def test_a_divided_learner_goes_on_bit_by_bit(both: Path) -> None:
    assert told(both, "resumed") == [True, True]


def test_any_number_of_ranks_reads_what_any_number_wrote(both: Path) -> None:
    assert same(both / "one", both / "one in two") and same(both / "pieces", both / "two in three")
    assert not same(both / "one", both / "pieces")
    names = sorted(path.name for path in (both / "two in three" / "step-00000001").iterdir())
    kinds = [f"{kind}.{rank}.safetensors" for kind in ("optimizer", "weights") for rank in range(3)]
    assert names == sorted([*kinds, "SHA256SUMS", "rng.safetensors", "state.json"])
    learner = new_learner("offload", None)
    load_learner(both / "two in three" / "step-00000001", learner, select())
    for rank in range(3):
        published = load_file(both / "two in three" / str(rank))
        assert all(torch.equal(published[name], p) for name, p in learner.whole.trainable().items())
    policy = load().policy  # without a learner, as an export reads it; the critic's pieces are left
    load_policy(both / "two in three" / "step-00000001", policy)
    assert all(torch.equal(published[name], p) for name, p in policy.trainable().items())
    read = checkpoint.load(both / "pieces" / "step-00000001")
    for name, (parameter, optimizer) in trained_by(learner).items():
        assert torch.equal(parameter, read.weights[name])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], read.optimizer[f"exp_avg.{name}"])


def test_a_piece_that_is_missing_is_noticed(both: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    path.mkdir()
    for file in (both / "pieces" / "step-00000001").iterdir():
        if file.name != "weights.1.safetensors":
            (path / file.name).hardlink_to(file)
    with pytest.raises(CheckpointError, match=r"weights\.1\.safetensors cannot be read"):
        load_learner(path, new_learner("offload", None), select())
    (path / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="has no file with some rows of "):
        load_learner(path, new_learner("offload", None), select())
