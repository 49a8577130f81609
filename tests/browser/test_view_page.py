"""The page of `npu-vlrl view` as a person uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.report.view.page import write_page
from npu_vlrl.report.view.records import RunRecords
from tests.support.scripted import a_task, encode
from tests.support.viewed import (
    DRAW,
    HUGE,
    SEEN,
    as_of_old,
    change_records,
    copied,
    failed,
    record_group,
    run_folder,
    until,
)

BLUE, ORANGE = "rgba(51, 122, 235, 0.76)", "rgba(235, 118, 30, 0.76)"
"""The strongest colours of an advantage: alpha is 0.06 + 0.7."""

TO_THE_END = "document.querySelector('#stage').scrollTop = 1e9"

FOCUSED = """(() => {
    const one = document.activeElement;
    return [one.id || one.name || one.className, getComputedStyle(one).outlineStyle];
})()"""

NUMBERS = {
    "log-probability": "−0.03",
    "learner's": "−0.032",
    "entropy": "0.2",
    "gap": "−0.002",
    "advantage": "−0.375",
    "version": "3",
}
"""Of the third token of a second member."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "run"
    made = run_folder(folder)
    for step in range(3):
        record_group(made, step, f"step{step}.0/0/t/1", members=3)
    record_group(made, 3, "step3.0/0/t/1", a_task(HUGE, "Which way is <b>up</b>?"))
    made.trajectories(3, [failed("step3.0/1/t/1")], {})
    return folder


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    write_page(RunRecords(run), run.parent / "view.html")
    return run.parent / "view.html"


def written(run: Path) -> Path:
    write_page(RunRecords(run), run / "view.html")
    return run / "view.html"


def chosen(page: Any) -> str:
    return page.evaluate("decodeURIComponent(location.hash.slice(1))")


def names(page: Any) -> list[str]:
    return page.eval_on_selector_all("#list .row", "rows => rows.map((row) => row.innerText)")


def colours(page: Any, turn: int = 1) -> list[str]:
    spans = f".turn:nth-of-type({turn}) .action .tokens:not(.opening) .t"
    return page.eval_on_selector_all(spans, "all => all.map((one) => one.style.backgroundColor)")


def test_a_trajectory_turn_by_turn(show: Callable[..., Any], file: Path) -> None:
    shown = show(file)
    page = shown.ready()
    assert page.inner_text("#count") == "12 trajectories"
    roles = page.eval_on_selector_all("#stage .role", "all => all.map((one) => one.innerText)")
    assert [role.split()[0] for role in roles if role] == ["system", "user", "assistant", "user", "assistant"]
    assert page.inner_text("article .summary h2") == "t/1 · member 0"
    first, second = page.query_selector_all(".action")
    assert DRAW in first.inner_text() and "<|im_end|>" not in first.inner_text()  # quiet until tokens are coloured
    assert "draw_line" in first.query_selector(".tool").inner_text()
    assert '"start": [\n    2,' in first.query_selector("pre").inner_text()
    outcome = second.query_selector(".outcome").inner_text()
    for words in ("reward +0.25", "accuracy 0", "format +0.25", "not solved", "advantage +0.5", "end of turn"):
        assert words in outcome
    assert "feedback" not in second.inner_text()  # the episode ended: nobody was told anything
    assert shown.requests == [f"file://{file}"]  # and nothing else, ever: `show` looks for errors


