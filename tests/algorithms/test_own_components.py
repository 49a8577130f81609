"""Estimators, losses and group rewards from the user's own files: what is refused, and how the message reads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_vlrl.algorithms import AlgorithmConfig, Group, GroupRewards, LossTokens
from npu_vlrl.algorithms.component import Chosen
from npu_vlrl.algorithms.group_rewards import GroupReward
from npu_vlrl.config import ConfigError
from npu_vlrl.report.fingerprints import code_files
from npu_vlrl.types import (
    DataError,
    EpisodeStatus,
    Sample,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from tests.support.runs import small_config

HEAD = """
from dataclasses import dataclass
import torch
from npu_vlrl.algorithms import Options, estimator, group_reward, loss

class Own(Options):
    width: float = 0.5

@dataclass
class Plain:
    width: float = 0.5

"""
SPECIAL = SpecialTokens((9,))


def spec(folder: Path, code: str, name: str = "mine") -> str:
    file = folder / f"own_{abs(hash(code))}.py"
    file.write_text(HEAD + code)
    return f"{file}:{name}"


def tokens(count: int = 3) -> LossTokens:
    logprobs = torch.full((count,), -1.0, requires_grad=True)
    return LossTokens(logprobs, torch.full((count,), -1.0), torch.ones(count), sample_N=torch.zeros(count).long())


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig(**settings).try_own()
    return str(caught.value)


# --- before a model is loaded ----------------------------------------------------------------------------------------


def test_files_and_functions_that_are_not_there(tmp_path: Path) -> None:
    gone = refused(loss=f"{tmp_path}/gone.py:mine")
    assert gone == f"algorithm.loss: there is no file {tmp_path}/gone.py; correct the path in the configuration"
    other = spec(tmp_path, "def other(tokens): pass")
    assert refused(loss=other).startswith(f"algorithm.loss: {other}: the file has no plain function 'mine'; write")
    broken = spec(tmp_path, "import nothing_like_this")
    assert "cannot be imported: ModuleNotFoundError" in refused(advantage=broken)


@pytest.mark.parametrize(
    ("code", "given", "message"),
    [
        (
            "def mine(a, b): pass",
            {},
            "cannot be called with tokens (missing a required argument: 'b'); write `def mine",
        ),
        ("@loss(Own)\ndef mine(tokens): pass", {}, "cannot be called with tokens, options"),
        ("@loss(Own)\ndef mine(tokens, options): pass", {"widht": 1.0}, "loss_options.widht: unknown option; did you"),
        (
            "@loss(Own)\ndef mine(tokens, options): pass",
            {"width": "a"},
            "algorithm.loss_options.width: Input should be",
        ),
        ("@loss(Plain)\ndef mine(tokens, options): pass", {"bound": 1.0}, "unknown option; there are: width"),
        ("def mine(tokens): pass", {"width": 1.0}, "loss_options.width: unknown option; there are: none"),
        ("@estimator()\ndef mine(batch): pass", {}, "decorated as Estimator where Loss is asked for; correct that"),
        ("@loss(needs=('values',))\ndef mine(tokens): pass", {}, "needs names values; choose from proximal_N"),
    ],
)
def test_what_cannot_be_a_loss(tmp_path: Path, code: str, given: dict[str, Any], message: str) -> None:
    assert message in refused(loss=spec(tmp_path, code), loss_options=given)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return tokens.logprobs_N.mean()", "it returned shape [] for 4 tokens; return a tensor of shape [4]"),
        ("return 1.0", "it returned a float for 4 tokens"),
        ("return tokens.logprobs_N.detach()", "its loss has no gradient; compute it from tokens.logprobs_N"),
        ("return tokens.logprobs_N / 0", "its loss is not finite for log-probabilities that are"),
        ("return tokens.logprobs_N + tokens.logprobs_N[0]", "(tried with 0 tokens)"),
        ("raise KeyError('x')", "raised KeyError: 'x'"),
        ("return tokens.logprobs_N, {'mean': 1.0}", "its metric 'mean' cannot be recorded; end it in _sum"),
        ("return tokens.logprobs_N, {'gap_max': 1.0}", "its metric 'gap_max' cannot be recorded"),
        ("return tokens.logprobs_N, {'a_sum': tokens.logprobs_N}", "its metric 'a_sum' has the shape [4]; give one"),
        ("return tokens.logprobs_N, 1.0", "it returned a tuple that is no pair of result and metrics"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_early(tmp_path: Path, body: str, message: str) -> None:
    own = spec(tmp_path, f"def mine(tokens):\n    {body}")
    said = refused(loss=own)
    assert said.startswith(f"algorithm.loss: {own}") and message in said


def test_options_beside_a_built_in_component() -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm.loss_options: are for a file of your own; remove them, or write what cispo"
    ):
        AlgorithmConfig(loss="cispo", loss_options={"clip_low": 0.1}).resolved()
    with pytest.raises(ConfigError, match="has no effect without algorithm.group_reward"):
        AlgorithmConfig(group_reward_options={"a": 1}).resolved()


def test_keys_of_built_in_components_beside_an_own_one(tmp_path: Path) -> None:
    own = spec(tmp_path, "def mine(tokens): return -tokens.logprobs_N")
    assert "algorithm.clip_high: has no effect here" in refused(loss=own, clip_high=0.3)
    assert AlgorithmConfig(preset="dapo", loss=own).resolved().clip_high is None
    AlgorithmConfig(loss=own, correction="tis", kl_coef=0.1).try_own()


# --- what a component declares ---------------------------------------------------------------------------------------


def test_declarations_reach_the_learner(tmp_path: Path) -> None:
    head = "@loss(Own, needs=('proximal_N',), ratio=True)\n"
    own = spec(tmp_path, head + "def mine(tokens, options): return tokens.anchor_N")
    algorithm = AlgorithmConfig(loss=own, kl_coef=0.0)
    assert algorithm.needs == {"proximal_N"} and algorithm.tolerated_staleness == 1
    plain = AlgorithmConfig(loss=spec(tmp_path, "def mine(tokens): return tokens.logprobs_N"), kl_coef=0.0)
    assert not plain.needs and plain.tolerated_staleness == 0
    head = "@estimator(needs=('values_N',))\n"
    critic = spec(tmp_path, head + "def mine(batch): return batch.tokens(True, True).values_N")
    assert AlgorithmConfig(advantage=critic).needs_critic
    corrects = spec(tmp_path, "@loss(corrects=True)\ndef mine(tokens): return tokens.logprobs_N * 1")
    with pytest.raises(ConfigError, match="algorithm.correction: the loss has a correction of its own"):
        AlgorithmConfig(loss=corrects, correction="tis").policy_terms()


def test_options_and_metrics_of_a_loss_by_hand(tmp_path: Path) -> None:
    code = "@loss(Own)\ndef mine(tokens, options): return -options.width * tokens.logprobs_N, {'seen_sum': 3}"
    own = AlgorithmConfig(loss=spec(tmp_path, code), loss_options={"width": 2.0}).policy_terms().loss
    loss_N, metrics = own(tokens())
    assert loss_N.tolist() == [2.0] * 3 and metrics["seen_sum"].item() == 3.0 and metrics["seen_sum"].shape == ()


# --- estimators ------------------------------------------------------------------------------------------------------


def sample(name: str, group: str, reward: float) -> Sample:
    prompt = Segment(SegmentKind.PROMPT, (1, 2), SPECIAL)
    answer = Segment(SegmentKind.ACTION, (3, 4), SPECIAL, (), (-1.0, -1.0), (0, 0), StopReason.END_OF_TURN, reward)
    return Sample(name, group, (prompt, answer), (1,), reward, reward, name)


SAMPLES = [sample("a/0", "a", 1.0), sample("a/1", "a", 4.0)]


def test_an_estimator_by_hand(tmp_path: Path) -> None:
    code = """
