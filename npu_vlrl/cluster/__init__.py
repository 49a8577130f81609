"""Placement of a run's processes by Ray: one configuration for a laptop, one machine and several machines.

`driver.py` is the process that the user starts, `placement.py` connects it to a cluster and reserves resources, and
`ray_actor.py` has the actor that runs on the machines. Each process of the run is `python -m npu_vlrl` with torchrun's
variables, as torchrun starts it.
"""

from __future__ import annotations

import os

from npu_vlrl.config import Config, ConfigError

__all__ = ["check_started", "drives"]


def drives(config: Config) -> bool:
    """Whether this process is the driver, which lets Ray place the processes of the run.

    Raises ConfigError under torchrun with another number of processes.
    """
    wanted, started = config.ray.processes, os.environ.get("WORLD_SIZE")
    if wanted and started not in (None, str(wanted)):
        raise ConfigError(
            f"ray.processes={wanted}, but this is one of WORLD_SIZE={started} processes that torchrun started; start "
            "one process without torchrun, or set ray.processes=0"
        )
    return wanted > 0 and started is None


def check_started(config: Config) -> None:
    """Raises ConfigError in a driver process, which must be `npu-vlrl train` or `npu-vlrl eval`."""
    if drives(config):
        raise ConfigError(
            f"ray.processes={config.ray.processes} is for the commands npu-vlrl train and npu-vlrl eval; set "
            "ray.processes=0 in a program of your own"
        )
