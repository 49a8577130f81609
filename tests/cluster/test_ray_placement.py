"""Where processes are put: by the platform's resource, and with an error that says what is there and what is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npu_vlrl.cluster import drives
from npu_vlrl.cluster.driver import Processes
from npu_vlrl.cluster.placement import Place, bundles, connected, reserved
from npu_vlrl.cluster.ray_actor import ProcessActor
from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.hardware import PLATFORMS
from npu_vlrl.hardware.npu import NpuPlatform
from tests.support.program import SMALL, config_file, program
from tests.support.ranks import free_port
from tests.support.ray_nodes import SETTINGS, two_nodes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two nodes with two cores each; the first has two NPUs, 4 and 5 of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
        with two_nodes(tmp_path_factory.mktemp("nodes"), {"NPU": 2}) as address:
            patch.delenv("ASCEND_RT_VISIBLE_DEVICES")
            yield address


def a_config(folder: Path, *words: str) -> Config:
    return load_config(config_file(folder, data={"train": {"generator": "arrow"}}), [*SMALL, *words])


def test_processes_go_where_the_devices_are_in_their_order(cluster: str, tmp_path: Path) -> None:
    config, npu = a_config(tmp_path, "ray.processes=2", f"ray.address={cluster}"), PLATFORMS["npu"]()
    needs = bundles(config, npu)
    assert needs == [{"CPU": 1, "NPU": 1}] * 2
    with connected(config, npu) as ray, reserved(ray, needs, npu) as places:
        assert [place.devices for place in places] == ["4", "5"]
        assert {place.address for place in places} == {"127.0.0.2"}
        assert len({place.node for place in places}) == 1


def test_an_engine_gets_as_many_devices_as_it_splits_its_model_over(tmp_path: Path) -> None:
    words = ["ray.processes=4", "train.learners=2", "rollout.engine=vllm", "rollout.tensor_parallel=3"]
    needs = bundles(a_config(tmp_path, *words), PLATFORMS["npu"]())
    assert [bundle["NPU"] for bundle in needs] == [1, 1, 3, 3]


def test_devices_of_a_process_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps them in a set of words; CANN takes them in their order only."""
    npu, started = NpuPlatform(), []
    for given, devices in (("10,9", "9,10"), ("4", "4"), ("GPU-b,GPU-a", "GPU-b,GPU-a"), ("", "")):
        monkeypatch.setenv(npu.visible_devices_variable, given)
        assert ProcessActor().devices(npu.visible_devices_variable) == devices
    actor: Any = SimpleNamespace(
        free_port=SimpleNamespace(remote=lambda: 1), start=SimpleNamespace(remote=lambda *words: started.append(words))
    )
    ray = SimpleNamespace(get=lambda answer: answer)
    Processes(ray, [Place(actor, "node", "127.0.0.1", "host", "9,10")]).start(a_config(tmp_path), "train", npu)
    assert started[0][-1]["ASCEND_RT_VISIBLE_DEVICES"] == "9,10"


def test_two_devices_of_a_real_worker(cluster: str, tmp_path: Path) -> None:
    words = ["ray.processes=1", "rollout.engine=vllm", "rollout.tensor_parallel=2", f"ray.address={cluster}"]
    config, npu = a_config(tmp_path, *words), PLATFORMS["npu"]()
    with connected(config, npu) as ray, reserved(ray, [{"CPU": 1, "NPU": 2}], npu) as places:
        assert [place.devices for place in places] == ["4,5"]


def test_too_many_processes_are_told_what_there_is(cluster: str, tmp_path: Path) -> None:
    config, npu = a_config(tmp_path, "ray.processes=3", f"ray.address={cluster}"), PLATFORMS["npu"]()
    host = os.uname().nodename
    with connected(config, npu) as ray, pytest.raises(ConfigError) as refused, reserved(ray, bundles(config, npu), npu):
        pass
    message = str(refused.value)
    assert message.startswith("ray.processes=3: each needs 1 CPU, 1 NPU, and the Ray cluster has room for 2: ")
    assert f"{host} (127.0.0.2) has 2 CPU, 2 NPU" in message and f"{host} (127.0.0.3) has 2 CPU, 0 NPU" in message
    assert message.endswith("""ray start --resources='{"NPU": N}'""")


def test_a_run_folder_that_is_not_shared_is_refused(cluster: str, tmp_path: Path) -> None:
    """`/proc/self/cwd` is another folder on each of the nodes."""
    config = config_file(tmp_path, data={"train": {"generator": "arrow"}})
    words = ["ray.processes=2", "ray.cpus=2", f"ray.address={cluster}", "run.dir=/proc/self/cwd/runs/one"]
    refused = program("train", "--config", config, *SMALL, *words).refused()
    assert refused.startswith("run.dir: /proc/self/cwd/runs/one on ")
    assert "is not the folder of that name on " in refused and "all machines share" in refused


def test_a_folder_that_a_machine_lacks_is_named(cluster: str, tmp_path: Path) -> None:
    config, cpu = a_config(tmp_path, "ray.processes=1", f"ray.address={cluster}"), PLATFORMS["cpu"]()
    with connected(config, cpu) as ray, reserved(ray, bundles(config, cpu), cpu) as places:
        found = ray.get(places[0].actor.start.remote("train", "", "/no/folder", {}))
        assert found.startswith("/no/folder, where the run was started, is not there")
        with Processes(ray, places):  # which ends with nothing started
            pass


def test_no_cluster_is_one_message(tmp_path: Path) -> None:
    config = config_file(tmp_path, data={"train": {"generator": "arrow"}})
    address = f"127.0.0.1:{free_port()}"
    refused = program("train", "--config", config, *SMALL, "ray.processes=2", f"ray.address={address}").refused()
    assert refused.startswith(f"ray.address={address}: [Errno 111] Connection refused")
    assert "ray start --head" in refused


def test_without_ray_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it now raises ModuleNotFoundError
    config = config_file(tmp_path, data={"train": {"generator": "arrow"}})
    refused = program("eval", "--config", config, *SMALL, "ray.processes=2").refused()
    assert refused.startswith("ray.processes=2 needs Ray") and "pip install 'npu-vlrl[ray]'" in refused


def test_who_drives_and_who_is_driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(tmp_path, "ray.processes=2")
    assert drives(config) and not drives(a_config(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not drives(config) and not drives(a_config(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="ray.processes=2, but this is one of WORLD_SIZE=3 processes"):
        drives(config)


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", ""])
def test_other_addresses_are_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"ray\.address: "):
        a_config(tmp_path, f"ray.address={address!r}")
