"""From `model.path` to a policy: any Hugging Face folder of Qwen2.5-VL, Qwen3-VL, Qwen2 or Qwen3."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerBase

from npu_vlrl.config import ConfigError, LoraConfig, ModelConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.kernels.attention import attach
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.types import SpecialTokens

VISION_MODELS = ("qwen2_5_vl", "qwen3_vl")
TEXT_MODELS = ("qwen2", "qwen3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    """None for a text-only model."""
    folder: Path


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """The ids of Qwen's control tokens, as far as the tokenizer has them. ConfigError without an end of turn."""
    vocabulary = tokenizer.get_vocab()
    ends = tuple(vocabulary[t] for t in ("<|im_end|>", "<|endoftext|>") if t in vocabulary)
    if not ends:
        raise ConfigError(f"{tokenizer.name_or_path}: the tokenizer has no <|im_end|>; only Qwen's chat format is known")
    return SpecialTokens(
        end_of_turn=ends,
        image=vocabulary.get("<|image_pad|>"),
        video=vocabulary.get("<|video_pad|>"),
        vision_start=vocabulary.get("<|vision_start|>"),
        vision_end=vocabulary.get("<|vision_end|>"),
    )


def model_folder(path: str, scratch: Path, seed: int) -> Path:
    """The folder that `model.path` means; `tiny:KIND` is written to `scratch` first, unless it is there already."""
    if path.startswith("tiny:"):
        try:
            return scratch if (scratch / "config.json").is_file() else write_tiny_model(path[5:], scratch, seed)
        except ValueError as error:
            raise ConfigError(f"model.path: {error}") from error
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder} is not a Hugging Face model folder (it has no config.json)")
    return folder


def load_model(config: ModelConfig, scratch: Path, seed: int, device: torch.device) -> LoadedModel:
    """Loads weights (safetensors only), tokenizer and image processor; freezes and adds adapters as configured.

    Raises ConfigError for an unsupported or incomplete folder, naming what is missing.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    folder = model_folder(config.path, scratch, seed)
    model = load_weights(folder, DTYPES[config.dtype]).to(device)
    attach(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _read_chat_template(tokenizer, folder)
    processor = ImageProcessor.from_folder(folder)
    is_vision_model = model.config.model_type in VISION_MODELS
    if is_vision_model and processor is None:
        raise ConfigError(f"model.path: {folder} holds a vision-language model but no preprocessor_config.json")
    processor = processor if is_vision_model else None
    if processor is not None:
        limits = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
        processor = dataclasses.replace(processor, **{k: v for k, v in limits.items() if v is not None})
    if config.freeze_vision and is_vision_model:
        model.model.visual.requires_grad_(False)
    if config.lora is not None:
        model = _add_adapter(model, config.lora)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    merge = processor.merge_size if processor is not None else 2
    return LoadedModel(Policy(model, special_tokens(tokenizer), len(tokenizer), merge), tokenizer, processor, folder)


def replace_weights(policy: Policy, folder: Path) -> None:
    """Puts the weights of a folder of the same model into `policy`."""
    weights = load_weights(folder, next(policy.base.parameters()).dtype).state_dict()
    policy.base.load_state_dict(weights)


def load_weights(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The transformers model of a folder. Raises ConfigError when a weight is missing, left over or misshapen."""
    settings = AutoConfig.from_pretrained(folder)
    if settings.model_type in VISION_MODELS:
        family = AutoModelForImageTextToText
    elif settings.model_type in TEXT_MODELS:
        family = AutoModelForCausalLM
    else:
        raise ConfigError(
            f"model.path: {folder} is a {settings.model_type}; supported are {', '.join(VISION_MODELS + TEXT_MODELS)}"
        )
    try:
        model, report = family.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ConfigError(f"model.path: cannot load {folder}: {error}") from error
    wrong = {kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[kind]}
    if wrong:
        raise ConfigError(f"model.path: the weights of {folder} do not fit its config.json: {wrong}")
    return model


def _read_chat_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Processors of transformers keep the template in chat_template.json; tokenizers do not read that file."""
    if tokenizer.chat_template is None and (folder / "chat_template.json").is_file():
        tokenizer.chat_template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.path: {folder} has no chat template (chat_template.jinja or tokenizer_config.json)")


def _add_adapter(model: nn.Module, config: LoraConfig) -> nn.Module:
    layers = [name for name, _ in model.named_modules() if ".visual." not in f".{name}."]
    chosen = [name for name in layers if name.rpartition(".")[2] in config.targets]
    missing = [target for target in config.targets if not any(name.endswith(f".{target}") for name in chosen)]
    if missing:
        raise ConfigError(f"model.lora.targets: no language-model layer is named {', '.join(missing)}")
    settings = PeftConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=chosen)
    return get_peft_model(model, settings)
