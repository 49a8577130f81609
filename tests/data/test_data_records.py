"""Rows of every container and every way in which a row can be wrong."""

from __future__ import annotations

import base64
import datetime
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings, strategies

from npu_vlrl.data.files import read_records
from npu_vlrl.data.records import control_character, load_tasks, task_from_record
from npu_vlrl.data.values import TimeText
from npu_vlrl.types import DataError, Image, Message

WHERE = "train.parquet row 17"


def png(level: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (2, 2), (level,) * 3).save(file, "PNG")
    return file.getvalue()


def an_image(level: int) -> Image:
    return Image(np.full((2, 2, 3), level, np.uint8))


def row(**changes: Any) -> dict[str, Any]:
    record = {
        "data_source": "geo",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": png(1), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "13"},
        "extra_info": {"split": "train", "index": 3, "id": None},
    }
    return {key: value for key, value in (record | changes).items() if value != "DELETED"}


def content(value: Any, **changes: Any) -> dict[str, Any]:
    return row(prompt=[{"role": "user", "content": value}], **changes)


def test_a_row_of_verls_schema(tmp_path: Path) -> None:
    task = task_from_record(row(), WHERE, tmp_path)
    assert task.id == WHERE and task.answer == "13" and task.data_source == "geo"
    assert task.messages == (Message("user", (an_image(1), "Find x.")),)
    assert task.extra == {"split": "train", "index": 3}


def test_tags_take_images_in_order_across_messages(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "Look well."},
        {"role": "user", "content": "a<image>b<image>"},
        {"role": "assistant", "content": "seen"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and\n"}]},
    ]
    task = task_from_record(row(prompt=prompt, images=[{"bytes": png(k)} for k in (1, 2, 3)]), WHERE, tmp_path)
    assert [message.parts for message in task.messages] == [
        ("Look well.",),
        ("a", an_image(1), "b", an_image(2)),
        ("seen",),
        (an_image(3), "and\n"),
    ]
    swapped = task_from_record(row(prompt=prompt, images=[{"bytes": png(k)} for k in (2, 1, 3)]), WHERE, tmp_path)
    assert swapped.messages != task.messages


def test_every_way_to_give_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(7))
    both, no_bytes = {"bytes": png(7), "path": "gone.png"}, {"bytes": None, "path": "a.png"}
    text = base64.b64encode(png(7)).decode()  # as JSON lines have it
    written = [{"bytes": text}, f"data:image/png;base64,{text}", {"path": f"data:image/png;base64,{text}"}]
    for image in (png(7), "a.png", {"path": "a.png"}, both, no_bytes, *written):
        assert task_from_record(row(images=[image]), WHERE, tmp_path).images == (an_image(7),)
        inline = content([{"type": "image", "image": image}, {"type": "text", "text": "q", "image": None}], images=None)
        assert task_from_record(inline, WHERE, tmp_path).messages[0].parts == (an_image(7), "q")


