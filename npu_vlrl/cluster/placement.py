"""Connection to a Ray cluster, and reservation of resources for the processes of a run."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from npu_vlrl.cluster.ray_actor import ProcessActor
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.config.extras import remedy
from npu_vlrl.hardware import Platform

Bundle = dict[str, float]
"""Resources of one process, by Ray's names. Example: `{"CPU": 1, "NPU": 1}`"""

BUILT_IN = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Resources for which Ray's functions have arguments of their own."""

LOOK_AGAIN_S = 5.0
"""Seconds between checks while others use the resources, or the loss of a machine is not known yet."""

REACH_S = 10.0

LOCAL_OBJECTS = 2**27
"""Bytes of the object store of a local cluster, through which only short strings go."""


@dataclass(frozen=True)
class Place:
    """Location of a process. Example: `Place(actor, "3f0c…", "10.0.0.2", "node2", "4")`"""

    actor: Any
    """A handle of `ray_actor.ProcessActor`."""
    node: str
    address: str
    host: str
    devices: str
    """Value of the process's visible-devices variable; empty where the platform has none."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


def bundles(config: Config, platform: Platform) -> list[Bundle]:
    """Resources of each process, by rank; an engine needs as many devices as it splits its model over."""
    processes, learners = config.ray.processes, config.train.learners
    learning = processes if learners == "all" else learners
    cpus = {"CPU": float(config.ray.cpus)}
    if platform.visible_devices_variable is None:
        return [cpus] * processes
    counts = [1 if rank < learning else config.rollout.tensor_parallel for rank in range(processes)]
    return [{**cpus, platform.ray_resource: float(count)} for count in counts]


@contextmanager
def connected(config: Config, platform: Platform) -> Iterator[Any]:
    """Context in which the module `ray`, its value, is connected to the cluster of `ray.address`.

    Raises ConfigError when Ray is not installed or there is no such cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"ray.processes={config.ray.processes} needs Ray, which is not installed: {remedy('ray')}, or set "
            "ray.processes=0"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = config.ray.address == "local"
    if local:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # with this Ray listens on 127.0.0.1 only
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 a training starves beside anything else
    ray = importlib.import_module("ray")
    own = _own_cluster(config, platform) if local else {}
    try:
        if config.ray.address not in ("local", "auto"):  # Ray would try for minutes
            host, _, port = config.ray.address.rpartition(":")
            socket.create_connection((host, int(port)), REACH_S).close()
        ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"ray.address={config.ray.address}: {_first_line(error)}; start a cluster with `ray start --head` and join "
            "it from the other machines, or set ray.address=local"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _own_cluster(config: Config, platform: Platform) -> dict[str, Any]:
    """Options of a local cluster: with the devices that are visible here, which Ray does not always find, and the
    requested number of cores.
    """
    found: Bundle = {"CPU": config.ray.cpus * config.ray.processes}
    if platform.visible_devices_variable is not None:
        found[platform.ray_resource] = platform.device_count()
    return {**_options(found), "include_dashboard": False, "object_store_memory": LOCAL_OBJECTS}


def _options(needs: Bundle) -> dict[str, Any]:
    """Converts resources to arguments of Ray's functions."""
    return {
        **{BUILT_IN[name]: amount for name, amount in needs.items() if name in BUILT_IN},
        "resources": {name: amount for name, amount in needs.items() if name not in BUILT_IN},
    }


@contextmanager
def reserved(ray: Any, needs: Sequence[Bundle], platform: Platform) -> Iterator[list[Place]]:
    """Context with a place for each bundle, on as few machines as possible; its end releases the resources.

    Ranks with equal needs that share a machine are neighbours, in the order of their devices.

    Raises ConfigError when the resources exceed those of the whole cluster; otherwise it waits for them.
    """
    group = ray.util.placement_group(list(needs), strategy="PACK")
    actors: list[Any] = []
    try:
        reported = False
        while True:
            _check_room(ray, needs)
            if group.wait(LOOK_AGAIN_S):
                break
            if not reported:
                print("npu-vlrl: waiting for room in the Ray cluster; others use it", file=sys.stderr, flush=True)
                reported = True
        for index, bundle in enumerate(needs):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
            options = {**_options(bundle), "scheduling_strategy": strategy, "max_concurrency": 2}
            actors.append(ray.remote(ProcessActor).options(**options).remote())
        places = _places(ray, group, actors, platform)
        yield [places[index] for index in _order(needs, places)]
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _places(ray: Any, group: Any, actors: Sequence[Any], platform: Platform) -> list[Place]:
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    where = ray.util.placement_group_table(group)["bundles_to_node_id"]
    variable = platform.visible_devices_variable
    devices = ray.get([actor.devices.remote(variable or "") for actor in actors])
    return [
        Place(
            actor,
            where[index],
            nodes[where[index]]["NodeManagerAddress"],
            nodes[where[index]]["NodeManagerHostname"],
            devices[index] if variable else "",
        )
        for index, actor in enumerate(actors)
    ]


def _order(needs: Sequence[Bundle], places: Sequence[Place]) -> list[int]:
    """Order of the bundles by rank; the first bundle stays rank 0."""

    def key(index: int) -> tuple[bool, bool, str, list[int], int]:
        place = places[index]
        devices = [int(number) for number in place.devices.split(",") if number.isdecimal()]
        return needs[index] != needs[0], place.node != places[0].node, place.node, devices, index

    return sorted(range(len(places)), key=key)


def _check_room(ray: Any, needs: Sequence[Bundle]) -> None:
    """Raises ConfigError when the bundles do not fit into the cluster, including resources that others use."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    left = [dict(node["Resources"]) for node in alive]
    fitted = 0
    for bundle in needs:
        for resources in left:
            if all(resources.get(name, 0) >= amount for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    resources[name] -= amount
                fitted += 1
                break
    if fitted == len(needs):
        return
    machines = "; ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has {_amounts(node['Resources'], needs[0])}"
        for node in alive
    )
    raise ConfigError(
        f"ray.processes={len(needs)}: each needs {_amounts(needs[0], needs[0])}, and the Ray cluster has room for "
        f"{fitted}: {machines}. Ask for fewer, or let machines join; what Ray does not find by itself is told to it: "
        f"ray start --resources='{{\"{list(needs[0])[-1]}\": N}}'"
    )


def _amounts(resources: Bundle, wanted: Bundle) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in wanted)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
