"""Optional packages of the distribution."""

from __future__ import annotations

EXTRAS = {
    **{"matplotlib": "plots", "gymnasium": "games"},
    **{name: name for name in ("ray", "vllm", "tensorboard", "wandb", "swanlab", "trackio")},
}
"""Extra of pyproject.toml that installs an optional package, by the package's import name."""


def remedy(package: str) -> str:
    """The command that installs an optional package, e.g. `pip install 'npu-vlrl[ray]'`."""
    return f"pip install 'npu-vlrl[{EXTRAS[package]}]'"
