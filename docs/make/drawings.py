"""Draws docs/images/*.svg, the drawings of docs/concepts.md: python docs/make/drawings.py

Each drawing is a function that fills a `Canvas`. Colours are classes of a style that also knows dark screens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).parents[1] / "images"

STYLE = """
    .ground { fill: #ffffff } .box { fill: #eef3fb; stroke: #3b6fb6; stroke-width: 1.5 }
    .side { fill: #f3f4f6; stroke: #8a8a8a; stroke-width: 1.2 }
    .name { font-size: 15px; font-weight: 600; fill: #14304f } .note { font-size: 12.5px; fill: #3d4a58 }
    .mono { font-size: 12px; font-family: ui-monospace, Menlo, Consolas, monospace; fill: #3d4a58 }
    .arrow { stroke: #4d5a68; stroke-width: 1.6; fill: none } .head { fill: #4d5a68 }
    .line { stroke: #9aa6b2; stroke-width: 1; stroke-dasharray: 4 4; fill: none }
    .prompt { fill: #b9c4d0 } .action { fill: #3f8f5b } .seen { fill: #d9a441 } .idle { fill: #e3e7ec }
    .old { fill: #7ba7d9 } .new { fill: #2f5f9e } .bar { fill: #3f8f5b }
    .on { font-size: 12px; fill: #ffffff } .off { font-size: 12px; fill: #1d2630 }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #10161d } .box { fill: #1b2a3c; stroke: #6d9bd8 } .side { fill: #1e242b; stroke: #7d8893 }
      .name { fill: #e4eefb } .note, .mono { fill: #b4c0cc } .arrow { stroke: #9fb0c0 } .head { fill: #9fb0c0 }
      .line { stroke: #5b6773 } .idle { fill: #2a323b } .bar { fill: #58b27a }
    }"""


class Canvas:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, kind: str, x: float, y: float, width: float, height: float, radius: int = 0) -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>')

    def text(self, kind: str, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def token(self, kind: str, x: float, y: float, width: float, text: str, height: float = 30) -> None:
        self.box(kind, x, y, width - 2, height, 3)
        words = {"action": "on", "new": "on", "idle": "note"}.get(kind, "off")
        self.text(words, x + width / 2 - 1, y + height / 2 + 4, text, "middle")

    def path(self, kind: str, path: str) -> None:
        end = ' marker-end="url(#to)"' if kind == "arrow" else ""
        self.parts.append(f'<path class="{kind}"{end} d="{path}"/>')

    def svg(self) -> str:
        inside = "\n  ".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            'font-family="system-ui, Helvetica, Arial, sans-serif" role="img" aria-labelledby="title">\n'
            f'  <title id="title">{escape(self.title)}</title>\n  <style>{STYLE}\n  </style>\n'
            '  <defs><marker id="to" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
            '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
            f'  <rect class="ground" width="{self.width}" height="{self.height}" rx="10"/>\n  {inside}\n</svg>\n'
        )


def segments() -> Canvas:
    """One episode with a tool call, token by token."""
    c = Canvas(960, 262, "An episode as segments: what is trained, and what each sampled token carries")
    kinds = [
        ("prompt", "PROMPT", ["user", "<img>", "<img>", "Which", "way?"]),
        ("action", "ACTION", ["look", "()", "end"]),
        ("seen", "OBSERVATION", ["\\n", "tool", "<img>", "<img>"]),
        ("action", "ACTION", ["up", "end"]),
    ]
    logprobs = [["-.1", "-.7", "-.0"], ["-.3", "-.2"]]
    rows = {"loss mask": 118, "logprob": 148, "weight version": 178}
    for name, y in rows.items():
        c.text("note", 20, y, name)
    x, width = 130, 57
    turn = 0
    for kind, name, tokens in kinds:
        c.text("name", x, 42, name)
        for index, token in enumerate(tokens):
            c.token(kind, x, 56, width, token)
            middle = x + width / 2
            action = kind == "action"
            c.text("mono", middle, rows["loss mask"], "1" if action else "0", "middle")
            c.text("mono", middle, rows["logprob"], logprobs[turn][index] if action else "·", "middle")
            c.text("mono", middle, rows["weight version"], "4" if action else "·", "middle")
            x += width
        turn += kind == "action"
    c.path("line", "M20 196 H900")
    notes = [
        "Only the segments are kept. Mask, log-probabilities and versions are read off them, so none can drift.",
        "<img> are the placeholders of a picture, as many as it becomes tokens. The policy can never sample one.",
    ]
    for index, note in enumerate(notes):
        c.text("note", 20, 220 + 20 * index, note)
    return c


def exports() -> Canvas:
    """What becomes of an episode of three turns."""
    c = Canvas(960, 330, "Exports: concat makes one sample of an episode, individual one of each turn")
    episode = [
        ("prompt", "P", 70),
        ("action", "A1", 70),
        ("seen", "O1", 60),
        ("action", "A2", 70),
        ("seen", "O2", 60),
        ("action", "A3", 70),
    ]

    def row(y: float, upto: int, trained: Sequence[int], note: str) -> None:
        x = 170.0
        for index, (kind, name, width) in enumerate(episode[:upto]):
            c.token(kind if kind != "action" or index in trained else "idle", x, y, width, name)
            x += width
        c.text("note", 590, y + 20, note)

    c.text("name", 20, 46, "episode")
    row(26, 6, (1, 3, 5), "rewards r1, r2, r3 of the actions")
    c.path("line", "M20 76 H940")
    c.text("name", 20, 118, "concat")
    row(98, 6, (1, 3, 5), "one sample; its reward is the episode's outcome")
    c.path("line", "M20 150 H940")
    c.text("name", 20, 192, "individual")
    row(172, 2, (1,), "reward r1 + γ r2 + γ² r3")
    row(212, 4, (3,), "reward r2 + γ r3")
    row(252, 6, (5,), "reward r3")
    c.box("action", 170, 298, 14, 14, 3)
    c.text("note", 190, 310, "trained")
    c.box("idle", 260, 298, 14, 14, 3)
    same = "an action that is context here. With one weight on each token both exports have the same gradient."
    c.text("note", 280, 310, same)
    return c


def tree() -> Canvas:
    """Three samples laid over each other."""
    c = Canvas(960, 372, "The prefix tree: what samples begin with in common is computed once")
    shared = [("prompt", "P"), ("prompt", "<img>"), ("prompt", "<img>")]
    tails = [["a", "b", "c"], ["a", "b", "d"], ["e", "f"]]
    c.text("name", 20, 40, "3 samples, 17 tokens")
    for row, tail in enumerate(tails):
        x = 20
        for kind, name in (*shared, *[("action", t) for t in tail]):
            c.token(kind, x, 56 + 40 * row, 50, name)
            x += 50
    c.path("arrow", "M345 111 H405")
    c.text("name", 430, 40, "one tree, 9 tokens")
    places = {"P": (430, 76), "<img>1": (480, 76), "<img>2": (530, 76)}
    for key, (x, y) in places.items():
        c.token("prompt", x, y, 50, key.rstrip("12"))
    c.path("arrow", "M581 84 L610 72")
    c.path("arrow", "M581 98 L610 146")
    for index, token in enumerate("ab"):
        c.token("action", 614 + 50 * index, 56, 50, token)
    c.token("action", 614, 136, 50, "e")
    c.token("action", 664, 136, 50, "f")
    c.path("arrow", "M715 66 L748 54")
    c.path("arrow", "M715 76 L748 102")
    c.token("action", 752, 36, 50, "c")
    c.token("action", 752, 92, 50, "d")
    c.path("line", "M20 196 H940")
    c.text("name", 20, 228, "who sees whom")
    c.text("note", 20, 252, "The tree stands in one sequence, depth first.")
    c.text("note", 20, 270, "A token sees those above it and itself.")
    c.text("note", 20, 288, "d does not see c, and e sees neither a nor b.")
    c.text("note", 20, 306, "Positions count from the beginning of a sample.")
    names = ["P", "<img>", "<img>", "a", "b", "c", "d", "e", "f"]
    parents = [None, 0, 1, 2, 3, 4, 4, 2, 7]
    size = 14
    for row, name in enumerate(names):
        y = 228 + size * row
        seen, at = set(), row
        while at is not None:
            seen.add(at)
            at = parents[at]
        c.text("mono", 480, y + 11, name, "end")
        for column in range(len(names)):
            kind = ("prompt" if column < 3 else "action") if column in seen else "idle"
            c.box(kind, 490 + size * column, y, size - 2, size - 2, 2)
    return c


CREDIT = {
    "dr_grpo": ("outcome minus the group's mean", [[0.5] * 3, [0.5] * 2, [0.5] * 3]),
    "gigpo": (
        "and the turn's return, minus the mean of turns from the same state",
        [[0.905] * 3, [0.5] * 2, [0.5] * 3],
    ),
    "turn_wise_gae": ("return minus what the critic said at the turn's end", [[0.45] * 3, [0.35] * 2, [0.1] * 3]),
    "masked_gae": (
        "return minus what the critic said, at each token",
        [[0.5, 0.48, 0.45], [0.4, 0.35], [0.2, 0.15, 0.1]],
    ),
}
"""A rule and what it gives each token; a test computes the numbers with the real estimators."""


def credit() -> Canvas:
    """An episode that is solved in its third turn, beside one that is not."""
    c = Canvas(960, 446, "Credit over turns: what each sampled token of an episode gets from four estimators")
    turns = [3, 2, 3]
    x0, width, gap = 350, 50, 40
    x = x0
    for number, count in enumerate(turns, 1):
        c.text("name", x, 34, f"turn {number}")
        c.text("note", x + 60, 34, f"reward {1 if number == 3 else 0}")
        for index in range(count):
            c.token("action", x + width * index, 46, width, f"t{index + 1}", 24)
        x += width * count + gap
    for row, (name, (rule, values)) in enumerate(CREDIT.items()):
        base = 152 + 78 * row
        c.text("name", 20, base - 26, name)
        words, line = rule.split(), ""
        lines = []
        for word in words:
            if len(line) + len(word) > 42:
                lines.append(line)
                line = ""
            line = f"{line} {word}".strip()
        for index, part in enumerate([*lines, line]):
            c.text("note", 20, base - 8 + 16 * index, part)
        x = x0
        for turn in values:
            for index, value in enumerate(turn):
                c.box("bar", x + width * index + 8, base - 48 * value, width - 18, 48 * value, 2)
                c.text("mono", x + width * (index + 0.5) - 1, base + 14, f"{value:g}", "middle")
            c.path("line", f"M{x} {base} H{x + width * len(turn)}")
            x += width * len(turn) + gap
    c.text("note", 20, 418, "The other episode of the group earns 0, and begins in the same state.")
    c.text("note", 20, 435, "γ is 0.9 for gigpo, and 1 for the estimators with a critic, which are not whitened yet.")
    return c


def staleness() -> Canvas:
    """An episode that new weights reach while it is played."""
    c = Canvas(960, 262, "Weight versions and staleness: an episode whose tokens have two versions")
    c.text("name", 20, 66, "engines")
    c.text("name", 20, 156, "learner")
    for version, (x, width) in enumerate([(120, 230), (350, 250), (600, 250)]):
        c.text("note", x + 6, 32, f"weights of version {version + 3}")
        c.path("line", f"M{x} 22 V196")
        c.token("idle", x + 4, 136, width - 70, f"step {version + 3}: trains")
        c.path("arrow", f"M{x + width - 62} 150 L{x + width - 8} 104")
    c.path("line", "M850 22 V196")
    c.token("old", 170, 48, 180, "turn 1, version 3")
    c.token("new", 350, 48, 90, "version 4")
    c.token("seen", 440, 48, 70, "tool")
    c.token("new", 510, 48, 80, "turn 2")
    c.text("note", 170, 98, "begun with version 3")
    c.path("arrow", "M590 66 C 640 66 640 120 650 134")
    notes = [
        "Step 5 trains on it: its staleness is 5 - 3 = 2 updates, so train.staleness must be at least 2. Each token",
        "keeps the version that made it and its log-probability under it. New weights come between two tokens.",
    ]
    for index, note in enumerate(notes):
        c.text("note", 20, 222 + 19 * index, note)
    return c


def processes() -> Canvas:
    """Who holds what."""
    c = Canvas(960, 406, "Processes: who holds weights, optimiser, engine and judges")

    def process(x: float, y: float, name: str, lines: Sequence[str], kind: str = "box") -> None:
        c.box(kind, x, y, 190, 36 + 17 * len(lines), 8)
        c.text("name", x + 12, y + 22, name)
        for index, line in enumerate(lines):
            c.text("note", x + 12, y + 42 + 17 * index, line)

    c.text("name", 20, 34, "one process")
    process(
        20,
        48,
        "rank 0",
        [
            "the loop, the run folder",
            "weights, optimiser, critic",
            "KL reference",
            "engine: same weights, its",
            "keys and values",
        ],
    )
    process(20, 210, "judge, tool", ["your functions only", "killed when they hang"], "side")
    c.path("arrow", "M115 170 V206")

    c.text("name", 260, 34, "a learner and engines: torchrun, 3 processes")
    process(260, 48, "rank 0: learner", ["the loop, the run folder", "weights, optimiser, critic", "KL reference"])
    process(510, 48, "rank 1: engine", ["weights", "keys and values"])
    process(510, 144, "rank 2: engine", ["weights", "keys and values"])
    c.path("arrow", "M452 74 H506")
    c.path("arrow", "M452 110 L506 166")
    c.text("note", 260, 160, "new weights after each update;")
    c.text("note", 260, 177, "rounds of turns as messages")

    c.text("name", 260, 250, "all learn and sample: train.learners=all, train.shard=true")
    for index in range(3):
        first = ["the loop, the run folder"] if index == 0 else ["told what to do"]
        process(
            260 + 230 * index,
            264,
            f"rank {index}",
            [*first, "1/3 of weights, optimiser", "a whole copy to sample", "keys and values"],
        )
        if index:
            c.path("arrow", f"M{262 + 230 * index} 330 H{222 + 230 * index + 10}")
    c.text("note", 260, 390, "gradients are summed over the ranks; a round of turns is shared out; no weights are sent")
    return c


DRAWINGS: tuple[Callable[[], Canvas], ...] = (segments, exports, tree, credit, staleness, processes)

if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for drawing in DRAWINGS:
        (TARGET / f"{drawing.__name__}.svg").write_text(drawing().svg(), encoding="utf-8")
