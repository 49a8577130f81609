"""One of two ranks that save a checkpoint in pieces: `python -m tests.learner.killed_save FOLDER CALL`.

Both save step 1. In step 2 the second rank is killed before the CALL-th of its writes ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from npu_vlrl.learner.checkpoint import Checkpoint, save
from npu_vlrl.learner.ranks import Ranks
from tests.learner.test_checkpoint import kill_at


def content(step: int, rank: int) -> Checkpoint:
    """Of five rows the first rank holds three."""
    rows = range(3) if rank == 0 else range(3, 5)
    held = torch.arange(5.0)[rows.start : rows.stop] + step
    place = (rows.start, 5)
    return Checkpoint(
        step,
        weights={"layer": held},
        optimizer={"exp_avg.layer": 2 * held},
        rng={"torch": torch.get_rng_state()},
        state={},
        rows={"layer": place, "exp_avg.layer": place},
    )


def main() -> None:
    folder, call = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    ranks = Ranks(dist.new_group([0, 1]))
    save(folder, content(1, ranks.rank), 1, ranks)
    if ranks.rank == 1:
        for patch in kill_at(call, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            patch.start()
    save(folder, content(2, ranks.rank), 1, ranks)


if __name__ == "__main__":
    main()
