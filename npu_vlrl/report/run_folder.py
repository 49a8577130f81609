"""Folder of a run: its configuration, metrics and trajectories, as JSON lines that any tool can read."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL import Image as PillowImage

from npu_vlrl.common.atomic_files import unwritable, write_text, write_whole, writing
from npu_vlrl.config import Config, ConfigError, dump_config, load_config
from npu_vlrl.report.lines import read_lines
from npu_vlrl.report.token_values import TokenValues
from npu_vlrl.report.verdicts import verdict_record
from npu_vlrl.sync.files import FOLDER as WEIGHTS
from npu_vlrl.types import Image, Segment, Trajectory
from npu_vlrl.workflow.environments.formats import Format

FREE: Any = {
    "run": True,
    "sync": True,
    "ray": True,
    "train": {"steps", "learners", "shard", "offload", "threads"},
    "model": {"gradient_checkpointing"},
    "data": {"train": {"path", "max_skip_share"}},
    "workflow": {"tool_workers", "tool_deadline_s", "tool_memory_mib"},
    "reward": {"workers", "deadline_s", "memory_mib"},
    "rollout": {"cache_mib", "feature_cache_mib", "graphs", "max_failed_share"},
    "algorithm": {"max_logprob_gap"},
    "optim": {"micro_batch_tokens", "logprob_chunk"},
    "evaluation": {"every"},
}
"""Keys that a resumed run may change: output, distribution, memory and length. Data are compared by content."""


LINES = ("metrics.jsonl", "trajectories.jsonl")

LOCK = "lock"
"""Lock file of the process that writes in the folder; it holds its number and machine."""

BEFORE = {"model", WEIGHTS, "sinks.json", "tensorboard", "wandb", "swanlab", LOCK}
"""Files that may exist before a folder is a run's: the model is made, and sinks begin, before all else is ready."""


