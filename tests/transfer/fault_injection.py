"""Faults at named points of the protocol: what is done to a message or a frame on its way.

A plan of faults is data. `Disturber` carries it out on whatever passes, over the two state machines
(tests/transfer/machine_pair.py) as over real links (tests/transfer/faulty_links.py).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, TypeVar

from kv_transfer.messages import (
    Accepted,
    Close,
    Commit,
    Credit,
    Grant,
    Open,
    ReceiverMessage,
    SenderMessage,
)

T = TypeVar("T")


class Point(Enum):
    """Where in a hand-off."""

    OPEN = "open"
    GRANT = "grant"
    FRAME = "frame"
    CREDIT = "credit"
    FRAMES_END = "frames_end"
    COMMIT = "commit"
    CLOSE = "close"
    ACCEPTED = "accepted"


class Effect(Enum):
    """What is done to what passes there.

    DELAY holds it up, and all that follows on its stream; REORDER lets the next thing on its stream
    overtake it; CUT breaks the link.
    """

    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    DAMAGE = "damage"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Fault:
    """`occurrence`: which of those that pass the point, from 0."""

    point: Point
    effect: Effect
    occurrence: int = 0

    def __str__(self) -> str:
        return f"{self.effect.value} {self.point.value} {self.occurrence}"


POINTS: dict[type, Point] = {
    Open: Point.OPEN,
    Grant: Point.GRANT,
    Credit: Point.CREDIT,
    Commit: Point.COMMIT,
    Close: Point.CLOSE,
    Accepted: Point.ACCEPTED,
}

M = TypeVar("M", SenderMessage, ReceiverMessage)


class LinkCut(Exception):
    """A fault broke the link here."""


@dataclass(slots=True)
class Disturber(Generic[T]):
    """Carries a plan out on one stream: messages one way, or frames.

    Attributes:
        done: the faults that have happened.
    """

    faults: frozenset[Fault]
    done: list[Fault] = field(default_factory=list)
    _passed: Counter[Point] = field(default_factory=Counter)
    _held_back: list[T] = field(default_factory=list)

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> "Disturber[T]":
        return cls(frozenset(faults))

    def strike(self, point: Point) -> Effect | None:
        """What happens to what passes `point` now."""
        occurrence = self._passed[point]
        self._passed[point] += 1
        for fault in self.faults:
            if (fault.point, fault.occurrence) == (point, occurrence):
                self.done.append(fault)
                return fault.effect
        return None

    def after(self, effect: Effect | None, item: T, damaged: T) -> list[T]:
        """What goes on now in place of `item`, in order.

        Raises:
            LinkCut: nothing does any more.
        """
        match effect:
            case Effect.CUT:
                raise LinkCut
            case Effect.DROP:
                passing: list[T] = []
            case Effect.DUPLICATE:
                passing = [item, item]
            case Effect.DAMAGE:
                passing = [damaged]
            case Effect.REORDER:
                self._held_back.append(item)
                return []
            case _:
                passing = [item]
        held_back, self._held_back = self._held_back, []
        return passing + held_back


def damaged_message(message: M) -> M:
    """A message that says something else, in the form of its kind."""
    match message:
        case Open():
            return replace(message, secret=damaged_bytes(message.secret))
        case Grant():
            return replace(message, frame_credits=0)
        case Credit():
            return replace(message, frames=message.frames + 7)
        case Commit():
            return replace(message, num_frames=max(0, message.num_frames - 1))
        case Close():
            return replace(message, detail=message.detail + "?")
        case Accepted():
            return replace(message, kv_bytes=message.kv_bytes + 1)


def damaged_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """One bit in the middle is flipped."""
    altered = bytearray(data)
    altered[len(altered) // 2] ^= 1
    return bytes(altered)
