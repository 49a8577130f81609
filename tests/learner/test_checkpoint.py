"""Checkpoints on disk: whole or not there, readable without running code, and damage is named."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from npu_vlrl.learner import checkpoint
from npu_vlrl.learner.checkpoint import Checkpoint, CheckpointError, latest, load, save
from tests.support.checkpoints import seal
from tests.support.ranks import finish, fork, said

FILES = ("SHA256SUMS", "optimizer.safetensors", "rng.safetensors", "state.json", "weights.safetensors")


def content(step: int) -> Checkpoint:
    return Checkpoint(
        step,
        weights={"layer.weight": torch.full((2, 3), float(step)).requires_grad_(), "half": torch.ones(2).bfloat16()},
        optimizer={"exp_avg.layer.weight": torch.arange(6.0).reshape(3, 2).T, "step.layer.weight": torch.tensor(4.0)},
        rng={"torch": torch.get_rng_state()},
        state={"updates": step, "skipped": ["a/é"], "tasks": {"position": 7}},
    )


def same(first: Checkpoint, second: Checkpoint) -> bool:
    tensors = all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
        for a, b in ((first.weights, second.weights), (first.optimizer, second.optimizer), (first.rng, second.rng))
    )
    return tensors and first.step == second.step and first.state == second.state


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "folder", content(3), keep=2)
    assert path.name == "step-00000003" and latest(path.parent) == path
    assert same(load(path), content(3))
    assert not same(load(path), content(4))


def test_files_are_json_and_safetensors_and_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path, content(1), keep=1)
    assert tuple(sorted(file.name for file in path.iterdir())) == FILES
    assert json.loads((path / "state.json").read_text())["step"] == 1
    for name in FILES:
        if name.endswith(".safetensors"):
            data = (path / name).read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            ends = [entry["data_offsets"][1] for entry in header.values()]
            assert 8 + int.from_bytes(data[:8], "little") + max(ends) == len(data)  # tensors, and no byte more


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 9, 10, 11):
        save(tmp_path, content(step), keep)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{s:08d}" for s in (9, 10, 11)[3 - keep :]]
    assert latest(tmp_path) == tmp_path / "step-00000011"


def test_the_checkpoint_of_a_step_is_written_once(tmp_path: Path) -> None:
    path = save(tmp_path, content(2), keep=1)
    before = (path / "weights.safetensors").stat().st_mtime_ns
    assert save(tmp_path, content(2), keep=1) == path
    assert (path / "weights.safetensors").stat().st_mtime_ns == before


def test_what_is_no_complete_checkpoint_is_not_found(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing") is None and latest(tmp_path) is None
    path = save(tmp_path, content(1), keep=5)
    (tmp_path / ".step-00000005.partial").mkdir()
    (tmp_path / ".step-00000005.partial" / "state.json").write_text("{}")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "state.json").write_text("{}")
    (tmp_path / "step-00000008").write_text("a file")
    assert latest(tmp_path) == path


def test_a_newer_one_that_has_lost_its_state_is_not_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, content(step), keep=5)
    (tmp_path / "step-00000001" / "state.json").unlink()  # half removed by a run that was killed
    assert latest(tmp_path) == tmp_path / "step-00000002"
    (tmp_path / "step-00000002" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000002/state\.json is missing; put back .* from the beginning"):
        latest(tmp_path)


# --- killed while writing --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As a signal would, it passes every `except Exception`."""


