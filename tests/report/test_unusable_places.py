"""Places that cannot be written to are told by their names, in one message, before anything is computed."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from safetensors import SafetensorError

from npu_vlrl.cli import main
from npu_vlrl.common.atomic_files import refusal, writing
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.report.run_folder import RunFolder

NOBODY = 65534
CORRECT = "correct the path or the rights to it, or choose another place"


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder that other users reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody(work: Callable[[], str]) -> str:
    """What a function returns in a process that is not root's, who may write everywhere."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            os.write(writing, work().encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


def opened(folder: Path) -> str:
    config = Config.model_validate(
        {
            "model": {"path": "tiny:qwen3"},
            "data": {"train": {"generator": "arrow"}},
            "run": {"dir": str(folder), "if_exists": "resume"},
        }
    )
    with ExitStack() as cleanup:
        try:
            RunFolder(config, cleanup).begin()
        except ConfigError as error:
            return str(error)
    return "fine"


def test_a_run_in_a_folder_that_is_not_ours(room: Path) -> None:
    (room / "run").mkdir(0o555)
    told = f"run.dir: {room / 'run'} cannot be written in, since {room / 'run'} is not writable; choose another"
    assert as_nobody(lambda: opened(room / "run")) == told
    assert as_nobody(lambda: opened(room / "run" / "deep" / "er")).endswith(
        f"since {room / 'run'} is not writable; choose another"
    )
    (room / "run").chmod(0o777)
    assert as_nobody(lambda: opened(room / "run")) == "fine"
    (room / "run").chmod(0o555)  # a run by now
    assert as_nobody(lambda: opened(room / "run")) == told
    (room / "run").chmod(0o777)
    assert as_nobody(lambda: opened(room / "run")) == "fine"


def test_a_folder_that_cannot_be_entered(room: Path) -> None:
    (room / "closed").mkdir(0o700)
    if os.getuid() != 0:
        (room / "closed").chmod(0)
    told = as_nobody(lambda: opened(room / "closed" / "run"))
    assert (
        told == f"run.dir: {room}/closed/run cannot be made, since {room}/closed/run: Permission denied; choose another"
    )
    (room / "closed").chmod(0o700)


def test_other_things_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert f"since {tmp_path / 'link'} is a link to nothing" in opened(tmp_path / "link")
    assert f"since {tmp_path / 'link'} is a link to nothing" in opened(tmp_path / "link" / "run")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in opened(tmp_path / "loop") and opened(tmp_path / "loop") != "fine"
    assert "File name too long; choose another" in opened(tmp_path / ("x" * 300))
    assert "File name too long; choose another" in opened(Path(f"{tmp_path}{'/y' * 3000}"))
    (tmp_path / "there").mkdir()
    (tmp_path / "good").symlink_to(tmp_path / "there")
    assert opened(tmp_path / "good") == "fine"


@pytest.mark.parametrize("name", ["checkpoints", "images", "metrics.jsonl", "trajectories.jsonl", "lock"])
def test_parts_of_a_run(room: Path, name: str) -> None:
    (room / "run").mkdir()
    (room / "run").chmod(0o777)
    run, is_file = room / "run", "." in name or name == "lock"
    assert as_nobody(lambda: opened(run)) == "fine"
    part, saved = run / name, room / "saved"
    if part.exists():
        part.rename(saved)
    part.mkdir() if is_file else part.touch()
    kind = "file" if is_file else "folder"
    assert as_nobody(lambda: opened(run)) == f"run.dir: {part} is no {kind}; move it away, or choose another run.dir"
    part.rmdir() if is_file else part.unlink()
    part.touch(0o444) if is_file else part.mkdir(0o555)
    told = as_nobody(lambda: opened(run))
    assert told == f"run.dir: {part} is not writable; change its rights, or choose another run.dir"


def command(*words: str) -> str:
    """What a command tells on standard error, and its exit code."""
    told = StringIO()
    with redirect_stderr(told):
        code = main(words)
    return f"{code} {told.getvalue()}"


def test_a_command_that_is_given_such_a_path() -> None:
    told = command("config", "--config", "x" * 300)
    assert told == f"2 npu-vlrl: {'x' * 300}: File name too long; {CORRECT}\n"


def test_which_errors_are_about_a_path() -> None:
    assert refusal(PermissionError(13, "Permission denied", "/a")) == f"/a: Permission denied; {CORRECT}"
    for other in (OSError(5, "Input/output error", "/a"), BrokenPipeError(32, "Broken pipe"), OSError("text")):
        assert refusal(other) is None
    with pytest.raises(OSError, match="Permission denied: '/a/w.safetensors'"), writing(Path("/a/w.safetensors")):
        raise SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)")
