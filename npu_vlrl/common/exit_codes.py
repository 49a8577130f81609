"""Exit codes of the commands."""

DONE, FAILED, BAD_INPUT = 0, 1, 2
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
