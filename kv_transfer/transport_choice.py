"""Which way the frames of a pair go: the first of the sender's that the receiver can go too."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.kv_layout import KVLayout
from kv_transfer.bulk import BulkTransport, SlotTerms
from kv_transfer.device_memory import DeviceMemoryTransport
from kv_transfer.frame import HEADER_BYTES
from kv_transfer.shared_memory import SharedMemoryTransport
from protos import kv_pb2

TransportName = Literal["auto", "shm", "ipc", "nccl", "gloo", "nixl", "grpc"]

log = logging.getLogger(__name__)

GRPC = "grpc"
_OF_ONE_MACHINE = (DeviceMemoryTransport.name, SharedMemoryTransport.name)


class TransferConfigError(ValueError):
    """What the configuration asks of hand-offs cannot be done here."""


class NoCommonTransport(Exception):
    """Names what each end has, and why what both have does not work between them."""


@dataclass(frozen=True, slots=True)
class Transports:
    """The ways for frames that a worker may use.

    Attributes:
        bulk: best first.
        grpc: () if it may not be used; it is the last choice, and always possible.
    """

    bulk: tuple[BulkTransport, ...] = ()
    grpc: tuple[Literal["grpc"], ...] = (GRPC,)

    @property
    def names(self) -> tuple[str, ...]:
        return (*(transport.name for transport in self.bulk), *self.grpc)

    @property
    def encrypted(self) -> "Transports":
        """Those by which nothing can be read on a network, where gRPC has TLS."""
        return replace(self, bulk=tuple(each for each in self.bulk if each.name in _OF_ONE_MACHINE))

    def named(self, name: str) -> BulkTransport | None:
        return next((transport for transport in self.bulk if transport.name == name), None)

    async def choose(self, offers: Sequence[kv_pb2.TransportOffer]) -> str:
        """For the receiver.

        Raises:
            NoCommonTransport: see there.
        """
        reasons: list[str] = []
        for offer in offers:
            if offer.name in self.grpc:
                return offer.name
            transport = self.named(offer.name)
            reason = await transport.refusal(offer) if transport is not None else None
            if transport is not None and reason is None:
                return offer.name
            if reason is not None:
                reasons.append(f"{offer.name}: {reason}")
        theirs = ", ".join(offer.name for offer in offers) or "none"
        raise NoCommonTransport(
            "; ".join((f"kv_transport: {', '.join(self.names)} here, {theirs} there", *reasons))
        )


def transports_for(
    choice: TransportName,
    terms: SlotTerms,
    host: str = "127.0.0.1",
    device: torch.device = torch.device("cpu"),
) -> Transports:
    """
    Args:
        choice: "auto": between processes of one machine ipc on GPUs or shm, else grpc. Another name forces
            that one.
        terms: of the bulks that are offered.
        host: what this worker is reached at.
        device: of the engine.

    Raises:
        TransferConfigError: see there.
    """
    of_device = DeviceMemoryTransport(terms, device)
    match choice:
        case "auto":
            of_host = SharedMemoryTransport(terms)
            return Transports((of_host,) if device.type == "cpu" else (of_device, of_host))
        case "shm":
            return Transports((SharedMemoryTransport(terms),), ())
        case "ipc":
            if device.type == "cpu":
                log.warning("kv_transport: ipc is for GPUs: here it reaches only workers of this process")
            return Transports((of_device,), ())
        case "grpc":
            return Transports()
        case "gloo" | "nccl":
            # What torch was built without is missed only where it is forced.
            from kv_transfer.distributed_transport import DistributedTransport, is_available

            if not is_available(choice, device):
                raise TransferConfigError(f"kv_transport: {choice} is not available here, on {device}")
            return Transports((DistributedTransport(choice, terms, host, device),), ())
        case "nixl":
            from kv_transfer import nixl_transport

            if not nixl_transport.is_available():
                raise TransferConfigError("kv_transport: nixl is not installed (pip install 'baton[nixl]')")
            return Transports((nixl_transport.NixlTransport(terms),), ())


def check_slots(layout: KVLayout, slot_bytes: int, choice: TransportName) -> None:
    """
    Raises:
        TransferConfigError: a way with slots is forced, and one does not hold a block of `layout`.
    """
    needed = layout.largest_block_bytes
    if choice not in ("auto", GRPC) and needed > slot_bytes:
        raise TransferConfigError(
            f"kv_slot_bytes: a block of {layout.block_size} tokens needs {needed} bytes in one layer, "
            f"not {slot_bytes}"
        )


def check_frame_limit(layout: KVLayout, max_frame_bytes: int) -> None:
    """
    Raises:
        TransferConfigError: not one block of `layout`, which is sent or received, fits into a frame.
    """
    needed = layout.largest_block_bytes + HEADER_BYTES
    if needed > max_frame_bytes:
        raise TransferConfigError(
            f"max_frame_bytes: a block of {layout.block_size} tokens needs {needed} bytes in one layer, "
            f"not {max_frame_bytes}"
        )
