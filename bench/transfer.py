"""Hand-offs over every transport between two processes, on CPUs a core each, beside what the machine can do.

Baselines of the same run: a copy (one thread's memcpy, or the GPU's own), and plain TCP over loopback.
"""

import worker  # noqa: F401  gRPC set up as in workers, before it is imported

# isort: split
import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import torch
import typer
import uvloop

from bench.report import Report
from bench.transfer_receiver import Setting, settle
from bench.transfer_sender import Sender, copy_s, sender_to, tcp_s
from engine.kv_layout import KVLayout, TensorLayout
from kv_transfer.bulk import SlotTerms
from kv_transfer.messages import Grant
from kv_transfer.transport_choice import TransportName

MB = 1 << 20


def layout_of(num_layers: int, num_heads: int, head_dim: int) -> KVLayout:
    tensors = tuple(TensorLayout(name, num_heads, head_dim, "bfloat16") for name in ("k", "v"))
    return KVLayout("bench", "bfloat16", 16, (tensors,) * num_layers)


# 64 KB a token.
LARGE = layout_of(16, 8, 128)
# SmolLM2-135M's: 23 KB a token.
SMALL = layout_of(30, 3, 64)
# What a core needs for a layer of it (docs: prefill), in seconds by prompt length.
LAYER_S = {512: 0.018, 2048: 0.09}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, how often, and with which staging memory."""

    transports: list[TransportName]
    sizes_mb: list[int]
    repeats: int
    slots: SlotTerms
    terms: Grant
    cores: tuple[int, int]
    device: str

    def setting(self, transport: TransportName, layout: KVLayout, max_tokens: int, checksum: bool) -> Setting:
        return Setting(
            layout=layout,
            max_tokens=max_tokens,
            transport=transport,
            slots=self.slots,
            terms=self.terms,
            has_checksum=checksum,
            core=self.cores[1],
            device=self.device,
        )


def baselines(sender: Sender, num_bytes: int, repeats: int) -> tuple[float, float]:
    """MB/s of a copy and of TCP."""
    part = sender.memory[:num_bytes]
    target = torch.ones_like(part)
    copying = median(copy_s(part, target) for _ in range(repeats))
    in_host = part.cpu().numpy().data
    sending = median(tcp_s(sender.ports, in_host) for _ in range(repeats))
    return num_bytes / copying / 1e6, num_bytes / sending / 1e6


async def rates(plan: Plan, report: Report, transport: TransportName, checksum: bool) -> None:
    largest = max(plan.sizes_mb) * MB // LARGE.token_bytes
    async with sender_to(plan.setting(transport, LARGE, largest, checksum)) as sender:
        for table in ("contiguous", "shuffled"):
            await sender.hand_off(largest, table)
        for size_mb in plan.sizes_mb:
            num_bytes = size_mb * MB
            copy, tcp = baselines(sender, num_bytes, plan.repeats)
            reached = [
                median([await rate(sender, num_bytes, table) for _ in range(plan.repeats)])
                for table in ("contiguous", "shuffled")
            ]
            report.rows.append(
                (
                    transport,
                    "yes" if checksum else "no",
                    size_mb,
                    copy,
                    tcp,
                    *reached,
                    reached[0] / copy,
                    reached[0] / tcp,
                    reached[0] / reached[1],
                )
            )


async def rate(sender: Sender, num_bytes: int, table: str) -> float:
    """MB/s from the first layer's offer to the accepted commit."""
    return num_bytes / (await sender.hand_off(num_bytes // LARGE.token_bytes, table)).whole_s / 1e6


async def overlap(plan: Plan, report: Report, transport: TransportName) -> None:
    async with sender_to(plan.setting(transport, SMALL, max(LAYER_S), True)) as sender:
        for num_tokens, layer_s in LAYER_S.items():
            await sender.hand_off(num_tokens)
            serial = median([(await sender.hand_off(num_tokens)).whole_s for _ in range(plan.repeats)])
            exposed = median(
                [(await sender.hand_off(num_tokens, layer_s=layer_s)).exposed_s for _ in range(plan.repeats)]
            )
            report.rows.append(
                (
                    transport,
                    num_tokens,
                    num_tokens * SMALL.token_bytes / MB,
                    serial * 1e3,
                    exposed * 1e3,
                    exposed / serial,
                )
            )


async def delivery(plan: Plan, report: Report, transport: TransportName) -> None:
    num_tokens = 64 * MB // LARGE.token_bytes
    async with sender_to(plan.setting(transport, LARGE, num_tokens, True)) as sender:
        await sender.hand_off(num_tokens)
        idle = await sender.token_delays(500)
        busy = asyncio.create_task(keep_busy(sender, num_tokens))
        loaded = await sender.token_delays(500)
        busy.cancel()
        await asyncio.wait({busy})
        report.rows.append((transport, *(1e3 * f(d) for d in (idle, loaded) for f in (median, p99))))


async def keep_busy(sender: Sender, num_tokens: int) -> None:
    while True:
        await sender.hand_off(num_tokens)


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[-1]


Transports = Annotated[str, typer.Option(help="Comma-separated.")]
Sizes = Annotated[str, typer.Option(help="In MB, comma-separated.")]


def main(
    transports: Transports = "grpc,shm,gloo,nixl",
    sizes: Sizes = "1,16,64,256",
    repeats: Annotated[int, typer.Option(help="Of which the medians are taken.")] = 7,
    slots: Annotated[int, typer.Option(help="Slots of a bulk.")] = 16,
    slot_kb: Annotated[int, typer.Option(help="Size of a slot.")] = 4096,
    device: Annotated[str, typer.Option(help="Where K and V lie: cpu or cuda.")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """MB/s, exposed transfer and token delivery of hand-offs, by transport."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    if device == "cpu":
        settle(first)
    plan = Plan(
        list(transports.split(",")),  # pyright: ignore[reportArgumentType]
        [int(size) for size in sizes.split(",")],
        repeats,
        SlotTerms(slots, slot_kb << 10),
        Grant(slots, (slot_kb << 10) + 4096),
        (first, second),
        device,
    )
    reports = uvloop.run(measure(plan))
    for number, report in enumerate(reports):
        report.print()
        if json is not None:
            report.write(json.with_stem(f"{json.stem}-{number}"))


async def measure(plan: Plan) -> list[Report]:
    reached = Report(
        "MB/s of a hand-off, first layer offered to commit accepted",
        (
            "transport",
            "checksum",
            "MB",
            "copy",
            "TCP",
            "contiguous",
            "shuffled",
            "/copy",
            "/TCP",
            "cont./shuf.",
        ),
    )
    exposed = Report(
        "Exposed transfer: last layer computed to commit accepted",
        ("transport", "prompt tokens", "MB", "serial ms", "exposed ms", "exposed/serial"),
    )
    tokens = Report(
        "Delivery of a token, ms, while 64 MB hand-offs flow on the same pair",
        ("transport", "idle p50", "idle p99", "loaded p50", "loaded p99"),
    )
    for transport in plan.transports:
        for checksum in (True, False):
            await rates(plan, reached, transport, checksum)
        await overlap(plan, exposed, transport)
        await delivery(plan, tokens, transport)
    return [reached, exposed, tokens]


if __name__ == "__main__":
    typer.run(main)
