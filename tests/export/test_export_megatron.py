"""Checkpoints of Megatron-core become Hugging Face folders, bit by bit, whatever they were divided into."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.tiny import tiny_tokenizer, write_tiny_model
from tests.export.megatron_shards import write
from tests.support.models import plain_model
from tests.support.program import Outcome, program
from tests.support.ranks import finish, fork, said

torch.set_num_threads(1)

ROWS = 448
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"bias": True, "tied": False},
    "qwen2 tied": {"bias": True, "tied": True},
    "qwen3": {"bias": False, "tied": False},
    "qwen3 tied": {"bias": False, "tied": True},
}
REAL = ("qwen2", "qwen3 tied")
"""Those that megatron-core itself is asked about."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Model folders with eight heads of queries and four of keys, every number random."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("base") / "base"
        if name.endswith("vl"):
            return write_tiny_model(name, folder, seed=3, hidden=64, layers=4)
        kind = Qwen2ForCausalLM if name.startswith("qwen2") else Qwen3ForCausalLM
        more = {} if kind is Qwen2ForCausalLM else {"head_dim": 16}
        config = (Qwen2Config if kind is Qwen2ForCausalLM else Qwen3Config)(
            vocab_size=ROWS,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=SHAPES[name]["tied"],
            **more,
        )
        model = kind(config)
        randomise(model, 5)
        model.save_pretrained(folder)
        tiny_tokenizer(FAMILIES["qwen2_5_vl"]).save_pretrained(folder)
        return folder

    return made