def test_images_have_the_resolution_of_the_model_and_open_at_full_size(show: Callable[..., Any], file: Path) -> None:
    page = show(file, "#step3.0/0/t/1/0").ready()
    page.evaluate(TO_THE_END)
    until(page, "document.querySelectorAll('#stage canvas[data-drawn]').length === 2")
    sizes = page.eval_on_selector_all("#stage canvas", "all => all.map((c) => [c.width, c.height, c.clientWidth])")
    assert sizes == [[308, 140, 308], [308, 140, 308]]  # the model has it shrunk from 448 x 224
    left, right = page.evaluate(
        "(() => { const c = document.querySelector('#stage canvas').getContext('2d');"
        " return [c.getImageData(5, 10, 1, 1).data[0], c.getImageData(5, 120, 1, 1).data[0]]; })()"
    )
    assert abs(left - 16) <= 2 and abs(right - 192) <= 2  # the grey of each row of the stored image is its number
    page.click("#stage .open")
    until(page, "document.querySelector('#full img').naturalWidth === 448")
    assert page.get_attribute("#full img", "src").startswith("blob:")
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('#full').open")
    page.keyboard.press("k")
    small = show(file, "#step0.0/0/t/1/0").ready()
    small.evaluate(TO_THE_END)
    until(small, "document.querySelectorAll('#stage canvas[data-drawn]').length === 2")
    assert (
        small.eval_on_selector_all("#stage canvas", "all => all.map((c) => [c.width, c.clientWidth])")
        == [[56, 224]] * 2
    )
    captions = small.eval_on_selector_all("#stage .image small", "all => all.map((one) => one.innerText)")
    assert captions[0] == "56×56 seen · 4 tokens · 56×56 stored · drawn 4×"


def test_keys(show: Callable[..., Any], file: Path) -> None:
    page = show(file).ready()
    assert chosen(page) == "step0.0/0/t/1/0"
    for key, expected in (("j", "step0.0/0/t/1/1"), ("j", "step0.0/0/t/1/2"), ("k", "step0.0/0/t/1/1")):
        page.keyboard.press(key)
        until(page, f"decodeURIComponent(location.hash.slice(1)) === '{expected}'")
    page.keyboard.press("g")
    until(page, "document.querySelectorAll('.column').length === 3")
    assert page.get_attribute("#group", "aria-pressed") == "true"
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('.column').length === 0")
    page.keyboard.press("c")
    assert page.input_value("#colour") == "mask"
    page.keyboard.press("Shift+C")
    assert page.input_value("#colour") == "none"
    page.keyboard.press("/")
    page.keyboard.type("jjgc?")  # words, not commands
    assert page.input_value("[name=search]") == "jjgc?" and page.input_value("#colour") == "none"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement === document.body")
    page.keyboard.press("?")
    assert page.is_visible("#help") and "previous trajectory" in page.inner_text("#help")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")


def test_everything_is_reached_by_tab_and_seen(show: Callable[..., Any], file: Path) -> None:
    page = show(file).ready()
    until(page, "document.querySelectorAll('#stage .open').length === 2")
    wanted = {"colour", "group", "theme", "keys", "search", "row", "open"}
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(FOCUSED)
        seen.add(name)
        assert outline == "solid" or name == "stage" or name == "", name
    assert wanted <= seen
    page.focus("#list .row")
    page.keyboard.press("ArrowDown")
    until(page, "document.activeElement.dataset.at === '1' && document.activeElement.ariaCurrent === 'true'")


FILTERS = [
    ({"search": "which way is <b>"}, ["step3.0/0/t/1/0", "step3.0/0/t/1/1"]),
    ({"search": "too long"}, ["step3.0/1/t/1/0"]),
    ({"solved": "first", "step_to": "0"}, ["step0.0/0/t/1/1"]),
    ({"step_from": "1", "step_to": "1"}, [f"step1.0/0/t/1/{i}" for i in range(3)]),
    ({"reward_from": "0.5", "reward_to": "1"}, [f"step{s}.0/0/t/1/1" for s in range(4)]),
    ({"status": "=failed"}, ["step3.0/1/t/1/0"]),
    ({"stop": "=end_of_turn", "group": "step2"}, [f"step2.0/0/t/1/{i}" for i in range(3)]),
    ({"order": "best", "step_to": "0"}, [f"step0.0/0/t/1/{i}" for i in (1, 0, 2)]),
    ({"order": "newest", "step_from": "3"}, ["step3.0/1/t/1/0", "step3.0/0/t/1/1", "step3.0/0/t/1/0"]),
    ({"task": "no such task"}, []),
    (
        {"phase": "=step", "source": "=test", "step_from": "3"},
        ["step3.0/0/t/1/0", "step3.0/0/t/1/1", "step3.0/1/t/1/0"],
    ),
]


