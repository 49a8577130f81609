"""From `model.path` to a policy: any Hugging Face folder of Qwen2.5-VL, Qwen3-VL, Qwen2 or Qwen3."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from npu_vlrl.config import ConfigError, LoraConfig, ModelConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.kernels.modules import attach
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.model.tokens import special_tokens

VISION_MODELS = ("qwen2_5_vl", "qwen3_vl")
TEXT_MODELS = ("qwen2", "qwen3")
POSITION_SCALES = {"qwen3_vl": 1000}
"""Qwen2.5-VL writes pixels; Qwen3-VL was trained on relative positions from 0 to 1000 (its grounding cookbook)."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    """None for a text-only model."""
    folder: Path


def model_folder(path: str, scratch: Path, seed: int) -> Path:
    """The folder that `model.path` means; `tiny:KIND` is written below `scratch` first, unless it is there already."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()  # every load begins here, and so does writing a tiny model
    if path.startswith("tiny:"):
        folder = scratch / f"{path[5:]}-seed{seed}"
        try:
            return folder if folder.is_dir() else write_tiny_model(path[5:], folder, seed)
        except ValueError as error:
            raise ConfigError(f"model.path: {error}") from error
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} is not a Hugging Face model folder (it has no config.json); download a model "
            "there, or name the folder it is in"
        )
    return folder


def load_model(config: ModelConfig, scratch: Path, seed: int, device: torch.device) -> LoadedModel:
    """Loads weights (safetensors only), tokenizer and image processor; freezes and adds adapters as configured.

    On the device `meta` the policy has the names and shapes of weights, and no weights.

    Raises ConfigError for an unsupported or incomplete folder, naming what is missing.
    """
    folder = model_folder(config.path, scratch, seed)
    dtype = DTYPES[config.dtype]
    model = outline(folder, dtype) if device.type == "meta" else load_weights(folder, dtype).to(device)
    attach(model)
    with _explained(f"model.path: cannot read {folder}"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        _read_chat_template(tokenizer, folder)
    is_vision_model = model.config.model_type in VISION_MODELS
    processor = load_processor(config, folder) if is_vision_model else None
    if is_vision_model and processor is None:
        raise ConfigError(
            f"model.path: {folder} holds a vision-language model but no preprocessor_config.json; add its publisher's"
        )
    if processor is not None:
        processor = dataclasses.replace(processor, position_scale=POSITION_SCALES.get(model.config.model_type))
    model = arranged(model, config)
    merge = processor.merge_size if processor is not None else 2
    with _explained("model.path"):
        special = special_tokens(tokenizer, with_images=is_vision_model, owner=str(folder))
    return LoadedModel(Policy(model, special, len(tokenizer), merge), tokenizer, processor, folder)


def arranged(model: Any, config: ModelConfig) -> Any:
    """The model with what is frozen, added and recomputed in it as configured."""
    if config.freeze_vision and model.config.model_type in VISION_MODELS:
        model.model.visual.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers call it activation checkpointing
        if config.lora is not None:
            model = _add_adapter(model, config.lora)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_processor(config: ModelConfig, folder: Path) -> ImageProcessor | None:
    """A folder's image processor within the configured limits; None for a folder without one. Raises ConfigError."""
    with _explained(f"model.path: cannot read {folder}"):
        processor = ImageProcessor.from_folder(folder)
    return processor and limited(processor, config)


def limited(processor: ImageProcessor, config: ModelConfig) -> ImageProcessor:
    """The processor within the configured limits. Raises ConfigError."""
    limits: dict[str, Any] = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    with _explained("model.min_pixels and model.max_pixels, with those of the folder where one is not set"):
        return dataclasses.replace(processor, **{k: v for k, v in limits.items() if v is not None})


def replace_weights(policy: Policy, folder: Path) -> None:
    """Puts the weights of a folder of the same model into `policy`."""
    weights = load_weights(folder, next(policy.base.parameters()).dtype).state_dict()
    policy.base.load_state_dict(weights)


def load_weights(folder: Path, dtype: torch.dtype) -> Any:
    """The transformers model of a folder. Raises ConfigError when a weight is missing, left over or misshapen."""
    _, family = _family(folder)
    with _explained(f"model.path: cannot load the weights of {folder}"):
        model, report = family.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below instead
        )
    wrong = {
        kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[kind]
    }
    if wrong:
        raise ConfigError(f"model.path: the weights of {folder} do not fit its config.json: {wrong}; download it again")
    return model


def outline(folder: Path, dtype: torch.dtype, device: str | torch.device = "meta") -> Any:
    """The transformers model of a folder without its weights, on the device `meta`; with random ones on another. Raises
    ConfigError.
    """
    settings, family = _family(folder)
    with torch.device(device):
        return family.from_config(settings, dtype=dtype)


def _family(folder: Path) -> tuple[Any, Any]:
    """The config of a folder, and the class that makes its model."""
    with _explained(f"model.path: cannot read {folder / 'config.json'}"):
        settings = AutoConfig.from_pretrained(folder)
    if settings.model_type in VISION_MODELS:
        return settings, AutoModelForImageTextToText
    if settings.model_type in TEXT_MODELS:
        return settings, AutoModelForCausalLM
    raise ConfigError(
        f"model.path: {folder} is a {settings.model_type}; supported are {', '.join(VISION_MODELS + TEXT_MODELS)}"
    )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns what libraries raise about a folder's files into a ConfigError that begins with `what`."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{what}: {error}") from error


def _read_chat_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Processors of transformers keep the template in chat_template.json; tokenizers do not read that file."""
    if tokenizer.chat_template is None and (folder / "chat_template.json").is_file():
        tokenizer.chat_template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.path: {folder} has no chat template; add its publisher's chat_template.jinja")


def _add_adapter(model: Any, config: LoraConfig) -> Any:
    # embeddings and head are read as plain weights, so an adapter there would be left out in silence
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    layers = [name for name in linear if ".layers." in name and ".visual." not in name]
    chosen = [name for name in layers if name.rpartition(".")[2] in config.targets]
    missing = [target for target in config.targets if not any(name.endswith(f".{target}") for name in chosen)]
    if missing:
        raise ConfigError(f"model.lora.targets: no language-model layer is named {', '.join(missing)}")
    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides by it; a float is right
        lora_dropout=0.0,
        target_modules=chosen,
    )
    # Of the model's dtype: for float32, peft copies the input of every layer and multiplies at a fraction of the speed.
    # What 16 bits would lose is in the optimiser's masters.
    return get_peft_model(model, settings, autocast_adapter_dtype=False)
