"""What vLLM does on accelerators only, on a stand-in that records what it is asked: sleep, and devices of workers."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from npu_vlrl.config import load_config
from npu_vlrl.engines.kind import Placement
from npu_vlrl.engines.vllm import engine as vllm
from npu_vlrl.engines.vllm.engine import VllmEngine
from npu_vlrl.engines.vllm.worker import WeightTaker
from npu_vlrl.hardware import PLATFORMS, Memory
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.network.world import own_device
from npu_vlrl.training import processes
from tests.support.models import load, tiny_folder


def worker(load_weights: Callable[[Any], None]) -> WeightTaker:
    """Its samplers say what vllm-ascend's say, whatever it was told."""
    filters = SimpleNamespace(logprobs_mode="raw_logprobs")
    made = WeightTaker()
    made.model_runner = SimpleNamespace(
        get_model=partial(SimpleNamespace, load_weights=load_weights),
        sampler=SimpleNamespace(logprobs_mode="raw_logprobs", topk_topp_sampler=filters),
    )
    return made


class RecordingLLM:
    """Fails like an NPU when weights are written that are asleep."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        self.arguments = arguments
        self.shown = os.environ.get("SHOWN")
        self.store = os.environ.get(vllm.AGENT_STORE)
        self.did: list[str] = []
        self.asleep: set[str] = set()
        self.workers = [worker(lambda tensors: self.did.append(f"load {len(list(tensors))}"))]
        self.llm_engine = SimpleNamespace(
            reset_encoder_cache=lambda: self.did.append("forget images"),
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def sleep(self, level: int) -> None:
        self.did.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        self.did.append(f"wake {tags}")
        self.asleep -= set(tags)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        plain = pickle.loads(pickle.dumps(args))  # as vLLM sends it; what is sent are names, not weights
        assert len(pickle.dumps(args)) < 2**14
        for worker in self.workers:
            getattr(worker, method)(*plain)

    def apply_model(self, work: Callable[[Any], Any]) -> None:
        assert "weights" not in self.asleep, "a fault of the device"
        work(SimpleNamespace(load_weights=lambda tensors: self.did.append(f"load {len(list(tensors))}")))

    def reset_prefix_cache(self) -> bool:
        assert not self.asleep
        self.did.append("forget prompts")
        return True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "import_vllm", lambda: SimpleNamespace(LLM=RecordingLLM))


def engine(sleeps: bool) -> tuple[VllmEngine, RecordingLLM]:
    loaded = load(tiny_folder("qwen2_5_vl"))
    settings: Any = {"context_tokens": 64, "cache_bytes": 1, "capture": False, "seed": 0, "sleeps": sleeps}
    made = VllmEngine(loaded.policy, loaded.processor, loaded.folder, device=torch.device("cpu"), **settings)
    return made, made._llm


def test_weights_wake_first_and_the_cache_last(recorded: None) -> None:
    made, llm = engine(sleeps=True)
    assert llm.arguments["enable_sleep_mode"] is True
    made.weights_changed(0)
    made.sleep()
    made.sleep()
    made.weights_changed(1)
    load_all, forget = f"load {len(made.policy.trainable())}", ["forget prompts", "forget images"]
    first = [load_all, *forget]
    assert llm.did == [*first, "sleep 1", "wake ['weights']", load_all, "wake ['kv_cache']", *forget]
    made.weights_changed(2)
    assert llm.did[-3:] == first and not llm.asleep


def test_the_order_matters(recorded: None) -> None:
    made, _ = engine(sleeps=True)
    made.sleep()
    with patch.object(made, "_wake"), pytest.raises(AssertionError, match="a fault of the device"):
        made.weights_changed(1)


def test_who_does_not_sleep_is_never_put_to_sleep(recorded: None) -> None:
    made, llm = engine(sleeps=False)
    made.sleep()
    assert llm.did == [] and "enable_sleep_mode" not in llm.arguments


@pytest.mark.parametrize(
    ("rank", "local", "learners", "per_engine", "device"),
    [
        *[(0, 0, 1, 2, 0), (1, 1, 1, 2, 1), (2, 2, 1, 2, 3), (3, 3, 1, 2, 5)],
        *[(0, 0, 2, 2, 0), (1, 1, 2, 2, 1), (2, 2, 2, 2, 2), (3, 3, 2, 2, 4)],
        *[(4, 0, 1, 2, 0), (5, 1, 1, 2, 2), (4, 0, 5, 4, 0), (5, 1, 5, 4, 1)],  # a second machine
        *[(3, 3, 1, 1, 3), (3, 3, 8, 1, 3)],
    ],
)
def test_each_process_has_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch, rank: int, local: int, learners: int, per_engine: int, device: int
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    assert own_device(learners, per_engine) == device


def test_workers_see_the_devices_of_their_engine(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("SHOWN", "everything")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # with it, workers wait for a store that nobody opens
    words = ["rollout.engine=vllm", "rollout.tensor_parallel=2"]
    config = load_config("configs/photo_tiny.yaml", words)
    platform: Any = SimpleNamespace(
        visible_devices_variable="SHOWN",
        physical_id=lambda number: f"card{number}",
        device=lambda number: torch.device("cpu", number),
        graph_capture=lambda: None,
        memory=lambda number: Memory(free=2**30, total=2**36),
    )
    with ExitStack() as cleanup:
        loaded = load(tiny_folder("qwen2_5_vl"))
        made: Any = processes.local_engine(config, platform, loaded, None, Placement.ENGINE, cleanup)
    llm: RecordingLLM = made._llm
    assert llm.shown == "card3,card4" and made._device.index == 3 and llm.store is None
    # half of the weights (float32), the cache, and 4 GiB to work in
    weights = sum(tensor.numel() for tensor in made.policy.model.parameters()) * 4 // 2
    share = (weights + config.rollout.cache_mib * 2**20 + 2**32) / 2**36
    assert llm.arguments["gpu_memory_utilization"] == pytest.approx(share, rel=1e-9)
    assert llm.arguments["tensor_parallel_size"] == 2 and llm.arguments["distributed_executor_backend"] == "mp"


def keep(held: dict[str, torch.Tensor], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    held.update((name, tensor.clone()) for name, tensor in tensors)


class Split(RecordingLLM):
    """Two workers, each with what it was given."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        super().__init__(folder, **arguments)
        self.weights: list[dict[str, torch.Tensor]] = [{}, {}]
        self.workers = [worker(partial(keep, held)) for held in self.weights]