def test_filters_search_and_order(show: Callable[..., Any], file: Path) -> None:
    page = show(file).ready()
    ids = RunRecords(file.parent / "run").rows
    for given, expected in FILTERS:
        page.click("#reset")
        for name, value in given.items():
            field = page.locator(f"#filters [name={name}]")
            field.select_option(value) if field.evaluate("one => one.tagName") == "SELECT" else field.fill(value)
        count = f"{len(expected)} of 12 trajectories"
        until(page, f"document.querySelector('#count').innerText === '{count}'")
        shown = page.eval_on_selector_all("#list .row", "rows => rows.map((row) => Number(row.dataset.at))")
        assert [ids[place][1] for place in shown] == expected, given
    page.click("#reset")
    until(page, "document.querySelector('#count').innerText === '12 trajectories'")


def test_tokens_are_coloured_by_what_is_asked_for(show: Callable[..., Any], file: Path) -> None:
    page = show(file, "#step0.0/0/t/1/1").ready()  # its advantages are negative: -(place + 1) / 8
    n = len(encode(DRAW)) + 1
    page.select_option("#colour", "advantage")
    found = colours(page)
    assert len(found) == n and found[-1] == ORANGE and len(set(found)) == n
    alphas = [float(colour.rpartition(",")[2][:-1]) for colour in found]
    expected = [0.06 + 0.7 * (place + 1) / n for place in range(n)]
    assert alphas == pytest.approx(expected, abs=0.006)  # browsers keep 8 bits
    assert page.inner_text("#legend").split() == [f"−{n / 8:.4g}", f"{n / 8:.4g}"]
    context = page.eval_on_selector_all(".message:not(.action) .t", "all => all.map((t) => t.style.backgroundColor)")
    assert context and set(context) == {""}
    page.select_option("#colour", "version")
    assert len(set(colours(page))) == 1 and page.inner_text("#legend") == "3"
    page.select_option("#colour", "mask")
    assert page.inner_text("#legend").split("\n") == ["trained", "sampled, not trained", "context"]
    page.select_option("#colour", "gap")  # -0.001 · place
    gaps = [float(c.rpartition(",")[2][:-1]) for c in colours(page)]
    assert gaps[0] == pytest.approx(0.06, abs=0.005) and gaps == sorted(gaps)
    page.select_option("#colour", "entropy")
    assert page.inner_text("#legend").split() == ["0", f"{0.1 * (n - 1):.4g}"]
    page.hover(".action .tokens:not(.opening) .t:nth-child(3)")
    tip = page.inner_text("#tip").split("\n")
    for name, value in NUMBERS.items():
        assert tip[tip.index(name) + 1].split(" ")[0].split("\u00a0")[0] == value, name
    page.select_option("#colour", "none")
    assert set(colours(page)) == {""}


def test_siblings_stand_side_by_side_with_their_common_question_once(show: Callable[..., Any], file: Path) -> None:
    page = show(file, "#step1.0/0/t/1/1").ready()
    page.click("#group")
    until(page, "document.querySelectorAll('.column').length === 3")
    boxes = [column.bounding_box() for column in page.query_selector_all(".column")]
    assert boxes[0]["y"] == boxes[1]["y"] == boxes[2]["y"] and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    assert page.inner_text("#stage").count("Which way?") == 1
    assert "chosen" in page.query_selector_all(".column")[1].get_attribute("class")
    page.select_option("#colour", "advantage")
    columns = page.query_selector_all(".column")
    last = ".turn:nth-of-type(1) .action .tokens:not(.opening) .t:last-child"
    found = [column.eval_on_selector(last, "one => one.style.backgroundColor") for column in columns]
    assert found == [BLUE, ORANGE, BLUE]
    page.click(".column:nth-child(3) .member")
    until(page, "document.querySelector('.column:nth-child(3)').className.includes('chosen')")
    assert chosen(page) == "step1.0/0/t/1/2"


def test_members_of_two_models_are_named(show: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "r")

    def change(record: dict[str, Any]) -> None:
        first = record["id"].endswith("0")
        record.update(
            label="before" if first else "after", id=f"{record['group']}/0", step=record["step"] if first else 9
        )

    change_records(folder, change)
    page = show(written(folder)).ready()
    page.keyboard.press("j")
    until(page, "document.querySelector('#stage .label')?.innerText === 'after'")  # they have one name, and yet are two
    page.keyboard.press("g")
    until(page, "document.querySelectorAll('.column').length === 3")
    heads = page.eval_on_selector_all(".member b", "all => all.map((one) => one.innerText)")
    assert heads == ["before", "after", "after"] and "before" in names(page)[0]