def kill_at(call: int, how: Any) -> Any:
    """Every write ends in an fsync or a rename: the `call`-th of them does not return."""
    calls: list[int] = []

    def counted(real: Any) -> Any:
        def call_or_die(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                how()
            return real(*arguments)

        return call_or_die

    stack = mock.patch.multiple(checkpoint.os, fsync=counted(os.fsync), rename=counted(os.rename))
    files = mock.patch.object(checkpoint, "save_file", counted(checkpoint.save_file))
    return stack, files


def die() -> None:
    raise Killed


@pytest.mark.parametrize("call", range(1, 12))
def test_the_previous_one_survives_a_kill_at_any_point(tmp_path: Path, call: int) -> None:
    """3 files written, 5 files and their folder flushed, the rename (call 10), and the flush of the parent."""
    previous = save(tmp_path, content(1), keep=1)
    patches = kill_at(call, die)
    with patches[0], patches[1], pytest.raises(Killed):
        save(tmp_path, content(2), keep=1)
    assert same(load(previous), content(1))
    found = latest(tmp_path)
    assert found is not None and same(load(found), content(1 if call <= 10 else 2))
    # the next run comes by with another rhythm, and leaves nothing of the dead one behind
    save(tmp_path, content(5), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_the_previous_one_survives_a_process_that_vanishes(tmp_path: Path) -> None:
    previous = save(tmp_path, content(1), keep=1)
    child = os.fork()
    if child == 0:
        patches = kill_at(5, lambda: os._exit(9))
        with patches[0], patches[1]:
            save(tmp_path, content(2), keep=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [p.name for p in tmp_path.glob(".*")] == [".step-00000002.partial"]
    assert latest(tmp_path) == previous and same(load(previous), content(1))


@pytest.mark.parametrize("call", [1, 4])
def test_the_previous_one_survives_the_kill_of_a_rank_that_writes_its_pieces(tmp_path: Path, call: int) -> None:
    """Two real processes hold three rows and two; the second writes and flushes two files."""
    folder = tmp_path / "checkpoints"
    codes = finish(fork(2, ["-m", "tests.learner.killed_save", folder, call], tmp_path))
    assert codes[1] == -signal.SIGKILL and codes[0] == 1, said(tmp_path, 2)
    assert sorted(p.name for p in folder.iterdir()) == [".step-00000002.partial", "step-00000001"]
    found = latest(folder)
    assert found is not None and found.name == "step-00000001"
    left = load(found)
    assert left.weights["layer"].tolist() == [1, 2, 3, 4, 5]
    assert left.optimizer["exp_avg.layer"].tolist() == [2, 4, 6, 8, 10]
    save(folder, content(2), keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


# --- damage ----------------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garble(file: Path) -> None:
    file.write_bytes(b"\x80\x04" + file.read_bytes())  # as a pickle begins


def remove(file: Path) -> None:
    file.unlink()


def flip(file: Path) -> None:
    """One bit in the middle, which for safetensors is in a tensor or its name."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, empty, garble, remove, flip])
@pytest.mark.parametrize("name", FILES[1:])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Any) -> None:
    path = save(tmp_path, content(1), keep=1)
    damage(path / name)
    named = f"checkpoint file .*step-00000001/{name} (cannot be read|is damaged): .* remove .* from the beginning"
    with pytest.raises(CheckpointError, match=named):
        load(path)
    save(tmp_path, content(2), keep=2)
    damage(tmp_path / "step-00000002" / name)
    if (path / name).is_file() or name != "state.json":  # else it is no complete one either
        with pytest.raises(CheckpointError, match=r"step-00000002 to go on from (step-00000001|the beginning)"):
            load(tmp_path / "step-00000002")


@pytest.mark.parametrize("damage", [cut, empty, garble, flip])
def test_damaged_checksums(tmp_path: Path, damage: Any) -> None:
    path = save(tmp_path, content(1), keep=1)
    damage(path / "SHA256SUMS")
    with pytest.raises(CheckpointError, match=r"step-00000001/\S+ (cannot be read|is damaged|was not written)"):
        load(path)


def test_every_bit_counts(tmp_path: Path) -> None:
    path = save(tmp_path, content(1), keep=1)
    file = path / "optimizer.safetensors"
    data = file.read_bytes()
    for place in range(0, len(data), 7):
        file.write_bytes(data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match="optimizer.safetensors is damaged"):
            load(path)
    file.write_bytes(data)
    assert same(load(path), content(1))


def test_the_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    path = save(tmp_path, content(1), keep=1)
    told = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=True)
    assert sorted(told.stdout.splitlines()) == [f"{name}: OK" for name in sorted(FILES[1:])]


def test_a_file_of_another_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, content(1), keep=1)
    (path / "weights.1.safetensors").write_bytes((path / "weights.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"weights\.1\.safetensors was not written with the others"):
        load(path)


@pytest.mark.parametrize("damage", [cut, empty, garble, remove])
@pytest.mark.parametrize("name", FILES[1:])
def test_one_of_an_earlier_release_has_no_checksums(tmp_path: Path, name: str, damage: Any) -> None:
    path = save(tmp_path, content(1), keep=1)
    (path / "SHA256SUMS").unlink()
    assert same(load(path), content(1))
    damage(path / name)
    with pytest.raises(CheckpointError, match=f"checkpoint file .*step-00000001/{name} cannot be read: .* remove"):
        load(path)


@pytest.mark.parametrize("text", ["[1, 2]", "7", "null", '"x"'])
def test_a_state_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, content(1), keep=1)
    (path / "state.json").write_text(text)
    seal(path)
    with pytest.raises(CheckpointError, match=r"step-00000001/state\.json cannot be read"):
        load(path)


@pytest.mark.parametrize("text", ["{}", '{"step": 2}'])
def test_a_state_of_another_step(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, content(1), keep=1)
    (path / "state.json").write_text(text)
    seal(path)
    with pytest.raises(CheckpointError, match=r"state\.json is not that of the step in the folder's name"):
        load(path)


def test_a_renamed_folder(tmp_path: Path) -> None:
    path = save(tmp_path, content(1), keep=1)
    with pytest.raises(CheckpointError, match="folder's name"):
        load(path.rename(tmp_path / "best"))
