"""The processes of a test of `sync/`: `python -m tests.sync.actor FOLDER SIZE SCENARIOS…`.

For each argument SCENARIOS, names with commas between, SIZE processes are forked: torch is imported once for all.
Rank 0 plays the learner, the others engines, and the scenarios follow each other over the same connections. In `plain`,
`half` and `adapter` each process holds a tiny Qwen2.5-VL with a frozen tower, elsewhere a few tensors; the learner
changes what is trained between updates. What each process saw, said, and how it ended, is left in FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_vlrl.hardware import select
from npu_vlrl.kernels import use
from npu_vlrl.network.messages import Failed, Message, Ready, Stop
from npu_vlrl.network.world import PeerError, World, join, leave
from npu_vlrl.sync import buckets
from npu_vlrl.sync.buckets import in_place
from npu_vlrl.sync.plan import Plan
from npu_vlrl.sync.transfer import Checksums
from npu_vlrl.sync.weights import Decision, SyncError, WeightReceiver, Weights, WeightSender
from tests.support.ranks import free_port
from tests.sync.models import Model, TinyModel, fingerprint, state, train

TIMEOUT_S = 20.0
SHORT_S = 3.0
START_TIMEOUT_S = 60.0
BUCKET_BYTES = 16384
Seen = dict[str, Any]


def told(error: Exception) -> Seen:
    return {"error": str(error), "kind": type(error).__name__}


def engine(world: World, model: Model, parameters: dict[str, Tensor] | None = None) -> Seen:
    """Takes updates until the learner stops it. An error of its own it tells, and waits for the end."""
    channel = world.channel(0)
    receiver = WeightReceiver(world, in_place(parameters or model.parameters()))
    receiver.version = -1  # one from before, so that it shows when there is none
    history: list[Seen] = [{"version": receiver.version, **state(model)}]
    try:
        while isinstance(message := channel.receive(), Weights):
            receiver.receive(message)
            history.append({"version": receiver.version, **state(model)})
    except RuntimeError as error:
        if not isinstance(error, PeerError):
            channel.send(Failed(str(error)))
        return {"history": history, "after": {"version": receiver.version, **state(model)}, **told(error)}
    channel.send(Ready())
    return {"history": history}


class Learner:
    """Sends updates, and notes what each came to."""

    def __init__(self, world: World, model: Model) -> None:
        self.model = model
        self.sender = WeightSender(world, model.trained(), BUCKET_BYTES)
        self.history: list[Seen] = []

    def send(self, version: int) -> None:
        report = self.sender.send(version)
        sent = [report.bytes_sent, report.tensors, report.buckets]
        self.history.append({"sent": sent, **state(self.model)})

    def seen(self) -> Seen:
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.model.trained().items()}
        return {"history": self.history, "sizes": sizes}


def stop(world: World) -> None:
    """Lets the engines go on to the next scenario; what they still had to say is dropped."""
    for rank in range(1, world.size):
        world.channel(rank).send(Stop())
        while not isinstance(world.channel(rank).receive(TIMEOUT_S), Ready):
            pass


def plain(folder: Path, world: World) -> Seen:
    """Everything, then nothing, then one layer's weight, then everything again."""
    model = TinyModel(folder)
    if world.rank:
        return engine(world, model)
    trained = model.trained()
    one = next(name for name in trained if name.endswith("down_proj.weight"))
    learner = Learner(world, model)
    train(trained, 1)
    learner.send(0)
    learner.send(1)
    train({one: trained[one]}, 2)
    learner.send(2)
    train(trained, 3)
    learner.send(3)
    stop(world)
    return learner.seen() | {"changed alone": one}


def half(folder: Path, world: World) -> Seen:
    """Engines in bfloat16."""
    if world.rank:
        return engine(world, TinyModel(folder, dtype="bfloat16"))
    model = TinyModel(folder)
    learner = Learner(world, model)
    train(model.trained(), 1)
    learner.send(0)
    stop(world)
    seen = learner.seen()
    model.policy.model.to(torch.bfloat16)
    return seen | {"rounded": fingerprint(model)}


