"""Order, resuming and skipping."""

from __future__ import annotations

import gc
import io
import itertools
import json
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.data.source import TaskSource, surely_above, too_many
from npu_vlrl.tasks.arrow import arrow_task
from npu_vlrl.types import DataError
from npu_vlrl.workflow.rewards import make_judge


def write(path: Path, bad: set[int], rows: int) -> Path:
    with path.open("w") as file:
        for k in range(rows):
            prompt: list[Any] = [] if k in bad else [{"role": "user", "content": f"q{k}"}]
            record = {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": str(k)}}
            file.write(json.dumps(record) + "\n")
    return path


def ids(source: TaskSource, n: int) -> list[str]:
    return [task.id for task in source.next(n)]


def test_epochs_are_complete_and_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", set(), 12)
    source = TaskSource.from_records(path, seed=1)
    epochs = [ids(source, 12) for _ in range(3)]
    everything = [f"t/{k}" for k in range(12)]
    assert all(sorted(epoch) == sorted(everything) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, everything]}) == 4
    assert ids(TaskSource.from_records(path, seed=1), 12) == epochs[0]
    assert ids(TaskSource.from_records(path, seed=2), 12) != epochs[0]


def test_unshuffled_order_and_a_pass_apart_from_the_position(tmp_path: Path) -> None:
    source = TaskSource.from_records(write(tmp_path / "t.jsonl", {1}, 4), seed=1, shuffle=False)
    assert ids(source, 2) == ["t/0", "t/2"]
    assert [task.id for task in source.all()] == ["t/0", "t/2", "t/3"]
    assert ids(source, 3) == ["t/3", "t/0", "t/2"]


@given(before=st.integers(0, 60), seed=st.integers(0, 5), shuffle=st.booleans())
@settings(max_examples=40, deadline=None)
def test_resuming_gives_the_same_tasks_as_an_unbroken_run(
    before: int, seed: int, shuffle: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("d") / "t.jsonl", {2, 5}, 11)
    unbroken = TaskSource.from_records(path, seed, shuffle, max_skip_share=0.5)
    expected = ids(unbroken, before + 30)
    first = TaskSource.from_records(path, seed, shuffle, max_skip_share=0.5)
    assert ids(first, before) == expected[:before]
    state = json.loads(json.dumps(first.state_dict()))
    second = TaskSource.from_records(path, seed, shuffle, max_skip_share=0.5)
    second.load_state_dict(state)
    assert second.skipped == first.skipped
    assert ids(second, 30) == expected[before:]
    assert second.state_dict() == unbroken.state_dict()


def test_a_state_of_other_data_or_seed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", set(), 4)
    state = TaskSource.from_records(path, seed=1).state_dict()
    with pytest.raises(ValueError, match="other data: its seed is 1, here it is 2; resume with the same"):
        TaskSource.from_records(path, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="its shuffle is True"):
        TaskSource.from_records(path, seed=1, shuffle=False).load_state_dict(state)
    write(path, {0}, 4)
    with pytest.raises(ValueError, match="its content is"):
        TaskSource.from_records(path, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="its file is 't.jsonl', here it is 'u.jsonl'"):
        TaskSource.from_records(write(tmp_path / "u.jsonl", set(), 4), seed=1).load_state_dict(state)
    generated = TaskSource.generated(lambda index: arrow_task(1, index))
    with pytest.raises(ValueError, match="its kind is 'records', here it is 'generated'"):
        generated.load_state_dict(state)
    with pytest.raises(ValueError, match="its first_task is 'arrow/1/0', here it is 'arrow/2/0'"):
        TaskSource.generated(lambda index: arrow_task(2, index)).load_state_dict(generated.state_dict())


def test_generated_tasks() -> None:
    source = TaskSource.generated(lambda index: arrow_task(1, index))
    assert ids(source, 3) == ["arrow/1/0", "arrow/1/1", "arrow/1/2"]
    resumed = TaskSource.generated(lambda index: arrow_task(1, index))
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert ids(resumed, 1) == ["arrow/1/3"]
    assert [task.id for task in itertools.islice(source.all(), 2)] == ["arrow/1/0", "arrow/1/1"]
    assert source.skipped == {}


