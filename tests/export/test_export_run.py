"""`npu-vlrl export` of trainings: in plain transformers the folder computes what the run's own policy computed."""

from __future__ import annotations

import filecmp
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.export.run import MARK
from npu_vlrl.train_loop import train
from npu_vlrl.types import Image
from tests.support.checkpoints import seal
from tests.support.models import plain_model
from tests.support.program import program, records
from tests.support.runs import exported_weights, small_config

torch.set_num_threads(1)

LORA = {"model__lora": {"rank": 2, "alpha": 4}, "warm_start__steps": 0, "optim__lr": 5e-2}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"model__max_pixels": 28 * 28 * 2, "train__steps": 3},
    "qwen3_vl": {"model__path": "tiny:qwen3_vl", "train__steps": 2},
    "bfloat16": {"model__dtype": "bfloat16", "train__steps": 2},
    "lora": {**LORA, "train__steps": 2},
    "narrow lora": {**LORA, "model__dtype": "bfloat16", "train__steps": 2},
}
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of a finished run, which stays as it is."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("run") / "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NPU_VLRL_PLATFORM", "cpu")
            train(small_config(folder, **SETTINGS[name]))
        return folder

    return run


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def gaps(run: Path, folder: Path, model: Any) -> list[float]:
    """|recorded - computed| of the logprobs of the evaluation at the end, by transformers' own processor and model."""
    config = json.loads((folder / "config.json").read_text())
    forbidden = [config["image_token_id"], config["video_token_id"]]
    n_tokens = len(PreTrainedTokenizerFast.from_pretrained(folder))
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found = []
    for record in records(run, "trajectories.jsonl"):
        if not record["id"].startswith("final"):
            continue
        ids: list[int] = []
        images: list[Any] = []
        for turn in record["turns"]:
            assert turn["continues"] or not ids
            for segment in turn["new_context"]:
                ids += segment["token_ids"]
                images += [Pillow.open(run / "images" / f"{i['hash']}.png") for i in segment.get("images", [])]
            start = len(ids)
            ids += turn["action"]["token_ids"]
            inputs = torch.tensor([ids])
            seen = processor(images=images, return_tensors="pt") if images else {}
            types = (inputs == config["image_token_id"]).long()
            logits = model(input_ids=inputs, mm_token_type_ids=types, **seen).logits[0].float()
            logits[:, forbidden] = -math.inf
            logits[:, n_tokens:] = -math.inf
            computed = logits.log_softmax(-1)[range(start - 1, len(ids) - 1), ids[start:]]
            recorded = torch.tensor(turn["action"]["logprobs"])
            found.append(float((computed - recorded).abs().max()))
    return found


