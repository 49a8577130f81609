"""The checks of an acceptance test, in their order: function, time limit, and the setting that avoids it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

HERE = __name__.rpartition(".")[0]

MODELS = ("Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL-7B-Instruct")
"""Models whose shapes are tested; `estimate/published` has them."""

TRAINED, EXACT, UNUSED = "bfloat16", "float32", "float16"
"""Dtypes: that of training, the other value of `model.dtype`, and one in which nothing here is trained."""

PATTERNS = (
    *("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("all_gather_object", "broadcast_object_list"),
)
"""Collectives, as torch.distributed names them. This project uses the first five; vLLM, and experts, the others."""

ONE_DEVICE = 0
"""Value of `Check.ranks` for a check of several devices where there is one."""

ALONE = "NPU_VLRL_PROCESSES=1 (one process, no collectives)"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Example: `Check("streams", "npu_vlrl.acceptance.facts:streams", "nothing; update the driver")`
    """

    name: str
    function: str
    """Function as MODULE:FUNCTION; it receives a `worker.Machine` and the arguments."""
    turned_off_by: str
    """Key of the configuration or environment variable with which a training avoids the checked feature."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 120.0
    ranks: int = 1
    """Number of processes that run it together, each with a device of its own."""
    fresh: bool = False
    """Whether it needs a fresh process, since it measures peak memory or leaves much behind."""


FACTS = Check("facts", f"{HERE}.facts:facts", "")
"""First check: the others depend on its facts."""


def checks(facts: Mapping[str, Any]) -> Iterator[Check]:
    """Checks after `FACTS`, depending on its result. Features that a training needs come first."""
    for index in range(len(facts["devices"])):
        hidden = f"{facts['visible_devices_variable'] or 'nothing'} (leave this device out)"
        yield Check(f"device {index}", f"{HERE}.facts:device", hidden, {"index": index})
    yield from _ops(facts["ops"], TRAINED)
    yield from _single()
    yield from _several(facts["ranks"] if facts["ranks"] > 1 else ONE_DEVICE)
    yield from _vllm()
    yield from _memory(facts["allocator_variable"])
    yield from (check for dtype in (EXACT, UNUSED) for check in _ops(facts["ops"], dtype))


def _ops(names: list[str], dtype: str) -> Iterator[Check]:
    for name in names:
        turned_off_by = f"NPU_VLRL_REFERENCE_OPS={name}"
        yield Check(f"op {name} in {dtype}", f"{HERE}.ops:compare", turned_off_by, {"op": name, "dtype": dtype})


def _single() -> Iterator[Check]:
    """Checks of one process on the first device."""
    yield Check("streams", f"{HERE}.facts:streams", "nothing; update the driver")
    yield Check("graph capture", f"{HERE}.decoding:graph_capture", "rollout.graphs=false")
    ops = "NPU_VLRL_REFERENCE_OPS= with the ops that failed, or rollout.engine=vllm"
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        yield Check(f"in-process engine, {kind}", f"{HERE}.engines:inprocess", ops, {"kind": kind}, 180.0)
    for model in MODELS:
        arguments = {"model": model}
        yield Check(f"decode step of {model}", f"{HERE}.decoding:decode_step", "rollout.graphs=false", arguments)


def _several(ranks: int) -> Iterator[Check]:
    """Checks of one process for each device."""
    groups = {"all processes": "all"} | ({"learners": "some", "learner and engines": "engines"} if ranks > 2 else {})
    for name, members in groups.items():
        turned_off_by = {"learners": "train.learners=1", "learner and engines": "sync.through=disk"}.get(name, ALONE)
        for pattern in PATTERNS:
            arguments = {"pattern": pattern, "members": members}
            line = f"{pattern} of {name}"
            yield Check(line, f"{HERE}.collectives:pattern", turned_off_by, arguments, 60.0, ranks)
    yield Check("weights to engines", f"{HERE}.training:weights", "sync.through=disk", ranks=ranks)
    for shard, turned_off_by in ((False, "train.learners=1"), (True, "train.shard=false")):
        name = "sharded learners" if shard else "several learners"
        yield Check(name, f"{HERE}.training:learners", turned_off_by, {"shard": shard}, 180.0, ranks)


def _vllm() -> Iterator[Check]:
    for kind in ("qwen3", "qwen2_5_vl"):
        turned_off_by = "rollout.engine=inprocess"
        yield Check(f"vLLM, {kind}", f"{HERE}.engines:vllm", turned_off_by, {"kind": kind}, 300.0, fresh=True)


def _memory(allocator_variable: str | None) -> Iterator[Check]:
    allocator = f"{allocator_variable}= (empty)" if allocator_variable else "nothing"
    yield Check("allocator", f"{HERE}.memory:allocator", allocator)
    yield Check("out of memory", f"{HERE}.memory:out_of_memory", allocator)
    margin = "optim.micro_batch_tokens and rollout.cache_mib (leave a margin beside the estimate)"
    for model in MODELS:
        yield Check(f"memory of {model}", f"{HERE}.memory:estimate", margin, {"model": model}, 180.0, fresh=True)
