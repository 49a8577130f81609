"""Optional packages of the distribution."""

from __future__ import annotations

EXTRAS = {
    **{"matplotlib": "plots", "gymnasium": "games"},
    **{name: name for name in ("ray", "vllm", "tensorboard", "wandb", "swanlab", "trackio")},
}
"""The extra of pyproject.toml that brings a package, by the name that is imported."""


def remedy(package: str) -> str:
    """The command that installs an optional package, e.g. `pip install 'npu-vlrl[ray]'`."""
    return f"pip install 'npu-vlrl[{EXTRAS[package]}]'"
