"""Saving and restoring a learner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_vlrl.hardware import Platform
from npu_vlrl.learner import checkpoint
from npu_vlrl.learner.checkpoint import Checkpoint, CheckpointError, Stored
from npu_vlrl.learner.optimizer import master, sharded
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MASTER = "master"
DTYPES = ("F32", "BF16")
"""Dtypes of saved tensors, as safetensors names them."""

UNSTEPPED = "unstepped"
"""Key of the state: trained tensors that were not stepped yet. Earlier releases did not write it."""

CRITIC = "critic."
"""Prefix of the names of a critic's weights."""


def save_learner(
    folder: Path, step: int, learner: Learner, platform: Platform, state: dict[str, Any], keep: int
) -> Path:
    """Writes a checkpoint with the trained weights, the optimiser, the random states and `state` (JSON values).

    All ranks of a sharded policy call it, and the `state` of rank 0 is written.

    The masters of weights of 16 bits are part of the optimiser, since weights do not determine them.

    Frozen weights are those of `model.path` and are not written. Vision features are dropped, so that a run that
    continues computes the same bits as a resumed one.
    """
    learner.forget_features()
    trained = trained_by(learner)
    stepped = {
        f"{moment}.{name}": optimizer.state[master(p)][moment]
        for name, (p, optimizer) in trained.items()
        for moment in MOMENTS
        if master(p) in optimizer.state
    }
    unstepped = [name for name, (p, optimizer) in trained.items() if master(p) not in optimizer.state]
    masters = {f"{MASTER}.{name}": master(p) for name, (p, _) in trained.items() if p.dtype.itemsize < 4}
    rows = {name: learner.ranks.rows(len(p)) for name, (p, _) in trained.items() if sharded(master(p)) is not None}
    places = {name: (held.start, len(trained[name][0])) for name, held in rows.items()}
    content = Checkpoint(
        step,
        weights={name: master(p) if name in rows else p for name, (p, _) in trained.items()},
        optimizer=stepped | masters,
        rng={"torch": torch.get_rng_state(), "device": platform.rng_state()},
        state={"updates": learner.updates, "skipped": learner.skipped, UNSTEPPED: unstepped, **state},
        rows=places | {f"{m}.{name}": place for name, place in places.items() for m in MOMENTS if m != "step"},
    )
    return checkpoint.save(folder, content, keep, learner.ranks if learner.is_divided else None)


def load_learner(path: Path, learner: Learner, platform: Platform) -> tuple[int, dict[str, Any]]:
    """Restores what `save_learner` wrote; returns (steps done, state).

    The run that wrote it may have had weights of another dtype; masters that it did not have begin as its weights. Its
    policy may have been sharded over any number of ranks, or not at all: each rank reads its own rows.
    Raises CheckpointError, before anything is restored, when the checkpoint belongs to another model or lacks some of
    the optimiser's tensors, naming what differs.
    """
    content = checkpoint.load(path, learner.ranks)
    weights, moved = content.weights, content.optimizer
    trained = trained_by(learner)
    parameters = {name: p for name, (p, _) in trained.items()}
    _check_names(path, weights, parameters)
    updates, skipped = (needed(path, content.state, key, kind) for key, kind in (("updates", int), ("skipped", list)))
    _check_optimizer(content, path, parameters, stepped=updates > 0 and not skipped)
    for name, (parameter, optimizer) in trained.items():
        stepped = master(parameter)
        rows = None if sharded(stepped) is None else learner.ranks.rows(len(parameter))
        with torch.no_grad():
            wide = f"{MASTER}.{name}"
            stepped.copy_(moved.read(wide, rows) if wide in moved else weights.read(name, rows))
            if rows is None:
                parameter.copy_(stepped)
        found = {m: f"{m}.{name}" for m in MOMENTS if f"{m}.{name}" in moved}
        moments = {m: _wide(moved.read(key, None if m == "step" else rows)) for m, key in found.items()}
        if moments:
            optimizer.state[stepped] = {m: moment.to(stepped.device) for m, moment in moments.items()}
    learner.publish()
    _set_random(content.rng, path, platform)
    learner.updates, learner.skipped = updates, skipped
    return content.step, content.state


def load_policy(path: Path, policy: Policy) -> tuple[int, dict[str, Any]]:
    """Puts the weights of a checkpoint into a policy, one at a time; returns (steps done, state).

    Weights of 16 bits are rounded from their masters, as in the run. A critic's weights are ignored.
    Raises CheckpointError when the checkpoint belongs to another model, naming what differs.
    """
    content = checkpoint.load(path)
    weights, moved, here = content.weights, content.optimizer, policy.trainable()
    _check_names(path, weights, here, [name for name in weights if not name.startswith(CRITIC)])
    _check_layout(path, moved, {f"{MASTER}.{name}": p.shape for name, p in here.items() if f"{MASTER}.{name}" in moved})
    with torch.no_grad():
        for name, parameter in here.items():
            wide = f"{MASTER}.{name}"
            parameter.copy_(moved.read(wide) if wide in moved else weights.read(name))
    return content.step, content.state


