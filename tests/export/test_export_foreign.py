"""Distributed checkpoints of torch, and single files: what holds tensors alone is read, what may hold code is not."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from npu_vlrl.export.tensors import Pieces, read_tensors
from npu_vlrl.learner.checkpoint import CheckpointError
from tests.support.models import plain_model, tiny_folder
from tests.support.program import Outcome, program
from tests.support.ranks import finish, fork, said

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
KIND = "qwen2_5_vl"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that two processes divide: `safe` in safetensors, `classic` with a pickle, and what is expected."""
    folder = tmp_path_factory.mktemp("dcp")
    processes = fork(2, ["-m", "tests.export.dcp_ranks", tiny_folder(KIND), folder], folder)
    assert finish(processes) == [0, 0], said(folder, 2)
    return folder


def export(checkpoint: Path, out: Path) -> Outcome:
    return program("export", checkpoint, "--base", tiny_folder(KIND), "--out", out)


def found(out: Path) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in plain_model(out).named_parameters()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_divided_checkpoint_in_safetensors(saved: Path, tmp_path: Path) -> None:
    assert len(list((saved / "safe").glob("*.safetensors"))) == 2
    done = export(saved / "safe", tmp_path / "out")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{saved / 'safe'}, by the names of transformers\n")
    expected = load_file(saved / "expected.safetensors")
    assert equal(found(tmp_path / "out"), expected)
    assert not equal(found(tiny_folder(KIND)), expected)


def test_a_file_that_is_missing_is_noticed(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "safe", tmp_path / "safe")
    first, last = sorted((tmp_path / "safe").glob("*.safetensors"))
    last.rename(tmp_path / "kept")
    assert " is of another model: " in export(tmp_path / "safe", tmp_path / "out").refused()
    first.unlink()
    (tmp_path / "kept").rename(last)
    assert re.search(r"parts of \S+ are in no file", export(tmp_path / "safe", tmp_path / "out").refused())
    last.write_bytes(last.read_bytes()[:-7])
    assert f"{last} cannot be read" in export(tmp_path / "safe", tmp_path / "out").refused()


def run(words: list[str]) -> None:
    """A line of the documents, in the working directory."""
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    else:
        assert words[0] == "npu-vlrl"
        ours = program(*words[1:])
        assert ours.code == 0, ours.err


