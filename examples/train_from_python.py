# examples/train_from_python.py: a tiny model learns arrows, with an environment, a reward and an estimator of its own.
import numpy as np

import npu_vlrl

WAYS = ("up", "right", "down", "left")


def reward(answer: str, truth: str) -> float:
    return 1.0 if answer == truth else 0.0


class Arrow:
    actions = WAYS
    rules = "Which way does the arrow point?"

    def start(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.turns = int(rng.integers(4))
        y, x = np.mgrid[-1:1:56j, -1:1:56j]
        inside = (abs(y) < 0.8) & (abs(x) < np.where(y < 0, 0.75 * (y + 0.8), 0.2))
        dark, light = rng.integers(0, 91, 3), rng.integers(190, 256, 3)
        self.pixels = np.rot90(np.where(inside[..., None], dark, light), -self.turns).astype(np.uint8)

    def act(self, action: str) -> npu_vlrl.Move:
        return npu_vlrl.Move({"right": reward(action, WAYS[self.turns])}, solved=action == WAYS[self.turns])

    def picture(self) -> npu_vlrl.Image:
        return npu_vlrl.Image(self.pixels)

    def state_key(self) -> str:
        return f"{self.turns} {self.pixels[0, 0]} {self.pixels[28, 28]}"

    def solution(self) -> list[str]:
        return [WAYS[self.turns]]


def game() -> Arrow:
    return Arrow()


def estimate(batch: npu_vlrl.AdvantageBatch) -> np.ndarray:
    rewards_S, groups = np.array(batch.rewards()), np.array(batch.groups)
    means_S = [rewards_S[groups == group].mean() for group in groups]
    return batch.on_samples(rewards_S - means_S)


SETTINGS = {
    "run.dir": "runs/arrow_from_python",
    "environment.name": f"{__file__}:game",
    "workflow.max_turns": 2,
    "workflow.turn_discount": 0.5,
    "warm_start.right_share": 0.25,
    "algorithm.preset": "grpo",
    "algorithm.advantage": f"{__file__}:estimate",
    "train.steps": 60,
}

if __name__ == "__main__":
    summary = npu_vlrl.train(npu_vlrl.load_config("frozenlake_tiny", SETTINGS))
    before, after = (summary[when]["accuracy"] for when in ("baseline", "final"))
    print(f"right at the first try: {before:.2f} before, {after:.2f} after")
