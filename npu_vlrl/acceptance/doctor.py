"""Reports what this machine offers, and whether it computes and communicates correctly: `npu-vlrl doctor`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from npu_vlrl import kernels
from npu_vlrl.hardware import PLATFORMS, VARIABLE, HardwareError, Platform, collective, select, software
from npu_vlrl.kernels import parity
from npu_vlrl.kernels.graph_capture import can_capture
from npu_vlrl.report.console import printable

COLLECTIVE_S = 90.0
"""Seconds for two processes, which import torch and the vendor's libraries; the sum itself takes milliseconds."""

GOOD, CHECK_FAILED, NO_HARDWARE = 0, 1, 2


@dataclass(frozen=True)
class Check:
    """Result of one check. A failed one names the remedy."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


def doctor(as_json: bool) -> int:
    """Prints the report. Returns 0 when all is good, 1 when a check failed, 2 without the requested hardware."""
    report = diagnose()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, Console(highlight=False, soft_wrap=True))
    code: int = report["exit_code"]
    return code


def diagnose() -> dict[str, Any]:
    """Report as JSON values with stable keys: `exit_code`, `platform` (None without one), `problem` (why there is
    none), `platforms` (for each the reason why it cannot be used, or None), `versions`, `devices`, `environment`,
    `warnings`, `kernels` (for each op the implementation that runs) and `checks`.
    """
    everyone = {name: make() for name, make in PLATFORMS.items()}
    report: dict[str, Any] = {
        "exit_code": GOOD,
        "platform": None,
        "problem": None,
        "platforms": {name: platform.missing() for name, platform in everyone.items()},
        "versions": software.installed(everyone.values()),
        "devices": [],
        "environment": {n: v for p in everyone.values() for n, v in p.environment().items()},
        "warnings": [warning for p in everyone.values() for warning in p.warnings()],
        "kernels": {},
        "checks": [],
    }
    if os.environ.get(VARIABLE):
        report["environment"][VARIABLE] = os.environ[VARIABLE]
    try:
        platform = select()
    except HardwareError as error:
        return report | {"problem": str(error), "exit_code": NO_HARDWARE}
    kernels.use(platform.kernels)
    checks = [asdict(check) for check in _checks(platform)]
    return report | {
        "exit_code": GOOD if all(check["ok"] for check in checks) else CHECK_FAILED,
        "platform": platform.name,
        "versions": report["versions"] | platform.versions(),
        "devices": [device_facts(platform, index) for index in range(platform.device_count())],
        "kernels": kernels.active(),
        "checks": checks,
    }


def device_facts(platform: Platform, index: int) -> dict[str, Any]:
    """Name, number, memory in bytes and peaks of a device; memory is None where it does not answer."""
    try:
        memory = platform.memory(index)
    except RuntimeError:  # a device that does not answer; its check says so
        memory = None
    peak = platform.peak(index)
    return {
        "index": index,
        "physical": platform.physical_id(index),
        "name": platform.device_name(index),
        "memory_free_bytes": memory and memory.free,
        "memory_total_bytes": memory and memory.total,
        "peak_bf16_flops": peak and peak.flops,
        "peak_bytes_per_second": peak and peak.bandwidth,
    }


def _checks(platform: Platform) -> Iterator[Check]:
    for index in range(platform.device_count()):
        yield _tried(f"device {index}", partial(compute, platform, index), "look at it with the vendor's tool")
    yield _tried("streams", partial(streams, platform), "update the driver")
    yield _tried("graph capture", partial(_recording, platform), "set rollout.graphs=false, and update the driver")
    yield from _kernel_checks(platform)
    yield _tried(
        "collective",
        partial(_collective, platform),
        "see that nothing keeps this machine's processes from talking",
    )


def _tried(name: str, attempt: Callable[[], str], remedy: str) -> Check:
    """Runs a check: `attempt` returns a description, or raises an error."""
    try:
        return Check(name, True, attempt())
    except RuntimeError as error:
        return Check(name, False, str(error).strip() or type(error).__name__, remedy)


def compute(platform: Platform, index: int) -> str:
    """Adds on the device, which stays the current one, and copies to it and back. Raises HardwareError for wrong
    numbers.
    """
    platform.set_device(index)
    numbers = torch.arange(1, 101, dtype=torch.float32).to(platform.device(index))
    _expect("the sum of 1 to 100", numbers.sum().item(), 5050.0)
    _expect("the sum of what was copied back", sum((numbers * 2).tolist()), 10100.0)
    return f"{platform.device_name(index)}: adds up"


def streams(platform: Platform) -> str:
    """Doubles numbers on a second stream of the first device, between events. Raises HardwareError where the first
    stream sees others.
    """
    platform.set_device(0)
    second = platform.stream()
    if second is None:
        return "none on this platform: everything runs in order"
    numbers = torch.arange(1, 101, dtype=torch.float32, device=platform.device())
    first = torch.accelerator.current_stream()
    second.wait_event(first.record_event())
    with platform.on(second):
        doubled = numbers * 2
    first.wait_event(second.record_event())
    _expect("the sum of what a second stream doubled", doubled.sum().item(), 10100.0)
    return "two streams, ordered by events"


def _recording(platform: Platform) -> str:
    """Tests graph capture: captured work runs again at each replay, on the tensors' current values."""
    capture = platform.graph_capture()
    if capture is None:
        return "none: every step of decoding is launched anew"
    if not can_capture(platform, platform.device(), torch.bfloat16):
        return "not the attention: every step of decoding is launched anew"
    number = torch.zeros(1, device=platform.device())

    def step() -> None:
        number.mul_(2).add_(1)

    replay = capture(step)
    number.fill_(3)
    replay()
    replay()
    _expect("3, doubled and increased twice,", number.item(), 15.0)
    return "steps are recorded and replayed"


