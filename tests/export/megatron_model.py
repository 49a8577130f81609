"""`python -m tests.export.megatron_model FOLDER BASE…`, a process of some: models of the real megatron-core that they
divide, saved with their logits in FOLDER/0, FOLDER/1, …

They are saved as files of ranks, and as a distributed checkpoint. megatron-core asks for a GPU where it needs none: to
put angles and counts on, for random states of dropout, and before it saves.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file


def build(settings: dict) -> GPTModel:
    qwen3 = settings["model_type"] == "qwen3"
    heads = settings["num_attention_heads"]
    config = TransformerConfig(
        num_layers=settings["num_hidden_layers"],
        hidden_size=settings["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=settings["num_key_value_heads"],
        kv_channels=settings.get("head_dim") or settings["hidden_size"] // heads,
        ffn_hidden_size=settings["intermediate_size"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=not qwen3,
        qk_layernorm=qwen3,
        normalization="RMSNorm",
        layernorm_epsilon=settings["rms_norm_eps"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=qwen3, normalization="RMSNorm"),
        vocab_size=settings["vocab_size"] + 64,
        max_sequence_length=64,
        share_embeddings_and_output_weights=settings["tie_word_embeddings"],
        parallel_output=False,
        position_embedding_type="rope",
        rotary_base=settings["rope_parameters"]["rope_theta"],
    ).eval()


@torch.no_grad()
def save(base: Path, folder: Path) -> None:
    rank = dist.get_rank()
    settings = json.loads((base / "config.json").read_text())
    (folder / "distributed").mkdir(parents=True, exist_ok=True)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext)),
    ):
        torch.manual_seed(1)
        model = build(settings)
        common, own = torch.Generator().manual_seed(2), torch.Generator().manual_seed(3 + rank)
        for parameter in model.parameters():
            divided = getattr(parameter, "tensor_model_parallel", False)
            parameter.add_(torch.randn(parameter.shape, generator=own if divided else common) * 0.1)
        ids = torch.randint(0, settings["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(4))
        hidden = torch.ones(1, 1, 12, 12).triu(1).bool()
        logits = model(ids, torch.arange(12)[None].expand(2, -1), hidden)
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(folder / "distributed"))
    target = folder / "saved" / f"mp_rank_{rank:02d}"
    target.mkdir(parents=True)
    torch.save({"model": model.state_dict(), "iteration": 1}, target / "model_optim_rng.pt")
    if rank == 0:
        seen = logits[..., : settings["vocab_size"]].contiguous()
        save_file({"ids": ids, "logits": seen}, folder / "expected.safetensors")


def main(folder: Path, bases: list[Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    for number, base in enumerate(bases):
        save(base, folder / str(number))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
