"""Rule `rotation_strict`: scores the angle of a rotated image; 0 beyond 45 degrees."""

from __future__ import annotations

from npu_vlrl.tasks.rotation.angle import Distance, check_angle, score_angle
from npu_vlrl.types import Verdict

INLINE = True


def score(answer: str, text: str, *, distance: Distance = "circular", solved_within: float = 5.0) -> Verdict:
    """Scores 1 - d/45 for d of at most 45 degrees, else 0; see `score_angle`."""
    return score_angle(answer, text, 45.0, distance, solved_within)


def check_gold(answer: str, *, distance: Distance = "circular", solved_within: float = 5.0) -> None:
    """Raises DataError when `answer` is no angle."""
    check_angle(answer)
