"""Commands of `npu-vlrl`, a file each: `add` declares a command's arguments, and its function does the work.

Costly imports happen when a command runs, so that help and completion appear at once.
"""
