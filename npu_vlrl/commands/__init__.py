"""The commands of `npu-vlrl`, a file each: `add` describes a command's words, and its function does the work.

They import what costs time or memory when they run, so that help and completion appear at once.
"""
