"""How fast the page of `npu-vlrl view` is for a run of many trajectories, in a real Chromium.

It is made of one real run by repeating its records under new names:

    python benchmarks/view_many.py RUN --trajectories 10000

Needs requirements-browser.txt and a Chromium; NPU_VLRL_CHROMIUM says where it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from npu_vlrl.report.view.page import write_page
from npu_vlrl.report.view.records import RunRecords

SCROLL = """(distance) => new Promise((done) => {
    const list = document.getElementById("list");
    const times = [];
    let last = performance.now();
    const frame = (now) => {
        times.push(now - last);
        last = now;
        list.scrollTop += distance;
        if (times.length < 120) requestAnimationFrame(frame); else done(times.slice(1));
    };
    requestAnimationFrame(frame);
})"""


def repeat(run: Path, to: Path, trajectories: int) -> None:
    """A run folder with that many records, in groups of other names."""
    for name in ("images", "export", "model", "warm_start", "config.yaml"):
        if (run / name).exists():
            (to / name).symlink_to((run / name).absolute())
    lines = (run / "trajectories.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    with (to / "trajectories.jsonl").open("w", encoding="utf-8") as out:
        for i in range(trajectories):
            record: dict[str, Any] = json.loads(lines[i % len(lines)])
            turn = i // len(lines)
            old, new = record["group"], f"{record['group']}x{turn}"
            record |= {"group": new, "id": record["id"].replace(old, new), "step": record["step"] + 10 * turn}
            record["advantages"] = {key.replace(old, new): value for key, value in record["advantages"].items()}
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


def measure(page: Any, file: Path) -> dict[str, float]:
    """Seconds and milliseconds of what a person waits for."""
    found: dict[str, float] = {}
    began = time.perf_counter()
    page.goto(f"file://{file}", wait_until="commit")
    page.wait_for_selector("#stage article")
    found["first trajectory, s"] = time.perf_counter() - began
    page.wait_for_load_state("load")
    found["whole file, s"] = time.perf_counter() - began
    frames = page.evaluate(SCROLL, 900)
    found["frame while scrolling, median ms"] = statistics.median(frames)
    found["frame while scrolling, longest ms"] = max(frames)
    keys = []
    for _ in range(20):
        began, before = time.perf_counter(), page.url
        page.keyboard.press("j")
        while page.url == before:
            page.wait_for_timeout(1)
        keys.append(1000 * (time.perf_counter() - began))
    found["key j, median ms"] = statistics.median(keys)
    began = time.perf_counter()
    page.fill("[name=search]", "no such words")
    while not page.inner_text("#count").startswith("0 of ") or "searched" in page.inner_text("#count"):
        page.wait_for_timeout(20)
    found["first search of all text, s"] = time.perf_counter() - began
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--trajectories", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        repeat(options.run, Path(folder), options.trajectories)
        file = Path(folder) / "view.html"
        began = time.perf_counter()
        size = write_page(RunRecords(Path(folder)), file)
        print(f"records, MiB: {(Path(folder) / 'trajectories.jsonl').stat().st_size / 2**20:.1f}")
        print(f"page, MiB: {size / 2**20:.1f}")
        print(f"writing it, s: {time.perf_counter() - began:.1f}")
        path = os.environ.get("NPU_VLRL_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name, value in measure(browser.new_page(viewport={"width": 1440, "height": 900}), file).items():
            print(f"{name}: {value:.3g}")
        browser.close()


if __name__ == "__main__":
    main()
