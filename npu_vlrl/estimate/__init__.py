"""What a run takes before it is started: memory and time, from the shapes of a model that has no weights."""

from pathlib import Path

PUBLISHED = Path(__file__).parent / "published"
"""Folders with what gives the shapes of well-known models. It stands here, as `outline` imports transformers."""
