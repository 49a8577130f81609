"""Dashboard at the bottom of a terminal during a training: progress, metrics and warnings.

It is drawn again twice a second by a thread of its own, from values that the training sets here; the training never
waits for it. It takes as many lines and columns as there are, and cuts the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from npu_vlrl.types import Trajectory

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.:-=+*#"
"""Blocks for a terminal that shows only ASCII."""
_LABEL = 12
_SPARK = 30
_BAR = 24
_RECENT = 20
"""Number of steps whose mean duration gives the remaining time."""

TRENDS = (("reward", "reward"), ("accuracy", "first_try_accuracy"), ("solved", "solved"))
TOLD = (
    (
        "episodes",
        (
            ("turns {:.3g}", "turns"),
            ("tool calls {:.3g}", "tool_calls"),
            ("tokens a turn {:.4g}", "action_tokens"),
            ("turns cut {:.0%}", "cut_turns"),
        ),
    ),
    (
        "learning",
        (
            ("gap {:.2g}", "logprob_gap"),
            ("of the probe {:.2g}", "probe_gap"),
            ("KL {:.3g}", "kl"),
            ("entropy {:.3g}", "entropy"),
            ("gradient {:.3g}", "grad_norm"),
        ),
    ),
    (
        "speed",
        (
            ("{:.0f} tokens/s", "sampled_tokens_per_second"),
            ("{:.3g} episodes/s", "trajectories_per_second"),
            ("{:.0%} of the peak in updates", "update/mfu"),
            ("memory {:.2f} GiB", "peak_memory_gib"),
        ),
    ),
)


class Dashboard:
    """Dashboard drawn by rich. Values are replaced or appended as a whole, so its thread sees no partial state."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began = time.monotonic()
        self._done = 0
        self._metrics: Mapping[str, float] = {}
        self._trends: dict[str, list[float]] = {metric: [] for _, metric in TRENDS}
        self._seconds: list[float] = []
        self._last = self._evaluation = self._trouble = ""
        self._troubles = 0

    def step(self, step: int, metrics: Mapping[str, float], trajectory: Trajectory | None) -> None:
        """`step` counts from 0."""
        self._done, self._metrics = step + 1, dict(metrics)
        self._last = "" if trajectory is None else outcome_line(trajectory)
        if "seconds" in metrics:
            self._seconds.append(metrics["seconds"])
        for metric, values in self._trends.items():
            if metric in metrics:
                values.append(metrics[metric])

    def evaluation(self, name: str, results: Mapping[str, float]) -> None:
        if "accuracy" in results:  # of no task at all there is nothing to tell
            self._evaluation = f"{results['accuracy']:.3g}, {results['after_retries']:.3g} after retries ({name})"

    def trouble(self, text: str) -> None:
        self._troubles, self._trouble = self._troubles + 1, text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        for label, value in self._rows(plain):
            line = Text.assemble((f"{label:<{_LABEL}}", "dim"), value, end="")
            line.truncate(options.max_width, overflow="crop" if plain else "ellipsis")
            yield line
            yield Segment.line()

    def _progress(self, plain: bool) -> Text:
        text = Text(f"{self._done}/{self._steps}  {_clock(time.monotonic() - self._began)}")
        recent, left = self._seconds[-_RECENT:], self._steps - self._done
        if recent and left:
            text.append(f", about {_clock(left * sum(recent) / len(recent))} left")
        filled = round(_BAR * self._done / max(1, self._steps))
        return (
            text.append("  ").append("#━"[not plain] * filled, "cyan").append("-━"[not plain] * (_BAR - filled), "dim")
        )

    def _rows(self, plain: bool) -> Iterator[tuple[str, Text]]:
        metrics = self._metrics
        yield "training", self._progress(plain)
        for label, metric in TRENDS:
            if values := self._trends[metric][:]:
                spark = sparkline(values, _SPARK, PLAIN if plain else BLOCKS)
                yield label, Text(f"{values[-1]:<7.3g}").append(spark, "cyan")
        if self._evaluation:
            yield "evaluation", Text(self._evaluation)
        for label, told in TOLD:
            if text := ", ".join(form.format(metrics[name]) for form, name in told if name in metrics):
                yield label, Text(text)
        if "seconds" in metrics:
            yield "a step", _time_split(metrics, plain)
        if self._last:
            yield "an episode", Text(self._last)
        if self._troubles:
            yield "troubles", Text(f"{self._troubles}, the last: ", "yellow").append(self._trouble)


def sparkline(values: Sequence[float], width: int, blocks: str) -> str:
    """Draws values from the lowest to the highest block; neighbours share a place where there are more than `width`."""
    size = len(values)
    places = min(width, size)
    edges = [number * size // places for number in range(places + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if low == high:
        return blocks[len(blocks) // 2] * places
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in means)


def outcome_line(trajectory: Trajectory) -> str:
    """One line about an episode: `solved after 2 turns, reward 1.3: '…', right answer 'left'`."""
    turns = len(trajectory.turns)
    text = f"{trajectory.status.value} after {turns} turn{'' if turns == 1 else 's'}"
    text += f", reward {sum(trajectory.turn_rewards):.3g}"
    if turns:
        text += f": {trajectory.turns[-1].text[:200]!r}"
    answer = trajectory.task.answer
    return text if answer is None else f"{text}, right answer {answer[:60]!r}"


def _time_split(metrics: Mapping[str, float], plain: bool) -> Text:
    """Time of a step, split by phase. For an asynchronous rollout its part is the time that the learner waited."""
    total = max(metrics["seconds"], 1e-9)
    shares = [metrics.get(name, 0.0) / total for name in ("rollout_seconds", "update/seconds")]
    shares.append(max(0.0, 1 - sum(shares)))
    text = Text(f"{total:.3g} s  ")
    for share, letter, style in zip(shares, "ru." if plain else "█▓░", ("blue", "green", "dim"), strict=True):
        text.append(letter * round(share * _BAR), style)
    return text.append("  rollout {:.0%}, update {:.0%}, other {:.0%}".format(*shares))


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
