"""The card of an export: what the run's files say, as text that is neither Markdown nor HTML, below valid YAML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from npu_vlrl.config import Config, load_config
from npu_vlrl.export.card import LOADED, Source, converted_card, fenced, plain, run_card
from tests.support.models import tiny_folder

EVIL = (
    "a|b<script>alert(1)</script> ![x](http://x) `code` **bold**\n# heading\n---\n"
    "www.evil.org me@evil.org $x$ [link](javascript:x) &lt; \u2028<img src=x>"
)
METRICS = [
    {"step": 0, "eval/arrow/accuracy": 0.25, f"eval/{EVIL}/accuracy": 0.5},
    {"step": 0, "reward": 1.0},
    {"step": 4, "eval/arrow/accuracy": 0.375, "eval/new/accuracy": 1.0},
    {"step": 8, "eval/arrow/accuracy": 0.875, f"eval/{EVIL}/accuracy": None, "eval/---/<b>": 1.0},
]
SUMMARY = {"steps": 8, "platform": "cpu", "versions": {"torch": "2.13.0+cpu"}}
WHOLE = Source(sees=True, adapter=False, weights="float32")


def config(folder: Path, **sections: Any) -> Config:
    file = folder / "config.yaml"
    rest: dict[str, Any] = {
        "model": {"path": "/home/me/models/Qwen2.5-VL-3B-Instruct"},
        "data": {"train": {"path": "/home/me/secret project/train.parquet"}},
        "train": {"steps": 8},
        "reward": {"rule": "/home/me/rewards.py:score"},
    }
    file.write_text(json.dumps(rest | sections))
    return load_config(file)


def front_matter(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def table(card: str, heading: str) -> list[list[str]]:
    part = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


class Tags(HTMLParser):
    found: list[str]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)


def test_it_says_what_the_files_of_the_run_say(tmp_path: Path) -> None:
    made = config(tmp_path, workflow={"tools": ["look"], "max_turns": 2}, algorithm={"preset": "dapo"})
    card = run_card(made, WHOLE, 8, METRICS, SUMMARY)
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["reinforcement-learning", "npu_vlrl"],
    }
    assert "\n# license: " in card.split("---\n")[1] and "\nlicense:" not in card
    facts = dict(table(card, "Training"))
    assert facts["base model"] == "Qwen2.5-VL-3B-Instruct" and facts["steps"] == "8 of 8"
    assert facts["training data"] == facts["evaluation data"] == "train.parquet"
    assert facts["reward rule"] == "rewards.py\\:score" and facts["tools"] == "look"
    assert facts["algorithm"].startswith("dapo") and facts["platform"] == "cpu" and facts["torch"] == "2.13.0+cpu"
    assert "/home/me" not in card and "secret project" not in card
    rows = table(card, "Results")
    assert rows[0] == ["data source", "", "after 0 steps", "after 8 steps"]
    assert ["arrow", "accuracy", "0.25", "0.875"] in rows and len(rows) == 5
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])  # type: ignore[index]
    assert settings["workflow"] == {"max_turns": 2, "tools": ["look"]} and "run" not in settings


def test_it_says_nothing_of_later_steps_and_nothing_that_it_does_not_know(tmp_path: Path) -> None:
    made = config(tmp_path)
    card = run_card(made, WHOLE, 5, METRICS, {})
    assert table(card, "Results")[0][-1] == "after 4 steps" and "0.875" not in card
    assert not {"platform", "torch"} & dict(table(card, "Training")).keys()
    assert table(run_card(made, WHOLE, 5, METRICS[:1], {}), "Results")[0][2:] == ["after 0 steps"]
    assert "no evaluation" in run_card(made, WHOLE, 5, [], {})


def test_names_from_data_are_neither_markdown_nor_html(tmp_path: Path) -> None:
    made = config(tmp_path, run={"dir": str(tmp_path / EVIL.replace("/", ""))}, model={"path": f"/models/{EVIL}"})
    card = run_card(made, Source(True, False, EVIL), 8, METRICS, SUMMARY)
    assert front_matter(card)["library_name"] == "transformers"
    code = re.compile(r"^(`{3,})\w+\n.*?^\1$", re.DOTALL | re.MULTILINE)
    prose = code.sub("", card.split("---\n", 2)[2])
    tags = Tags()
    tags.found = []
    tags.feed(prose)
    assert tags.found == [] and not re.search(r"(?<!\\)[\[`*<$@]|www\.|http:|javascript:", prose)
    assert [line for line in prose.splitlines() if line.startswith("#")][1:] == [
        *("## Training", "## Results", "## How to load it", "## Configuration")
    ]
    assert all(len(row) == 4 for row in table(card, "Results"))
    assert all(len(row) == 2 for row in table(card, "Training"))


@given(st.text())
def test_plain_text_is_one_line_that_reads_back(text: str) -> None:
    line = plain(text)
    assert "\n" not in line and "\r" not in line and not re.search(r"(?<!\\)(\\\\)*[|`*\[<>]", line)
    unescaped = re.sub(r"\\(.)", r"\1", line)
    read = unescaped.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert read == " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text).split())


@given(st.text(alphabet="`a\n", max_size=30))
def test_a_code_block_ends_where_its_text_does(text: str) -> None:
    lines = fenced("yaml", text + "\n").split("\n")
    fence = lines[0].removesuffix("yaml")
    assert lines[-2].startswith("`") and [line for line in lines[1:] if line.startswith(fence)] == [lines[-2]]


def test_a_converted_model_has_no_history() -> None:
    card = converted_card("x", Source(False, False, "float32", {"checkpoint": "iter_5"}))
    assert front_matter(card)["pipeline_tag"] == "text-generation"
    assert "is not known here" in card and "## Results" not in card and "| checkpoint | iter\\_5 |" in card


@pytest.mark.parametrize("sees", [True, False])
def test_the_code_that_loads_a_model_loads_it(sees: bool) -> None:
    """All of it; `bash launch/test.sh --transformers4` has transformers 4 run it, too."""
    folder = str(tiny_folder("qwen2_5_vl" if sees else "qwen3"))
    names: dict[str, Any] = {}
    exec(LOADED[sees, False].replace("FOLDER", folder), names)
    assert names["model"].config.model_type == ("qwen2_5_vl" if sees else "qwen3")
    assert len(names["tokenizer"]) > 256 and ("image_processor" in names) is sees


def test_the_document_has_the_code_of_the_card() -> None:
    document = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    assert LOADED[True, False].replace("FOLDER", "mine-rl") in document
    assert LOADED[True, True].replace("FOLDER", "mine-lora").replace("BASE", "Qwen2.5-VL-3B-Instruct") in document


def test_an_adapter_is_loaded_onto_a_base_in_the_dtype_of_its_training(tmp_path: Path) -> None:
    """The folder of the base may say another."""
    made = config(tmp_path, model={"path": "/models/base", "dtype": "bfloat16", "lora": {"rank": 2}})
    card = run_card(made, Source(True, True, "adapters in bfloat16"), 8, METRICS, SUMMARY)
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None and 'from_pretrained("BASE", dtype="bfloat16")' in code[1]
    assert 'from_pretrained("FOLDER", dtype="auto")' in run_card(made, WHOLE, 8, METRICS, SUMMARY)


def test_a_text_model_has_no_vision_tower_to_freeze(tmp_path: Path) -> None:
    made = config(tmp_path, model={"path": "/models/base", "freeze_vision": True})
    text = dict(table(run_card(made, Source(False, False, "float32"), 8, METRICS, SUMMARY), "Training"))
    vision = dict(table(run_card(made, WHOLE, 8, METRICS, SUMMARY), "Training"))
    assert "frozen" not in text and vision["frozen"] == "the vision tower"
