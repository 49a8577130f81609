"""The processes of one training, as torchrun started them: learners and engines; a process may be both."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from npu_vlrl.hardware import HardwareError, Platform
from npu_vlrl.hardware.collective import keep_gloo_on_this_machine
from npu_vlrl.network.channel import Channel, PeerError
from npu_vlrl.network.messages import Hello, Peer, Welcome

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # `dist` has it, too, but not for type checkers

__all__ = ["Channel", "Peer", "PeerError", "World", "is_engine", "join", "leave", "local_rank", "started_processes"]

LEARNER = 0
START_TIMEOUT_S = 600.0
"""Limit of the start: every process imports its libraries and loads the model, possibly from a slow disk."""
TOKEN_TIMEOUT_S = 5.0
"""Limit of the wait for the token: processes of the training send it at once, and others must not block them longer."""
ADDRESS_KEY = "npu_vlrl/address"
HOST_KEY = "npu_vlrl/host"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets in each process, and other launchers must."""
REACHABLE = "nothing"
"""Text that stands for no problem."""

UNSEEN = Peer(-1, "another process", "an unknown host", 0)


def started_processes() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process on its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def own_device(learners: int, per_engine: int) -> int:
    """Number of this process's device on its machine, the first of `per_engine` if it is an engine.

    The first `learners` processes of all have one device each. On each machine learners come before engines.
    """
    first = int(os.environ.get("RANK", "0")) - local_rank()
    learning = max(learners - first, 0)
    return local_rank() if local_rank() < learning else learning + (local_rank() - learning) * per_engine


def is_engine() -> bool:
    """Whether this process follows the commands of rank 0."""
    return int(os.environ.get("RANK", "0")) != LEARNER


