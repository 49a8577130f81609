"""Hook of mkdocs: pages and files outside docs/ that documents point to become part of the site, below `project/`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PROJECT = "project"

LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)")
"""A relative link of Markdown: its opening, and the path up to the anchor."""


def on_files(files: Files, config: Any) -> Files:
    """Adds what documents link to, and what these link to in turn."""
    queue = [Path(file.abs_src_path) for file in files if file.abs_src_path and file.src_uri.endswith(".md")]
    seen = set(queue)
    while queue:
        page = queue.pop()
        for _, link in LINK.findall(page.read_text("utf-8")):
            target = (page.parent / link).resolve()
            inside = target.is_relative_to(ROOT) and target.is_file()
            if not inside or target in seen or target.is_relative_to(config.docs_dir):
                continue
            seen.add(target)
            files.append(File.generated(config, _uri(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                queue.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links to where their targets are in the site; a link to a folder loses its target, not its text."""
    source = Path(page.file.abs_src_path)

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]  # mkdocs says that it is broken
        depth = page.file.src_uri.count("/")
        return f"{match[1]}{'../' * depth}{_uri(target)}"

    return LINK.sub(moved, markdown)


def _uri(target: Path) -> str:
    """The path of a file of the repository in the site's sources."""
    inside = target.relative_to(ROOT)
    return inside.relative_to("docs").as_posix() if inside.parts[0] == "docs" else f"{PROJECT}/{inside.as_posix()}"
