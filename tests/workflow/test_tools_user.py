"""Users' tools in processes of their own: what they see, deadlines, deaths, clean-up."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from npu_vlrl.types import EpisodeStatus, Image, Message, Task, ToolCall, ToolResult, Verdict
from npu_vlrl.workflow.base import Sampling
from npu_vlrl.workflow.tools import TOOLS, Frame, Toolbox, ToolContext
from npu_vlrl.workflow.tools.context import MAX_PIXELS
from npu_vlrl.workflow.tools.user import UserTool
from npu_vlrl.workflow.tools.worker import pack, unpack
from npu_vlrl.workflow.workers.serve import serve
from npu_vlrl.workflow.workers.wire import receive, send
from tests.support.scripted import Script, Verdicts, a_task, an_image, workflow

ROOT = Path(__file__).parents[2]

FILE = '''
import os, subprocess, sys, time
import numpy as np
from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools import ToolContext, ToolError

print("imported in", os.getpid())

def mirror(ctx: ToolContext, image: int = 0) -> ToolResult:
    """Mirror an image."""
    return ToolResult(f"pid {os.getpid()}", (Image(ctx.image(image).rgb[:, ::-1]), ctx.image(0)))

def tell(ctx: ToolContext) -> ToolResult:
    """Tell all."""
    task, frames = ctx.task, [frame.seen for frame in ctx.frames]
    told = [task.id, task.answer, task.data_source, sorted(task.extra), [m.role for m in task.messages], frames]
    same = task.messages[0].images[0] == ctx.images[0] and task.extra["hidden"] == ctx.images[1]
    return ToolResult(repr((told, same, "torch" in sys.modules)))

def points(ctx: ToolContext, at: list[tuple[int, int]], note: str | None = None) -> ToolResult:
    """Take points."""
    assert all(type(point) is tuple for point in at)
    return ToolResult(f"{at} {note}")

def refuse(ctx: ToolContext) -> ToolResult:
    """Refuse."""
    raise ToolError("not this one")

def hang(ctx: ToolContext, how: str) -> ToolResult:
    """Hang or die."""
    if how == "sleep":
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)
    if how == "exit":
        sys.exit(3)
    if how == "die":
        os._exit(7)
    if how == "one picture":
        return ToolResult("one", ctx.image(0))
    if how == "narrow":
        return ToolResult("narrow", Image(np.zeros((1, 400000, 3), np.uint8)))
    if how == "no picture":
        return ToolResult("none", 5)
    if how == "half":
        return ToolResult("a\\ud800")
    if how == "long":
        return ToolResult("x" * 10**6)
    if how == "half error":
        raise ToolError("no \\ud800")
    if how == "half bug":
        raise KeyError("\\udfff" + "x" * 10**6)
    if how == "rubbish":
        return ToolResult("two", ("no image",))
    return ToolResult(f"pid {os.getpid()}")
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def box(file: Path) -> Iterator[Toolbox]:
    names = [f"{file}:{name}" for name in ("mirror", "tell", "points", "refuse", "hang")]
    box = Toolbox(names, workers=1, deadline_s=1.0)
    yield box
    box.close()


def context(*images: Image, frames: tuple[Frame, ...] = (), **extra: object) -> ToolContext:
    return ToolContext(Task("t/1", (Message("user", (*images[:1], "See.")),), "5", "test", extra), images, frames)


def run(box: Toolbox, name: str, ctx: ToolContext, **arguments: object) -> ToolResult:
    return box.run(ToolCall(name, arguments), ctx)


def pid(result: ToolResult) -> int:
    assert not result.error
    return int(result.text.removeprefix("pid "))


def test_it_runs_elsewhere_and_gives_back_its_images(box: Toolbox, file: Path) -> None:
    first, second = an_image(28, seed=1), Image(np.random.default_rng(2).integers(0, 256, (3, 5, 3), dtype=np.uint8))
    result = run(box, "mirror", context(first, second), image=1)
    assert result.images == (Image(second.rgb[:, ::-1].copy()), first)
    assert pid(result) != os.getpid()
    assert pid(run(box, "mirror", context(first))) == pid(result)  # the process lives on
    assert str(file) not in {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    wrong = run(box, "mirror", context(first), image=2)
    assert wrong.error and wrong.text == "mirror: there is no image 2 (they are numbered 0 to 0)."


def test_what_it_gives_back_may_be_one_image_and_is_told_when_it_is_none(box: Toolbox) -> None:
    shown = an_image(28, seed=1)
    assert run(box, "hang", context(shown), how="one picture") == ToolResult("one", (shown,))
    for how, told in {
        "narrow": "hang: the image has 400000x1 pixels, too narrow",
        "no picture": "hang failed: ",
        "half": "hang failed: its text holds half a surrogate pair, '\\ud800' (character 2).",
        "long": "hang failed: its text holds 1,000,000 characters, more than 100,000.",
        "half error": "hang: no \\ud800.",
        "half bug": "hang failed: KeyError: '\\udfffxxx",
    }.items():
        result = run(box, "hang", context(shown), how=how)
        assert result.error and result.text.startswith(told) and not result.images
        assert len(result.text.encode()) < 3000


def test_a_tool_that_can_only_return_something_else_is_refused_before_a_call(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text('def add(ctx, a: int) -> int:\n    """Add."""\n    return a\n')
    with pytest.raises(ValueError, match=r"theirs\.py:add returns int; let it return a ToolResult"):
        Toolbox([f"{tmp_path}/theirs.py:add"])


def test_what_fails_beside_the_function_is_told_to_the_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = UserTool(f"{file}:mirror", workers=1, deadline_s=5.0)
    try:
        # a request that the service itself stumbles over
        monkeypatch.setattr("npu_vlrl.workflow.tools.user.pack", lambda ctx: ({"task": {}}, []))
        result = tool.run(context(), {})
        assert result == ToolResult("The call failed: it raised KeyError: 'messages'.", error=True)
    finally:
        tool.close()


def test_what_it_sees_of_the_episode(box: Toolbox) -> None:
    shown, hidden = an_image(28, seed=1), an_image(56, seed=2)
    frames = (Frame((28, 28), (28, 28), (56, 56)), Frame.unchanged((56, 56)))
    result = run(box, "tell", context(shown, hidden, frames=frames, hidden=hidden, unit="cm", odd=object()))
    told = ["t/1", "5", "test", ["hidden", "unit"], ["user"], [(56, 56), (56, 56)]]
    assert result.text == repr((told, True, False))


def test_a_context_survives_the_journey() -> None:
    one, two, three = (an_image(28, seed=i) for i in range(3))
    messages = (Message("system", ("Be brief.",)), Message("user", (one, "and", one, two, "?")))
    extra = {"hidden": three, "list": [1, {"a": None}]}
    ctx = ToolContext(Task("t", messages, None, "x", extra), (one, two, one), (Frame((1, 2), (3, 4), (5, 6)),))
    content, images = pack(ctx)
    assert images == [one, two, three]
    assert unpack(content, images) == ctx


def test_arguments_arrive_as_they_are_typed(box: Toolbox) -> None:
    assert run(box, "points", context(), at=[[1, 2], [3, 4]]).text == "[(1, 2), (3, 4)] None"
    assert run(box, "points", context(), at=[], note=None).text == "[] None"
    wrong = run(box, "points", context(), at=[[1, 2, 3]], note=4)
    assert wrong.text == "points: 'at[0]' must have 2 items, not 3; 'note' must be a string, not 4."
    refused = run(box, "refuse", context())
    assert refused == ToolResult("refuse: not this one.", error=True)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("sleep", "The call failed: the tool 'hang' took longer than 1 s and was stopped."),
        ("die", "The call failed: the worker of the tool 'hang' exited with code 7."),
        ("exit", "hang failed: SystemExit: 3."),
        ("rubbish", "hang failed: its ToolResult holds something else than text and images."),
    ],
)
def test_what_fails_is_told_and_the_next_call_works(box: Toolbox, how: str, told: str) -> None:
    before = pid(run(box, "hang", context(), how="well"))
    result = run(box, "hang", context(), how=how)
    assert result == ToolResult(told, error=True)
    after = pid(run(box, "hang", context(), how="well"))
    assert (before != after) == (how in ("sleep", "die"))
    if before != after:
        assert not Path(f"/proc/{before}").exists()


def test_a_hanging_tool_costs_the_turn_and_holds_up_no_other_episode(file: Path) -> None:
    """One episode calls a tool that hangs; meanwhile another one plays three turns on the same event loop."""
    names = (f"{file}:hang",)
    toolbox = Toolbox(names, deadline_s=1.0)
    judge = Verdicts([Verdict(0.0, False)] * 2 + [Verdict(1.0, True)] * 2)
    flow = workflow(judge, toolbox=toolbox, tools=names, tool_error_reward=-0.5)
    order: list[str] = []

    async def episode(name: str, lines: list[str]) -> object:
        done = await flow.run(a_task(), Script(lines), name, 0, Sampling())
        order.append(name)
        return done

    async def both() -> list[object]:
        hang = '<tool_call>{"name": "hang", "arguments": {"how": "sleep"}}</tool_call>'
        return await asyncio.gather(episode("hangs", [hang, "up"]), episode("plays", ["a", "b", "c"]))

    hangs, plays = asyncio.run(both())
    toolbox.close()
    assert order == ["plays", "hangs"]
    assert plays.status is hangs.status is EpisodeStatus.SOLVED  # type: ignore[attr-defined]
    assert hangs.turn_rewards == (-0.5, 1.0)  # type: ignore[attr-defined]
    assert "took longer than 1 s" in hangs.turns[0].tool_results[0].text  # type: ignore[attr-defined]


def test_a_tool_that_cannot_be_started_any_more_fails_the_sample_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "gone.py"
    path.write_text(FILE)
    toolbox = Toolbox([f"{path}:hang"])
    flow = workflow(Verdicts([]), toolbox=toolbox, tools=(f"{path}:hang",))
    call = '<tool_call>{"name": "hang", "arguments": {"how": "die"}}</tool_call>'
    path.unlink()
    done = asyncio.run(flow.run(a_task(), Script([call, call]), "g", 0, Sampling()))
    toolbox.close()
    assert done.status is EpisodeStatus.FAILED and done.error is not None
    assert done.error.startswith("t/1: there is no file") and "gone.py" in done.error


def test_close_ends_the_process(file: Path) -> None:
    tool = UserTool(f"{file}:hang", workers=2, deadline_s=5.0)
    process = pid(tool.run(context(), {"how": "well"}))
    assert Path(f"/proc/{process}").exists()
    tool.close()
    assert not Path(f"/proc/{process}").exists()
    with pytest.raises(RuntimeError):
        tool.run(context(), {"how": "well"})


def test_what_the_service_says_on_its_socket(file: Path) -> None:
    """The same loop, in a thread of this process."""

    def talk(name: str, ctx: ToolContext, *arguments: dict) -> list[tuple[dict, tuple[Image, ...]]]:
        ours, theirs = Pipe()
        options = {"function": f"{file}:{name}"}
        setup = {"service": "npu_vlrl.workflow.tools.worker", "options": options}
        thread = threading.Thread(target=serve, args=(theirs, setup))
        thread.start()
        said = [receive(ours)[:2]]
        content, images = pack(ctx)
        for each in arguments:
            send(ours, {**content, "arguments": each}, images)
            said.append(receive(ours)[:2])
        ours.close()
        thread.join(5)
        assert not thread.is_alive()
        return said

    image = an_image(28)
    hello, (mirrored, shown), (refused, _) = talk("mirror", context(image), {}, {"image": 1})
    assert hello[0]["ready"]["function"]["description"] == "Mirror an image."
    assert not mirrored["error"] and shown == (Image(image.rgb[:, ::-1].copy()), image)
    assert refused == {"text": "mirror: there is no image 1 (they are numbered 0 to 0).", "error": True}
    _, (points, _) = talk("points", context(), {"at": [[1, 2]], "note": None})
    assert points == {"text": "[(1, 2)] None", "error": False}
    _, *others = talk("hang", context(), {"how": "exit"}, {"how": "rubbish"}, {})
    assert [reply["text"] for reply, _ in others] == [
        "hang failed: SystemExit: 3.",
        "hang failed: its ToolResult holds something else than text and images.",
        "hang failed: TypeError: hang() missing 1 required positional argument: 'how'.",
    ]
    assert talk("nothing", context()) == [
        (
            {
                "error": f"{file}:nothing: the file has no plain function 'nothing'; write "
                "`def nothing(…)` at its top level"
            },
            (),
        )
    ]


@pytest.mark.parametrize(
    ("workers", "deadline_s", "reason"),
    [(0, 1.0, "a tool pool needs at least 1 worker, got 0"), (1, 0.0, "the deadline of a tool is 0.0 s")],
)
def test_bad_numbers(workers: int, deadline_s: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Toolbox([], workers, deadline_s)


def test_a_toolbox_that_cannot_be_made_leaves_no_process_behind(file: Path) -> None:
    before = _children()
    with pytest.raises(ValueError, match="unknown tool 'rotat'"):
        Toolbox([f"{file}:hang", f"{file}:tell", "rotat"])
    with pytest.raises(ValueError, match="'hang' is named twice"):
        Toolbox([f"{file}:hang", f"{file}:hang"])
    assert _children() == before


def _children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_the_example_of_the_document_works(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), re.DOTALL)
    (tmp_path / "bright.py").write_text(code)
    box = Toolbox([f"{tmp_path}/bright.py:brightness"])
    image = Image(np.repeat(np.arange(100, dtype=np.uint8)[None, :, None], 3, axis=2).repeat(50, axis=0))
    frame = Frame((100, 50), (100, 50), (200, 100))
    result = run(box, "brightness", context(image, frames=(frame,)), bbox=[20, 0, 60, 100])  # columns 10 to 29
    box.close()
    assert result == ToolResult("20")


def test_the_document_names_every_tool() -> None:
    text = (ROOT / "docs" / "tools.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| [a-z]", text, re.MULTILINE)) >= set(TOOLS)
    assert f"{MAX_PIXELS / 1e6:.1f} million" in text
