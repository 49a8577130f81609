"""The served page: it follows a run that goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.report.view.records import PAGE, RunRecords
from npu_vlrl.report.view.serve import ViewServer
from tests.support.viewed import failed, record_group, run_folder, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ViewServer]:
    record_group(run_folder(tmp_path / "r"), 0, "step0.0/0/t/1")
    with ViewServer(RunRecords(tmp_path / "r")) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_run_that_goes_on_and_then_repeats_a_step(show: Callable[..., Any], server: ViewServer) -> None:
    shown = show(server.url)
    page = shown.ready()
    until(page, "document.querySelectorAll('#stage canvas[data-drawn]').length > 0")
    count = "document.querySelector('#count').innerText"
    assert page.evaluate(count) == "2 trajectories"
    run = run_folder(server.records.folder)
    record_group(run, 1, "step1.0/0/t/1", members=3)
    until(page, f"{count} === '5 trajectories'")
    assert "member 0" in page.inner_text("article h2")  # what is being read stays
    page.click(".row[data-at='4']")  # of a page that was fetched before it had this one
    until(page, "document.querySelector('article h2').innerText.includes('member 2')")
    run.trajectories(1, [failed(f"step1.0/{i + 1}/t/1") for i in range(PAGE)], {})
    until(page, f"{count} === '{PAGE + 5} trajectories'")
    page.fill("[name=search]", "too long")
    until(page, f"{count} === '{PAGE} of {PAGE + 5} trajectories'")
    page.click("#reset")
    run.rewind(1)
    record_group(run, 1, "step1.0/7/t/1", members=1)
    until(page, f"{count} === '3 trajectories'")
    own = f"http://127.0.0.1:{server.server_port}/"
    assert all(url.startswith(own) for url in shown.requests if not url.startswith("blob:"))


def test_without_the_token_there_is_nothing(show: Callable[..., Any], server: ViewServer) -> None:
    shown = show(server.url.partition("?")[0])
    shown.expected = ("403 (Forbidden)",)
    assert "Open the address" in shown.page.inner_text("body") and "t/1" not in shown.page.content()
