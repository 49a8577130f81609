"""The server of the viewer, asked by a real client: who is answered, and what can be had."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from npu_vlrl.report.view.records import RunRecords
from npu_vlrl.report.view.serve import ViewServer
from tests.support.ranks import PATIENCE_S, ROOT
from tests.support.viewed import SEEN, record_group, run_folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ViewServer]:
    record_group(run_folder(tmp_path / "r"), 0, "step0.0/0/t/1")
    (tmp_path / "secret.png").write_text("secret")
    with ViewServer(RunRecords(tmp_path / "r")) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: ViewServer, path: str, host: str | None = None, **words: Any) -> tuple[int, bytes]:
    """Status and content; with the token unless another is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE_S)
    given = {"token": server.token, **words}
    headers = {} if host is None else {"Host": host}
    connection.request("GET", f"{path}?{urlencode(given)}", headers=headers)
    answer = connection.getresponse()
    assert answer.getheader("X-Content-Type-Options") == "nosniff" and answer.getheader("Cache-Control") == "no-store"
    found = answer.status, answer.read()
    connection.close()
    return found


def index(server: ViewServer, start: int, generation: int) -> dict[str, Any]:
    status, data = ask(server, "/index", **{"from": start, "generation": generation})
    assert status == 200
    found: dict[str, Any] = json.loads(data)
    return found


def test_it_listens_on_loopback_only_and_tells_its_address(server: ViewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/?token={server.token}" and len(server.token) >= 32


def test_list_pages_and_images(server: ViewServer) -> None:
    status, page = ask(server, "/")
    assert status == 200 and b"step0.0/0/t/1" not in page and b'id="index"' not in page
    assert b"connect-src &#39;self&#39;" in page
    assert [row[1] for row in index(server, 0, 0)["rows"]] == ["step0.0/0/t/1/0", "step0.0/0/t/1/1"]
    status, data = ask(server, "/page", number=0)
    assert status == 200 and len(json.loads(data)["records"]) == 2
    status, data = ask(server, "/picture", hash=SEEN.hash)
    assert status == 200 and data.startswith(b"\x89PNG")


def test_a_stranger_is_told_nothing(server: ViewServer) -> None:
    for path in ("/", "/index", "/page", "/picture"):
        words = {"number": 0, "hash": SEEN.hash, "from": 0, "generation": 0}
        assert ask(server, path, token="", **words)[0] == 403
        assert ask(server, path, token=server.token[:-1] + "é", **words)[0] == 403
        # a page of another site whose name leads here
        assert ask(server, path, host=f"evil.example:{server.server_port}", **words)[0] == 403
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


def test_nothing_else_of_the_machine_can_be_had(server: ViewServer) -> None:
    for name in ("../secret", "../../secret", "..%2Fsecret", "/etc/passwd", f"../images/{SEEN.hash}", ""):
        assert ask(server, "/picture", hash=name)[0] == 404
    for path in ("/config.yaml", "/images", "/../secret.png", "/..", f"/images/{SEEN.hash}.png", "/trajectories.jsonl"):
        assert ask(server, path)[0] == 404
    for words in ({"number": 1}, {"number": -1}, {"number": "x"}, {}):
        assert ask(server, "/page", **words)[0] == 404
    assert ask(server, "/index")[0] == 404


def test_what_a_run_adds_is_found_and_what_it_repeats_replaces(server: ViewServer) -> None:
    run = run_folder(server.records.folder)
    record_group(run, 1, "step1.0/0/t/1", members=3)
    added = index(server, 2, 0)
    assert added["from"] == 2 and [row[0] for row in added["rows"]] == [1, 1, 1] and added["generation"] == 0
    assert index(server, 5, 0)["rows"] == []
    run.rewind(0)
    record_group(run, 0, "step0.0/9/t/1")
    again = index(server, 5, 0)
    assert (again["from"], again["generation"]) == (0, 1)
    assert [row[2] for row in again["rows"]] == ["step0.0/9/t/1"] * 2


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    record_group(run_folder(tmp_path / "r"), 0, "step0.0/0/t/1")
    words = [sys.executable, "-m", "npu_vlrl", "view", str(tmp_path / "r"), "--serve"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, cwd=ROOT, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("http://127.0.0.1:")
        assert process.stdout.readline() == "Ctrl-C ends it\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
