"""Acceptance test of a machine: `npu-vlrl doctor --ascend-report FILE`.

`report` runs the checks of `plan` one after the other in worker processes (`crew`, `worker`), and writes each result
into one file at once. The other modules implement the checks; only workers import them.
"""
