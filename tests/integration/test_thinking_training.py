"""A whole training under the published template of Qwen3-VL Thinking: warm start, calls, answers and their formats."""

from __future__ import annotations

from pathlib import Path

from npu_vlrl.config import load_config
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.train_loop import train
from tests.support.runs import lines
from tests.support.tokenizers import template

SETTINGS = """
train: {threads: 1, steps: 1}
data: {train: {generator: arrow}}
workflow:
  {tools: [look], describe_tools: false, max_turns: 3, turn_tokens: 20, context_tokens: 256, export_style: individual,
   reward_mode: sum, feedback: No., tool_call_reward: 0.3, system_prompt: ""}
reward: {rule: tagged, options: {choices: [up, right, down, left]}}
rollout: {groups: 4, group_size: 4}
warm_start: {steps: 40, batch: 4, right_share: 0.5, lr: 1.0e-2}
evaluation: {tasks: 4}
"""


def test_a_warm_start_teaches_calls_and_answers_behind_the_templates_tag(tmp_path: Path) -> None:
    model = write_tiny_model("qwen3_vl", tmp_path / "qwen3_vl", seed=0)
    (model / "chat_template.jinja").write_text(template("qwen3_vl_thinking"))
    (tmp_path / "thinking.yaml").write_text(SETTINGS)
    run = tmp_path / "run"
    train(load_config(tmp_path / "thinking.yaml", [f"model.path={model}", f"run.dir={run}"]))
    turns = [turn for episode in lines(run, "trajectories.jsonl") for turn in episode["turns"]]
    assert all(turn["text"].startswith("<think>\n") for turn in turns)
    called = [turn for turn in turns if turn["tool_calls"]]
    formatted = [turn for turn in turns if turn["verdict"] is not None and turn["verdict"]["terms"]["format"] > 0]
    assert called and formatted
    for turn in formatted:
        thought, answer = turn["text"].removeprefix("<think>\n").split("</think>")
        assert "<think>" not in thought
        assert answer.strip() in [f"<answer>{way}</answer>" for way in ("up", "right", "down", "left")]
