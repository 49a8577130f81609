"""torchvision beside a torch without CUDA: the index has a build for GPUs, whose library does not load there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
"""Operators that its Python code asks for when it is imported, and that nothing here calls."""

_libraries: list[torch.library.Library] = []


def declare(torchvision: ModuleType) -> None:
    """Declares the operators where the library does not load; they have no kernels."""
    try:
        ctypes.CDLL(str(Path(torchvision.__path__[0]) / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        _libraries.append(library)
