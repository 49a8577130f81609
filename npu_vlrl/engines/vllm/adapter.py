"""Adapters for vLLM, which leaves the model unchanged and reads the trained adapter from a folder in peft's layout."""

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
"""Ranks for which vLLM can allocate adapters."""

NAME = "default"
"""Name of a policy's adapter in peft."""


class AdapterFolder:
    """Folder with the newest adapter. Each adapter has a new number, by which vLLM distinguishes it from the last."""

    def __init__(self, policy: Policy) -> None:
        """Makes the folder. Raises ValueError for a rank above vLLM's limit."""
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
        """Options of `vllm.LLM` for the adapter."""
        return {"enable_lora": True, "max_lora_rank": self.room, "max_loras": 1}

    def renewed(self, tensors: Iterable[tuple[str, Tensor]]) -> Any:
        """Writes an adapter with these tensors, by their names in the policy; returns the request by which vLLM reads
        it. Tensors that are not given stay unchanged; the first call gives all.
        """
        for name, tensor in tensors:
            self._held[name.replace(f".{NAME}.", ".")] = tensor.detach().to("cpu", copy=True)
        save_file(self._held, Path(self._folder.name) / "adapter_model.safetensors")
        self._number += 1
        requests: Any = importlib.import_module("vllm.lora.request")
        return requests.LoRARequest(f"update {self._number}", self._number, self._folder.name)

    def close(self) -> None:
        self._folder.cleanup()
