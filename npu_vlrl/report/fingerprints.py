"""Fingerprints of a run's inputs besides its configuration, so that a resumed run continues with the same.

`inputs.json` in the run folder holds the SHA-256 of each file: of the model folder, of the data, of the warm start, and
of the user's rewards, tools, games and parts of the algorithm with the modules that they import. Every file is read as
a whole, since its time and size say nothing about its content, several at a time; loading the model then finds its
files in memory.

Files that a user's function opens by itself, and images that rows name by a path, are not covered.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from npu_vlrl.common.atomic_files import sha256, write_text
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.learner.checkpoint import steps_done
from npu_vlrl.model.inspect import model_files
from npu_vlrl.model.load import model_folder
from npu_vlrl.workflow.workers import is_spec

FILE = "inputs.json"
MODEL, CODE, WARM_START = "model.path", "code", "warm_start"

INSTALLED = {"site-packages", "dist-packages"}
THREADS = 8

Files = dict[str, Path]
"""Files by the names under which messages mention them."""
Digests = dict[str, str]


class _Record(TypedDict):
    """Content of `inputs.json`."""

    recorded: str
    """Time at which the run began."""
    accepted: list[dict[str, JsonValue]]
    """Changes of code that the run accepted."""
    sha256: dict[str, Digests]


_RECORD = TypeAdapter(_Record)


class Inputs:
    """Inputs of a run, as they are now and as they were when it began.

    Example: `inputs.check()` before anything is loaded, `inputs.record()` when the run folder is there.
    """

    def __init__(self, config: Config, absolute: Config, draws: bool = True) -> None:
        """`absolute` is the same configuration, `rooted`. `draws`: whether tasks of `data.train` will be drawn."""
        self._config, self._draws = absolute, draws
        self._code = {name: file.absolute() for name, file in code_files(config).items()}
        self._folder = Path(absolute.run.dir)
        self._file = self._folder / FILE
        self._accepted: list[dict[str, Any]] = []
        self._began = ""
        self._found: dict[str, Digests] | None = None
        self.messages: list[str] = []
        """Messages for the person who resumes the run."""

    def check(self) -> None:
        """Compares the inputs of a resumed run with those that it began with.

        Raises ConfigError, naming the files that differ, unless they are the user's own code and `run.if_changed`
        accepts that.
        """
        before = self._read()
        if before is None:
            self.messages.append(
                f"{self._folder} was begun by an earlier release and has no {FILE}: nobody knows whether model, data "
                "and code are those that it began with; from now on it is checked"
            )
            return
        self._began, self._accepted = before["recorded"], before["accepted"]
        self._found = self._now()
        for section, now in self._found.items():
            self._compare(section, before["sha256"].get(section), now)

    def check_model(self) -> None:
        """Compares the model alone. Raises ConfigError when it is not the one that the run began with."""
        before = self._read()
        if before is not None:
            self._began = before["recorded"]
            self._compare(MODEL, before["sha256"].get(MODEL), digests(self._model()))

    def record(self) -> None:
        """Writes the fingerprints of all inputs that are there; those of a warm start follow when it is done."""
        self._began = self._began or _time()
        self._write(self._now() if self._found is None else self._found)

    def record_warm_start(self) -> None:
        before = self._read()
        assert before is not None, "the run has begun"
        self._write(before["sha256"] | {WARM_START: digests(model_files(self._folder / WARM_START))})

    def _compare(self, section: str, was: Digests | None, now: Digests) -> None:
        """Raises ConfigError for differences, except those in code that the configuration accepts."""
        changes = {} if was is None else differences(was, now)
        if was is None or not changes:
            return
        told = ", ".join(f"{name} {change}" for name, change in changes.items())
        since = f"{told} since the run in {self._folder} began ({self._began})"
        if section != CODE:
            raise ConfigError(
                f"{section}: {since}; put that back, or begin another run with another run.dir, which may take up this "
                "one's weights by model.path=RUN/export"
            )
        if self._config.run.if_changed == "raise":
            raise ConfigError(
                f"run.if_changed: {since}, so rewards or worlds may be others; put that back, or go on with what is "
                "there now by run.if_changed=accept"
            )
        sums = {name: [was.get(name), now.get(name)] for name in changes}
        steps = steps_done(self._folder / "checkpoints")
        self._accepted.append({"recorded": _time(), "steps_done": steps, "sha256": sums})
        self.messages.append(f"{since}; going on with that, as run.if_changed=accept asks, and recording it in {FILE}")

    def _now(self) -> dict[str, Digests]:
        return {section: digests(files) for section, files in self._sections().items()}

    def _sections(self) -> dict[str, Files]:
        config, folder = self._config, self._folder
        found = {MODEL: self._model(), CODE: self._code}
        if (folder / WARM_START / "config.json").is_file():
            found[WARM_START] = model_files(folder / WARM_START)
        sources = {"data.train": config.data.train, "data.eval": config.data.eval}
        if not self._draws and config.data.eval is not None:
            del sources["data.train"]
        for section, source in sources.items():
            if source is not None and source.path is not None:
                found[section] = data_files(Path(source.path))
        return found

    def _model(self) -> Files:
        """Files of the model. An existing folder is not inspected here: "changed" is the better message."""
        folder = Path(self._config.model.path)
        if not (folder / "config.json").is_file():
            folder = model_folder(self._config.model.path, self._folder / "model", self._config.train.seed)
        return model_files(folder)

    def _read(self) -> _Record | None:
        if not self._file.is_file():
            return None
        try:
            return _RECORD.validate_json(self._file.read_bytes(), strict=True)
        except (OSError, ValidationError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False, include_input=False, include_context=False)[0]
                reason = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
            raise ConfigError(
                f"{self._file} cannot be read ({reason}); put it back, or remove it to go on without this check"
            ) from error

    def _write(self, found: Mapping[str, Digests]) -> None:
        content = {"recorded": self._began, "accepted": self._accepted, "sha256": found}
        write_text(self._file, json.dumps(content, indent=2) + "\n")


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def digests(files: Files) -> Digests:
    """SHA-256 of each file, in hexadecimal; missing files are left out."""
    there = {name: file for name, file in files.items() if file.is_file()}
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(there, threads.map(sha256, there.values()), strict=True))


def differences(before: Digests, now: Digests) -> dict[str, str]:
    """Changes by name: `differences({"a": "1", "b": "2"}, {"a": "3"}) == {"a": "changed", "b": "is gone"}`."""
    found = {}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            found[name] = "is gone"
        elif name not in before:
            found[name] = "is new"
        elif now[name] != before[name]:
            found[name] = "changed"
    return found


def data_files(path: Path) -> Files:
    """A file, or all files of a folder, by names that are independent of its path. Hidden files are left out, such as
    the notes of a downloader in `.cache`.
    """
    if path.is_dir():
        found = {file.relative_to(path): file for file in sorted(path.rglob("*")) if file.is_file()}
        return {name.as_posix(): file for name, file in found.items() if not any(p.startswith(".") for p in name.parts)}
    return {path.name: path}


def code_files(config: Config) -> Files:
    """Files of the user's own code: rewards, tools, environment, workflow and parts of the algorithm."""
    environment, algorithm = config.environment, config.algorithm
    settings: list[Any] = [config.reward.rule, config.reward.options, list(config.workflow.tools)]
    settings += [environment.name, environment.options, config.workflow.name, config.workflow.options]
    settings += [[algorithm.advantage, algorithm.advantage_options], [algorithm.loss, algorithm.loss_options]]
    settings += [algorithm.group_reward, algorithm.group_reward_options]
    found: Files = {}
    for text in _strings(settings):
        name = text.rpartition(":")[0] if is_spec(text) else text
        file = Path(name).expanduser()
        if is_spec(text) or _is_file(file):
            found[name] = file
    modules = {str(environment.options.get("id", "")).rpartition(":")[0]} if environment.name == "gymnasium" else set()
    waiting = [file for file in found.values() if file.suffix == ".py"]
    for module in modules:
        waiting += _add_module(module, found)
    while waiting:
        for module in sorted(_imported(waiting.pop())):
            waiting += _add_module(module, found)
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