@torch.no_grad()
def randomise(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def other(folder: Path) -> Any:
    """The model of a folder with other weights: what was trained."""
    return randomise(plain_model(folder), 11)


def export(checkpoint: Path, base: Path, out: Path) -> Outcome:
    return program("export", checkpoint, "--base", base, "--out", out)


def same(model: Any, out: Path) -> bool:
    found, expected = dict(plain_model(out).named_parameters()), dict(model.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_weights_come_back_bit_by_bit(folders: Any, tmp_path: Path, name: str, ranks: int) -> None:
    model = other(folders(name))
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) is SHAPES[name]["bias"]
    stages, fused = (2, False) if ranks == 2 else (1, True)
    write(model, tmp_path / "saved", ranks, stages, padded=ROWS + 64, fused_norms=fused, as_torch=ranks == 4)
    done = export(tmp_path / "saved", folders(name), tmp_path / "out")
    assert done.code == 0, done.err
    assert done.out == f"{tmp_path / 'saved'}, by the names of Megatron-core\nwritten to {tmp_path / 'out'}\n"
    assert same(model, tmp_path / "out") and not same(model, folders(name))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Megatron" in card and "text-generation" in card


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("tower", [True, False])
def test_models_that_see(folders: Any, tmp_path: Path, name: str, tower: bool) -> None:
    """The tower of Megatron-Bridge is that of transformers; where there is none, it is that of the base."""
    base = folders(name)
    model = other(base)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("12\n")
    saved = tmp_path / "saved" / "iter_0000012"
    write(model, saved, 2, prefix="language_model.", tower=tower, fused_norms=name == "qwen2_5_vl", as_torch=tower)
    done = export(tmp_path / "saved", base, tmp_path / "out")
    assert done.code == 0, done.err
    assert ("the vision tower is that of --base" in done.out) is not tower
    if not tower:
        model.model.visual.load_state_dict(plain_model(base).model.visual.state_dict())
    assert same(model, tmp_path / "out")
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


@pytest.fixture(scope="module")
def trained(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of the real megatron-core, divided over two processes, and their logits."""
    folder = tmp_path_factory.mktemp("megatron")
    processes = fork(2, ["-m", "tests.export.megatron_model", folder, *map(folders, REAL)], folder)
    assert finish(processes) == [0, 0], said(folder, 2)
    return folder


@pytest.mark.parametrize("name", REAL)
def test_megatrons_own_model_says_the_same(folders: Any, trained: Path, tmp_path: Path, name: str) -> None:
    """Plain transformers computes from the export the logits that megatron-core computed."""
    folder = trained / str(REAL.index(name))
    assert export(folder / "saved", folders(name), tmp_path / "out").code == 0
    assert gap(tmp_path / "out", folder) < 1e-5 and gap(folders(name), folder) > 0.1


def test_megatrons_own_distributed_checkpoint(folders: Any, trained: Path, tmp_path: Path) -> None:
    """It is a DCP, with layers stacked; its owner makes it readable."""
    folder, base = trained / "0", folders(REAL[0])
    refused = export(folder / "distributed", base, tmp_path / "out").refused()
    command = shlex.split(re.search(r"`python (.*?)`", refused)[1])  # type: ignore[index]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert export(tmp_path / "weights.pt", base, tmp_path / "out").code == 0
    assert gap(tmp_path / "out", folder) < 1e-5


@torch.no_grad()
def gap(model: Path, trained: Path) -> float:
    """Between the logits of a model folder and those of megatron-core."""
    expected = load_file(trained / "expected.safetensors")
    return float((plain_model(model)(input_ids=expected["ids"]).logits - expected["logits"]).abs().max())


# --- refusals --------------------------------------------------------------------------------------------------------


def change(folder: Path, rank: int, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of a shard, by the ends of their names, or removes them."""
    file = folder / f"mp_rank_{rank:02d}" / "model.safetensors"
    held = load_file(file)
    for end, tensor in tensors.items():
        (name,) = [name for name in held if name.endswith(end.replace("__", "."))]
        if tensor is None:
            del held[name]
        else:
            held[name] = tensor
    save_file(held, file)


def test_what_does_not_fit_is_named(folders: Any, tmp_path: Path) -> None:
    base = folders("qwen3")
    model = other(base)

    def refused(number: int, ranks: int = 2, **changed: Any) -> str:
        folder = write(model, tmp_path / f"saved{number}", ranks)
        for rank in range(ranks):
            if rank or not changed.get("second_only"):
                change(folder, rank, **{k: v for k, v in changed.items() if k != "second_only"})
        return export(folder, base, tmp_path / "out").refused()

    norm = "layers__1__mlp__linear_fc1__layer_norm_weight"
    assert "lacks weights: ['model.layers.1.post_attention_layernorm.weight']" in refused(1, **{norm: None})
    assert f"{norm.replace('__', '.')} is not the same on all tensor-parallel ranks" in refused(
        2, second_only=True, **{norm: torch.zeros(64)}
    )
    assert "tensors of different names" in refused(3, second_only=True, **{norm: None})
    qkv = {"layers__0__self_attention__linear_qkv__weight": torch.zeros(32, 64)}
    assert "has 64 rows, and the heads of the base model make 256" in refused(4, **qkv)
    assert "embed_tokens.weight is [440, 64], here [448, 64]" in refused(
        5, embedding__word_embeddings__weight=torch.zeros(220, 64)
    )
    wrong = export(write(other(folders("qwen2")), tmp_path / "qwen2", 1), base, tmp_path / "out").refused()
    assert "of another model: model.layers.0.self_attn.o_proj.weight is [64, 64], here [64, 128]" in wrong
    tied = export(write(model, tmp_path / "untied", 1), folders("qwen3 tied"), tmp_path / "out").refused()
    assert "lm_head.weight is another matrix than the embedding" in tied
    assert not (tmp_path / "out").exists()


def test_ranks_and_names_that_are_not_known(folders: Any, tmp_path: Path) -> None:
    base = folders("qwen3")
    model = other(base)
    some = write(model, tmp_path / "some", 4)
    shutil.rmtree(some / "mp_rank_01")
    assert "some mp_rank folders are not there" in export(some, base, tmp_path / "out").refused()
    experts = write(model, tmp_path / "experts", 1)
    (experts / "mp_rank_00").rename(experts / "mp_rank_00_000_000")
    assert "experts divided over ranks are not known" in export(experts, base, tmp_path / "out").refused()
    named = write(model, tmp_path / "named", 1)
    held = load_file(named / "mp_rank_00" / "model.safetensors")
    for name, message in {
        "decoder.layers.0.mlp.router.weight": "is no tensor of a layer of Qwen2 or Qwen3",
        "vision_model.decoder.layers.0.mlp.linear_fc1.weight": "is no tensor of Qwen2, Qwen3 or their vision-language",
    }.items():
        save_file({**held, name: torch.zeros(2)}, named / "mp_rank_00" / "model.safetensors")
        assert f"{name} {message}" in export(named, base, tmp_path / "out").refused()
