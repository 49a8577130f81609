"""Geometry problems: 60 real ones as data, and Geometry3K's reward."""

from __future__ import annotations

from npu_vlrl.tasks.starting import BOXED, GRPO, TRAINING, Values

PREPARE = "npu-vlrl data geo3k --out runs/data/geo3k"

STARTER: Values = {
    "run.dir": "runs/geo3k",
    "data.train.path": "runs/data/geo3k/train.parquet",
    "data.eval.path": "runs/data/geo3k/test.parquet",
    **TRAINING,
    **BOXED,
    **GRPO,
}