def test_every_worker_says_the_logprobs_of_what_it_draws_from(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made, llm = engine(sleeps=False)
    monkeypatch.setattr(vllm, "import_vllm", lambda: SimpleNamespace(LLM=Split))
    split, _ = engine(sleeps=False)
    for one in (*llm.workers, *split._llm.workers):
        sampler = one.model_runner.sampler
        assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs"
    del sampler.topk_topp_sampler  # vLLM's second runner has none
    one.set_logprobs_mode("processed_logprobs")
    one.model_runner.sampler = SimpleNamespace()
    with pytest.raises(RuntimeError, match="SimpleNamespace has no logprobs_mode; set rollout.engine=inprocess"):
        one.set_logprobs_mode("processed_logprobs")


def test_workers_beside_the_learner_open_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Late(CpuPlatform):
        """What was copied is there when the device was waited for."""

        def synchronize(self) -> None:
            waited.append("device")

    def take(places: Any, handles: Any) -> None:
        assert len(waited) == len(handles), "a worker was told of a bucket that is still being written"
        WeightTaker.take_weights(taker, places, handles)
        assert len(waited) > len(handles), "the bucket could be written again while it is read"

    monkeypatch.setitem(PLATFORMS, "cpu", Late)
    monkeypatch.setattr(vllm, "import_vllm", lambda: SimpleNamespace(LLM=Split))
    monkeypatch.setattr(vllm, "BUCKET_BYTES", 2**16)
    loaded, open_before = load(tiny_folder("qwen2_5_vl")), len(os.listdir("/proc/self/fd"))
    settings: Any = {"context_tokens": 64, "cache_bytes": 1, "capture": False, "seed": 0, "workers": 2}
    made = VllmEngine(loaded.policy, loaded.processor, loaded.folder, device=torch.device("cpu"), **settings)
    taker = made._llm.workers[0]
    taker.take_weights = take
    made.weights_changed(1)
    for held in made._llm.weights:
        assert held.keys() == loaded.policy.trainable().keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in loaded.policy.trainable().items())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_before  # buckets that were read are gone