@pytest.mark.parametrize("name", ["whole", "qwen3_vl", "lora"])
def test_it_says_what_the_run_said_at_its_end(runs: Runs, tmp_path: Path, name: str) -> None:
    """The engine recorded its logprobs, of words and of images; the run limits these to two patches."""
    run = runs(name)
    done = program("export", run, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    steps = SETTINGS[name]["train__steps"]
    assert done.out == (
        f"{run / 'checkpoints' / f'step-{steps:08d}'} after {steps} of {steps} steps\nwritten to {tmp_path / 'out'}\n"
    )
    found = gaps(run, tmp_path / "out", plain_model(tmp_path / "out"))
    assert len(found) >= 2 and max(found) < 2e-5
    start = next((run / "model").iterdir()) if name == "qwen3_vl" else Path(small_model(run))
    assert max(gaps(run, tmp_path / "out", plain_model(start))) > 1e-2


def small_model(run: Path) -> str:
    return next(
        line.split(": ")[1] for line in (run / "config.yaml").read_text().splitlines() if line.startswith("  path: /")
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_what_the_run_wrote_at_its_end(runs: Runs, tmp_path: Path, name: str) -> None:
    """There from the policy on the device, here from masters and adapters of the checkpoint: the same bits."""
    run, out = runs(name), tmp_path / "out"
    assert program("export", run, "--out", out).code == 0
    assert equal(weights(out), exported_weights(run))
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in (run / "export").iterdir()} >= {"README.md", MARK, "generation_config.json"}
    different = filecmp.cmpfiles(out, run / "export", names, shallow=False)
    assert different[1:] == ([], [])
    dtype = torch.bfloat16 if name in ("bfloat16", "narrow lora") else torch.float32
    assert {tensor.dtype for tensor in weights(out).values()} == {dtype}
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_weights_of_16_bits_are_rounded_from_their_masters(runs: Runs, tmp_path: Path) -> None:
    run = runs("bfloat16")
    masters = {
        name.removeprefix("master."): tensor
        for name, tensor in load_file(run / "checkpoints" / "step-00000002" / "optimizer.safetensors").items()
        if name.startswith("master.")
    }
    path = tmp_path / "step-00000002"
    shutil.copytree(run / "checkpoints" / "step-00000002", path)
    stale = load_file(path / "weights.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in stale.items()}, path / "weights.safetensors")
    seal(path)
    assert program("export", run, "--checkpoint", path, "--out", tmp_path / "out").code == 0
    model = dict(plain_model(tmp_path / "out").named_parameters())
    assert masters.keys() == model.keys()
    assert all(torch.equal(model[name].bfloat16(), masters[name].bfloat16()) for name in masters)
    assert any(not torch.equal(model[name].float(), masters[name]) for name in masters)
    assert "bfloat16, rounded from masters in float32" in (tmp_path / "out" / "README.md").read_text()


def test_an_earlier_step(runs: Runs, tmp_path: Path) -> None:
    run = runs("whole")
    for number in ("2", run / "checkpoints" / "step-00000002"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert program("export", run, "--checkpoint", number, "--out", tmp_path / "out").code == 0
        saved = load_file(run / "checkpoints" / "step-00000002" / "weights.safetensors")
        model = dict(plain_model(tmp_path / "out").named_parameters())
        assert equal(saved, {name: p.detach() for name, p in model.items()})
        assert not equal(weights(tmp_path / "out"), exported_weights(run))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 2 of 3 |" in card and "after 3 steps" not in card and "| platform |" not in card
    assert json.loads((tmp_path / "out" / MARK).read_text())["steps"] == 2


def test_pieces_of_three_learners(runs: Runs, tmp_path: Path) -> None:
    """Rows of every tensor in three files, one of which has none of some."""
    run, path = runs("bfloat16"), tmp_path / "step-00000002"
    shutil.copytree(run / "checkpoints" / "step-00000002", path)
    for kind in ("weights", "optimizer"):
        whole = load_file(path / f"{kind}.safetensors")
        (path / f"{kind}.safetensors").unlink()
        if kind == "weights":  # learners that divide a policy have float32 there, and no masters
            whole = {name.removeprefix("master."): tensor.float() for name, tensor in masters(run).items()}
        else:
            whole = {name: tensor for name, tensor in whole.items() if not name.startswith("master.")}
        for rank in range(3):
            part, rows = {}, {}
            for name, tensor in whole.items():
                if tensor.dim():
                    start = -(-len(tensor) // 3) * rank
                    part[name] = tensor[start : start + -(-len(tensor) // 3)].clone()
                    rows[name] = (min(start, len(tensor)), len(tensor))
            save_file(part, path / f"{kind}.{rank}.safetensors", {"rows": json.dumps(rows)})
    seal(path)
    assert program("export", run, "--checkpoint", path, "--out", tmp_path / "out").code == 0
    assert equal(weights(tmp_path / "out"), exported_weights(run))
    (path / "weights.1.safetensors").unlink()
    seal(path)
    refused = program("export", run, "--checkpoint", path, "--out", tmp_path / "other").refused()
    assert "has no file with some rows of" in refused and not (tmp_path / "other").exists()


def masters(run: Path) -> dict[str, Tensor]:
    found = load_file(run / "checkpoints" / "step-00000002" / "optimizer.safetensors")
    return {name: tensor for name, tensor in found.items() if name.startswith("master.")}


def test_a_critic_is_left_out(runs: Runs, tmp_path: Path) -> None:
    run, path = runs("whole"), tmp_path / "step-00000003"
    shutil.copytree(run / "checkpoints" / "step-00000003", path)
    more = load_file(path / "weights.safetensors")
    own = {f"critic.{name}": tensor + 1 for name, tensor in more.items()}
    save_file({**more, **own, "critic.head.bias": torch.zeros(1)}, path / "weights.safetensors")
    seal(path)
    assert program("export", run, "--checkpoint", path, "--out", tmp_path / "out").code == 0
    assert equal(weights(tmp_path / "out"), exported_weights(run))


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora", "narrow lora"])
def test_an_adapter_by_itself(runs: Runs, tmp_path: Path, name: str) -> None:
    run, out = runs(name), tmp_path / "out"
    done = program("export", run, "--out", out, "--adapter")
    assert done.code == 0, done.err
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        MARK,
    }
    saved = load_file(run / "checkpoints" / "step-00000002" / "weights.safetensors")
    written = {name.replace(".weight", ".default.weight"): t for name, t in weights_of_adapter(out).items()}
    assert equal(saved, written)
    dtype, made_from = ("float32", "") if name == "lora" else ("bfloat16", ", rounded from masters in float32")
    assert {str(tensor.dtype) for tensor in written.values()} == {f"torch.{dtype}"}
    assert f"| weights | adapters in {dtype}{made_from}" in (out / "README.md").read_text()
    assert json.loads((out / MARK).read_text())["weights"].startswith(f"adapters in {dtype}{made_from}")
    base = plain_model(Path(small_model(run)))
    model = PeftModel.from_pretrained(base, out).eval()
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == small_model(run)
    if name == "lora":
        program("export", run, "--out", tmp_path / "merged")
        assert max(gaps(run, tmp_path / "merged", model)) < 2e-5
        with model.disable_adapter():
            assert max(gaps(run, tmp_path / "merged", model)) > 1e-2


def weights_of_adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_a_run_without_an_adapter_has_none_to_write(runs: Runs, tmp_path: Path) -> None:
    run = runs("whole")
    refused = program("export", run, "--out", tmp_path / "out", "--adapter").refused()
    assert refused == f"--adapter: {run} trained no adapter (model.lora is not set); leave it out"


def test_the_documented_commands(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    found = re.findall(r"^npu-vlrl (export runs/.*)$", document, re.MULTILINE)
    assert len(found) == 3
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(runs("lora"))
    monkeypatch.chdir(tmp_path)
    for line in found:
        done = program(*[word.replace("100", "2") for word in shlex.split(line, comments=True)])
        assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "mine-rl", "mine-2", "mine-lora"}


# --- images, places, refusals --------------------------------------------------------------------------------------


def test_images_have_the_size_that_the_run_gave_them(runs: Runs, tmp_path: Path) -> None:
    run = runs("whole")
    program("export", run, "--out", tmp_path / "out")
    image = Image(torch.randint(0, 256, (112, 56, 3), dtype=torch.uint8).numpy())
    grids = {}
    for name, folder in (("base", Path(small_model(run))), ("export", tmp_path / "out")):
        plain = Qwen2VLImageProcessorPil.from_pretrained(folder)
        grids[name] = plain(images=[Pillow.fromarray(image.rgb)], return_tensors="pt")["image_grid_thw"][0].tolist()
        ours = ImageProcessor.from_folder(folder)
        assert ours is not None and list(ours.describe(image).grid) == grids[name]
    assert grids["base"] == [1, 8, 4] and math.prod(grids["export"]) <= 2 * 4


def test_an_earlier_export_is_replaced_and_nothing_else_is(runs: Runs, tmp_path: Path) -> None:
    run, out = runs("lora"), tmp_path / "out"
    out.mkdir()
    assert program("export", run, "--out", out).code == 0  # an empty folder
    (out / "left_over.txt").write_text("")
    assert program("export", run, "--out", out, "--adapter").code == 0
    assert not (out / "left_over.txt").exists() and not (out / "model.safetensors").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for taken in (mine, mine / "notes.txt"):
        refused = program("export", run, "--out", taken).refused()
        assert refused == (
            f"--out: {taken} exists and is no earlier export; choose another folder, or remove it yourself"
        )
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
    assert (
        f"--out: {tmp_path / 'no'} is no folder" in program("export", run, "--out", tmp_path / "no" / "out").refused()
    )


def test_a_link_to_an_earlier_export(runs: Runs, tmp_path: Path) -> None:
    run, link = runs("lora"), tmp_path / "link"
    assert program("export", run, "--out", tmp_path / "out").code == 0
    link.symlink_to(tmp_path / "out")
    (tmp_path / "out" / "left_over.txt").write_text("")
    assert program("export", run, "--out", link).code == 0
    assert link.is_symlink() and not (link / "left_over.txt").exists()


def test_what_was_there_stays_when_an_export_fails(runs: Runs, tmp_path: Path) -> None:
    run, out = runs("lora"), tmp_path / "out"
    assert program("export", run, "--out", out).code == 0
    before = (out / "model.safetensors").read_bytes()
    with mock.patch("npu_vlrl.model.folder.Path.write_text", side_effect=KeyboardInterrupt):
        assert program("export", run, "--out", out, "--adapter").code == 130
    assert (out / "model.safetensors").read_bytes() == before
    assert program("export", run, "--out", out).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # and the half of the one that failed is gone


def test_refusals_name_what_is_wrong(runs: Runs, tmp_path: Path) -> None:
    run, out = runs("whole"), tmp_path / "out"

    def refused(*words: object) -> str:
        return program("export", *words, "--out", out).refused()

    assert refused(tmp_path).startswith(f"{tmp_path} is no run folder: it has no config.yaml; give the run.dir")
    assert refused(run, "--checkpoint", 1) == (
        f"--checkpoint 1: {run} has no checkpoint of that step; it has those of: 2, 3"
    )
    missing = tmp_path / "missing"
    assert refused(run, "--checkpoint", missing) == (
        f"--checkpoint {missing}: no such folder; {run} has checkpoints of the steps: 2, 3"
    )
    assert "checkpoint file" in refused(run, "--checkpoint", run / "images")
    path = run / "checkpoints" / "step-00000003"
    one = f"{path} is one checkpoint of a run; write `npu-vlrl export RUN --checkpoint {path}`"
    assert refused(path) == one
    assert f"{path} is a checkpoint of npu_vlrl" in refused(path, "--base", run / "export")
    evaluated = tmp_path / "evaluated"
    evaluated.mkdir()
    shutil.copy(run / "config.yaml", evaluated)
    assert refused(evaluated).startswith(f"{evaluated} has no checkpoint; a training writes one")
    other = runs("lora") / "checkpoints" / "step-00000002"
    assert f"checkpoint {other} is of another model: " in refused(run, "--checkpoint", other)
    wider = runs("qwen3_vl") / "checkpoints" / "step-00000002"
    assert f"checkpoint {wider} is of another model: " in refused(run, "--checkpoint", wider)
    assert refused(run, "--base", run, "--adapter").startswith("--checkpoint and --adapter are for runs")
    assert not out.exists()
