"""A sibling of Qwen2-VL that writes positions in pixels."""

from __future__ import annotations

from dataclasses import replace

from npu_vlrl.model.families.qwen2_vl import Qwen2VL


class Qwen2VLPixels(Qwen2VL):
    title = "Qwen2-VL in pixels"
    model_type = "qwen2_vl_pixels"
    vision = replace(Qwen2VL.vision, position_scale=None)


FAMILY = Qwen2VLPixels()
