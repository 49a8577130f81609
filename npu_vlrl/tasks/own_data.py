"""Starting configuration for a file of the user's own."""

from __future__ import annotations

from npu_vlrl.tasks.starting import BOXED, GRPO, TRAINING, Values

PREPARE = "# write my_train.parquet as docs/data.md shows, or set data.train.path"

STARTER: Values = {
    "run.dir": "runs/own_data",
    "data.train.path": "my_train.parquet",
    **TRAINING,
    **BOXED,
    "evaluation.tasks": 64,
    **GRPO,
}