def trained_by(learner: Learner) -> dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer]]:
    """All trained parameters by name, with the optimiser that steps each."""
    found: dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer]] = {
        name: (p, learner.optimizer) for name, p in learner.parameters.items()
    }
    if learner.critic is not None:
        found |= {name: (p, learner.critic.optimizer) for name, p in learner.critic.parameters.items()}
    return found


def _wide(moment: Tensor) -> Tensor:
    """Converts a moment to float32; earlier releases without masters wrote moments of 16 bits."""
    return moment.to(torch.promote_types(moment.dtype, torch.float32))


def needed(path: Path, state: dict[str, Any], key: str, kind: type) -> Any:
    """Takes a value out of the state of a checkpoint. Raises CheckpointError when it is missing or no `kind`."""
    value = state.pop(key, None)
    if not isinstance(value, kind):
        raise CheckpointError(
            f"checkpoint file {path / checkpoint.STATE}: {key} is {value!r:.60}, no {kind.__name__}; "
            f"{checkpoint.remedy(path)}"
        )
    return value


def _check_optimizer(
    content: Checkpoint[Stored], path: Path, parameters: dict[str, torch.nn.Parameter], stepped: bool
) -> None:
    """Compares the optimiser's tensors with those that the parameters need. `stepped`: some parameters were stepped."""
    moved, unstepped = content.optimizer, content.state.pop(UNSTEPPED, None)
    narrow = [name for name in parameters if content.weights.dtype(name) != "F32"]
    if unstepped is None:  # written by an earlier release, perhaps without masters
        absent = [name for name in parameters if not any(f"{moment}.{name}" in moved for moment in MOMENTS)]
        unstepped = [] if stepped and len(absent) == len(parameters) else absent
        narrow = [name for name in narrow if f"{MASTER}.{name}" in moved]
    shapes: dict[str, torch.Size] = {}
    for name in parameters.keys() - set(unstepped):
        shapes |= {f"{moment}.{name}": parameters[name].shape for moment in MOMENTS} | {f"step.{name}": torch.Size()}
    shapes |= {f"{MASTER}.{name}": parameters[name].shape for name in narrow}
    if difference := sorted(shapes.keys() ^ set(moved)):
        problem = "the optimiser has no" if difference[0] in shapes else "the optimiser has an unknown"
        raise CheckpointError(
            f"checkpoint {path}: {problem} {difference[0]} ({len(difference)} tensors); {checkpoint.remedy(path)}"
        )
    _check_layout(path, moved, shapes)


def _check_layout(path: Path, saved: Stored, shapes: Mapping[str, torch.Size]) -> None:
    """Checks shapes and dtypes of the optimiser's tensors: a scalar would silently be broadcast over a weight."""
    for key, shape in shapes.items():
        if saved.shape(key) != list(shape) or saved.dtype(key) not in DTYPES:
            raise CheckpointError(
                f"checkpoint {path}: {key} is {saved.dtype(key)} {saved.shape(key)}, not F32 {list(shape)}; "
                f"{checkpoint.remedy(path)}"
            )


def _set_random(states: Mapping[str, Tensor], path: Path, platform: Platform) -> None:
    for name, set_state in (("torch", torch.set_rng_state), ("device", platform.set_rng_state)):
        try:
            set_state(states[name])
        except (KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint file {path / 'rng.safetensors'}: {name} is no random state here ({error}); resume on the "
                f"same kind of device, or {checkpoint.remedy(path)}"
            ) from error


def _check_names(
    path: Path, saved: Stored, here: dict[str, torch.nn.Parameter], names: Iterable[str] | None = None
) -> None:
    """Compares names, shapes and dtypes of saved weights with a model's. `names`: those to compare, None for all."""
    difference = sorted(set(saved if names is None else names) ^ here.keys())
    if difference:
        raise CheckpointError(f"checkpoint {path} is of another model: {difference[:3]} … ({len(difference)} names)")
    for name, parameter in here.items():
        if saved.shape(name) != list(parameter.shape):
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name} is {saved.shape(name)}, here {list(parameter.shape)}"
            )
        if saved.dtype(name) not in DTYPES:
            raise CheckpointError(f"checkpoint {path} holds {name} as {saved.dtype(name)}, not {' or '.join(DTYPES)}")