class World:
    """Rank of this process, and its connections to the others. Rank 0 runs the loop and has a channel to every other
    process. Weights and gradients go through torch.distributed, whose default group spans all processes.
    """

    def __init__(
        self,
        platform: Platform,
        rank: int,
        peers: Sequence[Peer],
        channels: dict[int, Channel],
        timeout_s: float,
        start_timeout_s: float,
        device: int,
        learners: int = 1,
    ) -> None:
        """`timeout_s` limits an answer or a transfer, once the processes have started. The first `learners` learn; the
        others sample, or all do if all learn. All processes make their `World` at the same time.
        """
        self._platform = platform
        self._device = device
        self.rank = rank
        self.peers = tuple(peers)
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._channels = channels
        self._works: SimpleQueue[Callable[[], None]] | None = None
        self._entered = threading.local()
        self.abandoned = False
        """Whether a collective was given up; it may wait in its thread for ever."""
        self.learners = range(learners)
        self.engines = range(1 if self.all_learn else learners, self.size)
        """Ranks that sample, without rank 0."""
        apart = 1 < learners < self.size
        self.weights_group = self._group([LEARNER, *self.engines]) if apart else None
        """Process group of rank 0 and the engines; None for the group of all processes."""

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def all_learn(self) -> bool:
        return len(self.learners) == self.size

    def channel(self, rank: int) -> Channel:
        return self._channels[rank]

    def learners_group(self) -> dist.ProcessGroup | None:
        """Process group of all learners; None in a process that does not learn. All processes call it at one time."""
        return self._group(self.learners)

    def _group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """Makes a process group whose collectives wait `timeout_s` at most; None in a process that is not in it."""
        members, timeout = list(ranks), timedelta(seconds=self.timeout_s)
        group = dist.new_group(members, backend=self._platform.process_group_backend, timeout=timeout)
        return group if self.rank in members else None

    def start(self, work: Callable[[], None]) -> None:
        """Runs work in a second thread, which the work prepares by `enter_thread`; the end does not wait for it.

        Works run one after the other. After an abandoned one the next gets a new thread.
        """
        if self._works is None or self.abandoned:
            self._works = SimpleQueue()
            threading.Thread(target=self._work, args=(self._works,), daemon=True, name="collectives").start()
        self._works.put(work)

    @staticmethod
    def _work(works: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            works.get()()

    def enter_thread(self) -> None:
        """Sets the device of this process in a new thread, which begins with device 0. Raises HardwareError as
        `Platform.set_device` does.
        """
        if not getattr(self._entered, "it", False):
            self._platform.set_device(self._device)
            self._entered.it = True

    def close(self) -> None:
        """Closes the connections, and the process group unless a collective hangs in it."""
        for channel in self._channels.values():
            channel.close()
        if not self.abandoned and dist.is_initialized():  # vLLM's end in this process ends all groups
            dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Ends this process at once. A collective that was given up would delay a normal end, or crash it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join(
    platform: Platform,
    timeout_s: float,
    start_timeout_s: float = START_TIMEOUT_S,
    device: int | None = None,
    learners: int = 1,
) -> World:
    """Joins the other processes, with a device each: without `device` that of the local rank. All call it at one time.
    The first `learners` learn, see `World`.

    Raises HardwareError without that device or a reachable address, or when the launcher's variables are inconsistent,
    and PeerError when another process does not connect within `start_timeout_s`.
    """
    rank, size, local_size = _check_launch()
    device = local_rank() if device is None else device
    platform.set_device(device)
    if local_size == size:
        keep_gloo_on_this_machine()
    kind = f"learner {rank}" if rank < learners < size else f"engine {rank}"
    me = Peer(rank, kind if rank else "learner", socket.gethostname(), os.getpid())
    try:
        dist.init_process_group(platform.process_group_backend, timeout=timedelta(seconds=start_timeout_s))
    except RuntimeError as error:
        raise PeerError(UNSEEN, f"did not come to {me} within {start_timeout_s:g} s ({error})") from error
    store = dist.distributed_c10d._get_default_store()
    host = "127.0.0.1" if local_size == size else os.environ["MASTER_ADDR"]
    if local_size < size:
        _check_reachable(store, host, me, size)
    if rank == LEARNER:
        channels = _accept(store, host, size, timeout_s, start_timeout_s)
        peers = [me, *(channels[other].peer for other in range(1, size))]
        for channel in channels.values():
            channel.send(Welcome(peers))
    else:
        channels = {LEARNER: _connect(store, host, me, timeout_s)}
        peers = channels[LEARNER].expect(Welcome, start_timeout_s, RuntimeError).peers
        channels[LEARNER].peer = peers[LEARNER]
    return World(platform, rank, peers, channels, timeout_s, start_timeout_s, device, learners)


def _check_launch() -> tuple[int, int, int]:
    """Rank of this process, and numbers of processes in all and on its machine, from the launcher's variables.

    Raises HardwareError for values with which a rendezvous would silently wait until its timeout.
    """
    missing = [name for name in LAUNCHED if not os.environ.get(name)]
    if missing:
        raise HardwareError(
            f"WORLD_SIZE={started_processes()} starts several processes, and {', '.join(missing)} is not set; start "
            "them with torchrun, or set what it sets"
        )
    rank, size, local_size = (int(os.environ[name]) for name in LAUNCHED[:3])
    for name, number, of, limit in (
        ("RANK", rank, "WORLD_SIZE", size),
        ("LOCAL_RANK", local_rank(), "LOCAL_WORLD_SIZE", local_size),
    ):
        if not 0 <= number < limit:
            raise HardwareError(
                f"{name}={number} is not below {of}={limit}: processes are numbered from 0 to {limit - 1}; correct "
                "what the launcher was told (NODE_RANK, NNODES)"
            )
    address = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise HardwareError(
            f"MASTER_ADDR={address} is no address that this machine can resolve ({error}); set it to the first "
            "machine's address in the network that all machines are in"
        ) from error
    return rank, size, local_size


def _check_reachable(store: Store, host: str, me: Peer, size: int) -> None:
    """Checks the learner's address; all processes call it. On some systems a machine resolves its own name to a
    loopback address, such as 127.0.1.1.

    Raises HardwareError in every process when the learner would listen there, and a process is on another machine.
    """
    store.set(f"{HOST_KEY}/{me.rank}", me.host)
    if me.rank == LEARNER:
        _, (address, *_) = _own_address(host)
        hosts = {store.get(f"{HOST_KEY}/{rank}").decode(): rank for rank in range(1, size)}
        away = next((found for found in hosts if found != me.host), None)
        problem = REACHABLE
        if away is not None and ipaddress.ip_address(address).is_loopback:
            problem = (
                f"MASTER_ADDR={host} is {address} on {me.host}, which rank {hosts[away]} on {away} does not reach; set "
                f"MASTER_ADDR to {me.host}'s address in the network that both are in"
            )
        store.set(f"{HOST_KEY}/problem", problem)
    if (said := store.get(f"{HOST_KEY}/problem").decode()) != REACHABLE:
        raise HardwareError(said)


def _own_address(host: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Address on which to listen, with a free port."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return family, address


def _connect(store: Store, host: str, me: Peer, timeout_s: float) -> Channel:
    learner = Peer(LEARNER, "learner", host, 0)
    try:
        port, token = store.get(ADDRESS_KEY).decode().split()
        connection = socket.create_connection((host, int(port)), timeout_s)
        connection.sendall(token.encode())
    except (OSError, RuntimeError) as error:  # the store raises RuntimeErrors
        raise PeerError(learner, f"cannot be reached ({error})") from error
    channel = Channel(connection, learner, timeout_s)
    channel.send(Hello(me))
    return channel


def _accept(store: Store, host: str, size: int, timeout_s: float, start_timeout_s: float) -> dict[int, Channel]:
    """Accepts the other processes, on loopback unless some are on other machines; only they know the token."""
    token = secrets.token_hex(16)
    channels: dict[int, Channel] = {}
    family, address = _own_address(host)
    with socket.create_server(address, family=family, backlog=size) as server:
        server.settimeout(start_timeout_s)
        store.set(ADDRESS_KEY, f"{server.getsockname()[1]} {token}")
        while len(channels) < size - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                absent = next(rank for rank in range(1, size) if rank not in channels)
                unseen = Peer(absent, f"engine {absent}", UNSEEN.host, 0)
                raise PeerError(unseen, f"did not come within {start_timeout_s:g} s") from None
            if not _knows(connection, token):
                connection.close()
                continue
            channel = Channel(connection, UNSEEN, timeout_s)
            channel.peer = channel.expect(Hello, timeout_s, RuntimeError).peer
            channels[channel.peer.rank] = channel
    return channels


def _knows(connection: socket.socket, token: str) -> bool:
    """Whether the first bytes are the token; nothing else of an unknown process is read."""
    connection.settimeout(TOKEN_TIMEOUT_S)
    try:
        return hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token.encode())
    except OSError:
        return False
