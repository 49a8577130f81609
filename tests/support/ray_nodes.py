"""A Ray cluster of two nodes on this machine, started as on two machines, and the program as a driver on it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.ranks import PATIENCE_S, ROOT, free_port

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_worker_niceness": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "NPU_VLRL_PLATFORM": "cpu",
}
"""Of nodes and drivers."""


@contextmanager
def two_nodes(folder: Path, resources: Mapping[str, float]) -> Iterator[str]:
    """Each node has an address of its own on the loopback network, a working directory of its own and two cores, and
    the first one `resources`. Gives the cluster's address.
    """
    port = free_port()
    address = f"127.0.0.2:{port}"
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--resources={json.dumps(dict(resources))}"]
    nodes = []
    try:
        for name, host, words in (("head", "127.0.0.2", head), ("second", "127.0.0.3", [f"--address={address}"])):
            (folder / name).mkdir()
            nodes.append(_node(folder / name, [*words, f"--node-ip-address={host}"]))
        yield address
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            node.wait(PATIENCE_S)


def _node(folder: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Returns once it has joined."""
    usual = ["--num-cpus=2", f"--object-store-memory={2**27}", "--disable-usage-stats", "--block"]
    node = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *usual],
        cwd=folder,
        env={**os.environ, **SETTINGS, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = b""
    assert node.stdout is not None
    while b"Ray runtime started." not in said:
        line = node.stdout.readline()
        assert line, f"a node did not start:\n{said.decode()}"
        said += line
    return node


class Driver(subprocess.Popen[bytes]):
    """A process of `python -m npu_vlrl ARGUMENTS`; what it says is in `folder/driver.out` and `.err`."""

    def __init__(self, arguments: Sequence[object], folder: Path, environment: Mapping[str, str]) -> None:
        self.out, self.err = folder / "driver.out", folder / "driver.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            super().__init__(
                [sys.executable, "-m", "npu_vlrl", *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, **SETTINGS, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def said(self) -> str:
        return f"{self.out.read_text()}\n{self.err.read_text()}"