def _expect(what: str, found: float, wanted: float) -> None:
    if found != wanted:
        raise HardwareError(f"{what} is {found} and not {wanted}")


def _kernel_checks(platform: Platform) -> Iterator[Check]:
    remedy = "compare the versions with those of docs/ascend.md; results of a run with this kernel would be wrong"
    try:
        results = parity.check(platform.device())
    except (RuntimeError, ValueError, TypeError) as error:
        yield Check("kernels", False, str(error).strip() or type(error).__name__, remedy)
        return
    for op, forward, backward, tolerance, ok in results:
        detail = f"forward {forward:.1e}, backward {backward:.1e} off the reference; {tolerance:.1e} is allowed"
        yield Check(f"kernel {op}", ok, detail, None if ok else remedy)


def _collective(platform: Platform) -> str:
    collective.check(platform, COLLECTIVE_S)
    name, wanted = collective.backend(platform), platform.process_group_backend
    found = f"{collective.SIZE} processes, {name}"
    return found if name == wanted else f"{found} on the host alone, since {wanted} needs a device for each"


def _show(report: dict[str, Any], console: Console) -> None:
    """Prints the report as tables."""
    chosen = report["platform"]
    _table(console, "platforms", ((n, "usable" if why is None else why) for n, why in report["platforms"].items()))
    _table(console, "versions", report["versions"].items())
    _table(console, "devices", ((str(d["index"]), _device_line(d)) for d in report["devices"]))
    _table(console, "environment", report["environment"].items())
    _table(console, "kernels", report["kernels"].items())
    _table(console, "checks", ((c["name"], _check_line(c)) for c in report["checks"]))
    for warning in report["warnings"]:
        console.print(Text(printable(f"warning: {warning}")))
    verdict = {
        GOOD: f"all good: trains on {chosen}",
        CHECK_FAILED: f"{sum(not c['ok'] for c in report['checks'])} checks failed on {chosen}",
        NO_HARDWARE: f"cannot train: {report['problem']}",
    }
    console.print(Text(printable(verdict[report["exit_code"]])))


def _table(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(printable(name)), Text(printable(value)))
    if table.row_count:
        console.print(table)


def _device_line(device: dict[str, Any]) -> str:
    line = f"{device['name']}, physical {device['physical']}"
    if device["memory_total_bytes"] is not None:
        line += f", {device['memory_free_bytes'] / 2**30:.1f} of {device['memory_total_bytes'] / 2**30:.1f} GiB free"
    return line


def _check_line(check: dict[str, Any]) -> str:
    return f"ok: {check['detail']}" if check["ok"] else f"FAILED: {check['detail']}; {check['remedy']}"
