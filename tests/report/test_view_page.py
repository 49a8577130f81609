"""The page as a file: what is in it, what cannot be, and what of it is code."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from npu_vlrl.report.view import run_images
from npu_vlrl.report.view.page import ASSETS, CODE, write_page
from npu_vlrl.report.view.records import RunRecords
from npu_vlrl.report.view.run_images import RunImages
from tests.support.program import program
from tests.support.viewed import SEEN, change_records, copied, record_group, run_folder

HOSTILE = "</script><script>alert(1)</script><!-- <script> --!> <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "run & <b>co"
    made = run_folder(folder)
    for step in range(3):
        record_group(made, step, f"step{step}.0/0/t/1", members=3)
    return folder


def written(run: Path, out: Path) -> str:
    assert write_page(RunRecords(run), out) == out.stat().st_size
    return out.read_text(encoding="utf-8")


def blocks(page: str) -> dict[str, str]:
    return dict(re.findall(r'<script type="text/plain" id="([\w-]+)">([^<]*)</script>', page))


def unpacked(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_everything_is_in_the_file_and_each_image_once(run: Path, tmp_path: Path) -> None:
    page = written(run, tmp_path / "view.html")
    found = blocks(page)
    head = unpacked(found["index"])
    assert len(head["rows"]) == 9 and head["name"] == "run & <b>co"
    assert unpacked(found["page-0"])["records"][8]["id"] == "step2.0/0/t/1/2"
    names = {name.removeprefix("picture-") for name in found if name.startswith("picture-")}
    assert names == {path.stem for path in (run / "images").iterdir()} and len(names) == 2
    assert page.count(f'id="picture-{SEEN.hash}"') == 1  # nine trajectories show it
    assert base64.b64decode(found[f"picture-{SEEN.hash}"]) == (run / "images" / f"{SEEN.hash}.png").read_bytes()
    assert not (tmp_path / "view.html.part").exists()


def test_nothing_points_outside_and_only_its_own_code_may_run(run: Path, tmp_path: Path) -> None:
    page = written(run, tmp_path / "view.html")
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+", page.partition('id="index"')[0]) == []
    assert not re.search(r"(src|href|action)\s*=", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (code,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, text in (("script", code), ("style", style)):
        own = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src &#39;sha256-{own}&#39;" in policy
    assert "default-src &#39;none&#39;" in policy and "connect-src &#39;none&#39;" in policy
    assert "<title>run &amp; &lt;b&gt;co" in page


def test_records_cannot_close_their_block(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "r")
    change_records(folder, lambda record: record.update(task=HOSTILE, answer=HOSTILE, error=HOSTILE, label=HOSTILE))
    page = written(folder, tmp_path / "view.html")
    assert "alert(1)" not in page and page.count("<script") == written(run, tmp_path / "other.html").count("<script")
    assert unpacked(blocks(page)["index"])["rows"][0][4] == HOSTILE  # it is there, in letters that mean nothing


def test_many_bytes_of_images_are_packed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(run, tmp_path / "view.html")
    monkeypatch.setattr("npu_vlrl.report.view.page.PNG_BYTES", 1)
    packed = written(run, tmp_path / "view.html")
    assert len(packed) < len(whole)
    data = base64.b64decode(blocks(packed)[f"picture-{SEEN.hash}"])
    (tmp_path / "p").write_bytes(data)
    with Pillow.open(tmp_path / "p") as image:
        assert image.format == "WEBP" and image.size == (56, 56)


def test_a_name_that_is_no_hash_is_no_image(run: Path, tmp_path: Path) -> None:
    (run / "secret.png").write_bytes((run / "images" / f"{SEEN.hash}.png").read_bytes())
    found = RunImages(run / "images")
    assert found.file(SEEN.hash) is not None and found.size(SEEN.hash) == (56, 56)
    for name in ("../secret", SEEN.hash.upper(), SEEN.hash + "\n", "", "0" * 64, f"/{SEEN.hash}"):
        assert found.file(name) is None and found.size(name) is None
    assert run_images.HASH.fullmatch(SEEN.hash)


def test_the_program_has_no_way_from_text_to_markup() -> None:
    code = "\n".join((ASSETS / f"{name}.js").read_text() for name in CODE)
    assert {path.stem for path in ASSETS.glob("*.js")} == set(CODE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser", code)
    assert "</script" not in code
    for path in ASSETS.iterdir():
        assert len(path.read_text().splitlines()) <= 400, path


def test_the_command(run: Path, tmp_path: Path) -> None:
    done = program("view", run, "--out", tmp_path / "a.html")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{tmp_path / 'a.html'}: 9 trajectories, 0.") and (tmp_path / "a.html").is_file()
    assert program("view", run).code == 0 and (run / "view.html").is_file()
    assert "trajectories.jsonl" in program("view", tmp_path).refused()
    assert "--out: " in program("view", run, "--out", tmp_path / "no" / "a.html").refused()
    assert "give one of them" in program("view", run, "--serve", "--out", tmp_path / "a.html").refused()
    assert "--port is for --serve" in program("view", run, "--port", 8000).refused()
    assert "--port: 70000 cannot be used" in program("view", run, "--serve", "--port", 70000).refused()
