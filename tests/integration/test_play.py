"""`npu-vlrl play` as a person uses it: scripted input, files of images, a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from npu_vlrl.preview.play import half_blocks
from npu_vlrl.tasks import frozenlake
from npu_vlrl.tasks.episodes import episode_task
from npu_vlrl.tasks.photo import load_photos, photo_task
from npu_vlrl.types import Image
from tests.support.program import Outcome, config_file, parquet, program, row
from tests.support.ranks import PATIENCE_S

ROOT = Path(__file__).parents[2]
LAKE = ("--environment", "frozenlake", "--option", "map=[SFFF, FHFH, FFFH, HFFG]", "--option", "hole_reward=-1")
Play = Callable[..., Outcome]
LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """The command with what a person types."""

    def run(typed: str, *arguments: object) -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        return program("play", *arguments)

    return run


def rewards(out: str) -> list[float]:
    return [float(number) for number in re.findall(r"^reward (\S+)", out, re.MULTILINE)]


def pixels_of(file: Path) -> np.ndarray:
    return np.asarray(PIL.Image.open(file))


def test_a_game_from_start_to_end(play: Play, tmp_path: Path) -> None:
    typed = "Down, down\n\n/state\n/solution\n<think>On.</think><answer>Right,Down,Right,Right</answer>\nRight\nUp\n"
    done = play(typed, *LAKE, "--images", tmp_path / "seen")
    assert (done.code, done.err) == (0, "")
    _, opening, *answers = re.split(r"^(?=You cross|> )", done.out, flags=re.MULTILINE)
    assert "A hole ends the game.\nAn action earns 0" in opening and "<think>…</think><answer>…</answer>" in opening
    assert [answer.splitlines()[0] for answer in answers] == ["> " + line for line in typed.splitlines()[:-1]]
    folder = tmp_path / "seen"
    assert answers[0].splitlines()[1:] == [
        "Done: Down, Down.",
        f"(image of 112x112 pixels: {folder / 'turn-001.png'})",
        "reward 0.5 (step 0, goal 0, hole 0, format 0.5)",
    ]
    assert answers[2].splitlines()[1:] == ["....", ".O.O", "P..O", "O..G"]
    assert answers[3].splitlines()[1:] == ["Right,Down,Right,Right"]
    assert "Only 3 actions count in a turn." in answers[4]
    assert answers[5].splitlines()[-2:] == [
        "reward 1.5 (step 0, goal 1, hole 0, format 0.5)",
        "end: solved, turns 3, reward 2.5 (step 0, goal 1, hole 0, format 1.5)",
    ]
    game = frozenlake.game(map=["SFFF", "FHFH", "FFFH", "HFFG"])
    game.start(0)
    assert sorted(file.name for file in folder.iterdir()) == [f"turn-00{n}.png" for n in range(4)]
    for number, actions in enumerate(["", "Down Down", "Right Down Right", "Right"]):
        for action in actions.split():
            game.act(action)
        assert (pixels_of(folder / f"turn-00{number}.png") == game.picture().rgb).all()


@pytest.mark.parametrize(
    ("typed", "end", "earned"),
    [
        ("Right,Down\nUp\n", "lost, turns 1, reward -0.5", [-0.5]),
        ("Right\n/quit\nRight\n", "quit, turns 1, reward 0.5", [0.5]),
        ("Right", "quit, turns 1, reward 0.5", [0.5]),
        ("", "quit, turns 0, reward 0\n", []),
        ("Jump\n<answer>Right</answer>\n<b>Right</b>\n", "quit, turns 3, reward 0", [0, 0, 0]),
    ],
)
def test_how_an_episode_may_end(play: Play, typed: str, end: str, earned: list[float]) -> None:
    done = play(typed, *LAKE)
    assert (done.code, done.err, rewards(done.out)) == (0, "", earned)
    assert f"\nend: {end}" in done.out
    assert "(image of 112x112 pixels)" in done.out and "\x1b" not in done.out


def test_a_configuration_gives_the_tasks_and_limits_of_its_training(play: Play, tmp_path: Path) -> None:
    values = {
        "data": {"train": {"generator": "episodes"}},
        "environment": {"name": "frozenlake", "options": {"size": 6}, "format": "no_think", "format_reward": 0.25},
        "workflow": {"max_turns": 2, "system_prompt": "You are a penguin."},
    }
    config = config_file(tmp_path, **values)
    (tmp_path / "still").mkdir()
    typed = "/state\n" + "Up\n" * 5
    first = play(typed, "--config", config, "--seed", 3, "--task", 5)
    assert first.out.startswith("frozenlake/3/5. ") and "\nYou are a penguin.\nYou cross" in first.out
    game = frozenlake.game(size=6)
    game.start(episode_task("frozenlake", 3, 5).extra["seed"])
    assert f"> /state\n{game.state_key()}\n" in first.out
    still = {**values, "environment": {"name": "frozenlake", "options": {"map": ["SFG"]}}}
    limited = play("Up\n" * 5, "--config", config_file(tmp_path / "still", **still))
    assert limited.out.endswith("\nend: max_turns, turns 2, reward 1 (step 0, goal 0, hole 0, format 1)\n")
    assert play(typed, "--config", config, "--task", 5, "train.seed=3").out == first.out
    assert play(typed, "--config", config, "--task", 5).out != first.out
    solution = play("/solution", "--config", config, "environment.separator=;").out
    assert re.search(r"^(Up|Down|Left|Right)(;(Up|Down|Left|Right))*$", solution, re.MULTILINE)


def test_questions_are_judged_and_tools_called_as_in_training(play: Play, tmp_path: Path) -> None:
    workflow = {"tools": ["look"], "tool_call_reward": 0.3, "feedback": "No.", "max_turns": 4}
    reward = {"rule": "tagged", "options": {"choices": ["up", "right", "down", "left"]}}
    config = config_file(tmp_path, data={"train": {"generator": "photo"}}, workflow=workflow, reward=reward)
    task = photo_task(0, 2, load_photos())
    wrong = "up" if task.answer != "up" else "down"
    typed = f"/solution\n/state\n{LOOK}\n<answer>{wrong}</answer>\n<answer>{task.answer}</answer>\n"
    done = play(typed, "--config", config, "--task", 2, "--images", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "You can call these tools" in done.out and task.messages[0].text in done.out
    assert f"the right answer is {task.answer!r}\n> /state\nnot known\n" in done.out
    assert f"Image 1 is what you see.\n(image of 56x56 pixels: {tmp_path / 'turn-001.png'})" in done.out
    assert done.out.count("No.\n") == 1  # the last answer is right
    assert done.out.endswith("\nend: solved, turns 3, reward 1.4 (tools 0.3, accuracy 0.9, format 0.2)\n")
    assert (pixels_of(tmp_path / "turn-000.png") == task.images[0].rgb).all()
    assert (pixels_of(tmp_path / "turn-001.png") == task.extra["hidden_image"].rgb).all()


def test_boxes_are_in_the_pixels_that_the_configured_model_sees(play: Play, tmp_path: Path) -> None:
    values = {"data": {"train": {"generator": "photo"}}, "workflow": {"tools": ["crop"]}, "reward": {"rule": "tagged"}}
    config = config_file(tmp_path, **values)
    crop = '<tool_call>{"name":"crop","arguments":{"bbox":[0,0,56,56]}}</tool_call>\n'
    small = play(crop, "--config", config).out  # the card has 28x28 stored pixels, and is seen as it is
    assert "inside [0, 0, 28, 28]" in small and small.count("(image") == 1
    large = play(crop, "--config", config, "model.min_pixels=3136").out
    assert "[0, 0, 28, 28]" not in large and large.count("(image of 28x28 pixels)") == 2
    refused = play(crop, "--config", config, "model.min_pixels=3136", "model.max_pixels=784").refused()
    assert refused.endswith("min_pixels 3136 is above max_pixels 784")


def test_a_users_judge_gets_the_earlier_answers_and_a_failing_one_is_told(play: Play, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def score(task, text, history, images):\n"
        "    if text == 'raise': raise RuntimeError('no')\n"
        "    return {'reward': len(history) + len(images) / 10, 'solved': text == 'end'}\n"
    )
    prompt = [{"role": "system", "content": "S\x1b[2J"}, {"role": "user", "content": "<image><image>?"}]
    rows = [row(0), row(1, prompt=prompt, images=row(1)["images"] * 2)]
    data = {"train": {"path": str(parquet(tmp_path / "rows.parquet", rows))}}
    config = config_file(tmp_path, data=data, reward={"rule": f"{tmp_path}/judge.py:score"}, workflow={"max_turns": 9})
    done = play("a\nraise\nend\n", "--config", config, "--task", 1, "--images", tmp_path)
    assert rewards(done.out) == [0.2, 0, 2.2]
    assert "the judge failed: rows/1: " in done.out and "RuntimeError: no" in done.out
    assert "end: solved, turns 3, reward 2.4 (answer 2.4)" in done.out
    assert "\nS\\x1b[2J\n" in done.out and "\x1b" not in done.out
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["turn-000-1.png", "turn-000.png"]
    replaced = play("", "--config", config, "--task", 1, "workflow.system_prompt=T")
    assert "\nT\n" in replaced.out and "\nS" not in replaced.out
    assert "--task 2: data.train has no such task" in play("", "--config", config, "--task", 2).refused()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--environment", "sokobn"], "unknown environment 'sokobn'; did you mean 'sokoban'?"),
        (["--environment", "visual_qa"], "give a configuration with --config FILE"),
        (["--environment", "frozenlake", "--option", "sizee=5"], "did you mean 'size'?"),
        (["--environment", "frozenlake", "--option", "size=x"], "options.size: Input should be a valid integer"),
        (["--environment", "frozenlake", "--option", "size=1"], "environment: frozenlake: size is 1"),
        (["--environment", "frozenlake", "--option", "size"], "--option size: write key=value, e.g. size=5"),
        (["--environment", "frozenlake", "--option", "map=[S"], "--option map=[S: "),
        (["--environment", "frozenlake", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--environment", "frozenlake", "--task", "-2"], "--task must be at least 0, got -2"),
        (["--environment", "frozenlake", "train.seed=1"], "train.seed=1 changes a configuration; with --environment"),
        (["--config", "/no/such.yaml"], "no such configuration file"),
        (["--config", "x.yaml", "--option", "size=5"], "with --config write environment.options.size=5"),
    ],
)
def test_mistakes_are_refused(play: Play, arguments: list[str], message: str) -> None:
    assert message in play("", *arguments).refused()


def test_other_mistakes(play: Play, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blocked = play("", *LAKE, "--images", tmp_path / "file")
    assert blocked.code == 2 and "npu-vlrl: --images: " in blocked.err and "Traceback" not in blocked.err
    for words in ([], ["--environment", "sokoban", "--config", "x"]):
        refused = play("", *words)
        assert refused.code == 2 and "usage: npu-vlrl play" in refused.err


SHOWN = re.compile(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀")


def read_back(shown: str) -> np.ndarray:
    """The pixels of an image in half blocks."""
    rows = []
    for line in shown.split("\n"):
        cells = np.array([list(map(int, cell)) for cell in SHOWN.findall(line)]).reshape(-1, 2, 3)
        assert SHOWN.sub("", line) == "\x1b[0m"
        rows += [cells[:, 0], cells[:, 1]]
    return np.array(rows)


def test_half_blocks_show_every_pixel_that_fits() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    assert (read_back(half_blocks(Image(pixels), 80, 24)) == pixels).all()
    large = np.repeat(np.repeat(pixels, 10, 0), 10, 1)
    assert (read_back(half_blocks(Image(large), 9, 24)) == pixels).all()
    assert (read_back(half_blocks(Image(large), 80, 3)) == pixels).all()
    for shape in ((1, 1), (1, 500), (500, 1), (7, 5), (168, 168)):
        rows, columns, _ = read_back(half_blocks(Image(np.zeros((*shape, 3), np.uint8)), 80, 24)).shape
        assert rows <= 48 and columns <= 80 and rows % 2 == 0


def test_show_puts_images_into_any_output(play: Play) -> None:
    done = play("", *LAKE, "--option", "tile=8", "--show")
    game = frozenlake.game(map=["SFFF", "FHFH", "FFFH", "HFFG"], tile=8)
    game.start(0)
    shown = "\n".join(line for line in done.out.split("\n") if "\x1b" in line)
    assert (read_back(shown) == game.picture().rgb).all()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def test_as_a_command_with_bytes_that_are_no_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "npu_vlrl", "play", *LAKE],
        input=b"R\xffight\nRight\n",
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "There is no action 'R\ufffdight'" in done.stdout.decode()
    assert b"\nend: quit, turns 2, reward 0.5 (" in done.stdout


def test_in_a_terminal_images_are_shown_and_ctrl_c_ends() -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "npu_vlrl", "play", *LAKE],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**environment(), "COLUMNS": "40", "LINES": "12"},
        cwd=ROOT,
    )
    os.close(terminal)
    seen = until(main, "> ")
    assert seen.count("▀") == 24 * 12  # 12 lines of half blocks show a square of 24 pixels
    os.write(main, b"Right\n")
    seen = until(main, "> ")
    assert "reward 0.5 (" in seen and seen.count("▀") == 24 * 12
    process.send_signal(signal.SIGINT)
    while not select.select([main], [], [], 5)[0]:
        process.send_signal(signal.SIGINT)  # the first one came after the prompt and before the wait for a line
    assert "end: quit, turns 1, reward 0.5 (" in until(main, "format 0.5)")
    assert process.wait(PATIENCE_S) == 0
    os.close(main)


def until(terminal: int, words: str) -> str:
    """What the program writes until `words` are the last."""
    seen = b""
    while not seen.decode(errors="replace").rstrip("\r\n").endswith(words):
        assert select.select([terminal], [], [], PATIENCE_S)[0], seen
        seen += os.read(terminal, 65536)
    return seen.decode()


def test_a_mistake_in_an_own_game_is_one_line(play: Play, tmp_path: Path) -> None:
    source = (ROOT / "tests" / "support" / "corridor.py").read_text()
    blind = source.replace("return Image(rgb)", "return rgb / 255")
    broken = source.replace("self.place += {", "self.place += {}['lost'] or {")
    for name, text in {"blind": blind, "broken": broken}.items():
        assert text != source
        (tmp_path / f"{name}.py").write_text(text)
    told = play("", "--environment", f"{tmp_path}/blind.py:game").refused()
    assert "blind.py:game: picture(): an image is an Image, a uint8 array [height, width, 3] or a Pillow image" in told
    later = play("Left\n", "--environment", f"{tmp_path}/broken.py:game")
    (line,) = later.err.splitlines()
    assert later.code == 2 and "broken.py:game: act('Left') raised KeyError: 'lost' (line " in line
