"""Loads `model.path` as a policy: any Hugging Face folder of a family in `model/families`."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from npu_vlrl.config import ConfigError, LoraConfig, ModelConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.kernels.modules import attach
from npu_vlrl.model.families import FAMILIES, TINY, Family
from npu_vlrl.model.images import image_processor
from npu_vlrl.model.inspect import (
    check_tokens,
    explained,
    inspect_folder,
    model_class,
    no_template,
    quieten,
    read_settings,
)
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.routing import attach_routers
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.model.tokens import special_tokens
from npu_vlrl.model.tower import Tower
from npu_vlrl.model.weight_files import AGAIN, BUILT_IN_ATTENTION, NO_CODE, check_report, read_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    """Image processor; None for a text-only model."""
    folder: Path


def model_folder(path: str, scratch: Path, seed: int, whole: bool = True) -> Path:
    """The folder of `model.path`; a model `tiny:KIND` is first written below `scratch`, unless it exists there.

    Raises ConfigError for a folder that cannot be trained, see `inspect_folder`, and for an unknown KIND.
    """
    quieten()
    if path.startswith(TINY):
        kind = path.removeprefix(TINY)
        folder = scratch / f"{kind}-seed{seed}"
        try:
            folder = folder if folder.is_dir() else write_tiny_model(kind, folder, seed)
        except ValueError as error:
            raise ConfigError(f"model.path: {error}") from error
        return inspect_folder(folder)
    return inspect_folder(path, whole)


def load_model(config: ModelConfig, scratch: Path, seed: int, device: torch.device) -> LoadedModel:
    """Loads weights (safetensors only), tokenizer and image processor; freezes and adds adapters as configured.

    On the device `meta` the policy has the names and shapes of weights, and no weights.

    Raises ConfigError for an unsupported or incomplete folder, naming what is missing.
    """
    folder = model_folder(config.path, scratch, seed)
    dtype = DTYPES[config.dtype]
    model = outline(folder, dtype) if device.type == "meta" else load_weights(folder, dtype).to(device)
    family = FAMILIES[model.config.model_type]
    attach(model, family.unlike)
    attach_routers(model, family)
    tokenizer = load_tokenizer(folder)
    with_images = family.vision is not None
    processor = load_processor(config, folder, family)
    model = arranged(model, config)
    merge = processor.merge_size if processor is not None else 2
    ids = tokenizer.get_vocab()
    check_tokens(folder, model.config, ids)
    with explained("model.path"):
        special = special_tokens(tokenizer, with_images, str(folder), family.chat)
    n_tokens = max(ids.values()) + 1  # more than there are tokens, where ids are left out
    return LoadedModel(Policy(model, special, n_tokens, merge), tokenizer, processor, folder)


def arranged(model: Any, config: ModelConfig) -> Any:
    """The model as configured: with frozen weights, adapters and gradient checkpointing."""
    family = FAMILIES[model.config.model_type]
    if config.freeze_vision and family.vision is not None:
        Tower(model, family, family.vision).freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers call it activation checkpointing
        if config.lora is not None:
            model = _add_adapter(model, config.lora, family)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, with its chat template. Raises ConfigError."""
    with explained(f"model.path: cannot read the tokenizer of {folder}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **NO_CODE)
    file = folder / "chat_template.json"  # of processors; tokenizers do not read it
    if tokenizer.chat_template is None and file.is_file():
        tokenizer.chat_template = read_object(file).get("chat_template")
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    if not template:
        raise ConfigError(no_template(folder))
    if not isinstance(template, str):
        raise ConfigError(f"model.path: the chat template of {folder} is {template!r:.60}, and must be a text; {AGAIN}")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"model.path: the chat template of {folder} cannot be read: {error}; {AGAIN}") from error
    except Exception:  # a template may refuse this message; whether it renders an episode, the renderer finds out
        pass
    return tokenizer


def load_processor(config: ModelConfig, folder: Path, family: Family) -> ImageProcessor | None:
    """A folder's image processor within the configured limits; None for a text-only model, and for a folder without
    one. Raises ConfigError.
    """
    with explained(f"model.path: cannot read {folder}"):
        processor = image_processor(folder, family)
    return processor and limited(processor, config)


def limited(processor: ImageProcessor, config: ModelConfig) -> ImageProcessor:
    """The processor within the configured limits. Raises ConfigError."""
    limits: dict[str, Any] = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    with explained("model.min_pixels and model.max_pixels, with those of the folder where one is not set"):
        return dataclasses.replace(processor, **{k: v for k, v in limits.items() if v is not None})


def replace_weights(policy: Policy, folder: Path) -> None:
    """Puts the weights of a folder of the same model into `policy`."""
    weights = load_weights(folder, next(policy.base.parameters()).dtype).state_dict()
    policy.base.load_state_dict(weights)


def load_weights(folder: Path, dtype: torch.dtype) -> Any:
    """Loads the transformers model of a folder. Raises ConfigError when a weight is missing, left over or misshapen."""
    settings = read_settings(folder)
    with explained(f"model.path: cannot load the weights of {folder}"):
        model, report = model_class(settings).from_pretrained(
            folder,
            config=settings,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below instead
            attn_implementation=BUILT_IN_ATTENTION,
            **NO_CODE,
        )
    check_report(folder, report)
    return model


def outline(folder: Path, dtype: torch.dtype, device: str | torch.device = "meta") -> Any:
    """The transformers model of a folder without its weights, on the device `meta`; with random ones on another. Raises
    ConfigError.
    """
    settings = read_settings(folder)
    with explained(f"model.path: cannot make a model of {folder}"), torch.device(device):
        return model_class(settings)._from_config(settings, dtype=dtype, attn_implementation=BUILT_IN_ATTENTION)


def _add_adapter(model: Any, config: LoraConfig, family: Family) -> Any:
    targets = family.lora_targets if config.targets is None else config.targets
    # embeddings and head are read as plain weights, so an adapter there would be silently ignored
    modules = model.get_submodule(f"{family.text}.layers").named_modules(prefix=f"{family.text}.layers")
    layers = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    chosen = [name for name in layers if name.rpartition(".")[2] in targets]
    missing = [target for target in targets if not any(name.endswith(f".{target}") for name in chosen)]
    if missing:
        raise ConfigError(f"model.lora.targets: no language-model layer is named {', '.join(missing)}")
    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides by it; a float is right
        lora_dropout=0.0,
        target_modules=chosen,
    )
    # Adapters have the model's dtype: for float32, peft copies the input of every layer and multiplies at a fraction of
    # the speed. The optimiser's masters hold the precision that 16 bits lack.
    return get_peft_model(model, settings, autocast_adapter_dtype=False)
