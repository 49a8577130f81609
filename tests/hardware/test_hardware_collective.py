"""The collective between two real processes, and what is said when it does not work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from npu_vlrl.hardware import collective
from npu_vlrl.hardware.collective import CollectiveError, check
from npu_vlrl.hardware.cpu import CpuPlatform


def interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Makes processes run this shell script instead of Python; its arguments are `-m MODULE collective RANK …`."""
    script = folder / "python"
    script.write_text("\n".join(["#!/bin/bash", "rank=$4", *lines]))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_two_processes_add_up() -> None:
    check(CpuPlatform(), timeout_s=60)


def test_a_wrong_sum_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (
        "import sys, torch; real = torch.arange; torch.arange = lambda *a, **k: real(*a, **k) + 1;"
        "from npu_vlrl.hardware.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    interpreter(tmp_path, monkeypatch, f"exec {sys.executable} -c '{wrong}' \"${{@:3}}\"")
    with pytest.raises(CollectiveError) as error:
        check(CpuPlatform(), timeout_s=60)
    # 2 3 4 5 and twice that
    assert str(error.value) in [
        f"process {first} of 2 ended with code 1: HardwareError: a sum over 2 processes on cpu is [6.0, 9.0, 12.0, "
        "15.0] and not [3, 6, 9, 12]"
        for first in (0, 1)
    ]


def test_a_process_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(
        tmp_path, monkeypatch, "[[ $rank == 0 ]] && exec sleep 600", "echo before >&2; echo no route >&2; exit 3"
    )
    with pytest.raises(CollectiveError, match=r"^process 1 of 2 ended with code 3: no route$"):
        check(CpuPlatform(), timeout_s=60)  # returns before the test's time is over, since the other one was stopped


def test_a_process_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(tmp_path, monkeypatch, "[[ $rank == 1 ]] && exec sleep 600", "exit 0")
    with pytest.raises(CollectiveError, match=r"^process 1 of 2 did not end within 5 s$"):
        check(CpuPlatform(), timeout_s=5)


def test_a_silent_death_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(tmp_path, monkeypatch, "[[ $rank == 1 ]] && exec sleep 600", "kill -9 $$")
    with pytest.raises(CollectiveError, match=r"^process 0 of 2 ended with code -9: no message$"):
        check(CpuPlatform(), timeout_s=60)


def test_devices_of_their_own_are_used_where_there_are_enough() -> None:
    class Machine(CpuPlatform):
        process_group_backend = "cpu:gloo,cuda:nccl"
        devices = 1

        def device_count(self) -> int:
            return self.devices

        def device(self, index: int = 0) -> torch.device:
            raise AssertionError

    assert collective.backend(Machine()) == "gloo"
    Machine.devices = 2
    assert collective.backend(Machine()) == "cpu:gloo,cuda:nccl"
