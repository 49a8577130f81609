"""Lets a person act in an environment in the policy's place, with its observations and rewards: `npu-vlrl play`."""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import PIL.Image
from yaml import YAMLError

from npu_vlrl.config import Config, ConfigError
from npu_vlrl.config.yaml_text import read_yaml
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.model.families import family_of_path
from npu_vlrl.model.load import load_processor, model_folder
from npu_vlrl.report.console import printable
from npu_vlrl.report.verdicts import labelled_terms
from npu_vlrl.training.build import make_setting, task_source
from npu_vlrl.types import (
    Environment,
    EpisodeStatus,
    Image,
    Message,
    Segment,
    SegmentKind,
    SpecialTokens,
    Step,
    StopReason,
    Task,
    Turn,
)
from npu_vlrl.workflow.environments import GameEnvironment
from npu_vlrl.workflow.environments.visual_qa import VisualQA
from npu_vlrl.workflow.tools.describe import describe_tools
from npu_vlrl.workflow.tools.forms import FORMS, HERMES, ToolForm

HELP = "/solution shows how it is solved, /state the name of the state, /quit ends."


def environment_config(name: str, options: Sequence[str], seed: int) -> Config:
    """Configuration with nothing but a game; `options` are words `key=value`, with values as in YAML.

    Raises ConfigError for a word of another form, and for an environment that needs more settings.
    """
    if name == "visual_qa":
        raise ConfigError(
            "--environment visual_qa needs questions and a judge; give a configuration with --config FILE"
        )
    values = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--option {option}: write key=value, e.g. size=5")
        try:
            values[key] = read_yaml(value)
        except YAMLError as error:
            raise ConfigError(f"--option {option}: {error}; write the value as YAML, e.g. size=5") from error
    sections: dict[str, Any] = {
        "model": {"path": "tiny:qwen2_5_vl"},
        "data": {"train": {"generator": "episodes"}},
        "environment": {"name": name, "options": values},
        "train": {"seed": seed},
    }
    return Config.model_validate(sections)


def play(config: Config, number: int, images: Path | None, show: bool, max_turns: int | None) -> None:
    """Plays one episode: task `number` of `data.train`, from standard input to standard output.

    Each image goes to a file in `images`, and with `show` to the terminal. `max_turns` None is no limit. Raises
    ConfigError or DataError for a task that cannot be played.
    """
    screen = Screen(images, show)
    with ExitStack() as cleanup:
        runner = cleanup.enter_context(asyncio.Runner())
        setting = make_setting(config, cleanup)
        source = task_source(config.data.train, config, config.train.seed, setting.check_gold)
        task = next(islice(source.all(), number, None), None)
        if task is None:
            raise ConfigError(
                f"--task {number}: data.train has no such task; the first one is 0, choose a smaller number"
            )
        environment = setting.new_environment(_processor(config, cleanup), None, _form(config))
        cleanup.callback(lambda: runner.run(environment.close()))
        opening = runner.run(environment.reset(task))
        screen.line(f"{task.id}. {HELP}")
        screen.messages(_told_first(config, opening, setting.schemas))
        _Episode(runner, environment, task, screen, config.environment.separator).run(max_turns)


class _Episode:
    def __init__(
        self, runner: asyncio.Runner, environment: Environment, task: Task, screen: Screen, separator: str
    ) -> None:
        """`separator` stands between actions."""
        self._runner, self._environment, self._task, self._screen = runner, environment, task, screen
        self._separator = separator
        self._turns: list[Turn] = []
        self._terms: Counter[str] = Counter()
        self._status: EpisodeStatus | None = None

    def run(self, max_turns: int | None) -> None:
        for line in _lines():
            if line == "/quit":
                break
            elif line == "/solution":
                self._screen.line(self._solution())
            elif line == "/state":
                self._screen.line(self._environment.state_key() or "not known")
            else:
                self._act(line)
                if self._status is None and len(self._turns) == max_turns:
                    self._status = EpisodeStatus.MAX_TURNS
                if self._status is not None:
                    break
        reward = sum(turn.action.reward for turn in self._turns)
        end = "quit" if self._status is None else self._status.value
        earned = f" ({_listed(self._terms)})" if self._turns else ""
        self._screen.line(f"end: {end}, turns {len(self._turns)}, reward {reward:g}{earned}")

    def _act(self, line: str) -> None:
        text = self._text(line)
        step = self._runner.run(self._environment.step(text, self._turns))
        self._turns.append(_turn(text, step))
        self._status = step.status
        terms = _terms(step)
        self._terms.update(terms)
        self._screen.turn = len(self._turns)
        if step.judge_error is not None:
            self._screen.line(f"the judge failed: {step.judge_error}")
        if step.tool_results:
            self._screen.messages(Message("tool", (result.text, *result.images)) for result in step.tool_results)
        elif step.status is None or not isinstance(self._environment, VisualQA):
            self._screen.messages(step.messages)  # an answer that ends the episode gets no feedback
        self._screen.line(f"reward {step.reward:g} ({_listed(terms)})")

    def _text(self, line: str) -> str:
        """Turn's text. For a game, a person may write actions alone; they are put into the format, with empty
        thoughts.
        """
        if not isinstance(self._environment, GameEnvironment) or "</" in line:
            return line
        answer_format = self._environment.format
        return answer_format.write(defaultdict(str, {answer_format.tag: line}))

    def _solution(self) -> str:
        if isinstance(self._environment, VisualQA):
            return f"the right answer is {self._task.answer!r}"
        actions = self._environment.game.solution() if isinstance(self._environment, GameEnvironment) else None
        return "no solution is known" if actions is None else self._separator.join(actions)


