"""Tests engines that sample a tiny model; the learner then scores each of their tokens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from npu_vlrl.acceptance.models import scratch, tiny_config
from npu_vlrl.acceptance.worker import Failed, Machine, NotTried
from npu_vlrl.config import Config
from npu_vlrl.engines.kind import Placement
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.trainer import LearnerError
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.rollout.probe import Probe
from npu_vlrl.training import processes
from npu_vlrl.training.guard import EngineGuard
from npu_vlrl.workflow.render import Renderer

ALLOWED = {"bfloat16": 0.3, "float32": 0.05}
"""Largest gap in nats between engine and learner. In bfloat16 0.03 to 0.06 is usual for models of this size; wrong
images or weights make 1 to 3."""


def inprocess(machine: Machine, kind: str) -> dict[str, Any]:
    """Tests the engine of the learner's process, in the dtype of training. It shares the learner's weights."""
    found = _certificate(machine, tiny_config(kind, "bfloat16", algorithm=_limit("bfloat16")), told_late=False)
    return {"detail": f"{found['gap']:.3f} nats from the learner, {found['gap_updated']:.3f} after an update", **found}


def vllm(machine: Machine, kind: str) -> dict[str, Any]:
    """Tests vLLM in this process: before an update, after it while vLLM has the old weights, and after it has the new
    ones.
    """
    for problem in machine.platform.vllm_problems("bfloat16", sleep=False):
        raise NotTried(problem)
    config = tiny_config(kind, "bfloat16", rollout={"engine": "vllm"}, algorithm=_limit("bfloat16"))
    found = _certificate(machine, config, told_late=True)
    return {"detail": f"{found['gap']:.3f} nats from the learner, {found['gap_updated']:.3f} after an update", **found}


def _limit(dtype: str) -> dict[str, object]:
    return {"max_logprob_gap": ALLOWED[dtype]}


def _certificate(machine: Machine, config: Config, told_late: bool) -> dict[str, Any]:
    """Gaps in nats of the probe that a training samples after each update. Raises LearnerError for a gap that is too
    large, and Failed where outdated weights of the engine make none.
    """
    platform = machine.platform
    with scratch() as folder, ExitStack() as cleanup:
        processes.prepare(config)
        loaded, vision = processes.load(config, folder, platform)
        _randomise(loaded, std=0.08)
        loaded.policy.model.save_pretrained(loaded.folder)  # for an engine that reads the folder
        engine = processes.local_engine(config, platform, loaded, vision, Placement.ONLY, cleanup)
        learner = LearnerGroup(lambda: processes.new_learner(config, platform, Ranks(), loaded.policy, vision))
        renderer = Renderer(loaded.tokenizer, loaded.processor, template_name=str(loaded.folder))
        check = EngineGuard(engine, learner, Probe(loaded, renderer, config.workflow.context_tokens))
        first = check(0)
        _randomise(loaded, std=0.09)
        vision.weights_changed()
        if told_late:
            _must_fail(check)
        engine.weights_changed(1)
        second = check(1)
    return {"gap": first["probe_gap"], "gap_updated": second["probe_gap"], "tokens": int(second["probe_tokens"])}


@torch.no_grad()
def _randomise(loaded: LoadedModel, std: float) -> None:
    """Randomises every weight, norms and biases too, so that a weight which an engine leaves out shows."""
    generator = torch.Generator().manual_seed(int(1e3 * std))
    for parameter in loaded.policy.trainable().values():
        noise = (torch.randn(parameter.shape, generator=generator) * std).to(parameter)
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)


def _must_fail(check: EngineGuard) -> None:
    """Raises Failed unless an engine with old weights fails the probe: the control."""
    try:
        found = check(1)
    except LearnerError:
        return
    raise Failed(
        f"an engine with old weights is {found['probe_gap']:.3f} nats from the learner, so the gap shows nothing"
    )
