"""What the processes of a test hold: a tiny Qwen2.5-VL, or a few tensors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from npu_vlrl.hardware import select
from npu_vlrl.kernels.tree import Tree


class Model:
    """What the scenarios need of a policy; here a few tensors, the last of which is frozen."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        device = select().device(int(os.environ["LOCAL_RANK"]))
        shapes = {"embed": (50, 64), "down_proj.weight": (64, 96), "bias": (96,), "scale": (), "tower": (32, 32)}
        self.tensors = {n: nn.Parameter(torch.randn(s, generator=generator).to(device)) for n, s in shapes.items()}

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def trained(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if name != "tower"}

    @torch.no_grad()
    def logprobs(self) -> list[float]:
        return (self.tensors["embed"] @ self.tensors["down_proj.weight"]).log_softmax(-1)[:, 0].tolist()


class TinyModel(Model):
    """A real one, through the class that engine and learner use."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from npu_vlrl.config import ModelConfig
        from npu_vlrl.model.load import load_model

        device = select().device(int(os.environ["LOCAL_RANK"]))
        config = ModelConfig(path=str(folder.parent / "model"), freeze_vision=True, **settings)
        self.policy = load_model(config, folder, 0, device).policy

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.policy.model.named_parameters())

    def trained(self) -> dict[str, Tensor]:
        return dict(self.policy.trainable())

    @torch.no_grad()
    def logprobs(self) -> list[float]:
        ids = torch.arange(10, 26, device=self.policy.device)
        positions = torch.arange(16, device=self.policy.device).expand(3, -1)
        hidden = self.policy.hidden_packed(ids, positions, Tree.of_sequences((0, 16)), [])
        scores = (hidden[:-1] @ self.policy.head_weight.T).float().log_softmax(-1)
        return scores.gather(1, ids[1:, None])[:, 0].tolist()


def train(parameters: dict[str, Tensor], seed: int) -> None:
    """One step of the learner's optimiser, with gradients that are noise made on the host."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in parameters.values():
        tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor)
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.02, fused=True)
    optimizer.step()
    optimizer.zero_grad()


def fingerprint(model: Model) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.parameters().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def state(model: Model) -> dict[str, Any]:
    return {"weights": fingerprint(model), "logprobs": model.logprobs()}
