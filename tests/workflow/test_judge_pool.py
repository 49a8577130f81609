"""Worker processes: deadlines, deaths, users' functions, concurrency, clean-up."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from npu_vlrl.types import (
    DataError,
    Image,
    JudgeError,
    Message,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
    Task,
    ToolResult,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.rewards import InlineJudge, JudgePool, WeightedJudge, make_judge
from npu_vlrl.workflow.workers.serve import serve
from npu_vlrl.workflow.workers.wire import receive, send
from tests.support.ranks import PATIENCE_S

DEADLINE_S = 1.0


def a_task(answer: str | None = "5", images: tuple[Image, ...] = (), **extra: object) -> Task:
    return Task("t/1", (Message("user", (*images, "Find x.")),), answer, "test", extra)


AnyJudge = JudgePool | InlineJudge | WeightedJudge


def judge(pool: AnyJudge, text: str, task: Task | None = None, history: tuple[Turn, ...] = ()) -> Verdict:
    return asyncio.run(pool.judge(task or a_task(), text, history))


def pids(pool: JudgePool) -> list[int]:
    return [worker._process.pid for worker in pool._pool._workers if worker._process is not None]


def is_alive(pid: int) -> bool:
    """Not even a zombie."""
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def math_pool() -> Iterator[JudgePool]:
    pool = make_judge("math_verify", {}, workers=1, deadline_s=DEADLINE_S)
    assert isinstance(pool, JudgePool)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "hostile",
    ["9^{9^{9^{9}}}", "(10^{8})!", "x+" + "(" * 300 + "5" + ")" * 300],
    ids=["power tower", "factorial", "parentheses"],
)
def test_a_hostile_answer_costs_the_deadline_and_the_next_is_judged_right(math_pool: JudgePool, hostile: str) -> None:
    assert judge(math_pool, "\\boxed{5}").solved  # started
    start = time.perf_counter()
    with pytest.raises(JudgeError, match=r"task t/1: the rule 'math_verify' took longer than 1 s"):
        judge(math_pool, f"\\boxed{{{hostile}}}")
    assert time.perf_counter() - start >= DEADLINE_S
    assert judge(math_pool, "\\boxed{5}").solved
    assert not judge(math_pool, "\\boxed{6}").solved


def test_starting_is_not_part_of_the_deadline(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(1.0)\ndef reward(text): return True\ndef late(text): time.sleep(1.0)")
    pool = make_judge(f"{slow}:reward", {}, workers=1, deadline_s=0.5)
    assert judge(pool, "").solved
    pool.close()
    late = make_judge(f"{slow}:late", {}, workers=1, deadline_s=0.5)
    with pytest.raises(JudgeError, match=r"longer than 0\.5 s"):
        judge(late, "")
    late.close()


def test_huge_and_odd_texts(math_pool: JudgePool) -> None:
    megabyte = "The angle is 5. " * 65_536
    assert judge(math_pool, megabyte).reward == -1.0
    assert judge(math_pool, megabyte + "\\boxed{5}").reward == 1.0
    assert judge(math_pool, "\x00\x1b \ud800 \\boxed{5}").reward == 1.0
    assert judge(math_pool, "").reward == -1.0


def test_golds(math_pool: JudgePool) -> None:
    math_pool.check_gold("\\frac{1}{2}")
    with pytest.raises(DataError, match="control character"):
        math_pool.check_gold("\x0crac{36}{13}")
    with pytest.raises(DataError, match=r"gold answer '9\^\{9.*took longer than 1 s"):
        math_pool.check_gold("9^{9^{9^{9}}}")
    with pytest.raises(DataError, match="cannot be judged: the rule 'math_verify' failed: raised TypeError"):
        math_pool.check_gold(["5"])  # type: ignore[arg-type]  # not a string: the rule itself fails
    with pytest.raises(DataError, match="task t/1: the gold answer ''"):
        judge(math_pool, "\\boxed{5}", a_task(""))
    with pytest.raises(DataError, match="task t/1 has no answer"):
        judge(math_pool, "\\boxed{5}", a_task(None))
    assert judge(math_pool, "\\boxed{5}").solved


def test_sixteen_judgements_on_two_workers_keep_their_order() -> None:
    pool = make_judge("geometry3k", {}, workers=2, deadline_s=5.0)
    assert isinstance(pool, JudgePool)

    async def run() -> list[Verdict]:
        judgements = (pool.judge(a_task(str(i)), f"\\boxed{{{i + i % 3}}}", ()) for i in range(16))
        return await asyncio.gather(*judgements)

    assert [verdict.solved for verdict in asyncio.run(run())] == [i % 3 == 0 for i in range(16)]
    assert len(set(pids(pool))) == 2
    pool.close()


def test_one_hostile_answer_does_not_hold_up_the_other_worker() -> None:
    pool = make_judge("math_verify", {}, workers=2, deadline_s=3.0)
    assert isinstance(pool, JudgePool)

    async def run() -> None:
        hostile = asyncio.ensure_future(pool.judge(a_task(), "\\boxed{9^{9^{9^{9}}}}", ()))
        others = await asyncio.gather(*(pool.judge(a_task(), "\\boxed{5}", ()) for _ in range(8)))
        assert all(verdict.solved for verdict in others)
        assert not hostile.done()
        hostile.cancel()

    asyncio.run(run())
    pool.close()


USER_FILE = '''
"""A user's reward."""
import os, signal, subprocess, sys, time
from dataclasses import dataclass

