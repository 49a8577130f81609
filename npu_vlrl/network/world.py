"""The processes of one training, as torchrun started them: learners and engines; one may be both."""

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
"""For what happens once: every process imports its libraries and loads the model, maybe from a slow disk."""
TOKEN_TIMEOUT_S = 5.0
"""Who connects says the token at once; a stranger who says nothing keeps the others waiting no longer."""
ADDRESS_KEY = "npu_vlrl/address"
HOST_KEY = "npu_vlrl/host"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets in each process, and other launchers must."""
REACHABLE = "nothing"
"""What is said where there is no problem."""

UNSEEN = Peer(-1, "another process", "an unknown host", 0)


def started_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def own_device(learners: int, per_engine: int) -> int:
    """Number of this process's device on its machine, the first of `per_engine` if it is an engine.

    The first `learners` processes of all have one each. On each machine learners come first, and engines after them.
    """
    first = int(os.environ.get("RANK", "0")) - local_rank()
    learning = max(learners - first, 0)
    return local_rank() if local_rank() < learning else learning + (local_rank() - learning) * per_engine


def is_engine() -> bool:
    """Whether this process was started to do what another one, rank 0, says."""
    return int(os.environ.get("RANK", "0")) != LEARNER


class World:
    """This process's place among the others. Rank 0 runs the loop; it has a channel to every other process, and each
    has one to it. Weights and gradients go through torch.distributed, whose default group spans all of them.
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
        """`timeout_s` is how long an answer or a transfer may take, once the processes have started. The first
        `learners` learn; the others sample, or all do if all learn. All processes make their `World` at the same time.
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
        """A collective was given up, and may wait in its thread for ever."""
        self.learners = range(learners)
        self.engines = range(1 if self.all_learn else learners, self.size)
        """Those that sample, but for rank 0."""
        apart = 1 < learners < self.size
        self.weights_group = self._group([LEARNER, *self.engines]) if apart else None
        """Rank 0 and the engines; None for all processes."""

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def all_learn(self) -> bool:
        return len(self.learners) == self.size

    def channel(self, rank: int) -> Channel:
        return self._channels[rank]

    def learners_group(self) -> dist.ProcessGroup | None:
        """A group of all learners; None in a process that is none. All processes call this at the same time."""
        return self._group(self.learners)

    def _group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """Its collectives wait `timeout_s` at most."""
        members, timeout = list(ranks), timedelta(seconds=self.timeout_s)
        group = dist.new_group(members, backend=self._platform.process_group_backend, timeout=timeout)
        return group if self.rank in members else None

    def start(self, work: Callable[[], None]) -> None:
        """Runs it in a second thread, which it makes ready by `enter_thread`; nothing waits for that at the end.

        One work comes after the other, unless one was abandoned: the next then gets a thread of its own.
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
        """A new thread begins with device 0; this gives it the process's own. Raises HardwareError as that does."""
        if not getattr(self._entered, "it", False):
            self._platform.set_device(self._device)
            self._entered.it = True

    def close(self) -> None:
        """Ends the connections, and the process group unless a collective hangs in it."""
        for channel in self._channels.values():
            channel.close()
        if not self.abandoned and dist.is_initialized():  # vLLM's end in this process ends all groups
            dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Ends this process at once. A collective that was given up would hold up a normal end, or crash it."""
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

    Raises HardwareError without that device or an address that others reach, or when the launcher's variables do not
    fit together, and PeerError when another process does not come in `start_timeout_s`.
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
    """This process's rank, and how many processes there are in all and on its machine, as the launcher says.

    Raises HardwareError for those that a rendezvous would wait for in vain, without a word.
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
    """All call this. On some systems a machine's name is on itself an address of itself alone, such as 127.0.1.1.

    Raises HardwareError in every process when the learner would listen there, and another one is on another machine.
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
    """Where to listen, on a port that is free."""
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
    """The learner listens, on loopback unless engines are on other machines; a stranger does not know the token."""
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
    """Whether the first bytes are the token; nothing else of a stranger is read."""
    connection.settimeout(TOKEN_TIMEOUT_S)
    try:
        return hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token.encode())
    except OSError:
        return False
