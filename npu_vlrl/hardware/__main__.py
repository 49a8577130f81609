"""Commands of this room for shell scripts and other processes.

`python -m npu_vlrl.hardware environment` prints the shell lines that the launch scripts run, for the selected platform.
`python -m npu_vlrl.hardware collective RANK STORE SECONDS` is one process of `collective.check`.
"""

from __future__ import annotations

import shlex
import sys

from npu_vlrl.hardware import HardwareError, Platform, select
from npu_vlrl.hardware.collective import peer


def exports(platform: Platform) -> str:
    """Shell lines that export the platform's variables, one each; a value that is set already stays."""
    return "".join(
        f"export {name}=${{{name}-{shlex.quote(setting.value)}}}  # {setting.why}\n"
        for name, setting in platform.launch_environment.items()
        if setting.wanted
    )


def main(arguments: list[str]) -> int:
    match arguments:
        case ["environment"]:
            try:
                print(exports(select()), end="")
            except HardwareError as error:
                print(f"npu-vlrl: {error}", file=sys.stderr)
                return 2
        case ["collective", rank, store, seconds]:
            try:
                peer(select(), int(rank), store, float(seconds))
            except Exception as error:  # whatever it is, the other process must read it as the last line
                print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
                return 1
        case _:
            print("usage: python -m npu_vlrl.hardware environment", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
