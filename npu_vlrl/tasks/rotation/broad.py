"""Rule `rotation_broad`: scores the angle of a rotated image; every degree counts, up to half a turn."""

from __future__ import annotations

from npu_vlrl.tasks.rotation.angle import Distance, check_angle, score_angle
from npu_vlrl.types import Verdict

INLINE = True


def score(answer: str, text: str, *, distance: Distance = "circular", solved_within: float = 5.0) -> Verdict:
    """Scores max(0, 1 - d/180), d in degrees; see `score_angle`."""
    return score_angle(answer, text, 180.0, distance, solved_within)


def check_gold(answer: str, *, distance: Distance = "circular", solved_within: float = 5.0) -> None:
    """Raises DataError when `answer` is no angle."""
    check_angle(answer)
