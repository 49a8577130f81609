"""Exports of every family in transformers 4 and in the project's: the same tokens, patches, logits and answers.

The folders that the exports begin with are written as transformers 5 writes them, with values other than its defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2Config,
    Qwen3Config,
)

from npu_vlrl.config import LoraConfig
from npu_vlrl.export.card import LOADED
from npu_vlrl.export.foreign import convert
from npu_vlrl.model import families
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.tiny import tiny_tokenizer, write_tiny_model
from tests.support.models import KINDS, is_vision, load
from tests.transformers4.conftest import PYTHON

PATIENCE_S = 600
"""Each reader takes 15 s on a free core. The time of the fixture counts as that of the first test."""

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)

READER = Path(__file__).with_name("read_exports.py")
TOLERANCE = 2e-5
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3")
TINY = (*KINDS, "qwen3_vl_moe")
"""Tiny models that are written as exports are; transformers 4 computes with experts in the layout of the file."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
"""Other frequencies and another temperature of the attention, at every position."""


def family(kind: str) -> Any:
    return AutoModelForImageTextToText if is_vision(kind) else AutoModelForCausalLM


def settings_of(kind: str, folder: Path) -> Any:
    """The config of a tiny model, with rope settings that are not the defaults of the family."""
    if is_vision(kind):
        config = AutoConfig.from_pretrained(write_tiny_model(kind, folder, seed=0, layers=2))
        config.text_config.rope_parameters["rope_theta"] = 12345.0
        return config
    ids = {"eos_token_id": 403, "pad_token_id": 401, "bos_token_id": None}
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_theta": 54321.0, **(YARN if kind == "qwen2" else {"rope_type": "default"})}
    make: Any = Qwen2Config if kind == "qwen2" else Qwen3Config
    more = {} if kind == "qwen2" else {"head_dim": 16}
    return make(vocab_size=448, num_key_value_heads=2, rope_parameters=rope, **shape, **ids, **more)


@torch.no_grad()
def base_folder(kind: str, tied: bool, folder: Path, claims_tied: bool | None = None) -> Path:
    """A folder as transformers 5 writes it; its config may claim something else of the head than what is true."""
    config = settings_of(kind, folder)
    config.tie_word_embeddings = tied
    model = family(kind).from_config(config)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 1))
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(families.FAMILIES["qwen2_5_vl"])
    tokenizer.save_pretrained(folder)
    if claims_tied is not None:
        written = json.loads((folder / "config.json").read_text())
        for part in (written, written.get("text_config", written)):
            part["tie_word_embeddings"] = claims_tied
        (folder / "config.json").write_text(json.dumps(written))
    if is_vision(kind):
        separate = folder / "preprocessor_config.json"
        image = json.loads(separate.read_text()) | {"image_processor_type": "Qwen2VLImageProcessorPil"}
        whole = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": image}
        (folder / "processor_config.json").write_text(json.dumps(whole))
        separate.unlink()
    return folder


def loaded_from(folder: Path, **settings: Any) -> LoadedModel:
    """A policy with adapters that say something, where it has any."""
    loaded = load(folder, **settings)
    if loaded.policy.has_adapter:
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for parameter in loaded.policy.trainable().values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return loaded


LORA = LoraConfig(rank=4, alpha=8.0)


def lines_for(kind: str, folder: Path, base: Path | None = None) -> str:
    """The lines of the model card; for an adapter those that load its base come first, for the tokenizer."""
    whole = LOADED[is_vision(kind), False].replace("FOLDER", str(base or folder))
    if base is None:
        return whole
    return whole + LOADED[is_vision(kind), True].replace("BASE", str(base)).replace("FOLDER", str(folder))


def made_cases(root: Path) -> Iterator[tuple[str, str]]:
    """A name, and the lines that load a folder made for it."""
    for kind in FAMILIES:
        yield from _family_cases(kind, root / kind)
    for kind in TINY:
        yield f"{kind} tiny", lines_for(kind, write_tiny_model(kind, root / f"{kind} tiny", seed=1))
    flat = flattened(base_folder("qwen2_5_vl", True, root / "flat"))
    export_model(loaded_from(flat), root / "out flat")
    yield "qwen2_5_vl flat", lines_for("qwen2_5_vl", root / "out flat")


