"""The process group of all ranks, and the broadcast of rank 0's messages in it. Belongs to the engine thread."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
# Integers of the first tensor of a message: a decode step of eight sequences has fewer, and is one broadcast.
_FIRST_WORDS = 256
# Workers wait for the next step as long as the server is idle. Rank 0 waits at most for the load of a worker; of a
# worker that has ended the connections are closed at once, and one that is stuck is found by the engine's watchdog.
_WORKER_TIMEOUT, _RANK_0_TIMEOUT = timedelta(days=365), timedelta(minutes=30)
_POLL_SECONDS = 0.05


def listen() -> socket.socket:
    """A listening socket on the loopback address, for the store of `open_store`."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((LOOPBACK, 0))
    listening.listen()
    return listening


class RankLost(RuntimeError):
    """A rank ended before it joined."""


class Channel:
    """One rank's end. Rank 0 waits until all other ranks have been started.

    sent_bytes  of all messages, as broadcast
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        port: int,
        device: str,
        *,
        listening: socket.socket | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Join the group of `ranks`.

        listening  the socket of rank 0 with the port; the store closes it
        stop       ends the wait of rank 0. Raises RankLost
        """
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
        # Read by transformers.
        os.environ["LOCAL_RANK"] = str(rank)
        if device != "cpu":
            torch.accelerator.set_device_index(rank)
        # Builds of torch for some systems lack it.
        from torch._C._distributed_c10d import TCPStore

        timeout = _RANK_0_TIMEOUT if rank == 0 else _WORKER_TIMEOUT
        store = TCPStore(
            LOOPBACK,
            port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=None if listening is None else listening.detach(),
        )
        store.set(_started_key(rank), "")
        while stop is not None and not store.check([_started_key(worker) for worker in range(ranks)]):
            if stop.wait(_POLL_SECONDS):
                raise RankLost
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        self.sent_bytes = 0

    def send(self, words: Sequence[int]) -> None:
        """Broadcast the integers from rank 0."""
        first = torch.zeros(_FIRST_WORDS, dtype=torch.long)
        first[0] = len(words)
        begin, rest = words[: _FIRST_WORDS - 1], words[_FIRST_WORDS - 1 :]
        first[1 : len(begin) + 1] = torch.tensor(begin)
        self._broadcast(first)
        if rest:
            self._broadcast(torch.tensor(rest))

    def receive(self) -> list[int]:
        """The integers of the next `send` of rank 0."""
        first = torch.empty(_FIRST_WORDS, dtype=torch.long)
        self._broadcast(first)
        count, *words = first.tolist()
        if count > len(words):
            rest = torch.empty(count - len(words), dtype=torch.long)
            self._broadcast(rest)
            words += rest.tolist()
        return words[:count]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0)
        self.sent_bytes += tensor.nbytes


def _started_key(rank: int) -> str:
    return f"started {rank}"


def _loopback_interface() -> str:
    """The name of the interface with the loopback address."""
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, addresses in interfaces if any(address.address == LOOPBACK for address in addresses))
