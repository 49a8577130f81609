"""`python -m tests.export.dcp_ranks BASE FOLDER`, a process of two: a divided model, saved as DCP in both formats."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from tests.support.models import plain_model


def main(base: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = plain_model(base)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if dist.get_rank() == 0:
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        save_file(whole, folder / "expected.safetensors")
    fully_shard(model)
    state = get_model_state_dict(model)
    state.pop("lm_head.weight", None)  # the embedding
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / "safe"), save_distributed=True))
    dcp.save({"app": {"model": state, "step": 4}}, storage_writer=dcp.FileSystemWriter(str(folder / "classic")))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ
    main(Path(sys.argv[1]), Path(sys.argv[2]))
