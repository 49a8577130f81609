"""A program in a real pseudo-terminal, and what such a terminal then shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Mapping
from typing import NamedTuple


class Shown(NamedTuple):
    code: int
    screen: list[str]
    """Lines that are not empty."""
    written: str
    """All bytes, as text."""
    cursor: bool
    """Whether it is visible at the end."""


def resize(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def in_terminal(
    code: str, columns: int, rows: int, environment: Mapping[str, str], then: tuple[int, int] | None = None
) -> Shown:
    """Runs Python code; `then` is the size that the terminal takes as soon as the code writes the word RESIZE."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.read(0, 1)  # until the terminal has its size
        os.execve(sys.executable, [sys.executable, "-c", code], dict(environment))
    resize(terminal, columns, rows)
    os.write(terminal, b"\n")
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux says so that the other side has gone
            break
        if not part:
            break
        written += part
        if then is not None and b"RESIZE" in written:
            resize(terminal, *then)
            then = None
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    text = written.decode(errors="replace")
    return Shown(
        os.waitstatus_to_exitcode(status), screen(text), text, text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l")
    )


def screen(text: str) -> list[str]:
    """What stands on an endless sheet after `text`: letters, new lines, cursor up, and lines that are erased."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\s\S]", text):
        if token == "\n":
            row, column = row + 1, column
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b["):
            if token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
            elif token == "\x1b[2K":
                lines[row] = ""
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]
