"""Adapters for vLLM: it keeps the model as it is, and reads what is trained from a folder as peft writes it."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from npu_vlrl.model.policy import Policy

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""

NAME = "default"
"""Of a policy's adapter."""


class AdapterFolder:
    """The newest adapter that vLLM was given. Each has a number of its own, by which vLLM tells it from the last."""

    def __init__(self, policy: Policy) -> None:
        """Raises ValueError for a rank that vLLM has no room for."""
        settings: Any = policy.model.peft_config[NAME]
        self.room = next((rank for rank in RANKS if rank >= settings.r), None)
        if self.room is None:
            raise ValueError(f"vLLM takes adapters up to rank {RANKS[-1]}; lower model.lora.rank={settings.r}")
        self._folder = tempfile.TemporaryDirectory(prefix="npu_vlrl_adapter_")
        settings.save_pretrained(self._folder.name)
        self._held: dict[str, Tensor] = {}
        self._number = 0  # vLLM begins at 1

    @property
    def options(self) -> dict[str, Any]:
        """For `vllm.LLM`."""
        return {"enable_lora": True, "max_lora_rank": self.room, "max_loras": 1}

    def renewed(self, tensors: Iterable[tuple[str, Tensor]]) -> Any:
        """The request that makes vLLM read the adapter with these tensors in it, which have their names in the policy.
        Those that are not among them stay as they were; the first time there are all.
        """
        for name, tensor in tensors:
            self._held[name.replace(f".{NAME}.", ".")] = tensor.detach().to("cpu", copy=True)
        save_file(self._held, Path(self._folder.name) / "adapter_model.safetensors")
        self._number += 1
        requests: Any = importlib.import_module("vllm.lora.request")
        return requests.LoRARequest(f"update {self._number}", self._number, self._folder.name)

    def close(self) -> None:
        self._folder.cleanup()
