"""One look at a model folder: what passes, and what every command refuses, by name and before anything is loaded."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from npu_vlrl.config import Config, ConfigError, ModelConfig
from npu_vlrl.estimate.outline import outline_of
from npu_vlrl.export.foreign import convert
from npu_vlrl.model.inspect import inspect_folder
from npu_vlrl.model.load import load_tokenizer, load_weights, model_folder
from npu_vlrl.preview import check_data
from npu_vlrl.training.build import build
from tests.support.models import load, tiny_folder

Spoil = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("qwen2_5_vl"), tmp_path / "model"))


def change(name: str, *path: str, **values: Any) -> Spoil:
    """Sets values in an object of a JSON file."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        place = content
        for key in path:
            place = place.setdefault(key, {})
        place.update(values)
        (folder / name).write_text(json.dumps(content))

    return apply


def write(name: str, content: str | bytes = b"{}") -> Spoil:
    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return apply


def remove(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink() for name in names]


def both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


def weights(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Spoil:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def without(name: str) -> Spoil:
    return weights(lambda tensors: tensors.pop(name))


def extra(name: str, tensor: torch.Tensor) -> Spoil:
    return weights(lambda tensors: tensors.update({name: tensor}))


def sharded(folder: Path, n: int = 3) -> list[Path]:
    """Writes the weights as the files of an index, and returns those."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % n + 1:05d}-of-{n:05d}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        own = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(own, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return [folder / file for file in sorted(set(places.values()))]


def own_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})


def larger_vocabulary(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    new = {"id": 448, "content": "<|new|>", "special": True, "single_word": False}
    content["added_tokens"].append(new | dict.fromkeys(("lstrip", "rstrip", "normalized"), False))
    file.write_text(json.dumps(content))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


QUANTISED: dict[str, tuple[Spoil, str]] = {
    method: (change("config.json", "quantization_config", quant_method=method), rf"is quantised \({method}\)")
    for method in ("awq", "gptq", "bitsandbytes", "compressed-tensors", "fp8")
}
QUANTISED |= {
    "in text_config": (
        change("config.json", "text_config", "quantization_config", quant_method="fp8"),
        r"is quantised \(fp8\): config.json has `text_config.quantization_config`; .* give the folder of the model",
    ),
    "compression": (change("config.json", "compression_config", format="x"), "config.json has `compression_config`"),
    "mlx": (change("config.json", "quantization", bits=4), "is quantised: config.json has `quantization`"),
    "auto_gptq": (write("quantize_config.json", '{"bits": 4}'), "is quantised: it has quantize_config.json"),
    "modelopt": (write("hf_quant_config.json"), "is quantised: it has hf_quant_config.json"),
    "int32 weights": (
        extra("model.layers.0.mlp.up_proj.qweight", torch.zeros(4, 4, dtype=torch.int32)),
        r"model.safetensors: model.layers.0.mlp.up_proj.qweight is I32, so the weights are quantised",
    ),
    "fp8 weights": (
        extra("model.layers.0.mlp.up_proj.weight", torch.zeros(128, 64).to(torch.float8_e4m3fn)),
        "up_proj.weight is F8_E4M3, so the weights are quantised",
    ),
    "gguf": (
        both(remove("model.safetensors"), write("model-q4.gguf", b"GGUF")),
        "no model.safetensors: its weights are a GGUF file",
    ),
}

PROCESSOR: dict[str, tuple[Spoil, str]] = {
    "patch": (
        change("preprocessor_config.json", patch_size=16),
        r"`patch_size` 16, and config.json has `vision_config.patch_size` 14; .*take that of the model's publisher",
    ),
    "merge": (
        change("preprocessor_config.json", merge_size=1),
        "`merge_size` 1, .* `vision_config.spatial_merge_size` 2",
    ),
    "time": (change("preprocessor_config.json", temporal_patch_size=1), "`temporal_patch_size` 1, .*patch_size` 2"),
    "first file": (
        write(
            "processor_config.json",
            '{"image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 32}}',
        ),
        "`patch_size` 32, and config.json has `vision_config.patch_size` 14",
    ),
    "missing": (remove("preprocessor_config.json"), "no preprocessor_config.json; add its publisher's"),
    "damaged": (write("preprocessor_config.json", "{"), "preprocessor_config.json is not a valid JSON file"),
}

TOKENS: dict[str, tuple[Spoil, str]] = {
    "image": (
        change("config.json", image_token_id=5),
        r"<\|image_pad\|> is 407 .*`image_token_id` 5 in config.json; take",
    ),
    "video": (change("config.json", video_token_id=5), r"<\|video_pad\|> is 408 .*`video_token_id` 5"),
    "start": (change("config.json", vision_start_token_id=5), r"`vision_start_token_id` 5"),
    "too many": (larger_vocabulary, r"ids up to 448, and the model's embedding 448 rows \(`vocab_size`\)"),
    "none": (remove("tokenizer.json"), "has no tokenizer.json; download"),
    "damaged": (write("tokenizer.json", "["), "tokenizer.json is not a valid JSON file"),
    "of another family": (
        write("tokenizer.json", '{"model": {"vocab": {"a": 0}}}'),
        r"no token <\|im_end\|>; use one of",
    ),
    "base model": (remove("chat_template.jinja"), "has no chat template; a base model has none, .*Instruct"),
}

WEIGHTS: dict[str, tuple[Spoil, str]] = {
    "shard": (
        lambda f: sharded(f)[1].unlink(),
        r"lacks 1 of the 3 files .* \(model-00002-of-00003.safetensors\); download",
    ),
    "empty shard": (lambda f: sharded(f)[2].write_bytes(b""), "model-00003-of-00003.safetensors is empty; download"),
    "index": (
        lambda f: (sharded(f), (f / "model.safetensors.index.json").unlink()),
        "model.safetensors.index.json, which lists them, is missing; download",
    ),
    "empty index": (
        lambda f: (sharded(f), write("model.safetensors.index.json")(f)),
        "index.json lists no weights",
    ),
    "index of more": (
        lambda f: (
            sharded(f),
            change("model.safetensors.index.json", "weight_map", x="model-00001-of-00003.safetensors")(f),
        ),
        r"lists weights that its files do not hold \(x\)",
    ),
    "index of elsewhere": (
        lambda f: (sharded(f), change("model.safetensors.index.json", "weight_map", x="../other.safetensors")(f)),
        r"names '../other.safetensors', which is no file of the folder",
    ),
    "two sets": (write("model.safetensors.index.json"), "has both model.safetensors and model.safetensors.index.json"),
    "distributed": (
        write("shard-00001-model-00001-of-00001.safetensors"),
        "holds a distributed checkpoint .*, which transformers reads before model.safetensors; run `npu-vlrl export",
    ),
    "elsewhere": (
        both(write("other.safetensors"), change("config.json", transformers_weights="other.safetensors")),
        "config.json names other files by `transformers_weights`, .* remove the key",
    ),
    "empty": (write("model.safetensors", b""), "model.safetensors is empty; download it again"),
    "cut": (cut, "model.safetensors is cut short or no safetensors file"),
    "lfs": (
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "is a pointer of Git LFS, not the weights; run `git lfs pull`",
    ),
    "pickle": (
        both(remove("model.safetensors"), write("pytorch_model.bin")),
        "its weights are pickles .*save_pretrained",
    ),
    "none": (remove("model.safetensors"), "has no weights: neither model.safetensors nor"),
    "missing": (
        without("model.norm.weight"),
        r"do not fit .*: 1 missing \(model.language_model.norm.weight\); download",
    ),
    "left over": (extra("score.weight", torch.zeros(1, 64)), r": 1 left over \(score.weight\)"),
    "shape": (
        extra("model.norm.weight", torch.zeros(65)),
        r"1 of another shape \(.*norm.weight \[65\] instead of \[64\]\)",
    ),
    "adapter inside": (
        extra("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(2, 64)),
        "an adapter that was not merged is among them, merge it first",
    ),
    "adapter beside": (
        both(write("adapter_config.json"), write("adapter_model.safetensors")),
        r"holds an adapter \(adapter_config.json\) beside the weights of a model, .*merge it .* or move its files",
    ),
    "adapter without its settings": (
        write("adapter_model.safetensors"),
        r"holds an adapter \(adapter_model.safetensors\)",
    ),
    "tied head, said to be its own": (
        both(
            change("config.json", tie_word_embeddings=False),
            change("config.json", "text_config", tie_word_embeddings=False),
        ),
        "says `tie_word_embeddings: false`, and the weights have no lm_head.weight; write true",
    ),
}

CONFIG: dict[str, tuple[Spoil, str]] = {
    "cut": (write("config.json", "{"), "config.json is not a valid JSON file"),
    "list": (write("config.json", "[]"), "config.json holds no JSON object"),
    "no type": (write("config.json"), "config.json has no `model_type`"),
    "wrong values": (
        change("config.json", "text_config", hidden_size="many"),
        "model.path: cannot (read|make a model)",
    ),
    "no heads": (change("config.json", "text_config", num_attention_heads=0), "model.path: "),
    "window": (
        change(
            "config.json",
            "text_config",
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention"] * 2,
        ),
        "sets `use_sliding_window`, which is not supported; write false",
    ),
    "another config": (
        both(write("config.4.0.0.json"), change("config.json", configuration_files=["config.4.0.0.json"])),
        "config.json names other files by `configuration_files`",
    ),
    "another tokenizer": (
        change("tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"]),
        "tokenizer_config.json names other files by `fast_tokenizer_files`",
    ),
    "empty template": (write("chat_template.jinja", ""), "has no chat template"),
    "frequencies by length": (
        change(
            "config.json",
            "text_config",
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        ),
        "scales rotary positions by `dynamic`, .* use yarn or linear",
    ),
    "tower": (change("config.json", "vision_config", out_hidden_size=32), "model.path: .*(out_hidden_size|do not fit)"),
}
CONFIG |= {
    kind: (
        change("config.json", model_type=kind),
        f"is of the model type {kind}; supported are glm4v, internvl, qwen2, qwen2_5_vl",
    )
    for kind in ("mllama", "qwen3_5", "llava", "qwen3_5_moe", "qwen3_moe", "unheard_of")
}
CONFIG |= {
    name: (
        change(name, "auto_map", AutoModel="evil.Model"),
        rf"{name} asks for code of the folder \(`auto_map`\), .* remove",
    )
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
}

DAMAGED = {
    f"{kind}: {name}": case
    for kind, cases in {
        "quantised": QUANTISED,
        "processor": PROCESSOR,
        "tokens": TOKENS,
        "weights": WEIGHTS,
        "config": CONFIG,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused_by_name(name: str, folder: Path) -> None:
    spoil, message = DAMAGED[name]
    inspect_folder(folder)
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        inspect_folder(folder)
    assert str(caught.value).startswith("model.path: ") and str(folder) in str(caught.value)


# What is no model folder at all


def a_run(folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {}")
    return folder


def a_checkpoint(folder: Path) -> Path:
    step = a_run(folder / "run") / "checkpoints" / "step-00000004"
    step.mkdir()
    for name in ("state.json", "weights.safetensors", "rng.safetensors"):
        (step / name).write_bytes(b"{}")
    return step


def holding(*names: str, content: str = "{}") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        return folder

    return make


STRANGERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda f: f / "x", "there is no such folder; correct the path"),
    "a file": (lambda f: holding("model.safetensors")(f) / "model.safetensors", "but a file; name the folder"),
    "an empty folder": (lambda f: (f.mkdir(), f)[1], "it has no config.json; download a model there"),
    "a run": (a_run, "it is the folder of a run; run `npu-vlrl export {folder} --out DIR` and give DIR"),
    "a run that ended": (
        lambda f: holding("export/config.json")(a_run(f)),
        "folder of a run; its model is {folder}/export",
    ),
    "a checkpoint": (
        a_checkpoint,
        "checkpoint of a run; run `npu-vlrl export {folder}/run --checkpoint {folder}/run/checkpoints/step-00000004",
    ),
    "all checkpoints": (
        lambda f: a_checkpoint(f).parent,
        "holds the checkpoints of a run; run `npu-vlrl export {folder}/run",
    ),
    "an adapter": (
        holding("adapter_config.json", content='{"base_model_name_or_path": "Qwen/Base"}'),
        "it is an adapter alone, of Qwen/Base; merge the two",
    ),
    "an adapter of whom": (holding("adapter_config.json"), "an adapter alone, of a model that it does not name"),
    "gguf": (holding("q4.gguf"), "its weights are a GGUF file"),
    "dcp": (holding(".metadata", "__0_0.distcp"), "run `npu-vlrl export {folder} --base MODEL --out DIR`"),
    "megatron": (
        holding("latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"),
        "it is a checkpoint of Megatron .* run `npu-vlrl export {folder} --base",
    ),
    "fsdp of verl": (
        holding("actor/model_world_size_2_rank_0.pt"),
        "it is an FSDP checkpoint of verl; run `python -m verl",
    ),
    "deepspeed": (holding("zero_to_fp32.py", "global_step5/x_model_states.pt"), "it is a checkpoint of DeepSpeed"),
    "pickles": (holding("pytorch_model.bin"), "its weights are pickles"),
    "cache of the Hub": (
        holding("snapshots/0a1b/config.json"),
        "it has no config.json, but there is one in {folder}/snapshots/0a1b",
    ),
    "folder of models": (holding("a/config.json", "b/config.json"), "there is one in {folder}/a, {folder}/b"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_other_folders_are_called_what_they_are(name: str, tmp_path: Path) -> None:
    make, message = STRANGERS[name]
    path = make(tmp_path / "it")
    with pytest.raises(ConfigError, match=message.format(folder=tmp_path / "it")) as caught:
        inspect_folder(path)
    assert str(caught.value).startswith(f"model.path: {path} is not a Hugging Face model folder")


def test_a_name_of_the_hub_is_not_downloaded() -> None:
    with pytest.raises(
        ConfigError, match=r"nothing is downloaded; .*`hf download Qwen/Qwen3-VL-4B-Instruct --local-dir DIR`"
    ):
        inspect_folder("Qwen/Qwen3-VL-4B-Instruct")


# What passes


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_a_layout_as_published(kind: str, tmp_path: Path) -> None:
    """An index of files with older names, a template of the processor, the vocabulary twice, and files for videos."""
    folder = Path(shutil.copytree(tiny_folder(kind), tmp_path / "model"))
    sharded(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(tokenizer["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in tokenizer["merges"]))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    if kind == "qwen3":
        change("tokenizer_config.json", chat_template=template)(folder)
    else:
        write("chat_template.json", json.dumps({"chat_template": template}))(folder)
        write("video_preprocessor_config.json", '{"patch_size": 14}')(folder)
    write("README.md", "# Model")(folder)
    write("configuration.json", '{"framework": "pytorch"}')(folder)
    assert inspect_folder(folder) == folder
    assert load(folder).tokenizer.chat_template == template


def test_a_flat_config_of_older_releases(folder: Path) -> None:
    """Qwen2.5-VL was published with the language model's settings at the top."""
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("text_config") | {"model_type": "qwen2_5_vl", "architectures": config["architectures"]}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": config.pop("rope_parameters")["mrope_section"]}
    config |= {"rope_theta": 1e6, "quantization_config": None, "auto_map": {}}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect_folder(folder) == folder


def test_a_head_of_its_own_is_read_whatever_config_json_says(folder: Path) -> None:
    """As transformers 5 does; an export then says what is true (test_model_saving.py)."""
    own_head(folder)
    head = load_file(inspect_folder(folder) / "model.safetensors")["lm_head.weight"]
    read = load_weights(folder, torch.float32)
    assert torch.equal(read.lm_head.weight, head)
    assert not torch.equal(head, read.get_input_embeddings().weight)


def test_a_head_that_is_written_out_and_the_embedding(folder: Path) -> None:
    weights(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))(folder)
    assert inspect_folder(folder) == folder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_any_floats(dtype: torch.dtype, folder: Path) -> None:
    weights(lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))(folder)
    assert inspect_folder(folder) == folder


