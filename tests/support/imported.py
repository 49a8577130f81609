"""What the ranks of `tests.support.ranks.fork` have imported when they begin; importing it is all it does."""

from transformers.models.auto import processing_auto, tokenization_auto
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl, processing_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from npu_vlrl import cli, train_loop
from npu_vlrl.commands import debug

__all__ = [
    "cli",
    "debug",
    "modeling_qwen2_5_vl",
    "modeling_qwen3_vl",
    "processing_auto",
    "processing_qwen2_5_vl",
    "tokenization_auto",
    "train_loop",
]