def _is_file(path: Path) -> bool:
    """Whether a text is the name of a file; texts of options may be anything."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _imported(file: Path) -> set[str]:
    """First parts of the names of all modules that a file imports; none for a file that is not Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # whoever imports it says more
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _add_module(module: str, found: Files) -> list[Path]:
    """Adds the files of a module that is neither Python's nor installed; returns the new ones."""
    name = module.partition(".")[0]
    if not name or name == "npu_vlrl" or name in sys.stdlib_module_names:
        return []
    spec = PathFinder.find_spec(name, [os.getcwd(), *sys.path])  # the working directory is a worker's first place
    if spec is None:
        return []
    files: Files = {}
    for place in spec.submodule_search_locations or []:
        files |= {f"{name}/{file.relative_to(place).as_posix()}": file for file in sorted(Path(place).rglob("*.py"))}
    if not files and spec.origin is not None:
        files = {Path(spec.origin).name: Path(spec.origin)}
    known = set(found.values())
    new = {key: file for key, file in files.items() if file not in known and file.is_file() and not _installed(file)}
    found |= new
    return [file for file in new.values() if file.suffix == ".py"]


def _installed(file: Path) -> bool:
    return bool(INSTALLED & set(file.parts)) or file.is_relative_to(sysconfig.get_path("stdlib"))