def test_a_pickled_one_is_refused_with_the_command_that_makes_it_readable(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = export(saved / "classic", tmp_path / "DIR").refused()
    monkeypatch.chdir(tmp_path)
    run(shlex.split(re.search(r"`(python .*?)`", refused)[1]))  # type: ignore[index]
    assert export(Path("weights.pt"), tmp_path / "DIR").code == 0
    assert equal(found(tmp_path / "DIR"), load_file(saved / "expected.safetensors"))


def test_the_documented_commands(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (ROOT / "docs" / "export.md").read_text()
    blocks = [block for block in re.findall(r"```bash\n(.*?)```", document, re.DOTALL) if "CHECKPOINT" in block]
    assert len(blocks) == 2
    for number, (block, checkpoint) in enumerate(zip(blocks, ("safe", "classic"), strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        Path("CHECKPOINT").symlink_to(saved / checkpoint)
        Path("Qwen2.5-VL-3B-Instruct").symlink_to(tiny_folder(KIND))
        for line in block.splitlines():
            run(shlex.split(line))
        assert equal(found(folder / "DIR"), load_file(saved / "expected.safetensors"))


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_file_with_more_than_tensors_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = plain_model(tiny_folder(KIND))
    state = {"model": {"model": model.state_dict()}, "args": Bomb()}
    torch.save(state, "bomb.pt")
    refused = export(Path("bomb.pt"), tmp_path / "out").refused()
    assert refused.startswith("bomb.pt cannot be read as tensors alone (") and "docs/export.md" in refused
    assert not Path("exploded").exists() and not (tmp_path / "out").exists()
    script = re.search(r"```python\n(# trusted\.py\n.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    assert script is not None
    Path("trusted.py").write_text(script[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # where this class is found by its owner
    words = [sys.executable, "trusted.py", "bomb.pt", "weights.safetensors"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path("exploded").exists()  # by the owner's own word; the check above would have seen it
    assert export(Path("weights.safetensors"), tmp_path / "out").code == 0
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert equal(found(tmp_path / "out"), expected)


def test_names_of_published_files_and_of_modules(tmp_path: Path) -> None:
    """Qwen2.5-VL was published with `model.…` and `visual.…`; its modules are `model.language_model.…`."""
    folder = tiny_folder(KIND)
    published = load_file(folder / "model.safetensors")
    modules = {name: p.detach() for name, p in plain_model(folder).named_parameters()}
    assert "visual.merger.ln_q.weight" in published and "model.visual.merger.ln_q.weight" in modules
    for number, tensors in enumerate((published, modules)):
        for prefix in ("", "actor.module."):
            file = tmp_path / f"{number}{prefix}.safetensors"
            more = {"ema.decay": torch.ones(1)} if prefix else {}
            save_file({f"{prefix}{name}": tensor + 1 for name, tensor in tensors.items()} | more, file)
            out = tmp_path / f"out{number}{prefix}"
            done = export(file, out)
            assert done.code == 0, done.err
            assert equal(found(out), {name: tensor + 1 for name, tensor in modules.items()})


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    published = load_file(tiny_folder(KIND) / "model.safetensors")

    def refused(tensors: dict[str, Tensor]) -> str:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "file.safetensors")
        return export(tmp_path / "file.safetensors", tmp_path / "out").refused()

    assert "0 tensors are named" in refused({"a": torch.ones(1)})
    assert "2 tensors are named" in refused(published | {f"ema.{name}": tensor for name, tensor in published.items()})
    assert "lacks weights: ['model.language_model.norm.weight'] … (1 names)" in refused(
        {name: tensor for name, tensor in published.items() if name != "model.norm.weight"}
    )
    some = {name: tensor for name, tensor in published.items() if name != "visual.merger.ln_q.weight"}
    assert "lacks weights: ['model.visual.merger.ln_q.weight']" in refused(some)
    assert "model.language_model.extra is [1], here no such weight" in refused(
        published | {"model.extra": torch.ones(1)}
    )
    assert not (tmp_path / "out").exists()


def test_places_without_a_checkpoint(tmp_path: Path) -> None:
    out, missing, empty = tmp_path / "out", tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    assert export(missing, out).refused() == f"{missing} does not exist; give the folder or the file of a checkpoint"
    assert f"{empty} holds neither .safetensors files nor one file of torch" in export(empty, out).refused()
    (empty / "notes.txt").write_text("")
    assert f"{empty / 'notes.txt'} is no checkpoint" in export(empty / "notes.txt", out).refused()
    weights = tiny_folder(KIND) / "model.safetensors"
    base = program("export", weights, "--base", empty, "--out", out).refused()
    assert base == f"--base: {empty} is no Hugging Face model folder (it has no config.json)"
    (empty / "config.json").write_text("[")
    assert "config.json is not JSON" in program("export", weights, "--base", empty, "--out", out).refused()
    (empty / "config.json").write_text('{"dtype": "float16"}')
    assert "asks for float16; known are" in program("export", weights, "--base", empty, "--out", out).refused()


def test_parts_are_put_where_they_belong(tmp_path: Path) -> None:
    """Along both dimensions; without their places two parts of one name are no tensor."""
    whole = torch.arange(20.0).reshape(4, 5)
    for number, (rows, columns) in enumerate([((0, 3), (0, 2)), ((0, 3), (2, 5)), ((3, 4), (0, 5))]):
        place = json.dumps({"a": {"saved_offsets": [rows[0], columns[0]]}})
        part = whole[slice(*rows), slice(*columns)].contiguous()
        save_file({"a": part}, tmp_path / f"{number}.safetensors", {"DCP_SHARDING_INFO": place})
    assert torch.equal(read_tensors(tmp_path)["a"], whole)
    with pytest.raises(CheckpointError, match="parts of a are in no file, or in two"):
        Pieces([tmp_path / "0.safetensors", tmp_path / "2.safetensors"])["a"]
    with pytest.raises(CheckpointError, match="parts of a are in no file, or in two"):
        Pieces([*sorted(tmp_path.glob("*.safetensors")), tmp_path / "0.safetensors"])["a"]
