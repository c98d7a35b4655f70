"""Two ranks of torch.distributed: the only place that uses its half-private constructors.

The receiver of a pair is rank 0 and hosts the place where the two meet.

gloo: what nobody sends is received until `WAIT_LIMIT_S`, which closes the pair. A send that is longer than
its receive ends the receiving process, in gloo itself: so both ends take the length from one announcement,
and the network must be trusted.
"""

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, ProcessGroupNCCL, Store, TCPStore, Work

# To find the other rank.
CONNECT_LIMIT_S = 10.0
# For one payload, once it is announced.
WAIT_LIMIT_S = 30.0

# Between two looks at what a GPU does: a wait of its own spins.
_POLL_S = 50e-6

# A lost peer costs its pair, not this process, which torch would end.
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

# Waits in the thread that calls it; raises RuntimeError or TimeoutError when the group is broken or aborted.
Wait = Callable[[], None]


class ProcessGroup(Protocol):
    """One rank of two. What is sent is received in the same order; a tensor is a payload, [num_bytes] uint8.

    `send` and `receive` do not wait. They and their waits are for one thread, `abort` is for any other.

    Attributes:
        device: where its payloads lie; what is sent must be complete there.
    """

    @property
    def device(self) -> torch.device: ...

    def send(self, payload: torch.Tensor) -> Wait: ...

    def receive(self, payload: torch.Tensor) -> Wait: ...

    def abort(self) -> None:
        """Ends every wait, and the group."""
        ...


class _Backend(Protocol):
    """What torch's own stubs leave out of a backend."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class Meeting(Protocol):
    """Where rank 0 waits for rank 1. `form` and `close` are for any thread, and wait at most CONNECT_LIMIT_S.

    Attributes:
        host, port: where it listens.
        device: of the group.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    def form(self, token: bytes) -> ProcessGroup:
        """Once.

        Raises:
            OSError, RuntimeError: nobody came who knows the token.
        """
        ...

    def close(self) -> None:
        """Nobody is waited for. Allowed after `form`."""
        ...


class Kind(Protocol):
    """A kind of groups, as a process makes them that is reached at some address."""

    def meet(self) -> Meeting:
        """For rank 0.

        Raises:
            OSError, RuntimeError: nothing can listen there.
        """
        ...

    def join(self, at: tuple[str, int], token: bytes) -> ProcessGroup:
        """For rank 1.

        Args:
            at: where rank 0 waits.

        Raises:
            OSError, RuntimeError: nobody is there who knows the token.
        """
        ...


class GlooKind:
    """See Kind. Between CPUs, over TCP."""

    def __init__(self, host: str) -> None:
        self._host = host

    def meet(self) -> Meeting:
        return GlooMeeting(self._host)

    def join(self, at: tuple[str, int], token: bytes) -> ProcessGroup:
        with socket.create_connection(at, CONNECT_LIMIT_S) as connection:
            connection.sendall(token)
            return GlooGroup(PairStore(connection), 1, self._host)


class GlooMeeting:
    """See Meeting."""

    device = torch.device("cpu")

    def __init__(self, host: str) -> None:
        self.host = host
        self._listening = socket.create_server((host, 0))
        self._listening.settimeout(CONNECT_LIMIT_S)
        self.port: int = self._listening.getsockname()[1]

    def form(self, token: bytes) -> ProcessGroup:
        with self._listening, self._listening.accept()[0] as connection:
            connection.settimeout(CONNECT_LIMIT_S)
            if not hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                raise ConnectionError("a stranger came")
            return GlooGroup(PairStore(connection), 0, self.host)

    def close(self) -> None:
        self._listening.close()