def _family_cases(kind: str, root: Path) -> Iterator[tuple[str, str]]:
    root.mkdir()
    tied, own = base_folder(kind, True, root / "tied"), base_folder(kind, False, root / "own")
    limits = {"max_pixels": 4096} if is_vision(kind) else {}
    for name, base, settings in (
        ("plain", tied, limits),
        ("own head", own, {}),
        ("merged", tied, {"lora": LORA} | limits),
        ("own head merged", own, {"lora": LORA}),
        ("own head that claims to be tied", base_folder(kind, False, root / "claims", claims_tied=True), {}),
        ("bfloat16", tied, {"dtype": "bfloat16"}),
    ):
        out = root / f"out {name}"
        export_model(loaded_from(base, **settings), out)
        yield f"{kind} {name}", lines_for(kind, out)
    export_model(loaded_from(root / "out plain", lora=LORA), root / "adapter", adapter=True)
    yield f"{kind} adapter", lines_for(kind, root / "adapter", root / "out plain")
    (root / "checkpoint").mkdir()
    tensors = {n: p.detach() * 0.9 for n, p in load(tied).policy.base.named_parameters()}
    save_file(tensors, root / "checkpoint" / "model.safetensors")
    convert(root / "checkpoint", tied, root / "foreign")
    yield f"{kind} foreign", lines_for(kind, root / "foreign")
    yield f"{kind} of transformers 5", lines_for(kind, tied)


def flattened(folder: Path) -> Path:
    """The folder with its config as Qwen2.5-VL was published: settings of the text model among those of the whole."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(text | config))
    return folder


class Read:
    """What one generation read of all folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.said: dict[str, Any] = json.loads((folder / "said.json").read_text())

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self._folder / f"{name}.safetensors")


def read_by(python: str, cases: Path, out: Path) -> Read:
    out.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, READER, cases, out], env=environment, check=True, timeout=PATIENCE_S)
    return Read(out)


@pytest.fixture(scope="module")
def generations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Read, Read]:
    """What transformers 4 and the project's transformers read."""
    root = tmp_path_factory.mktemp("exports")
    cases = root / "cases.json"
    cases.write_text(json.dumps(dict(made_cases(root))))
    return read_by(os.environ[PYTHON], cases, root / "old"), read_by(sys.executable, cases, root / "new")


KINDS_OF_EXPORT = (
    *("plain", "own head", "merged", "own head merged", "own head that claims to be tied"),
    *("bfloat16", "adapter", "foreign"),
)
NAMES = [
    *(f"{kind} {name}" for kind in FAMILIES for name in KINDS_OF_EXPORT),
    *(f"{kind} tiny" for kind in TINY),
    "qwen2_5_vl flat",
]


def test_two_generations_are_compared(generations: tuple[Read, Read]) -> None:
    old, new = generations
    assert old.said["transformers"].startswith("4.57.") and new.said["transformers"] == transformers.__version__
    known = {*NAMES, *(f"{kind} of transformers 5" for kind in FAMILIES), "transformers"}
    assert known == old.said.keys() == new.said.keys()


@pytest.mark.parametrize("name", NAMES)
def test_both_generations_compute_the_same(generations: tuple[Read, Read], name: str) -> None:
    old, new = generations
    assert "error" not in old.said[name] and old.said[name] == new.said[name]
    assert old.said[name]["dtype"] == ("torch.bfloat16" if name.endswith("bfloat16") else "torch.float32")
    there, here = old.tensors(name), new.tensors(name)
    here.pop("mm_token_type_ids", None)
    assert there.keys() == here.keys()
    for key in there.keys() - {"logits", "pixel_values"}:
        assert torch.equal(there[key], here[key]), key
    assert here["logits"].std() > 0.1
    for key in there.keys() & {"logits", "pixel_values"}:
        assert (there[key] - here[key]).abs().max() < TOLERANCE * here[key].abs().max(), key


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_differs_is_seen(generations: tuple[Read, Read], kind: str) -> None:
    """Heads, adapters, limits of pictures and weights of a checkpoint change the logits that are compared."""
    _, new = generations
    seen = [new.tensors(f"{kind} {name}")["logits"] for name in ("plain", "own head", "merged", "foreign")]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert one.shape != other.shape or (one - other).abs().max() > 1e-2
    adapter = new.tensors(f"{kind} adapter")["logits"]
    assert (adapter - seen[2]).abs().max() < TOLERANCE * adapter.abs().max()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layout_of_transformers_5_fails_in_transformers_4(generations: tuple[Read, Read], kind: str) -> None:
    """The reader finds what these tests are about."""
    old, new = generations
    assert "error" in old.said[f"{kind} of transformers 5"] and "error" not in new.said[f"{kind} of transformers 5"]
