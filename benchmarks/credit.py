"""Trains the tiny model on a task with delayed reward with several ways to give credit, and compares what came out.

    python -m benchmarks.credit [--seeds 3] [--processes 2] [--config configs/frozenlake_tiny.yaml]
        [--presets trico,aico,rico_gae,rico_grpo,grpo] [--out results.json] [key=value ...]

All runs of a seed begin with the same warm start and differ in `algorithm.preset` alone; they play the same evaluation
tasks. Every run is a process of one thread, `--processes` of them at a time. `key=value` changes the configuration of
all runs. Prints a table: means and standard deviations over the seeds. `--out` writes every run as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

PRESETS = ("trico", "aico", "rico_gae", "rico_grpo", "grpo")
CONFIG = Path(__file__).parents[1] / "configs" / "frozenlake_tiny.yaml"
SHOWN = {"after_retries": "success", "reward": "reward", "turns": "turns"}
"""What is compared, by its name in `summary.json`."""


def train(config: Path, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run in a process of its own; returns `before`, `after`, the success of each step and the seconds.

    Raises RuntimeError when it fails, with the end of what it printed, and when it skipped an update.
    """
    command = [sys.executable, "-m", "npu_vlrl", "train", "--config", str(config), *overrides]
    command += [f"run.dir={folder}", "run.show_every=0", "run.record_every=0", "train.threads=1"]
    began = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout[-3000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "solved" in line]
    if any(step["skipped_updates"] for step in steps):
        raise RuntimeError(f"{' '.join(command)} skipped updates that were not finite: there is nothing to compare")
    return {
        "before": {name: summary["baseline"][key] for key, name in SHOWN.items()},
        "after": {name: summary["final"][key] for key, name in SHOWN.items()},
        "solved": [round(step["solved"], 3) for step in steps],
        "seconds": round(time.monotonic() - began, 1),
    }


def compare(
    config: Path, presets: Sequence[str], seeds: Sequence[int], processes: int, folder: Path, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """All runs: for each seed a warm start, whose preset is None, and then every preset from there."""

    def warm(seed: int) -> dict[str, Any]:
        own = [*overrides, f"train.seed={seed}", "train.steps=0"]
        return {"preset": None, "seed": seed, **train(config, folder / f"warm-{seed}", own)}

    def reinforce(preset: str, seed: int) -> dict[str, Any]:
        start = [f"model.path={folder / f'warm-{seed}' / 'warm_start'}", "warm_start.steps=0"]
        own = [*overrides, *start, f"train.seed={seed}", f"algorithm.preset={preset}"]
        return {"preset": preset, "seed": seed, **train(config, folder / f"{preset}-{seed}", own)}

    with ThreadPoolExecutor(processes) as pool:
        runs = list(pool.map(warm, seeds))
        runs += pool.map(lambda pair: reinforce(*pair), [(preset, seed) for seed in seeds for preset in presets])
    for run in runs:
        start = next(other for other in runs if other["seed"] == run["seed"])
        assert run["before"] == start["before"], "all runs of a seed begin with the same policy and play the same tasks"
    return runs


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Success and more in Markdown: means over the seeds, with standard deviations where there are several seeds."""
    head = ("preset", "before", "after", "in training", "reward after", "turns after", "seconds")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for preset in dict.fromkeys(run["preset"] for run in runs if run["preset"] is not None):
        own = [run for run in runs if run["preset"] == preset]
        cells = [
            *(spread([100 * run[when]["success"] for run in own], "{:.0f} %") for when in ("before", "after")),
            spread([100 * statistics.mean(run["solved"]) for run in own], "{:.0f} %"),
            spread([run["after"]["reward"] for run in own], "{:.2f}"),
            spread([run["after"]["turns"] for run in own], "{:.1f}"),
            f"{statistics.mean(run['seconds'] for run in own):.0f}",
        ]
        lines.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], form: str) -> str:
    """The mean, ± the standard deviation of a sample."""
    mean = form.format(statistics.mean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.format(statistics.stdev(values)).removesuffix(' %')}"


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="credit_") as folder:
        runs = compare(
            given.config, given.presets.split(","), range(given.seeds), given.processes, Path(folder), given.overrides
        )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, cpu_seconds = round(time.monotonic() - began), round(used.ru_utime + used.ru_stime)
    print(table(runs))
    print(f"\n{seconds} s, {cpu_seconds} s of processor time, for {len(runs)} runs, {given.processes} at a time")
    if given.out is not None:
        about = {"config": given.config.name, "overrides": given.overrides, "processes": given.processes}
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        given.out.write_text(json.dumps({**machine(), **about, **times, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
