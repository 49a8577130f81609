"""One process of a test of `sync/`: `python -m tests.sync.actor SCENARIO FOLDER`. It writes what it saw as JSON.

Rank 0 plays the learner, the others engines. In `plain`, `half` and `adapter` each holds a tiny Qwen2.5-VL with a
frozen tower, elsewhere a few tensors; the learner changes what is trained between updates.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_vlrl.hardware import select
from npu_vlrl.kernels import use
from npu_vlrl.sync import weights
from npu_vlrl.sync.weights import SyncError, WeightReceiver, WeightSender
from npu_vlrl.sync.world import PeerError, World, join, leave

TIMEOUT_S = 6.0
START_TIMEOUT_S = 60.0
BUCKET_BYTES = 16384
Seen = dict[str, Any]


class Model:
    """What the scenarios need of a policy; here a few tensors, the last of which is frozen."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        device = select().device(int(os.environ["LOCAL_RANK"]))
        shapes = {"embed": (50, 64), "down_proj.weight": (64, 96), "bias": (96,), "scale": (), "tower": (32, 32)}
        self.tensors = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def trained(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if name != "tower"}

    def logprobs(self) -> list[float]:
        return (self.tensors["embed"] @ self.tensors["down_proj.weight"]).log_softmax(-1)[:, 0].tolist()


class TinyModel(Model):
    """A real one, through the class that engine and learner use."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from npu_vlrl.config import ModelConfig
        from npu_vlrl.model.load import load_model

        device = select().device(int(os.environ["LOCAL_RANK"]))
        config = ModelConfig(path=str(folder / "model"), freeze_vision=True, **settings)
        self.policy = load_model(config, folder, 0, device).policy

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.policy.model.named_parameters())

    def trained(self) -> dict[str, Tensor]:
        return dict(self.policy.trainable())

    @torch.no_grad()
    def logprobs(self) -> list[float]:
        ids = torch.arange(10, 26, device=self.policy.device)
        positions = torch.arange(16, device=self.policy.device).expand(3, -1)
        hidden = self.policy.hidden_packed(ids, positions, [16], [])
        scores = (hidden[:-1] @ self.policy.head_weight.T).float().log_softmax(-1)
        return scores.gather(1, ids[1:, None])[:, 0].tolist()


@torch.no_grad()
def change(parameters: dict[str, Tensor], seed: int) -> None:
    """The same on every device: the noise is made on the host."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in parameters.values():
        tensor.add_((0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor))


def fingerprint(model: Model) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.parameters().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def state(model: Model) -> Seen:
    return {"weights": fingerprint(model), "logprobs": model.logprobs()}


def engine(world: World, model: Model) -> Seen:
    """Takes updates until the learner stops it."""
    receiver = WeightReceiver(world, model.parameters())
    history: list[Seen] = [{"version": receiver.version, **state(model)}]
    try:
        while (message := world.channel(0).receive()).kind == "weights":
            receiver.receive(message)
            history.append({"version": receiver.version, **state(model)})
    except (PeerError, SyncError) as error:
        return {"history": history, "after": {"version": receiver.version, **state(model)}, **told(error)}
    return {"history": history}


def told(error: Exception) -> Seen:
    return {"error": str(error), "kind": type(error).__name__}


def learner(world: World, model: Model, steps: Callable[[WeightSender], Iterator[Any]]) -> Seen:
    sender = WeightSender(world, model.trained(), BUCKET_BYTES)
    history: list[Seen] = []
    for report in steps(sender):
        history.append({"sent": [report.bytes_sent, report.tensors, report.buckets], **state(model)})
    for rank in range(1, world.size):
        world.channel(rank).send("stop")
    return {"history": history, "sizes": {n: p.numel() * p.element_size() for n, p in model.trained().items()}}


def plain(folder: Path, world: World) -> Seen:
    """Everything, then nothing, then one layer's weight, then everything again."""
    model = TinyModel(folder)
    if world.rank:
        return engine(world, model)
    trained = model.trained()
    one = next(name for name in trained if name.endswith("down_proj.weight"))

    def steps(sender: WeightSender) -> Iterator[Any]:
        change(trained, 1)
        yield sender.send(0)
        yield sender.send(1)
        change({one: trained[one]}, 2)
        yield sender.send(2)
        change(trained, 3)
        yield sender.send(3)

    return learner(world, model, steps) | {"changed alone": one}


