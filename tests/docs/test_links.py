"""Links between documents lead somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import DOCUMENTS, ROOT, headings, links

OTHERS = [ROOT / "benchmarks" / "README.md", ROOT / "tests" / "host_cann" / "README.md"]


def broken(file: Path) -> Iterator[str]:
    for target in links(file.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        place = (file.parent / path).resolve() if path else file
        if not place.exists():
            yield f"{target}: there is no such file"
        elif anchor and anchor not in headings(place.read_text(encoding="utf-8")):
            yield f"{target}: there is no such heading"


@pytest.mark.parametrize("file", [*DOCUMENTS, *OTHERS], ids=lambda f: str(f.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    assert list(broken(file)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("# One, `two` & three\n[x](b.md) [y](#one-two--three) [z](#four) [w](https://x.org)\n")
    assert list(broken(file)) == ["b.md: there is no such file", "#four: there is no such heading"]


def test_every_document_is_on_the_map() -> None:
    named = set(links((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(pages - {target.partition("#")[0] for target in named}) == []
