"""Task `rotation`: tell by how many degrees a turned photograph must be rotated to stand upright."""

from __future__ import annotations

from npu_vlrl.tasks.starting import GRPO, TRAINING, Values

PREPARE = "npu-vlrl data rotation --photos YOUR_PHOTOS --out runs/data/rotation --size 448"

STARTER: Values = {
    "run.dir": "runs/rotation",
    "data.train.path": "runs/data/rotation/train.parquet",
    "data.eval.path": "runs/data/rotation/test.parquet",
    **TRAINING,
    "workflow.max_turns": 4,
    "workflow.turn_discount": 0.9,
    "workflow.tools": ["rotate"],
    "workflow.tool_call_reward": -0.05,
    "workflow.feedback": "That is not the angle. Look again.",
    "workflow.turn_tokens": 512,
    "workflow.context_tokens": 5120,
    "reward.rule": "rotation_broad",
    "reward.workers": 2,
    "evaluation.tasks": 0,
    "model.max_pixels": 401408,
    **GRPO,
}