class PairStore(Store):
    """What the two ranks of gloo tell each other of where they are, over one connection.

    In place of TCPStore, which looks up names of addresses: that takes seconds where nobody answers for
    them, and anybody may join it.
    """

    _LENGTHS = struct.Struct("<II")
    _LONGEST = 1 << 16

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._values: dict[str, bytes] = {}

    # torch's stubs say str, but bytes come.
    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._values[key] = value
        name = key.encode()
        self._connection.sendall(self._LENGTHS.pack(len(name), len(value)) + name + value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """The connection's own timeout counts."""
        while not self._values.keys() >= set(keys):
            name_bytes, value_bytes = self._LENGTHS.unpack(self._read(self._LENGTHS.size))
            if max(name_bytes, value_bytes) > self._LONGEST:
                raise ConnectionError("the other rank says what no rank says")
            name = self._read(name_bytes).decode()
            self._values[name] = self._read(value_bytes)

    def _read(self, num_bytes: int) -> bytes:
        data = self._connection.recv(num_bytes, socket.MSG_WAITALL)
        if len(data) < num_bytes:
            raise ConnectionError("the other rank went")
        return data


class GlooGroup:
    """See ProcessGroup."""

    device = torch.device("cpu")

    def __init__(self, store: Store, rank: int, host: str) -> None:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1
        options._timeout = timedelta(seconds=CONNECT_LIMIT_S)
        self._group = cast("_Backend", ProcessGroupGloo(store, rank, 2, options))
        self._store = store
        self._peer = 1 - rank

    def send(self, payload: torch.Tensor) -> Wait:
        return _wait_for(self._group.send([payload], self._peer, 0))

    def receive(self, payload: torch.Tensor) -> Wait:
        return _wait_for(self._group.recv([payload], self._peer, 0))

    def abort(self) -> None:
        """Its own `abort` does nothing; a wait that times out closes the pair."""
        try:
            # Another tag: no payload may end here.
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, 1).wait(
                timedelta(milliseconds=1)
            )
        except RuntimeError:
            return


def _wait_for(work: Work) -> Wait:
    def wait() -> None:
        work.wait(timedelta(seconds=WAIT_LIMIT_S))

    return wait


class NcclKind:
    """See Kind. Between GPUs; NCCL looks for an interface itself (NCCL_SOCKET_IFNAME).

    Two ranks on one GPU need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1. A rank that dies while the two
    connect leaves the other's thread waiting: NCCL cannot be told to give that up.
    """

    def __init__(self, host: str, device: torch.device) -> None:
        self._host = host
        self._device = device
        for name, value in _NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def meet(self) -> Meeting:
        return NcclMeeting(self._host, self._device)

    def join(self, at: tuple[str, int], token: bytes) -> ProcessGroup:
        limit = timedelta(seconds=CONNECT_LIMIT_S)
        store = TCPStore(*at, is_master=False, wait_for_workers=False, timeout=limit)
        return NcclGroup(PrefixStore(token.hex(), store), 1, self._device)


class NcclMeeting:
    """See Meeting."""

    def __init__(self, host: str, device: torch.device) -> None:
        self.host = host
        self.device = device
        listening = socket.create_server((host, 0))
        self.port: int = listening.getsockname()[1]
        # The store closes it.
        file = listening.detach()
        self._store = TCPStore(host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=file)

    def form(self, token: bytes) -> ProcessGroup:
        return NcclGroup(PrefixStore(token.hex(), self._store), 0, self.device)

    def close(self) -> None:
        """The store ends with its last user."""


class NcclGroup:
    """See ProcessGroup. On streams of its own, which the engine's kernels hold up least."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._is_aborted = False
        options = ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        self._group = cast("_Backend", ProcessGroupNCCL(store, rank, 2, options))
        self._peer = 1 - rank
        # The two connect with their first payload: now, while somebody waits for it.
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        (self.send(first) if rank else self.receive(first))()

    def send(self, payload: torch.Tensor) -> Wait:
        with torch.cuda.stream(self._stream):
            self._group.send([payload], self._peer, 0).wait()
            return self._recorded()

    def receive(self, payload: torch.Tensor) -> Wait:
        with torch.cuda.stream(self._stream):
            self._group.recv([payload], self._peer, 0).wait()
            return self._recorded()

    def _recorded(self) -> Wait:
        event = torch.cuda.Event()
        event.record(self._stream)
        return partial(self._wait, event)

    def _wait(self, event: torch.cuda.Event) -> None:
        """NCCL has no limit of its own, and what is aborted looks as if it had gone well."""
        limit_s = time.monotonic() + WAIT_LIMIT_S
        while not event.query():
            if time.monotonic() > limit_s:
                raise TimeoutError("a payload that was announced does not come")
            time.sleep(_POLL_S)
        if self._is_aborted:
            raise RuntimeError("the group was aborted")

    def abort(self) -> None:
        """Only this rank's: the other one's waits end when it hears of it."""
        self._is_aborted = True
        self._group.abort()