class Screen:
    """Standard output, and the files of images."""

    def __init__(self, images: Path | None, show: bool) -> None:
        self.turn = 0
        """Number of the turn in the names of the files."""
        self._folder, self._show = images, show
        self._root = Path.cwd()  # before a game may change it
        self._written: Counter[int] = Counter()

    def line(self, text: str) -> None:
        print(printable(text), flush=True)

    def messages(self, messages: Iterable[Message]) -> None:
        for message in messages:
            for part in message.parts:
                if isinstance(part, Image):
                    self._image(part)
                elif part.strip():
                    self.line(part.strip("\n"))

    def _image(self, image: Image) -> None:
        if self._show:
            print(half_blocks(image, *shutil.get_terminal_size()))
        width, height = image.size
        where = "" if self._folder is None else f": {self._write(image, self._folder)}"
        self.line(f"(image of {width}x{height} pixels{where})")

    def _write(self, image: Image, folder: Path) -> Path:
        """Writes `turn-000.png`, and `turn-000-1.png` for a second image in the same turn. Raises ConfigError."""
        index = self._written[self.turn]
        self._written[self.turn] += 1
        file = folder / f"turn-{self.turn:03}{f'-{index}' if index else ''}.png"
        try:
            (self._root / folder).mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(image.rgb).save(self._root / file)
        except OSError as error:
            raise ConfigError(f"--images: {error}; choose another folder") from error
        return file


def half_blocks(image: Image, columns: int, lines: int) -> str:
    """Renders an image for a terminal with 24-bit colours: each `▀` shows two pixels, one above the other.

    The image is reduced, if necessary, to fit into columns x lines.
    """
    width, height = image.size
    scale = min(1.0, columns / width, 2 * lines / height)
    size = (max(1, round(width * scale)), 2 * max(1, round(height * scale / 2)))
    rgb = np.asarray(PIL.Image.fromarray(image.rgb).resize(size, PIL.Image.Resampling.BOX))
    rows = zip(rgb[::2].tolist(), rgb[1::2].tolist(), strict=True)
    return "\n".join(
        "".join(f"\x1b[38;2;{_colour(above)};48;2;{_colour(below)}m▀" for above, below in zip(*row, strict=True))
        + "\x1b[0m"
        for row in rows
    )


def _colour(rgb: Sequence[int]) -> str:
    return ";".join(map(str, rgb))


def _lines() -> Iterator[str]:
    """Lines that the person writes, until the end of input or Ctrl-C; empty lines are skipped."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not sys.stdin.isatty():
            print(line)  # nobody else shows what came from a file or pipe
        if line:
            yield line


def _told_first(config: Config, opening: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """First messages as the policy receives them, though a chat template may describe tools in other words."""
    if schemas:
        yield Message("system", (describe_tools(schemas),))
    system = config.workflow.system_prompt
    if system is not None:
        yield Message("system", (system,))
    yield from (message for message in opening if system is None or message.role != "system")


def _turn(text: str, step: Step) -> Turn:
    """Turn as judges read it; it has no tokens."""
    special = SpecialTokens(end_of_turn=(0,))
    action = Segment(SegmentKind.ACTION, (), special, stop_reason=StopReason.END_OF_TURN, reward=step.reward)
    return Turn((), action, text, step.verdict, step.tool_calls, step.tool_results)


def _terms(step: Step) -> Mapping[str, float]:
    """Rewards of a turn by name; judges need not name their terms."""
    if step.verdict is None:
        return {"tools": step.reward}
    return labelled_terms(step.verdict) or {"answer": step.reward}


def _listed(terms: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in terms.items())


def _form(config: Config) -> ToolForm:
    """Form in which the configured model writes tool calls."""
    family = family_of_path(config.model.path)
    return HERMES if family is None else FORMS[family.chat.tool_calls]


def _processor(config: Config, cleanup: ExitStack) -> ImageProcessor | None:
    """Image processor of the configured model, since tools take positions in the pixels that it sees; None without
    tools.
    """
    if not config.workflow.tools:
        return None
    scratch = Path(cleanup.enter_context(TemporaryDirectory()))
    folder = model_folder(config.model.path, scratch, config.train.seed, whole=False)
    family = family_of_path(str(folder))
    return None if family is None else load_processor(config.model, folder, family)
