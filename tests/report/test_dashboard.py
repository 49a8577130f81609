"""What the dashboard shows of the values it was given."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from npu_vlrl.report.dashboard import BLOCKS, PLAIN, Dashboard, outcome_line, sparkline
from npu_vlrl.types import EpisodeStatus, Trajectory, Verdict
from tests.support.scripted import Verdicts, a_task, an_image, play, workflow

METRICS = {
    **{"reward": 0.5, "first_try_accuracy": 0.25, "solved": 0.75, "turns": 2.14, "tool_calls": 1.0},
    **{"action_tokens": 7.1, "cut_turns": 0.02, "logprob_gap": 1.2e-6, "kl": 0.0365, "entropy": 0.136},
    **{"seconds": 2.0, "rollout_seconds": 1.0, "update/seconds": 0.5, "update/mfu": 0.41, "peak_memory_gib": 1.5},
    **{"sampled_tokens_per_second": 1234.4, "trajectories_per_second": 33.0},
}


def episode() -> Trajectory:
    judge = Verdicts([Verdict(0.1, False), Verdict(1.0, True)])
    return play(workflow(judge), ["down 中\n", "up"], a_task(an_image(28), "Which way?"))


def shown(dashboard: Dashboard, width: int = 100, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    Console(file=file, width=width).print(dashboard)
    return raw.getvalue().decode(encoding).splitlines()


def filled(metrics: Mapping[str, float] = METRICS, steps: int = 3) -> Dashboard:
    dashboard = Dashboard(10)
    for step in range(steps):
        dashboard.step(step, metrics, episode())
    return dashboard


def test_sparklines_by_hand() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, BLOCKS) == BLOCKS
    assert sparkline([7, 0], 8, BLOCKS) == "█▁"
    assert sparkline([0, 0, 7, 7, 3, 4], 3, BLOCKS) == "▁█▅"  # two values share a place: 0, 7, 3.5
    assert sparkline([2.5, 2.5], 8, PLAIN) == "=="


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70), st.integers(1, 40))
def test_sparklines_take_any_numbers(values: list[float], width: int) -> None:
    spark = sparkline(values, width, BLOCKS)
    assert len(spark) == min(width, len(values)) and set(spark) <= set(BLOCKS)


def test_an_outcome_is_one_line() -> None:
    assert outcome_line(episode()) == "solved after 2 turns, reward 1.1: 'up', right answer 'up'"
    failed = Trajectory(a_task("?"), "g", 0, (), EpisodeStatus.FAILED, "no")
    assert outcome_line(failed) == "failed after 0 turns, reward 0, right answer 'up'"


def test_all_that_a_person_wants_to_see() -> None:
    dashboard = filled()
    dashboard.evaluation("baseline, step 0", {"accuracy": 0.293, "after_retries": 0.559})
    dashboard.trouble("step 1: the judge hung")
    dashboard.trouble("step 2: [red]hung[/] again")
    lines = shown(dashboard)
    assert re.match(r"training    3/10  0:\d\d:\d\d, about 0:00:14 left  ━{24}$", lines[0])
    assert lines[1:] == [
        "reward      0.5    ▅▅▅",
        "accuracy    0.25   ▅▅▅",
        "solved      0.75   ▅▅▅",
        "evaluation  0.293, 0.559 after retries (baseline, step 0)",
        "episodes    turns 2.14, tool calls 1, tokens a turn 7.1, turns cut 2%",
        "learning    gap 1.2e-06, KL 0.0365, entropy 0.136",
        "speed       1234 tokens/s, 33 episodes/s, 41% of the peak in updates, memory 1.50 GiB",
        "a step      2 s  ████████████▓▓▓▓▓▓░░░░░░  rollout 50%, update 25%, other 25%",
        "an episode  solved after 2 turns, reward 1.1: 'up', right answer 'up'",
        "troubles    2, the last: step 2: [red]hung[/] again",
    ]


def test_before_the_first_step_and_without_optional_metrics() -> None:
    [line] = shown(Dashboard(10))
    assert re.match(r"training    0/10  0:\d\d:\d\d  ━{24}$", line)
    few = {"reward": 0.5, "seconds": 0.0}  # a clock may stand still
    assert [line.split()[0] for line in shown(filled(few, 10))] == ["training", "reward", "a", "an"]
    assert "left" not in shown(filled(few, 10))[0]  # the last step is done


def test_no_line_is_wider_than_the_terminal() -> None:
    """Also where letters are two columns wide, and where there is room for nothing."""
    dashboard = filled()
    dashboard.trouble("中" * 80)
    for width in range(1, 121):
        lines = shown(dashboard, width)
        assert len(lines) == 10 and all(cell_len(line) <= width for line in lines)


def test_ascii_is_enough() -> None:
    lines = shown(filled(), encoding="ascii")
    assert lines[0].endswith("  #######-----------------") and lines[1] == "reward      0.5    ==="
    assert lines[7].startswith("a step      2 s  rrrrrrrrrrrruuuuuu......")


def test_half_a_training_has_less_to_tell() -> None:
    """No episode where recorded ones are trained on, and maybe no clock."""
    dashboard = Dashboard(2)
    dashboard.step(0, {"reward": 0.5}, None)
    assert [line.split()[0] for line in shown(dashboard)] == ["training", "reward"]