def test_bad_rows_are_skipped_and_told(tmp_path: Path) -> None:
    source = TaskSource.from_records(write(tmp_path / "t.jsonl", {3}, 40), seed=0)
    assert "t/3" not in ids(source, 39 * 2)
    message = "t.jsonl row 3, prompt: empty; give at least one message {role, content}"
    assert source.skipped == {"t.jsonl row 3": message}


def test_too_many_bad_rows_end_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", set(range(0, 40, 10)), 40)  # rows 0, 10, 20, 30: a tenth
    source = TaskSource.from_records(path, seed=0, shuffle=False, max_skip_share=0.05)
    ids(source, 18)  # rows 1..9 and 11..19: 20 rows seen, 2 of them bad, which the file may have
    with pytest.raises(DataError, match=r"t.jsonl: 3 of 21 rows were skipped, .* share 0.05; correct .*row 20, prompt"):
        source.next(1)
    assert len(ids(TaskSource.from_records(path, seed=0, shuffle=False, max_skip_share=0.1), 72)) == 72
    with pytest.raises(DataError, match="were skipped"):
        list(TaskSource.from_records(path, seed=0, max_skip_share=0.05).all())


def test_bad_rows_that_happen_to_come_first_do_not_end_the_run(tmp_path: Path) -> None:
    allowed = write(tmp_path / "t.jsonl", set(range(20)), 400)  # a twentieth; a tenth is allowed
    for seed in range(30):
        source = TaskSource.from_records(allowed, seed, max_skip_share=0.1)
        assert len(source.next(800)) == 800 and len(source.skipped) == 20
    at_the_limit = write(tmp_path / "u.jsonl", set(range(29)), 100)  # 0.29 * 100 < 29 in floating point
    for seed in range(100):
        TaskSource.from_records(at_the_limit, seed, max_skip_share=0.29).next(150)


def test_a_file_of_bad_rows_ends_the_run_at_once(tmp_path: Path) -> None:
    for bad in (1000, 800):
        path = write(tmp_path / "t.jsonl", set(range(bad)), 1000)
        for seed in range(10):
            source = TaskSource.from_records(path, seed, max_skip_share=0.1)
            with pytest.raises(
                DataError, match=r"t.jsonl: \d+ of 2\d rows were skipped, more than the allowed share 0.1"
            ):
                source.next(30)


def test_what_is_no_chance_any_more() -> None:
    """Against the exact binomial tail, which the bound may only exceed."""
    for share, seen in itertools.product((0.01, 0.1, 0.5, 0.9), (20, 200)):
        for bad in range(seen + 1):
            exact = sum(math.comb(seen, k) * share**k * (1 - share) ** (seen - k) for k in range(bad, seen + 1))
            if surely_above(share, bad, seen):
                assert exact < 1e-6
            else:
                assert bad <= seen * share or exact > 1e-9, "not much later than it could"
    assert surely_above(0.0, 1, 20) and not surely_above(1.0, 20, 20)


def test_an_empty_answer_is_a_bad_row_where_the_rule_needs_one(tmp_path: Path) -> None:
    record = {"data_source": "s", "prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": ""}}
    path = write(tmp_path / "t.jsonl", set(), 3)
    path.write_text(path.read_text() + json.dumps(record) + "\n")
    judge = make_judge("tagged", {}, workers=1, deadline_s=5.0)
    source = TaskSource.from_records(path, seed=0, max_skip_share=0.5, check_answer=judge.check_gold)
    assert sorted(ids(source, 6)) == sorted(2 * ["t/0", "t/1", "t/2"])
    told = "t.jsonl row 3, reward_model.ground_truth: empty, but the reward rule needs the right answer; fill it in"
    assert source.skipped == {"t.jsonl row 3": told}
    free = TaskSource.from_records(path, seed=0, check_answer=lambda answer: None)  # as of a user's own function
    assert "t/3" in ids(free, 4) and not free.skipped


def test_the_first_rows_are_tried_and_come_again(tmp_path: Path) -> None:
    """Trying changes neither the order nor what was counted."""
    path = write(tmp_path / "t.jsonl", {3}, 40)
    made, again = (TaskSource.from_records(path, seed=0) for _ in range(2))
    made.try_first()
    assert made.skipped == {} and made.state_dict() == again.state_dict()
    assert ids(made, 60) == ids(again, 60)
    assert made.state_dict() == again.state_dict()