@estimator(Own)
def mine(batch, options):
    return batch.on_samples(batch.rewards() * options.width), {"highest": max(batch.rewards())}
"""
    algorithm = AlgorithmConfig(advantage=spec(tmp_path, code), kl_coef=0.0)
    made, metrics = algorithm.with_credit(SAMPLES)
    assert [s.credit.advantages_N.tolist() for s in made if s.credit] == [[0.5, 0.5], [2.0, 2.0]]
    assert metrics == {"highest": 4.0}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return batch.rewards()", "its advantages have the shape [2]; return one for each of the 4 scored tokens"),
        (
            "return [1.0, 2.0, float('nan'), 1.0]",
            "its advantages are not finite: number 2 is nan; return finite numbers",
        ),
        ("return 'four'", "its advantages are no numbers"),
        ("return [1.0] * 4, {'a': float('inf')}", "its metric 'a' cannot be recorded"),
        ("return batch.states()", "raised ValueError: sample a/0: its environment does not say in which state"),
    ],
)
def test_what_an_estimator_may_not_return(tmp_path: Path, body: str, message: str) -> None:
    own = spec(tmp_path, f"def mine(batch):\n    {body}")
    with pytest.raises(DataError) as caught:
        AlgorithmConfig(advantage=own, kl_coef=0.0).with_credit(SAMPLES)
    assert str(caught.value).startswith(own) and message in str(caught.value)


# --- rewards of groups -----------------------------------------------------------------------------------------------


def episode(member: int, *rewards: float, group: str = "g") -> Trajectory:
    action = sample("", "", 0.0).segments[1]
    turns = tuple(Turn((), replace(action, special=SPECIAL, reward=reward), "") for reward in rewards)
    return Trajectory(Task("t", (), None, "test"), group, member, turns, EpisodeStatus.MAX_TURNS)


def test_the_last_turn_earns_what_the_group_gives() -> None:
    asked: list[Group] = []

    def reward(group: Group) -> Any:
        asked.append(group)
        return [10.0 * outcome for outcome in group.outcomes], {"members": len(group.trajectories)}

    rewards = GroupRewards(Chosen(GroupReward(reward)), lambda t: sum(t.turn_rewards))
    played = [episode(0, 1.0, 2.0), episode(0, 5.0, group="h"), episode(1, 0.5), episode(2)]
    for _ in range(2):  # dynamic sampling asks, and the update: the function is called once a group
        assert [t.turn_rewards for t in rewards.added(played)] == [(1.0, 32.0), (55.0,), (5.5,), ()]
    assert [group.name for group in asked] == ["g", "h"]
    assert [t.turn_rewards for t in played] == [(1.0, 2.0), (5.0,), (0.5,), ()], "records keep their rewards"
    assert rewards.metrics(played) == {"group_reward": (30 + 5 + 0 + 50) / 4, "group_reward/members": 2.0}
    assert rewards.metrics(played) == {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "its rewards have the shape [1]; return one for each of the 2 episodes of the group g"),
        ("return [1.0, float('inf')]", "its rewards are not finite: number 1 is inf"),
        ("return [1.0, 1e7]", "it gave a reward beyond 1e+06; give smaller ones"),
    ],
)
def test_what_a_group_reward_may_not_return(tmp_path: Path, body: str, message: str) -> None:
    own = spec(tmp_path, f"def mine(group):\n    {body}")
    rewards = GroupRewards(AlgorithmConfig(group_reward=own).reward_of_groups, lambda t: 0.0)
    with pytest.raises(DataError) as caught:
        rewards.added([episode(0, 1.0), episode(1, 2.0)])
    assert str(caught.value) == f"{own}: {message}" or message in str(caught.value)


# --- the run folder and the configuration ----------------------------------------------------------------------------


def test_the_files_are_inputs_of_a_run(tmp_path: Path) -> None:
    names = {}
    for key in ("loss", "advantage", "group_reward"):
        (tmp_path / f"{key}_file.py").write_text("def mine(x): pass")
        names[f"algorithm__{key}"] = f"{tmp_path}/{key}_file.py:mine"
    found = code_files(small_config(tmp_path / "run", **names))
    own = {"loss_file.py", "advantage_file.py", "group_reward_file.py"}
    assert {Path(name).name for name in found} == own | {"reward.py"}


def test_a_configuration_is_read_without_torch(tmp_path: Path) -> None:
    """Also one whose algorithm is resolved; the control shows that the check can fail."""
    code = "import sys, npu_vlrl.config as c; c.AlgorithmConfig(preset='trico').resolved(); {}; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code.format("0")], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", code.format("import torch")], check=False).returncode == 1
