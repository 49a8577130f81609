"""Command `npu-vlrl doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_vlrl.commands.options import Commands


def add(commands: Commands) -> None:
    doctor = commands.add_parser("doctor", help="show what this machine offers, and try devices, kernels, collectives")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument(
        "--ascend-report",
        type=Path,
        metavar="FILE",
        help="try all that no NPU has run yet, in about ten minutes, and write what came of it",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.ascend_report is not None:
        from npu_vlrl.acceptance.report import write_report

        return write_report(options.ascend_report)
    from npu_vlrl.acceptance.doctor import doctor

    return doctor(options.json)