def test_a_file_without_a_good_row_ends_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {0, 1, 2}, 3)
    for use in (lambda s: s.next(1), lambda s: list(s.all())):
        with pytest.raises(DataError, match="t.jsonl: none of its 3 rows can be used; the last one: .*prompt: empty"):
            use(TaskSource.from_records(path, seed=0, max_skip_share=1.0))


def test_other_errors_are_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a mistake in the program")

    monkeypatch.setattr("npu_vlrl.data.records.task_from_record", broken)
    with pytest.raises(KeyError):
        TaskSource.from_records(write(tmp_path / "t.jsonl", set(), 3), seed=0).next(1)


def test_images_die_with_their_tasks(tmp_path: Path) -> None:
    rows = []
    for k in range(64):
        file = io.BytesIO()
        PIL.Image.fromarray(np.full((400, 500, 3), k, np.uint8)).save(file, "PNG")
        prompt = [{"role": "user", "content": "<image>q"}]
        images = [{"bytes": file.getvalue()}]
        rows.append({"data_source": "s", "prompt": prompt, "images": images, "reward_model": {"ground_truth": "1"}})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    source = TaskSource.from_records(tmp_path / "t.parquet", seed=0)
    refs: list[weakref.ref[Any]] = []
    for _ in range(4):
        tasks = source.next(16)
        refs += [weakref.ref(task.images[0]) for task in tasks]
        assert sum(ref() is not None for ref in refs) == 16
        del tasks
        gc.collect()
        assert not any(ref() for ref in refs)
    assert len(refs) == 64


def test_tasks_that_were_not_finished_come_first_and_nothing_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {1}, 6)
    source = TaskSource.from_records(path, seed=1, shuffle=False, max_skip_share=0.5)
    drawn = [source.draw() for _ in range(4)]
    assert [(position, task.id) for position, task in drawn] == [(0, "t/0"), (2, "t/2"), (3, "t/3"), (4, "t/4")]
    state = json.loads(json.dumps(source.state_dict([2, 4])))
    resumed = TaskSource.from_records(path, seed=1, shuffle=False, max_skip_share=0.5)
    resumed.load_state_dict(state)
    assert resumed.draw()[1].id == "t/2"
    again = resumed.state_dict([2])
    assert again["again"] == [2, 4], "what was not drawn yet is kept"
    assert ids(resumed, 3) == ["t/4", "t/5", "t/0"]
    # every row that was not skipped counts once, however often it was drawn
    assert resumed.state_dict()["seen"] == 7 and source.state_dict()["seen"] == 5


def test_an_older_state_has_nothing_to_play_again() -> None:
    source = TaskSource.generated(lambda index: arrow_task(0, index, 56, 28))
    state = source.state_dict()
    del state["again"]
    source.load_state_dict(state | {"position": 3})
    assert source.draw()[0] == 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("bad", [set(), set(range(15)), set(range(60, 75)), set(range(0, 200, 7)), {199}])
def test_where_a_run_ends_is_known_from_one_pass(tmp_path: Path, bad: set[int], shuffle: bool) -> None:
    """Compared with runs that draw an epoch, and with passes such as evaluations make."""
    path = write(tmp_path / "t.jsonl", bad, 200)
    lenient = TaskSource.from_records(path, 3, shuffle, max_skip_share=1.0)
    list(lenient.all())

    def read(source: TaskSource, tasks: int | None) -> int | None:
        try:
            for _ in source.next(201 - len(bad)) if tasks is None else itertools.islice(source.all(), tasks or None):
                pass
        except DataError as error:
            return int(str(error).split(" of ")[1].split(" rows")[0])
        return None

    for share in (0.0, 0.05, 0.1, 0.5):
        for tasks in (None, 0, 10, 50):
            strict = TaskSource.from_records(path, 3, shuffle, max_skip_share=share)
            assert lenient.ends_after(share, tasks) == read(strict, tasks)


def test_too_many_bad_rows() -> None:
    """A tenth is allowed; of 100 rows, of which 20 or more were seen."""
    assert not too_many(0.1, bad=19, failures=19, seen=19, rows=100) and too_many(0.1, 19, 19, 20, 100)
    assert not too_many(0.1, bad=10, failures=10, seen=100, rows=100) and too_many(0.1, 11, 11, 100, 100)