def adapter(folder: Path, world: World) -> Seen:
    from npu_vlrl.config import LoraConfig

    model = TinyModel(folder, lora=LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    if world.rank:
        return engine(world, model)
    learner = Learner(world, model)
    train(model.trained(), 1)
    learner.send(0)
    stop(world)
    return learner.seen()


def _refused(world: World, spoil: Callable[[dict[str, Tensor]], None]) -> Seen:
    """The last engine says that it holds something else."""
    model = Model()
    if world.rank:
        parameters = model.parameters()
        if world.rank == world.size - 1:
            spoil(parameters)
        return engine(world, model, parameters)
    seen: Seen = {}
    try:
        WeightSender(world, model.trained(), BUCKET_BYTES)
    except SyncError as error:
        seen = {"refused": str(error)}
    stop(world)
    return seen


def other_shape(folder: Path, world: World) -> Seen:
    def spoil(parameters: dict[str, Tensor]) -> None:
        parameters["down_proj.weight"] = parameters["down_proj.weight"][:, :5]

    return _refused(world, spoil)


def missing(folder: Path, world: World) -> Seen:
    return _refused(world, lambda parameters: parameters.pop("down_proj.weight"))


def two_dtypes(folder: Path, world: World) -> Seen:
    def spoil(parameters: dict[str, Tensor]) -> None:
        parameters["bias"] = parameters["bias"].bfloat16()

    return _refused(world, spoil)


def corrupted(folder: Path, world: World) -> Seen:
    """The last engine gets a wrong byte in the first update; the second goes well."""
    model = Model()
    right, calls = Checksums.take, []

    def wrong(sums: Checksums, number: int, bucket: Tensor) -> None:
        calls.append(number)
        if len(calls) == 2:
            bucket[3] += 1
        right(sums, number, bucket)

    if world.rank:
        Checksums.take = wrong if world.rank == world.size - 1 else right  # type: ignore[method-assign]
        try:
            return engine(world, model)
        finally:
            Checksums.take = right  # type: ignore[method-assign]
    learner = Learner(world, model)
    train(model.trained(), 1)
    errors: list[str] = []
    try:
        learner.send(0)
    except SyncError as error:
        errors.append(str(error))
    learner.send(1)
    stop(world)
    return learner.seen() | {"errors": errors}


def falling(folder: Path, world: World) -> Seen:
    model = Model()
    if world.rank:
        return engine(world, model)
    learner = Learner(world, model)
    learner.send(5)
    errors: list[str] = []
    try:
        learner.send(4)
    except ValueError as error:
        errors.append(str(error))
    stop(world)
    return learner.seen() | {"errors": errors}


def _one_update(world: World) -> Seen:
    model = Model()
    if world.rank:
        return engine(world, model)
    learner = Learner(world, model)
    train(model.trained(), 1)
    learner.send(0)
    stop(world)
    return learner.seen()


def _at_broadcast(number: int, do: Callable[[], Any]) -> None:
    """Does something else instead of the broadcast of this number, counted from 0."""
    real, calls = buckets.dist.broadcast, []

    def broadcast(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return do() if len(calls) - 1 == number else real(*arguments, **options)

    buckets.dist.broadcast = broadcast


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def engine_dies(folder: Path, world: World) -> Seen:
    """The last engine is killed after the first bucket; the others must know that they hold no version."""
    if world.rank == world.size - 1:
        _at_broadcast(1, _die)
    return _one_update(world)


def learner_dies(folder: Path, world: World) -> Seen:
    """The learner is killed after the first bucket."""
    if world.rank == 0:
        _at_broadcast(1, _die)
    return _one_update(world)


def learner_dies_late(folder: Path, world: World) -> Seen:
    """The learner is killed when it has told one engine to commit, and not yet the others."""

    def only_the_first(sender: WeightSender, message: Message) -> None:
        for channel in sender._channels:
            channel.send(message)
            if message == Decision(commit=True):
                _die()

    if world.rank == 0:
        WeightSender._tell = only_the_first
    return _one_update(world)


def engine_stands_still(folder: Path, world: World) -> Seen:
    """The last engine is stopped, as a debugger would, before it takes the weights: alive, and silent."""
    transfer = WeightSender._transfer

    def hurried(sender: WeightSender, plan: Plan, version: int) -> None:
        world.timeout_s = SHORT_S  # not before: on a busy machine the others may need longer to answer
        transfer(sender, plan, version)

    WeightSender._transfer = hurried  # type: ignore[method-assign]
    if world.rank == world.size - 1:
        _at_broadcast(0, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    try:
        return _one_update(world)
    finally:
        if world.rank == 0:
            os.kill(world.peers[-1].pid, signal.SIGKILL)


def engine_without_memory(folder: Path, world: World) -> Seen:
    def full(plan: object, parameters: object) -> None:
        raise torch.OutOfMemoryError("no memory for 42 bytes")

    if world.rank == world.size - 1:
        buckets.OwnBuckets = full  # type: ignore[assignment, misc]
    return _one_update(world)


def transfer_fails(folder: Path, world: World) -> Seen:
    """The last engine's collective raises, while those of the others wait for it."""

    def broken() -> None:
        raise RuntimeError("link down")

    if world.rank == world.size - 1:
        _at_broadcast(0, broken)
    return _one_update(world)


def absent(folder: Path, world: World) -> Seen:
    """An engine joined, and then never says what it holds."""
    if world.rank:
        world.channel(0).receive()
        return {}
    world.start_timeout_s = 2.0
    WeightSender(world, {"a": torch.zeros(1)}, BUCKET_BYTES)
    return {}


def rank_main(folder: Path, scenarios: list[str]) -> int:
    """One process. Writes `folder/rank<n>.json`, of a process that was not killed."""
    torch.set_num_threads(1)
    platform = select()
    use(platform.kernels)
    world = join(platform, TIMEOUT_S, START_TIMEOUT_S)
    seen: Seen = {}
    try:
        for name in scenarios:
            seen[name] = globals()[name](folder, world)
    except (PeerError, SyncError) as error:
        seen[name] = told(error)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
    if "error" in seen[name]:
        leave(1)
    world.close()
    return 0


def fork(folder: Path, rank: int, size: int, port: int, scenarios: list[str]) -> int:
    """The process id. The child ends as Python does, by the exit of this whole program."""
    child = os.fork()
    if child:
        return child
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    raise SystemExit(rank_main(folder, scenarios))


def exit_codes(processes: list[int], limit_s: float) -> list[int | None]:
    """None of a process that did not end in time, and was killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit_s
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for process in set(processes) - set(codes):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for process in set(processes) - set(codes):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return [codes.get(process) for process in processes]


def main(folder: Path, size: int, groups: list[str]) -> None:
    for group in groups:
        inside = folder / group
        inside.mkdir()
        port = free_port()
        processes = [fork(inside, rank, size, port, group.split(",")) for rank in range(size)]
        (inside / "codes.json").write_text(json.dumps(exit_codes(processes, limit_s=60)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
