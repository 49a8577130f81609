"""Model card, the README.md of an exported model, made of the run's own files only."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from npu_vlrl.config import Config, SourceConfig

FRONT_MATTER = """\
---
library_name: {library}
pipeline_tag: {task}
tags:
- reinforcement-learning
- npu_vlrl
# license: yours to choose, within what the licences of the base model and of the data allow
# base_model: the name that the base model has on the hub
---
"""

LOADED = {
    (True, False): """\
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

model = AutoModelForImageTextToText.from_pretrained("FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
image_processor = AutoImageProcessor.from_pretrained("FOLDER")  # AutoProcessor, which is both, needs torchvision
""",
    (False, False): """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
""",
    (True, True): """\
from peft import PeftModel
from transformers import AutoModelForImageTextToText

base = AutoModelForImageTextToText.from_pretrained("BASE", dtype="auto")
model = PeftModel.from_pretrained(base, "FOLDER")
""",
    (False, True): """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE", dtype="auto")
model = PeftModel.from_pretrained(base, "FOLDER")
""",
}
"""Code that loads an export, by whether it sees images and is an adapter. The reader replaces FOLDER and BASE."""

GENERATIONS = "4.57 or 5"
"""Generations of transformers with which an export was read."""

MACHINE = {"run", "sync", "ray"}
"""Sections of the configuration about where a run ran, not what it learned."""


@dataclass(frozen=True)
class Source:
    """Origin of an export."""

    sees: bool
    adapter: bool
    weights: str
    """Dtype and origin of the weights."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Known facts of its making, a row each."""


def run_card(
    config: Config, source: Source, step: int, metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> str:
    """Card of a run's checkpoint after `step` steps; `metrics` and `summary` are the content of its files."""
    name = PurePath(config.run.dir).name
    facts = {"weights": source.weights, **dict(_facts(config, source, step, summary)), **source.facts}
    parts = [
        _head(source),
        f"# {plain(name)}\n",
        "A model trained by reinforcement learning over several turns, with npu_vlrl. This file was written from the "
        "files of the run.\n",
        "## Training\n",
        "".join(_table(("", ""), facts.items())),
        "## Results\n",
        "".join(_results(step, metrics)),
        _loading(source, config.model.dtype if source.adapter else "auto"),
        "## Configuration\n",
        "What differs from the defaults; of paths the last part.\n",
        fenced("yaml", yaml.safe_dump(_changed(config), sort_keys=False, allow_unicode=True, width=110)),
    ]
    return "\n".join(parts)


def converted_card(title: str, source: Source) -> str:
    """Card of a model that was trained by another program."""
    parts = [
        _head(source),
        f"# {plain(title)}\n",
        "Converted from a checkpoint of another program by npu_vlrl. How the model was trained is not known here.\n",
        "".join(_table(("", ""), {"weights": source.weights, **source.facts}.items())),
        _loading(source),
    ]
    return "\n".join(parts)


def plain(value: Any) -> str:
    """One line of text in which nothing is Markdown or HTML."""
    words = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(value)).split())
    return re.sub(r"([\\`*_\[\]|~$:@]|(?<=[wW]{3})\.)", r"\\\1", html.escape(words, quote=False))


def fenced(language: str, text: str) -> str:
    """Code block whose fence does not occur in `text`."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"


def _head(source: Source) -> str:
    task = "image-text-to-text" if source.sees else "text-generation"
    return FRONT_MATTER.format(library="peft" if source.adapter else "transformers", task=task)


def _loading(source: Source, dtype: str = "auto") -> str:
    """Instructions for loading. `dtype`: of the base that an adapter was trained on, whose folder may name another."""
    code = LOADED[source.sees, source.adapter].replace("auto", dtype)
    return f"## How to load it\n\nWith transformers {GENERATIONS}:\n\n{fenced('python', code)}"


def _facts(config: Config, source: Source, step: int, summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from _method(config, source, step)
    evaluation = config.data.eval or config.data.train
    yield "training data", _data(config.data.train)
    yield "evaluation data", _data(evaluation)
    yield "environment", _short(config.environment.name)
    if config.environment.is_judged:
        yield "reward rule", _short(config.reward.rule)
        yield "tools", ", ".join(map(_short, config.workflow.tools)) or "none"
    yield "turns", f"at most {config.workflow.max_turns} of {config.workflow.turn_tokens} tokens"
    if "platform" in summary:
        yield "platform", summary["platform"]
    yield from summary.get("versions", {}).items()


def _method(config: Config, source: Source, step: int) -> Iterator[tuple[str, Any]]:
    algorithm, rollout, lora = config.algorithm.resolved(), config.rollout, config.model.lora
    yield "base model", _short(config.model.path)
    yield "steps", f"{step} of {config.train.steps}"
    if config.warm_start.steps:
        yield "warm start", f"{config.warm_start.steps} supervised steps before them"
    chosen = f"advantage {_short(str(algorithm.advantage))}, loss {_short(str(algorithm.loss))}"
    yield "algorithm", f"{algorithm.preset} ({chosen})"
    yield (
        "trajectories a step",
        f"{rollout.groups} groups of {rollout.group_size}, at temperature {rollout.temperature}",
    )
    yield "learning rate", config.optim.lr
    yield "trained", f"adapters of rank {lora.rank}" if lora else "all weights"
    if config.model.freeze_vision and lora is None and source.sees:
        yield "frozen", "the vision tower"
    yield "seed", config.train.seed


def _data(source: SourceConfig) -> str:
    return f"generated: {source.generator}" if source.path is None else _short(source.path)


def _short(path: str) -> str:
    """Path without the folders of somebody's machine; `file.py:function` and plain names are unchanged."""
    return PurePath(path).name or path


def _results(step: int, metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Results of the evaluations before the first step, and of the last one up to `step`."""
    found = [line for line in metrics if line["step"] <= step and any(key.startswith("eval/") for key in line)]
    shown = [line for line in found if line["step"] == 0][:1] + [line for line in found if line["step"] > 0][-1:]
    names = sorted({key for line in shown for key in line if key.startswith("eval/")})
    if not names:
        yield "The run has recorded no evaluation up to this step.\n"
        return
    heads = ["data source", "", *(f"after {line['step']} steps" for line in shown)]
    rows = []
    for name in names:
        data_source, _, measure = name.removeprefix("eval/").rpartition("/")
        rows.append((data_source, measure, *(_number(line.get(name)) for line in shown)))
    yield from _table(heads, rows)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _table(heads: Sequence[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    yield _row(map(plain, heads))
    yield _row(["---"] * len(heads))
    yield from (_row(map(plain, row)) for row in rows)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _changed(config: Config) -> Any:
    return _without_folders(config.model_dump(mode="json", exclude_defaults=True, exclude=MACHINE))


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