def test_a_vocabulary_in_the_older_files(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in tokenizer["model"]["merges"]))
    added = {str(token.pop("id")): token for token in tokenizer["added_tokens"]}
    change("tokenizer_config.json", added_tokens_decoder=added)(folder)
    assert inspect_folder(folder) == folder
    change("config.json", image_token_id=3)(folder)
    with pytest.raises(ConfigError, match="`image_token_id` 3"):
        inspect_folder(folder)


def test_for_shapes_alone_config_and_processor_are_enough(folder: Path) -> None:
    remove("model.safetensors", "tokenizer.json", "chat_template.jinja")(folder)
    assert inspect_folder(folder, whole=False) == folder
    with pytest.raises(ConfigError, match="has no weights"):
        inspect_folder(folder)
    change("preprocessor_config.json", patch_size=16)(folder)
    with pytest.raises(ConfigError, match="`patch_size` 16"):
        inspect_folder(folder, whole=False)


# Every command


def config_of(folder: Path) -> Config:
    return Config.model_validate(
        {"model": {"path": str(folder)}, "data": {"train": {"generator": "photo"}}, "train": {"threads": 1}}
    )


def checks_data(folder: Path) -> None:
    list(check_data.check(config_of(folder)))


def trains(folder: Path) -> None:
    with ExitStack() as cleanup:
        build(config_of(folder), folder.parent / "run", cleanup)