def test_dark_and_light(show: Callable[..., Any], file: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light, dark = (show(file, color_scheme=scheme).ready() for scheme in ("light", "dark"))
    bright, gloomy = light.evaluate(back), dark.evaluate(back)
    assert (bright, gloomy) == ("rgb(247, 247, 245)", "rgb(19, 20, 23)")
    light.click("#theme")
    dark.keyboard.press("t")
    assert (light.evaluate(back), dark.evaluate(back)) == (gloomy, bright)


def test_a_run_of_many_is_a_list_of_few_elements(show: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "r")
    file = folder / "trajectories.jsonl"
    first = file.read_text().splitlines()[0]
    file.write_text("".join(first.replace("step0.0/0/", f"step0.0/{i}/") + "\n" for i in range(2000)))
    page = show(written(folder)).ready()
    until(page, "document.querySelector('#count').innerText === '2,000 trajectories'")
    assert 8 <= len(names(page)) <= 24 and page.evaluate("document.querySelectorAll('*').length") < 600
    page.evaluate("document.querySelector('#list').scrollTop = 1e9")
    until(page, "[...document.querySelectorAll('.row')].some((row) => row.dataset.at === '1999')")
    assert len(names(page)) <= 24
    page.click(".row[data-at='1999']")
    until(page, "document.querySelector('.summary .small').innerText.includes('step0.0/1999/t/1/0')")


def test_images_are_decoded_when_they_come_into_view(show: Callable[..., Any], tmp_path: Path) -> None:
    made = run_folder(tmp_path / "r")
    record_group(made, 0, "step0.0/0/t/1", a_task(*[SEEN, "and", HUGE] * 8, "Which way?"), members=2)
    page = show(written(tmp_path / "r")).ready()
    decoded = "document.querySelectorAll('#stage canvas[data-drawn]').length"
    until(page, f"{decoded} > 0")
    page.wait_for_timeout(200)
    total = len(page.query_selector_all("#stage canvas"))
    before = page.evaluate(decoded)
    assert total == 17 and before < 8
    page.evaluate(TO_THE_END)
    until(page, f"{decoded} > {before}")
    page.evaluate("document.querySelector('#stage').scrollTop = 0")
    page.wait_for_timeout(100)
    assert page.evaluate(decoded) < total  # what was jumped over is not decoded


def test_records_that_lack_things(show: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "old")
    change_records(folder, as_of_old)
    page = show(written(folder)).ready()
    page.select_option("#colour", "entropy")
    assert page.inner_text("#legend") == "not recorded for these tokens"
    page.select_option("#colour", "advantage")  # that of the turn
    assert set(colours(page)) == {BLUE}
    (folder / "config.yaml").unlink()
    for file in (folder / "images").iterdir():
        file.unlink()
    with (folder / "trajectories.jsonl").open("a") as lines:
        lines.write('{"step": 9, "id"')
    bare = show(written(folder)).ready()
    assert "No tokenizer was found" in bare.inner_text("#note")
    assert DRAW in bare.inner_text(".action") and "image not in the run folder" in bare.inner_text(".missing")
    until(bare, "document.querySelector('#count').innerText === '12 trajectories'")
    error = show(folder / "view.html", "#step3.0/1/t/1/0").ready()
    assert "the prompt is too long" in error.inner_text(".error") and "no turns" in error.inner_text("#stage")


def test_a_history_that_was_rewritten_and_half_a_character(show: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "r")

    def change(record: dict[str, Any]) -> None:
        for turn in record["turns"][1:]:
            turn.update(
                continues=False,
                feedback="half \ud83d",
                state="at 2, 3",
                parsed={"answer": None, "thoughts": {"think": "a <i>b"}, "right": False},
            )

    change_records(folder, change)
    page = show(written(folder)).ready()
    assert "The template rewrote the history" in page.inner_text(".turn:nth-of-type(2) .break")
    second = page.inner_text(".turn:nth-of-type(2) .action")
    for words in ("half", "at 2, 3", "think", "a <i>b", "the format is not right"):
        assert words in second
