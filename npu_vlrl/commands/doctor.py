"""`npu-vlrl doctor`"""

from __future__ import annotations

import argparse

from npu_vlrl.commands.options import Commands


def add(commands: Commands) -> None:
    doctor = commands.add_parser("doctor", help="show what this machine offers, and try devices, kernels, collectives")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from npu_vlrl.doctor import doctor

    return doctor(options.json)
