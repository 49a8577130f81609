"""Estimates memory and time of a run before it starts, from the shapes of a model without weights."""

from pathlib import Path

PUBLISHED = Path(__file__).parent / "published"
"""Folders with the shapes of well-known models. The constant stands here, since `outline` imports transformers."""
