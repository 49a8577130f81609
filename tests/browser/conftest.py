"""A real Chromium without a window: `bash launch/test.sh --browser` brings what these tests need."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import PATIENCE_S

HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
collect_ignore_glob = [] if HAS_PLAYWRIGHT and os.environ.get("NPU_VLRL_CHROMIUM") else ["test_*.py"]

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Not for the whole session: the driver's event loop stands in the way of tests that have one of their own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["NPU_VLRL_CHROMIUM"], args=list(QUIET))
        yield browser
        browser.close()


class Shown:
    """A page, with all that it asked for and complained about."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 800}, **context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.expected: tuple[str, ...] = ()  # parts of errors that the test brings about, at any time
        self.dialogs: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("dialog", self._dialog)
        self.page.goto(address)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def ready(self) -> Any:
        self.page.wait_for_selector("html[data-ready]")
        self.page.wait_for_selector("#stage article, #stage .together")
        return self.page


@pytest.fixture
def show(chromium: Any) -> Iterator[Callable[..., Shown]]:
    """Opens a file or an address; afterwards no error may be there but those that the test expects, and no dialog."""
    opened: list[Shown] = []

    def work(target: Path | str, fragment: str = "", **context: Any) -> Shown:
        address = target if isinstance(target, str) else f"file://{target}{fragment}"
        opened.append(Shown(chromium, address, **context))
        return opened[-1]

    yield work
    for shown in opened:
        shown.context.close()
        assert [error for error in shown.errors if not any(part in error for part in shown.expected)] == []
        assert shown.dialogs == []
