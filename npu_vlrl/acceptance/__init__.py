"""Acceptance test of a machine: `npu-vlrl doctor --ascend-report FILE`.

`report` runs the checks of `plan` one after the other in worker processes (`crew`, `worker`), and writes what they find
into one file as soon as it is found. What a check does is in the other modules, which only workers import.
"""