class RunFolder:
    """Folder of a run. The constructor inspects `run.dir` and writes nothing before `begin`.

    Raises ConfigError when it exists and `run.if_exists` is `raise`, when a resumed run was configured differently in
    what is not `FREE`, or when another process uses it.
    """

    def __init__(self, config: Config, cleanup: ExitStack | None = None) -> None:
        """Locks the folder: no other process may have it until `cleanup`."""
        self.path = Path(config.run.dir).absolute()
        self._config = config
        self._cleanup = cleanup
        self.format: Format | None = None
        """Format of the turns of a game, once it is known, by which records split them."""
        self.before: Config | None = None
        """Original configuration of a resumed run."""
        in_the_way = os.path.exists(self.path) and not os.path.isdir(self.path)
        if not in_the_way and (problem := unwritable(self.path)):
            what = "written in" if os.path.isdir(self.path) else "made"
            raise ConfigError(f"run.dir: {self.path} cannot be {what}, since {problem}; choose another")
        self.resumed = (self.path / "config.yaml").is_file()
        if self.resumed:
            self._check_writable()
            self._check_resumable(config)
            self._lock()
        elif self.path.exists() and (not self.path.is_dir() or any(p.name not in BEFORE for p in self.path.iterdir())):
            raise ConfigError(f"run.dir: {self.path} exists and is not a run folder; choose another with run.dir=…")

    def begin(self) -> None:
        """Makes the folder a run's. Called once everything else is ready, so that a refused run leaves none behind."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.resumed:
            self._lock()
        write_text(self.path / "config.yaml", dump_config(self._config))
        (self.path / "images").mkdir(exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rewind(self, step: int) -> None:
        """Drops the records of `step` and later, before the run repeats it, and an incomplete line after a crash.

        Raises ConfigError for a damaged line.
        """
        for _ in read_lines(self.path / "metrics.jsonl"):
            pass  # the export reads them at the end of the run, and would refuse them there
        for name in LINES:
            file = self.path / name
            if file.is_file():
                with file.open("r+b") as lines:
                    lines.truncate(_size_before(step, lines, file))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", {"step": step, **{k: _finite(v) for k, v in values.items()}})

    def trajectories(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        advantages: Mapping[str, Sequence[float]],
        values: TokenValues | None = None,
    ) -> None:
        """Writes each trajectory with its tokens; images go to `images/HASH.png`, once each."""
        own: dict[str, dict[str, Sequence[float]]] = {}
        for name, numbers in advantages.items():  # of a whole episode, or of one turn of it
            for episode in {name, name.rpartition("/")[0]}:
                own.setdefault(episode, {})[name] = numbers
        for trajectory in trajectories:
            for image in _images(trajectory):
                self._save(image)
            record = trajectory_record(trajectory, own.get(trajectory.id, {}), self.format, values)
            self._append("trajectories.jsonl", {"step": step, **record})

    def summary(self, values: Mapping[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(values, indent=2) + "\n")

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        path = self.path / name
        # a lone surrogate, which a user's reward may return, becomes its JSON escape
        with writing(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")

    def _save(self, image: Image) -> None:
        target = self.path / "images" / f"{image.hash}.png"
        if not target.exists():  # so half of one would stay for ever
            pil = PillowImage.fromarray(image.rgb)
            write_whole(target, lambda partial: pil.save(partial, "PNG", compress_level=1))

    def _lock(self) -> None:
        """Locks the folder for as long as this process lives; the system releases the lock of a killed process."""
        if self._cleanup is None:
            return
        path = self.path / LOCK
        file = self._cleanup.enter_context(path.open("a+b", buffering=0))  # nothing is left for its end
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            who = file.read().decode() or "another process"
            raise ConfigError(
                f"run.dir: {who} is at work in {self.path}; wait for its end, or choose another run.dir"
            ) from error
        except OSError:  # a file system without locks, each of which says so in its own way: the run does without
            return
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} of {socket.gethostname()}".encode())

    def _check_writable(self) -> None:
        """Raises ConfigError before steps are done whose records cannot be written."""
        for name in ("checkpoints", "images", *LINES, LOCK):
            path, is_file = self.path / name, name in (*LINES, LOCK)
            if not path.exists() and not path.is_symlink():
                continue
            if not (path.is_file() if is_file else path.is_dir()):
                raise ConfigError(
                    f"run.dir: {path} is no {'file' if is_file else 'folder'}; move it away, or choose another run.dir"
                )
            if not os.access(path, os.W_OK):
                raise ConfigError(f"run.dir: {path} is not writable; change its rights, or choose another run.dir")

    def _check_resumable(self, config: Config) -> None:
        if config.run.if_exists == "raise":
            raise ConfigError(
                f"run.dir: {self.path} holds a run; continue it with run.if_exists=resume or choose another run.dir"
            )
        self.before = load_config(self.path / "config.yaml")
        before, now = (c.model_dump(exclude=FREE) for c in (self.before, config))
        changed = [f"{s}.{k}" for s in now for k in (now[s] or {}) if now[s][k] != (before[s] or {}).get(k)]
        if changed:
            raise ConfigError(
                f"run.dir: {self.path} was configured differently in {', '.join(changed)}; cannot resume: take that "
                "back, or begin another run with another run.dir"
            )


_STEP = re.compile(rb'\{"step": (\d+)[,}]')
"""Pattern of the beginning of a line. A run may have recorded more than fits into memory, so the rest is not parsed."""


def _size_before(step: int, lines: Iterable[bytes], file: Path) -> int:
    """Bytes of the complete lines before those of `step`; lines are in the order of steps. Raises ConfigError."""
    size = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):  # cut by a crash. Only \n ends a line; texts may hold U+2028
            break
        found = _STEP.match(line)
        if found is None:
            raise ConfigError(f"{file}: line {number} does not begin with its step; mend or remove it")
        if int(found[1]) >= step:
            break
        size += len(line)
    return size


def trajectory_record(
    trajectory: Trajectory,
    advantages: Mapping[str, Sequence[float]],
    form: Format | None = None,
    values: TokenValues | None = None,
) -> dict[str, Any]:
    """A trajectory as JSON values. `advantages` holds the mean advantage of each trained turn of its samples, by their
    ids; `form` reads the turns of a game; `values` are added to the actions that they belong to.
    """
    return {
        "id": trajectory.id,
        "group": trajectory.group,
        "task": trajectory.task.id,
        "data_source": trajectory.task.data_source,
        "answer": trajectory.task.answer,
        "status": trajectory.status.value,
        "error": trajectory.error,
        "solved": trajectory.solved,
        "solved_first_try": trajectory.solved_first_try,
        "advantages": {name: [_finite(value) for value in numbers] for name, numbers in advantages.items()},
        "turns": [
            _turn_record(trajectory, k, form, (values or {}).get((trajectory.id, k), {}))
            for k in range(len(trajectory.turns))
        ],
    }


def _turn_record(
    trajectory: Trajectory, k: int, form: Format | None, values: Mapping[str, Sequence[float | None]]
) -> dict[str, Any]:
    turn = trajectory.turns[k]
    before = trajectory.turns[k - 1] if k else None
    kept = (*before.context, before.action) if before else ()
    continues = turn.context[: len(kept)] == kept
    verdict, parsed = turn.verdict, form and form.parse(turn.text)
    return {
        "state": turn.state,
        "text": turn.text,
        "parsed": parsed and {"answer": parsed.answer, "thoughts": dict(parsed.thoughts), "right": parsed.right},
        "continues": continues,
        "new_context": [_segment_record(s) for s in (turn.context[len(kept) :] if continues else turn.context)],
        "action": {**_segment_record(turn.action), **values},
        "verdict": verdict and verdict_record(verdict),
        "tool_calls": [{"name": c.name, "arguments": dict(c.arguments)} for c in turn.tool_calls],
        "tool_results": [
            {"text": r.text, "images": [i.hash for i in r.images], "error": r.error} for r in turn.tool_results
        ],
        "feedback": turn.feedback,
        "judge_error": turn.judge_error,
        "invalid": turn.invalid,
    }


def _segment_record(segment: Segment) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": segment.kind.value, "token_ids": segment.token_ids}
    if segment.images:
        record["images"] = [{"hash": i.image.hash, "grid": i.grid} for i in segment.images]
    if segment.stop_reason is not None:
        record |= {
            "logprobs": [float(f"{value:.9g}") for value in segment.logprobs],  # float32, exactly
            "weight_versions": segment.weight_versions,
            "stop_reason": segment.stop_reason.value,
            "reward": segment.reward,
        }
    return record


def _images(trajectory: Trajectory) -> set[Image]:
    """All images that the records name: those that the model saw, and those of tools that no turn came to see."""
    seen = {i.image for turn in trajectory.turns for segment in turn.context for i in segment.images}
    return seen | {i for turn in trajectory.turns for result in turn.tool_results for i in result.images}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
