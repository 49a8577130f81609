"""Workers whose functions fork, leave daemons, forge replies, print without end, take all memory or close files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_vlrl.types import JudgeError, Message, Task, ToolCall, Verdict
from npu_vlrl.workflow.rewards import JudgePool, make_judge
from npu_vlrl.workflow.tools import Toolbox, ToolContext
from npu_vlrl.workflow.workers.supervise import MAX_OUTPUT
from tests.support.ranks import PATIENCE_S

FILE = '''
import ctypes, json, os, stat, sys, time
from multiprocessing.connection import Connection
from pathlib import Path
from npu_vlrl.types import ToolResult

here = Path(__file__).parent


def score(text):
    """The reward is the length of the text, and the feedback the text: a verdict that tells which answer it is of."""
    if text.startswith("fork"):
        os.fork()
    elif text.startswith("C fork"):
        ctypes.CDLL(None).fork()
    elif text.startswith("forge"):
        forge(text)
    elif text.startswith("daemon"):
        daemon(text)
    elif text == "close":
        os.closerange(3, 4096)
    elif text == "close and hang":
        os.closerange(3, 4096)
        time.sleep(60)
    elif text == "memory":
        held = bytearray(os.urandom(2**20)) * 400
        time.sleep(2)
    elif text == "memory of a child":
        if not os.fork():
            held = bytearray(os.urandom(2**20)) * 400
            time.sleep(60)
        time.sleep(2)
    elif text == "print":
        for _ in range(20):
            print("x" * 50_000)
            os.write(2, b"y" * 50_000)
    elif text == "worker":
        return {"reward": 0.0, "feedback": str(os.getpid())}
    return {"reward": len(text), "feedback": text}


def forge(text):
    """Another process answers in the place of this one: once, or each time."""
    flag = here / "forged"
    if text == "forge once" and flag.exists():
        return
    flag.touch()
    (fd,) = [fd for fd in range(3, 4096) if is_socket(fd)]
    copy = os.dup(fd)
    if not os.fork():
        other = Connection(copy)
        verdict = {"reward": 99.0, "solved": True, "feedback": "forged"}
        reply = {"content": {"verdict": verdict}, "sizes": [], "number": 1, "pid": os.getpid()}
        other.send_bytes(b"rubbish" if "rubbish" in text else json.dumps(reply).encode())
        os._exit(0)
    os.wait()


def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def daemon(text):
    """Forks twice into a session of its own, with a copy of the socket: nothing but its pid leads to it."""
    copies = [os.dup(fd) for fd in range(3, 4096) if is_socket(fd)]
    if not os.fork():
        os.setsid()
        if not os.fork():
            (here / "daemon").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not (here / "daemon").exists() or not (here / "daemon").read_text():
        time.sleep(0.01)
    if text == "daemon, hang":
        time.sleep(600)
    if text == "daemon, die":
        os._exit(7)


def echo(ctx, text: str) -> ToolResult:
    """Say it again, maybe forking."""
    if text.startswith("fork"):
        os.fork()
    return ToolResult(text)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def pool(file: Path) -> Iterator[JudgePool]:
    made = make_judge(f"{file}:score", {}, workers=1, deadline_s=10.0, memory_mib=300)
    assert isinstance(made, JudgePool)
    yield made
    made.close()


def judge(pool: JudgePool, text: str) -> Verdict:
    return asyncio.run(pool.judge(Task("t/1", (Message("user", ("?",)),), "1", "d"), text, ()))


def own(text: str) -> Verdict:
    return Verdict(float(len(text)), len(text) >= 1, text)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int) -> bool:
    until = time.monotonic() + PATIENCE_S
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_running(pid)


def test_an_answer_that_forks_gets_its_own_verdict_and_so_do_all_after_it(pool: JudgePool) -> None:
    for text in ("a", "fork", "bb", "C fork", "ccc", "fork again", "d" * 50, "e"):
        assert judge(pool, text) == own(text)
    assert pool.wrong_replies == 0  # the forked processes were ended before they said anything


def test_a_tool_that_forks_gives_each_call_its_own_text(file: Path) -> None:
    box = Toolbox([f"{file}:echo"], workers=1, deadline_s=10.0)
    said = [
        box.run(ToolCall("echo", {"text": text}), ToolContext(Task("t", (), None, "d"), ())).text
        for text in ("a", "fork", "b", "fork 2", "c", "d")
    ]
    box.close()
    assert said == ["a", "fork", "b", "fork 2", "c", "d"]


def test_a_reply_of_another_process_ends_the_worker_is_counted_and_the_answer_is_judged_again(pool: JudgePool) -> None:
    before = judge(pool, "worker").feedback
    assert judge(pool, "forge once") == own("forge once")
    assert pool.wrong_replies == 1
    assert judge(pool, "worker").feedback != before
    for text in ("forge", "forge rubbish"):
        with pytest.raises(JudgeError, match="task t/1: the worker of the rule 'python' was ended, since another pro"):
            judge(pool, text)
    assert pool.wrong_replies == 5  # each of the two was tried again
    assert judge(pool, "abc") == own("abc")


@pytest.mark.parametrize(
    ("text", "reason"), [("daemon", None), ("daemon, hang", "longer than 2 s"), ("daemon, die", "exited with code 7")]
)
def test_a_daemon_in_a_session_of_its_own_ends_with_its_worker(file: Path, text: str, reason: str | None) -> None:
    pool = JudgePool("python", {"function": f"{file}:score"}, workers=1, deadline_s=2.0)
    began = time.monotonic()
    if reason is None:
        assert judge(pool, text) == own(text)
    else:
        with pytest.raises(JudgeError, match=reason):
            judge(pool, text)
    assert time.monotonic() - began < PATIENCE_S  # the daemon holds the socket open, and nobody waits for it
    daemon = int((file.parent / "daemon").read_text())
    if reason is None:
        assert is_running(daemon)
        pool.close()
    assert ends(daemon)
    pool.close()


def test_a_worker_ends_with_its_supervisor(pool: JudgePool) -> None:
    worker = int(str(judge(pool, "worker").feedback))
    (supervisor,) = [each._process.pid for each in pool._pool._workers if each._process is not None]
    assert supervisor != worker
    os.kill(supervisor, 9)
    assert ends(worker)
    assert judge(pool, "abc") == own("abc")


@pytest.mark.parametrize("text", ["close", "close and hang"])
def test_a_function_that_closes_all_files_costs_its_own_answer(pool: JudgePool, text: str) -> None:
    with pytest.raises(JudgeError, match=r"exited with code|closed its connection, and was stopped"):
        judge(pool, text)
    assert judge(pool, "abc") == own("abc")


@pytest.mark.parametrize("text", ["memory", "memory of a child"])
def test_memory_is_that_of_a_worker_and_its_children(pool: JudgePool, text: str) -> None:
    with pytest.raises(JudgeError, match=r"took more than 300 MiB of memory with its children and was stopped"):
        judge(pool, text)
    assert judge(pool, "abc") == own("abc")


def test_without_a_limit_memory_is_not_watched(file: Path) -> None:
    pool = JudgePool("python", {"function": f"{file}:score"}, workers=1, deadline_s=30.0)
    assert judge(pool, "memory") == own("memory")
    pool.close()


def test_what_a_process_prints_is_bounded_and_that_is_said_once(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pool = JudgePool("python", {"function": f"{file}:score"}, workers=1, deadline_s=10.0)
    for _ in range(3):
        assert judge(pool, "print") == own("print")
    pool.close()
    said = capfd.readouterr().err
    shown, notice = said[:MAX_OUTPUT], said[MAX_OUTPUT:]
    assert set(shown) == set("xy\n")
    assert notice == "\nthe rule 'python' printed 64 KiB; no more of this process is shown\n"
