"""How a command ends, for whoever started it."""

DONE, FAILED, BAD_INPUT = 0, 1, 2
INTERRUPTED = 130
"""By Ctrl-C, as a shell would say."""