def estimates(folder: Path) -> None:
    outline_of(ModelConfig(path=str(folder)))


def exports(folder: Path) -> None:
    checkpoint = folder.parent / "checkpoint"
    shutil.copytree(tiny_folder("qwen2_5_vl"), checkpoint)
    convert(checkpoint, folder, folder.parent / "out")


COMMANDS: Mapping[str, Callable[[Path], None]] = {
    "data check": checks_data,
    "train, eval": trains,
    "estimate, init": estimates,
    "export": exports,
    "all": load,
}
EACH = [
    "quantised: awq",
    "quantised: int32 weights",
    "processor: patch",
    "tokens: image",
    "weights: adapter beside",
    "weights: tied head, said to be its own",
    "weights: missing",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_a_run_folder_is(command: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="it is the folder of a run; run `npu-vlrl export|--base: .* is no Hugging Face"
    ):
        COMMANDS[command](a_run(tmp_path / "old"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", EACH)
def test_every_command_refuses_it(name: str, command: str, folder: Path) -> None:
    spoil, message = DAMAGED[name]
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        COMMANDS[command](folder)


def test_a_tiny_model_that_was_damaged_since(tmp_path: Path) -> None:
    made = model_folder("tiny:qwen3", tmp_path, seed=0)
    write("model.safetensors", b"")(made)
    with pytest.raises(ConfigError, match="model.safetensors is empty"):
        model_folder("tiny:qwen3", tmp_path, seed=0)


# Code of the folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions on the terminal; each is answered by yes."""
    questions: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": (questions.append(text), "y")[1])
    return questions


def hostile(folder: Path, **config: Any) -> Path:
    """Every file of the folder names code, which leaves a mark."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: ...\n")
    change("config.json", **config)(folder)
    for name, kind in (("config.json", "AutoConfig"), ("preprocessor_config.json", "AutoImageProcessor")):
        change(name, "auto_map", **{kind: "evil.Evil"})(folder)
    change("config.json", "auto_map", AutoModelForCausalLM="evil.Evil", AutoModelForImageTextToText="evil.Evil")(folder)
    change("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})(folder)
    change("processor_config.json", "auto_map", AutoProcessor="evil.Evil")(folder)
    return folder


@pytest.mark.parametrize("config", [{}, {"model_type": "mine"}, {"model_type": "llava"}], ids=str)
@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_a_folder_never_runs_and_nobody_is_asked(
    command: str, config: dict[str, str], folder: Path, asked: list[str]
) -> None:
    hostile(folder, **config)
    with pytest.raises(ConfigError, match="model.path: .*(asks for code of the folder|is of the model type)"):
        COMMANDS[command](folder)
    assert asked == [] and not (folder / "ran").exists()


def test_transformers_by_itself_asks(folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shows that the tests above would notice a question."""
    monkeypatch.setattr(builtins, "input", lambda text="": (asked.append(text), "n")[1])
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(hostile(folder, model_type="mine"))
    assert len(asked) == 1 and "Do you wish to run the custom code?" in asked[0]


def test_a_broken_template_is_told_where_it_is_read(folder: Path) -> None:
    write("chat_template.jinja", "{% for message in messages %}")(folder)
    with pytest.raises(ConfigError, match="the chat template of .* cannot be read"):
        load(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [([{"name": "tool_use", "template": "x"}], "has no chat template"), (3, "is 3, and must be a text")],
)
def test_what_is_no_template_is_refused_where_it_is_read(folder: Path, template: Any, message: str) -> None:
    (folder / "chat_template.jinja").unlink()
    change("tokenizer_config.json", chat_template=template)(folder)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(folder)


def test_a_kernel_that_config_json_names_is_not_fetched(folder: Path) -> None:
    change("config.json", attn_implementation="someone/kernel")(folder)
    load(folder)
    estimates(folder)
