"""What the documents hold: their code blocks, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- not run: (.+?) -->\n+ *\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason` says why it cannot run here: `<!-- not run: needs an NPU -->` on the line before it."""

    document: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(text: str, document: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        marker = MARKER.search(before)
        body = "\n".join(line.removeprefix(found["indent"]) for line in found["text"].split("\n"))
        yield Block(document, before.count("\n") + 1, found["language"], body, marker and marker[1])


def all_blocks() -> list[Block]:
    return [
        block for file in DOCUMENTS for block in blocks(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a bash block as words, without comments, redirections, and assignments in front of them."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" && | \| ", line):
            words = shlex.split(part, comments=True)
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):
                del words[0]
            words = words[: words.index(">")] if ">" in words else words
            if words:
                yield words


def headings(text: str) -> set[str]:
    """Anchors of a document, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def links(text: str) -> list[str]:
    """Targets of links and images that stand in the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
    return [target for target in found if "://" not in target]