def half(folder: Path, world: World) -> Seen:
    """Engines in bfloat16."""
    if world.rank:
        return engine(world, TinyModel(folder, dtype="bfloat16"))
    model = TinyModel(folder)

    def steps(sender: WeightSender) -> Iterator[Any]:
        change(model.trained(), 1)
        yield sender.send(0)

    seen = learner(world, model, steps)
    model.policy.model.to(torch.bfloat16)
    return seen | {"rounded": fingerprint(model)}


def adapter(folder: Path, world: World) -> Seen:
    from npu_vlrl.config import LoraConfig

    model = TinyModel(folder, lora=LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    if world.rank:
        return engine(world, model)

    def steps(sender: WeightSender) -> Iterator[Any]:
        change(model.trained(), 1)
        yield sender.send(0)

    return learner(world, model, steps)


def other_shape(folder: Path, world: World) -> Seen:
    """Engine 1 says that it holds another model."""
    model = Model()
    if world.rank:
        parameters = model.parameters()
        parameters["down_proj.weight"] = parameters["down_proj.weight"][:, :5]
        WeightReceiver(world, parameters)
        world.channel(0).receive()
        return {}
    WeightSender(world, model.trained(), BUCKET_BYTES)
    return {}


def missing(folder: Path, world: World) -> Seen:
    model = Model()
    if world.rank:
        parameters = model.parameters()
        del parameters["down_proj.weight"]
        WeightReceiver(world, parameters)
        world.channel(0).receive()
        return {}
    WeightSender(world, model.trained(), BUCKET_BYTES)
    return {}


def two_dtypes(folder: Path, world: World) -> Seen:
    model = Model()
    if world.rank:
        parameters = model.parameters()
        if world.rank == 2:
            parameters["bias"] = parameters["bias"].bfloat16()
        WeightReceiver(world, parameters)
        world.channel(0).receive()
        return {}
    WeightSender(world, model.trained(), BUCKET_BYTES)
    return {}


def corrupted(folder: Path, world: World) -> Seen:
    """The last engine gets a wrong byte in the first update; the second goes well."""
    model = Model()
    if world.rank:
        right, calls = weights.checksum, []

        def wrong(bucket: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 2 and world.rank == world.size - 1:
                bucket[3] += 1
            return right(bucket)

        weights.checksum = wrong
        return engine(world, model)

    def steps(sender: WeightSender) -> Iterator[Any]:
        change(model.trained(), 1)
        try:
            sender.send(0)
        except SyncError as error:
            errors.append(str(error))
        yield sender.send(1)

    errors: list[str] = []
    return learner(world, model, steps) | {"errors": errors}


def falling(folder: Path, world: World) -> Seen:
    model = Model()
    if world.rank:
        return engine(world, model)

    def steps(sender: WeightSender) -> Iterator[Any]:
        yield sender.send(5)
        try:
            sender.send(4)
        except ValueError as error:
            errors.append(str(error))

    errors: list[str] = []
    return learner(world, model, steps) | {"errors": errors}


def engine_dies(folder: Path, world: World) -> Seen:
    """The last engine is killed in the middle of the first bucket; the others must keep their weights."""
    model = Model()
    if world.rank == world.size - 1:
        weights.dist.broadcast = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    if world.rank:
        return engine(world, model)

    def steps(sender: WeightSender) -> Iterator[Any]:
        change(model.trained(), 1)
        yield sender.send(0)

    return learner(world, model, steps)


def learner_dies(folder: Path, world: World) -> Seen:
    """The learner is killed after all buckets arrived, before it says commit."""
    model = Model()
    if world.rank == 0:
        WeightSender._compare = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if world.rank:
        return engine(world, model)

    def steps(sender: WeightSender) -> Iterator[Any]:
        change(model.trained(), 1)
        yield sender.send(0)

    return learner(world, model, steps)


def absent(folder: Path, world: World) -> Seen:
    """An engine joined, and then never says what it holds."""
    if world.rank:
        world.channel(0).receive()
        return {}
    world.start_timeout_s = 2.0
    WeightSender(world, {"a": torch.zeros(1)}, BUCKET_BYTES)
    return {}


SCENARIOS = {
    f.__name__: f
    for f in (
        plain,
        half,
        adapter,
        other_shape,
        missing,
        two_dtypes,
        corrupted,
        falling,
        engine_dies,
        learner_dies,
        absent,
    )
}


def main(scenario: str, folder: Path) -> int:
    torch.set_num_threads(1)
    platform = select()
    use(platform.kernels)
    try:
        seen = SCENARIOS[scenario](folder, join(platform, TIMEOUT_S, START_TIMEOUT_S))
    except (PeerError, SyncError) as error:
        seen = told(error)
    rank = os.environ["RANK"]
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    if "error" in seen:
        leave(1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
