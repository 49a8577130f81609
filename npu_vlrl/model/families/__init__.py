"""Families of models, each in a file of its own that states its facts. A new file adds a family."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

from npu_vlrl.model.families.base import CHATML, ChatFormat, Family, MixtureFacts, TowerShape, VisionFacts

__all__ = [
    "CHATML",
    "FAMILIES",
    "TINY",
    "ChatFormat",
    "Family",
    "MixtureFacts",
    "TowerShape",
    "VisionFacts",
    "family_of_path",
]

TINY = "tiny:"
"""Prefix of `model.path` for a model of random weights; a model type follows."""


def _found() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.model_type: family for family in families}


FAMILIES: dict[str, Family] = _found()
"""Families by the `model_type` of config.json."""


def family_of_path(path: str) -> Family | None:
    """The family of the model at `model.path`; None where there is none, for which loading raises the reason."""
    if path.startswith(TINY):
        return FAMILIES.get(path.removeprefix(TINY))
    try:
        settings = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    return FAMILIES.get(kind) if isinstance(kind, str) else None