@dataclass
class Kept:
    calls: int = 0

kept = Kept()

def reward(task, text, history, images):
    kept.calls += 1
    print("a user may print")
    if text == "raise":
        raise KeyError("no such thing")
    if text == "hang":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    if text == "die":
        os._exit(7)
    if text == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        sys.exit(3)
    if text == "nan":
        return float("nan")
    if text == "none":
        return None
    if text == "bool":
        return True
    if text == "modules":
        return {"reward": 0.0, "feedback": " ".join(sys.modules)}
    if text == "calls":
        return {"reward": kept.calls}
    pixels = [(image.mode, image.size, image.getpixel((1, 0))) for image in images]
    return {"reward": 0.5, "solved": True, "feedback": repr((task, text, history, pixels)), "terms": {"a": 0.5}}

async def later(task, text, history, images):
    return 1.0

not_a_function = 3
'''


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(USER_FILE)
    return path


@pytest.fixture(scope="module")
def user_pool(user_file: Path) -> Iterator[JudgePool]:
    pool = make_judge(f"{user_file}:reward", {}, workers=1, deadline_s=DEADLINE_S)
    assert isinstance(pool, JudgePool)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", r"mine\.py:reward raised KeyError: 'no such thing' \(.*mine\.py, line 16\)"),
        ("hang", r"took longer than 1 s"),
        ("die", r"exited with code 7"),
        ("killed", r"was killed by SIGKILL"),
        ("exit", r"raised SystemExit: 3"),
        ("nan", r"mine\.py:reward returned reward=nan"),
        ("none", r"mine\.py:reward returned reward=None"),
    ],
)
def test_a_users_function_that_fails(user_pool: JudgePool, text: str, reason: str) -> None:
    with pytest.raises(JudgeError, match=f"(?s)task t/1: .*{reason}"):
        judge(user_pool, text)
    assert judge(user_pool, "bool") == Verdict(1.0, True)


def test_what_a_users_function_sees(user_pool: JudgePool) -> None:
    first = Image(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    second = Image(np.full((3, 5, 3), 9, np.uint8))
    special = SpecialTokens(end_of_turn=(0,))
    action = Segment(SegmentKind.ACTION, (1,), special, (), (-0.1,), (0,), StopReason.END_OF_TURN)
    turn = Turn((), action, "first try", tool_results=(ToolResult("here", (second,)),))
    task = a_task("5", (first,), unit="cm", hidden_image=second)
    verdict = judge(user_pool, "second try", task, (turn,))
    seen_task = {"id": "t/1", "answer": "5", "data_source": "test", "extra": {"unit": "cm"}}
    pixels = [("RGB", (2, 1), (4, 5, 6)), ("RGB", (5, 3), (9, 9, 9))]
    assert verdict == Verdict(0.5, True, repr((seen_task, "second try", ["first try"], pixels)), {"a": 0.5})
    assert "extra': {}" in str(judge(user_pool, "a", a_task("5", odd=object())).feedback)
    user_pool.check_gold("anything goes")


def test_a_worker_lives_on_and_imports_no_torch(user_pool: JudgePool) -> None:
    calls = judge(user_pool, "calls").reward
    assert judge(user_pool, "calls").reward == calls + 1
    modules = str(judge(user_pool, "modules").feedback).split()
    assert "npu_vlrl.types" in modules
    assert "torch" not in modules and "transformers" not in modules


def test_a_worker_that_died_while_idle_is_replaced(user_pool: JudgePool) -> None:
    assert judge(user_pool, "bool").solved
    os.kill(pids(user_pool)[0], 9)
    time.sleep(0.2)
    assert judge(user_pool, "bool").solved


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("{folder}/other.py:reward", r"no file .*/other\.py"),
        ("{file}:missing", r"mine\.py.*no plain function 'missing'"),
        ("{file}:not_a_function", r"no plain function"),
        ("{file}:later", r"no plain function"),
        ("{file}:", r"path/to/file\.py:function"),
        ("{folder}/broken.py:reward", r"broken\.py cannot be imported: ModuleNotFoundError: .*no_such_package"),
        ("{folder}/leaves.py:reward", r"leaves\.py cannot be imported: SystemExit"),
        ("{folder}/dies.py:reward", r"could be started.*exited with code 4"),
    ],
)
def test_a_users_function_that_cannot_be_used_fails_at_start(user_file: Path, spec: str, reason: str) -> None:
    user_file.with_name("broken.py").write_text("import no_such_package")
    user_file.with_name("leaves.py").write_text("raise SystemExit(1)")
    user_file.with_name("dies.py").write_text("import os; os._exit(4)")
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        make_judge("python", {"function": spec.format(folder=user_file.parent, file=user_file)}, 1, 1.0)


def test_a_users_function_in_the_home_folder(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(user_file.parent))
    pool = make_judge("python", {"function": "~/mine.py:reward"}, 1, 5.0)
    assert judge(pool, "bool").solved
    pool.close()


def test_unknown_rules_and_options() -> None:
    with pytest.raises(ValueError, match="unknown reward rule 'math_verfy'; did you mean 'math_verify'"):
        make_judge("math_verfy", {}, 1, 1.0)
    with pytest.raises(ValueError, match=r"unknown option of the rule 'tagged': 'format_wieght'; did you mean"):
        make_judge("tagged", {"format_wieght": 0.1}, 1, 1.0)
    with pytest.raises(ValueError, match=r"unknown option of the rule 'math_verify': 'zzz' \(known: none\)"):
        make_judge("math_verify", {"zzz": 0.1}, 1, 1.0)
    with pytest.raises(ValueError, match=r"'my/mk\.py' names no function of the file; write path/to/file\.py:function"):
        make_judge("my/mk.py", {}, 1, 1.0)
    with pytest.raises(ValueError, match="needs the option 'function'"):
        make_judge("python", {}, 1, 1.0)
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        make_judge("math_verify", {}, 0, 1.0)
    for deadline_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="deadline"):
            make_judge("math_verify", {}, 1, deadline_s)


def test_tagged_is_judged_in_place() -> None:
    judge_ = make_judge("tagged", {"choices": ["up", "down"]}, 1, 1.0)
    assert isinstance(judge_, InlineJudge)
    assert judge(judge_, "<answer>UP</answer>", a_task("up")).reward == pytest.approx(1.0)
    with pytest.raises(DataError, match="none of the choices"):
        judge_.check_gold("left")
    with pytest.raises(DataError, match="task t/1 has no answer"):
        judge(judge_, "<answer>UP</answer>", a_task(None))
    judge_.close()


def test_close_ends_the_processes_and_the_judgement_under_way(user_file: Path) -> None:
    pool = JudgePool("python", {"function": f"{user_file}:reward"}, workers=1, deadline_s=30.0)
    (pid,) = pids(pool)

    async def run() -> None:
        waiting = asyncio.ensure_future(pool.judge(a_task(), "hang", ()))
        await asyncio.sleep(0.3)
        pool.close()
        with pytest.raises(JudgeError, match="killed"):
            await waiting

    asyncio.run(run())
    assert not is_alive(pid)
    pool.close()  # twice is fine
    with pytest.raises(RuntimeError):
        judge(pool, "bool")


def test_a_forgotten_pool_ends_its_processes(user_file: Path) -> None:
    pool = JudgePool("python", {"function": f"{user_file}:reward"})
    assert judge(pool, "bool").solved
    (pid,) = pids(pool)
    assert is_alive(pid)
    del pool
    for _ in range(20):  # the pool's thread lets go of it a moment after the answer
        gc.collect()
        if not is_alive(pid):
            break
        time.sleep(0.1)
    assert not is_alive(pid)


def test_workers_end_with_the_program_even_if_it_is_killed(user_file: Path) -> None:
    """A program that leaves without closing, then one killed while its worker hangs: its supervisor ends that."""
    program = (
        "import asyncio, os, sys\n"
        "from npu_vlrl.types import Task\n"
        "from npu_vlrl.workflow.rewards import JudgePool\n"
        f"pool = JudgePool('python', {{'function': {str(user_file) + ':reward'!r}}}, 1, 1.0)\n"
        "print(pool._pool._workers[0]._process.pid, flush=True)\n"
        "if sys.argv[1] == 'hang':\n"
        "    import threading\n"
        "    threading.Timer(0.5, lambda: os.kill(os.getpid(), 9)).start()\n"
        "    asyncio.run(pool.judge(Task('t', (), '5', 'x'), 'hang', ()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for how in ("leave", "hang"):
        done = subprocess.run(
            [sys.executable, "-c", program, how],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == (0 if how == "leave" else -9)
        pid, ended_by = int(done.stdout), time.perf_counter() + PATIENCE_S
        while is_running(pid) and time.perf_counter() < ended_by:
            time.sleep(0.05)
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    """An orphan may stay as a zombie where nobody reaps it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_what_a_worker_says_on_its_socket(user_file: Path) -> None:
    """The same loop, in a thread of this process."""

    def talk(options: dict, *requests: tuple[dict, list[Image]]) -> list[dict]:
        ours, theirs = Pipe()
        setup = {"service": "npu_vlrl.workflow.rewards.worker", "options": options}
        thread = threading.Thread(target=serve, args=(theirs, setup))
        thread.start()
        replies = [receive(ours)[0]]
        for request, images in requests:
            send(ours, request, images)
            replies.append(receive(ours)[0])
        ours.close()
        thread.join(5)
        assert not thread.is_alive()
        return replies

    ready, right, gold, bad_gold, fault = talk(
        {"rule": "math_verify", "options": {}},
        ({"answer": "5", "text": "\\boxed{5}"}, []),
        ({"answer": "5"}, []),
        ({"answer": ""}, []),
        ({"answer": 5, "text": "\\boxed{5}"}, []),
    )
    assert ready == {"ready": True}
    assert right["verdict"]["reward"] == 1.0
    assert gold == {"verdict": None}
    assert "cannot be parsed" in bad_gold["data_error"]
    assert fault["error"].startswith("raised AttributeError")

    setup = {"rule": "python", "options": {"function": f"{user_file}:reward"}}
    request = {"task": {"id": "t"}, "text": "raise", "history": [], "messages": []}
    nines = Image(np.full((1, 2, 3), 9, np.uint8))
    _, broken, seen = talk(setup, (request, [nines]), ({**request, "text": "look"}, [nines]))
    assert "KeyError" in broken["error"]
    assert "('RGB', (2, 1), (9, 9, 9))" in seen["verdict"]["feedback"]
    (refused,) = talk({"rule": "python", "options": {"function": f"{user_file}:missing"}})
    assert "no plain function 'missing'" in refused["error"]
    (refused,) = talk({"rule": "python", "options": {"function": "nowhere.py:missing"}})
    assert "no file" in refused["error"]
    (refused,) = talk({"rule": "python", "options": {"function": "nowhere"}})
    assert "does not name a function" in refused["error"]
    (refused,) = talk({"rule": "python", "options": {}})
    assert refused["error"] == "KeyError: 'function'"
