"""What a model, a data set or a tool says is shown and never obeyed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.report.view.page import frame, write_page
from npu_vlrl.report.view.records import RunRecords
from npu_vlrl.types import Task
from tests.support.scripted import a_task
from tests.support.viewed import RIGHT, SEEN, change_records, episode, run_folder, until

ATTACKS = (
    "<script>window.owned = 1; alert(1)</script>",
    "</script><script>window.owned = 2</script>",
    "<!-- <script> -->",
    '<img src="http://127.0.0.1:9/x.png" onerror="window.owned = 3">',
    "<svg onload=alert(4)>",
    "\"'><iframe srcdoc='<script>parent.owned = 5</script>'></iframe>",
    "javascript:alert(6)",
    "{{ 7 * 7 }}{% include 'view.css' %}",
    "<style>@import 'http://127.0.0.1:9/x.css'; * { display: none }</style>",
    "<link rel=stylesheet href=http://127.0.0.1:9/y.css><base href=http://127.0.0.1:9/>",
    "constructor __proto__ \u202e\u2028\u0000\x1b[2J",
)
ALL = " ".join(ATTACKS)
ELEMENTS = "document.querySelectorAll('iframe, link, base, style, svg, object, embed').length"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "run <script>window.owned = 8"
    run = run_folder(folder)
    call = f'<tool_call>{{"name":"draw_line","arguments":{{"start":[1,1],"end":[9,9]}}}}</tool_call>{ALL}'
    for i in range(2):
        question = Task(ALL, a_task(SEEN, ALL).messages, ALL, ALL)
        run.trajectories(0, [episode(f"step0.0/{ALL}", i, [call, ALL], [RIGHT], question)], {})

    def change(record: dict[str, Any]) -> None:
        record.update(error=ALL, label=ALL, status=ALL, data_source=ALL)
        for turn in record["turns"]:
            turn.update(feedback=ALL, judge_error=ALL, state=ALL)
            turn["parsed"] = {"answer": ALL, "thoughts": {ALL: ALL, "__proto__": ALL}, "right": True}
            turn["verdict"] = {"reward": 1.0, "solved": True, "terms": {ALL: 1.0}}
            turn["tool_calls"] = [{"name": ALL, "arguments": {ALL: [ALL]}}]
            turn["tool_results"] = [{"text": ALL, "images": [ALL, "../../x"], "error": True}]
            turn["action"]["stop_reason"] = ALL

    change_records(folder, change)
    write_page(RunRecords(folder), folder.parent / "view.html")
    return folder.parent / "view.html"


def test_nothing_of_it_runs_or_is_fetched(show: Callable[..., Any], file: Path) -> None:
    shown = show(file)
    page = shown.ready()
    elements = page.evaluate(ELEMENTS)
    for key in ("c", "c", "c", "c", "g", "j", "g", "?", "Escape"):
        page.keyboard.press(key)
        page.wait_for_timeout(30)
    page.fill("[name=search]", "window.owned = 1")
    until(page, "document.querySelector('#count').innerText === '2 trajectories'")
    page.hover(".action .t")
    assert page.evaluate("window.owned === undefined") and page.inner_text("#run") == "run <script>window.owned = 8"
    assert page.evaluate(ELEMENTS) == elements == 1
    assert page.evaluate("document.querySelectorAll('script:not([type])').length") == 1
    assert shown.requests == [f"file://{file}"] and shown.dialogs == []
    text = page.inner_text("#stage")
    for attack in ATTACKS[:3]:  # they are there to be read: asked, answered, and told by all that the record holds
        assert text.count(attack) >= 10, attack


def test_a_page_that_took_text_for_markup_would_be_found_out(show: Callable[..., Any], tmp_path: Path) -> None:
    """Without its two defences the page runs what it shows; with the policy alone the browser refuses."""
    hole = f'<body><div id="hole">{ATTACKS[0]}{ATTACKS[3]}</div>'
    page = frame("run", None).replace("<body>", hole)
    (tmp_path / "guarded.html").write_text(page)
    (tmp_path / "open.html").write_text(re.sub(r"<meta http-equiv=.Content-Security-Policy.*?>", "", page))
    unsafe = show(tmp_path / "open.html")
    until(unsafe.page, "window.owned === 3")
    assert unsafe.dialogs == ["1"] and any(":9/" in url for url in unsafe.requests)
    guarded = show(tmp_path / "guarded.html")
    guarded.page.wait_for_timeout(200)
    assert guarded.page.evaluate("window.owned === undefined") and guarded.dialogs == []
    unsafe.dialogs.clear()
    unsafe.expected = ("has been blocked by CORS policy", "net::ERR_")  # a page that has no server
    guarded.expected = (*unsafe.expected, "violates the following Content Security Policy directive")