def test_literal_tags_stay_text_in_parts_and_answers(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What does <image> mean in HTML?"}]
    record = content(parts, images=[], reward_model={"ground_truth": "<image>"})
    task = task_from_record(record, WHERE, tmp_path)
    assert task.messages[0].parts == ("What does <image> mean in HTML?",) and task.answer == "<image>"


GOLDS = [
    *[
        ("13", "13"),
        (5, "5"),
        (2.5, "2.5"),
        ("", None),
        (" ", None),
        ("a\nb", "a\nb"),
        ("5.0", "5.0"),
        ("1e-05", "1e-05"),
    ],
    *[(5.0, "5"), (1e-05, "0.00001"), (1e16, "10000000000000000"), (Decimal("7.50"), "7.5"), (np.int64(3), "3")],
    *[(np.float32(0.1), "0.1"), (10**30, "1" + "0" * 30), (np.str_("up"), "up")],
]


@pytest.mark.parametrize(("gold", "answer"), GOLDS)
def test_golds(gold: Any, answer: str | None, tmp_path: Path) -> None:
    assert task_from_record(row(reward_model={"ground_truth": gold}), WHERE, tmp_path).answer == answer


def message(**keys: Any) -> dict[str, Any]:
    return row(prompt=[{"role": "user", "content": "<image>?", **keys}])


def part(**keys: Any) -> dict[str, Any]:
    return content([{"type": "image", **keys}])


BAD = {
    "more tags": (content("<image><image>q"), r"prompt\[0\].content: more <image> tags .*add the missing image"),
    "tag, no image": (row(images=[]), r"prompt\[0\].content: more <image> tags .*list of parts"),
    "tag, images null": (row(images=None), "more <image> tags"),
    "image, no tag": (content("q"), "images: 1 images, but the prompt has fewer <image> tags .* once for each image"),
    "part, no image": (content([{"type": "image"}], images=None), "more <image> tags"),
    "no data_source": (row(data_source="DELETED"), "data_source: missing"),
    "data_source type": (row(data_source=3), "data_source: expected str, got int 3; change its type"),
    "no prompt": (row(prompt="DELETED"), "prompt: missing"),
    "prompt type": (row(prompt="Find x"), "prompt: expected list, got str"),
    "empty prompt": (row(prompt=[]), "prompt: empty; give at least one message"),
    "message type": (row(prompt=["q"]), r"prompt\[0\]: expected dict, got str"),
    "no role": (row(prompt=[{"content": "q"}]), r"prompt\[0\].role: missing"),
    "unknown role": (row(prompt=[{"role": "human", "content": "q"}]), "role: unknown role 'human'; use one of system"),
    "no content": (content(None), r"prompt\[0\].content: missing"),
    "content type": (content(3), r"prompt\[0\].content: expected list, got int"),
    "empty content": (content("", images=None), r"prompt\[0\].content: empty; give the message a text"),
    "empty parts": (content([], images=None), r"prompt\[0\].content: empty"),
    "null part": (content([None]), r"prompt\[0\].content\[0\]: missing"),
    "part type": (content([{"type": "audio"}]), r"prompt\[0\].content\[0\].type: 'audio' is not supported"),
    "part text": (content([{"type": "text"}]), r"prompt\[0\].content\[0\].text: missing"),
    "part image": (content([{"type": "image", "image": 3}]), r"content\[0\].image: expected bytes, a path.* got int"),
    "null byte": (content("<image>a\0b"), r"prompt\[0\].content: the text contains a null byte; remove it"),
    "null byte in part": (content([{"type": "text", "text": "\0"}]), r"content\[0\].text: .* null byte"),
    "surrogate": (content("<image>\ud800"), r"prompt\[0\].content: .*surrogate"),
    "images type": (row(images="a.png"), "images: expected list, got str"),
    "image type": (row(images=[3]), r"images\[0\]: expected bytes, a path"),
    "image without both": (row(images=[{"bytes": None, "path": None}]), r"images\[0\]: expected bytes, a path"),
    "image bytes": (row(images=[{"bytes": b"x"}]), r"images\[0\]: not an image"),
    "image zero bytes": (row(images=[{"bytes": b""}]), r"images\[0\]: the image has zero bytes"),
    "image text": (row(images=[{"bytes": "a.png"}]), r"images\[0\]: the bytes 'a.png' are text, but not base64"),
    "image base64": (row(images=["iVBORw0KGgo" * 999]), r"images\[0\]: the image file 'iVBO.{70,80}' cannot be read"),
    "image uri": (row(images=["data:image/png;base64,AAAA"]), r"images\[0\]: not an image that can be read"),
    "image path": (row(images=["gone.png"]), r"images\[0\]: there is no image file"),
    "image outside": (row(images=["../../etc/x.png"]), r"images\[0\]: the image path .* leaves"),
    "address": (row(images=["https://a.b/c.png"]), r"images\[0\]: 'https.*' is an address; download"),
    "EasyR1's columns": (
        {"images": [], "problem": "Find x.", "answer": "5"},
        "data_source, prompt, reward_model: missing; the row has the columns 'images, problem, answer'; write rows as "
        "in docs/data.md, or say .*, as in data.train.columns.prompt=problem data.train.columns.answer=answer$",
    ),
    "no columns that are known": (
        row(prompt="DELETED", data_source="DELETED"),
        "data_source, prompt: missing; the row has the columns 'images, reward_model, extra_info'; write rows as",
    ),
    "no reward_model": (row(reward_model="DELETED"), "reward_model: missing"),
    "reward_model type": (row(reward_model="13"), "reward_model: expected dict, got str"),
    "no gold": (row(reward_model={"style": "rule"}), "reward_model.ground_truth: missing; give the right answer"),
    "gold list": (row(reward_model={"ground_truth": ["1"]}), "reward_model.ground_truth: .* got list"),
    "gold numpy bool": (row(reward_model={"ground_truth": np.bool_(True)}), "reward_model.ground_truth: .* got bool"),
    "gold date": (row(reward_model={"ground_truth": datetime.date(2024, 1, 2)}), "ground_truth: .* got date"),
    "gold time": (row(reward_model={"ground_truth": TimeText("2024-01-02")}), "ground_truth: .* got a date or time"),
    "gold digits": (row(reward_model={"ground_truth": Decimal("1e500")}), "ground_truth: .*too many digits.*correct"),
    "gold bool": (row(reward_model={"ground_truth": True}), "reward_model.ground_truth: .* got bool"),
    "gold nan": (row(reward_model={"ground_truth": float("nan")}), "reward_model.ground_truth: .*not finite"),
    "gold form feed": (row(reward_model={"ground_truth": "\x0crac{1}{2}"}), "ground_truth: .*U\\+000C.*at its source"),
    "gold tab": (row(reward_model={"ground_truth": "\theta"}), "ground_truth: .*U\\+0009"),
    "gold null byte": (row(reward_model={"ground_truth": "1\0"}), "ground_truth: .*null byte"),
    "extra type": (row(extra_info="x"), "extra_info: expected dict, got str"),
    "extra id bool": (row(extra_info={"id": True}), "extra_info.id: expected str or int"),
    "extra id": (row(extra_info={"id": [1]}), "extra_info.id: expected str or int"),
    "extra type inside": (
        row(extra_info={"a": [object()]}),
        r"extra_info.a\[0\]: object .*no form in JSON; change its",
    ),
    "extra surrogate": (row(extra_info={"id": "\ud800"}), "extra_info.id: the text contains half of a surrogate pair"),
    "answer in prompt": (
        row(prompt=[{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "13"}]),
        r"prompt\[1\]: the prompt ends with a message of the assistant, .* reward_model.ground_truth",
    ),
    "tool calls": (
        row(prompt=[{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, *row()["prompt"]]),
        r"prompt\[0\].tool_calls: write the calls into its content",
    ),
    "thought": (message(reasoning_content="hm"), r"prompt\[0\].reasoning_content: write it into its content"),
    "name": (message(name="Ann"), r"prompt\[0\].name: nothing uses it, only role and content; rename or remove"),
    "weight": (message(weight=0), r"prompt\[0\].weight: nothing uses it"),
    "limit of a part": (part(max_pixels=50176), r"content\[0\].max_pixels: images have no limits of their own"),
    "side of a part": (part(resized_width=280), r"content\[0\].resized_width: images have no limits"),
    "key of a part": (part(detail="low"), r"content\[0\].detail: nothing uses it, only type and image; rename"),
    "text of an image part": (part(text="Look!"), r"content\[0\].text: nothing uses it, only type and image"),
    "image of a text part": (
        content([{"type": "text", "text": "q", "image": "a.png"}]),
        r"content\[0\].image: nothing uses it, only type and text",
    ),
    "limit of an image": (
        row(images=[{"bytes": png(1), "min_pixels": 9}]),
        r"images\[0\].min_pixels: images have no",
    ),
    "key of an image": (row(images=[{"bytes": png(1), "caption": "x"}]), r"images\[0\].caption: nothing uses it, only"),
    "tools": (
        row(tools=[{"type": "function"}]),
        "tools: a row brings no tools; name those of all rows in workflow.tools",
    ),
    "sounds": (row(audios=["a.wav"]), "audios: sounds are not supported"),
    "an image column": (
        row(prompt=[{"role": "user", "content": "?"}], images="DELETED", image={"bytes": png(1)}),
        "image: nothing uses it, so the model would be blind; name the column `images`, or set columns.images=image",
    ),
    "a video": (row(video="a.mp4"), "video: videos are not supported"),
    "a sound": (row(audio="a.wav"), "audio: sounds are not supported"),
    "videos": (row(videos=[{"path": "a.mp4"}]), "videos: videos are not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_name_row_field_and_remedy(name: str, tmp_path: Path) -> None:
    record, words = BAD[name]
    with pytest.raises(DataError, match=f"{WHERE}, .*{words}"):
        task_from_record(record, WHERE, tmp_path)


def test_keys_that_say_nothing_are_no_loss(tmp_path: Path) -> None:
    """Tables give each struct all fields of its type, and null where a row has none."""
    empty: dict[str, Any] = {"name": None, "tool_calls": [], "reasoning_content": "", "prefix": False}
    limits = {"max_pixels": None, "resized_height": None}
    prompt = [{"role": "user", "content": [{"type": "image", "text": None, **limits}], **empty}]
    extra = {"need_tools_kwargs": False, "tools_kwargs": {"zoom": {"create_kwargs": None}}, "index": 3}
    images = [{"bytes": png(1), "path": None, **limits}]
    record = row(prompt=prompt, images=images, extra_info=extra, tools=[], videos=None, image=None)
    assert task_from_record(record, WHERE, tmp_path).messages == (Message("user", (an_image(1),)),)


KEYS = strategies.sampled_from(
    [*["role", "content", "type", "text", "image", "bytes", "path", "style", "ground_truth", "id"]]
    + ["tool_calls", "max_pixels", "tools_kwargs", "other"]
)
JSON = strategies.recursive(
    strategies.one_of(
        *[strategies.none(), strategies.booleans(), strategies.integers(), strategies.floats(), strategies.text()],
        *[strategies.sampled_from(["user", "assistant", "text", "image", "<image>", "1e999", "\ud800"])],
        *[strategies.dates(), strategies.timedeltas(), strategies.decimals(), strategies.binary(max_size=4)],
    ),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["data_source", "prompt", "images", "reward_model", "extra_info", "tools", "videos", "image", "other"]


@settings(max_examples=300, deadline=None)
@hypothesis.given(strategies.dictionaries(strategies.sampled_from(FIELDS), JSON))
def test_whatever_a_row_holds_it_is_a_task_or_refused(changes: dict[str, Any]) -> None:
    """No other exception, which would end a run; what a task got, judges get as JSON."""
    try:
        task = task_from_record(row(**changes), WHERE, Path("/nowhere"))
    except DataError as error:
        assert str(error).startswith(f"{WHERE}, ")
    else:
        json.dumps(dict(task.extra))
        assert task.messages[-1].role != "assistant"


def test_control_characters() -> None:
    assert [control_character(text) for text in ("\\frac{1}{2}\n°", "a\x07", "\x9f")] == [None, "U+0007", "U+009F"]


def save(path: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    if kind == "jsonl":
        path = path / "train.jsonl"
        lines = [json.dumps(r | {"images": ["a.png"]}) for r in rows]
        path.write_text("\n" + "\n\n".join(lines) + "\n")
        (path.parent / "a.png").write_bytes(png(1))
    elif kind == "parquet":
        path = path / "train.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    else:  # the layout of datasets' save_to_disk, checked once against the library
        path = path / "train"
        path.mkdir()
        names = [f"data-{k:05d}-of-00002.arrow" for k in range(2)]
        for name, part in zip(names, (rows[:4], rows[4:]), strict=True):
            table = pa.Table.from_pylist(part, pa.Table.from_pylist(rows).schema)
            with pa.ipc.new_stream(path / name, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None}))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_containers_give_any_row_in_any_order(kind: str, tmp_path: Path) -> None:
    rows = [row(reward_model={"ground_truth": str(k)}, extra_info={"split": "x"}) for k in range(10)]
    rows[4]["extra_info"] = {"split": "x", "id": "four"}
    path = save(tmp_path, rows, kind)
    tasks = load_tasks(path)
    assert len(tasks) == len(read_records(path)) == 10
    for k in (9, 0, 4, 3, 9):
        task = tasks[k]
        assert task.answer == str(k) and task.images == (an_image(1),)
        assert task.id == ("train/four" if k == 4 else f"train/{k}")
    assert tasks.records.where(2) == f"{path.name} row 2"
    for outside in (10, -1):
        with pytest.raises(IndexError, match="rows 0 to 9"):
            tasks[outside]


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    path = save(tmp_path, [row()], "parquet")
    before = read_records(path).fingerprint
    assert read_records(path).fingerprint == before
    pq.write_table(pa.Table.from_pylist([row(reward_model={"ground_truth": "14"})]), path)
    assert read_records(path).fingerprint != before


def test_parquet_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spill))
    tasks = load_tasks(save(tmp_path, [row()], "parquet"))
    assert not list(spill.iterdir()) and tasks[0].answer == "13"


def test_a_full_disk_is_not_the_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = save(tmp_path, [row()], "parquet")
    monkeypatch.setattr("npu_vlrl.data.files.pa.ipc.new_stream", full)
    with pytest.raises(DataError, match="train.parquet: its copy does not fit into the temporary folder .* TMPDIR"):
        read_records(path)


def test_damaged_lines_name_their_row(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n"\xff"\n' + b"[" * 100000 + b"\n")
    records = read_records(path)
    assert records[0] == {"a": 1}
    for number, words in enumerate(("Expecting value", "an object is expected, got list", "decode", "recursion"), 1):
        with pytest.raises(DataError, match=f"t.jsonl row {number}: the row cannot be read .*{words}.*write it again"):
            records[number]


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        with pytest.raises(DataError, match=words):
            load_tasks(path)

    refused(tmp_path / "gone.parquet", "gone.parquet: there is no such file or folder")
    (tmp_path / "a.csv").write_text("x")
    refused(tmp_path / "a.csv", "a.csv: unknown kind of file; use .parquet, .jsonl")
    (tmp_path / "a.parquet").write_text("x")
    refused(tmp_path / "a.parquet", "a.parquet: cannot be read")
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(tmp_path / "empty.jsonl", "empty.jsonl: there are no rows")
    refused(tmp_path, "no state.json.; name a file inside")
    (tmp_path / "dataset_dict.json").write_text("{}")
    refused(tmp_path, "name one split inside")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("{", "lists no data files"),
        ('{"_data_files": 3}', "lists no data files"),
        ("{}", "lists no data files"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "leaves the folder"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "cannot be read"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}', "flatten_indices"),
        ('{"_data_files": []}', "there are no rows"),
    ],
)
def test_broken_save_to_disk_folders(tmp_path: Path, state: str, words: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=words):
        load_tasks(tmp_path)
