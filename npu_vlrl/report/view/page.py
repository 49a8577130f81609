"""Builds the page: its frame from a template, its code and style from files, and the records of a run inside it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from npu_vlrl.report.view.records import COLUMNS, PAGE, RunRecords
from npu_vlrl.report.view.run_images import PNG_BYTES

ASSETS = Path(__file__).parent / "assets"

CODE = ("dom", "source", "images", "colour", "episode", "filters", "list", "main")
"""Files of the page's program; later ones use definitions of earlier ones."""


def head(records: RunRecords, from_row: int = 0) -> dict[str, Any]:
    """Data that the page needs at once: the list from a row on, and facts about the run."""
    content = records.content
    return {
        "name": records.folder.resolve().name,
        "model": records.model,
        "notes": records.notes,
        "unreadable": records.unreadable,
        "generation": records.generation,
        "page": PAGE,
        "columns": COLUMNS,
        "control": sorted(content.control),
        "from": from_row,
        "rows": records.rows[from_row:],
    }


def frame(name: str, index: str | None) -> str:
    """Page without records. `index` is `packed` into it; a page without one requests it from its server."""
    code = "\n".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in CODE)
    code = f'"use strict";\n(() => {{\n{code}\n}})();\n'
    style = (ASSETS / "view.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("view.html").render(
        name=name,
        index=index,
        policy=policy(code, style, "'none'" if index is not None else "'self'"),
        code=code,
        style=style,
    )


def policy(code: str, style: str, connect: str) -> str:
    """Content-Security-Policy under which only this code and this style run, and nothing is loaded."""
    code_hash, style_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (code, style)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{code_hash}'; style-src 'sha256-{style_hash}'; img-src blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def packed(value: Any) -> str:
    """Packs JSON, compressed, as characters without a meaning in HTML."""
    return base64.b64encode(gzip.compress(json.dumps(value).encode(), 6, mtime=0)).decode()


def write_page(records: RunRecords, file: Path) -> int:
    """Writes all records and images of a run into one file, and returns its size in bytes. Raises OSError."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w", encoding="utf-8") as out:
        out.write(frame(records.folder.resolve().name, packed(head(records))))
        for name, data in _blocks(records):
            # the closing tags of a page may be left out, so what follows can grow
            out.write(f'<script type="text/plain" id="{name}">{data}</script>\n')
    os.replace(part, file)
    return file.stat().st_size


def _blocks(records: RunRecords) -> Iterator[tuple[str, str]]:
    """Yields the data blocks: pages first, so that their texts are there early."""
    images: dict[str, None] = {}
    for number in range(records.n_pages):
        page = records.page(number)
        images |= dict.fromkeys(_named(page))
        yield f"page-{number}", packed(page)
    sizes = [file.stat().st_size for name in images if (file := records.images.file(name))]
    lossy = sum(sizes) > PNG_BYTES
    for name in images:
        yield f"picture-{name}", base64.b64encode(records.images.encoded(name, lossy)).decode()


def _named(page: dict[str, Any]) -> Iterator[str]:
    """Hashes of the existing images of a page."""
    for blocks in page["segments"]:
        yield from (image["hash"] for block in blocks for image in block["images"] if image["stored"])
    for record in page["records"]:
        results = (result for turn in record["turns"] for result in turn["tool_results"])
        yield from (image["hash"] for result in results for image in result["images"] if image["stored"])
