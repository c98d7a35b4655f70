"""The end of a hand-off, as a router is told it."""

from kv_transfer.messages import Drop, DropCause
from protos import worker_pb2
from worker.leg import LegDropped

_CAUSES = {
    DropCause.ENDED_AT_FIRST_TOKEN: worker_pb2.DROP_CAUSE_ENDED_AT_FIRST_TOKEN,
    # The other leg's router cancelled it, or its worker gave it up.
    DropCause.CANCELLED: worker_pb2.DROP_CAUSE_PUSH_BROKEN,
    DropCause.PUSH_BROKEN: worker_pb2.DROP_CAUSE_PUSH_BROKEN,
    DropCause.DAMAGED: worker_pb2.DROP_CAUSE_DAMAGED,
    DropCause.INCOMPATIBLE: worker_pb2.DROP_CAUSE_INCOMPATIBLE,
    DropCause.INVALID: worker_pb2.DROP_CAUSE_INVALID,
    DropCause.DRAINING: worker_pb2.DROP_CAUSE_DRAINING,
    DropCause.INTERNAL: worker_pb2.DROP_CAUSE_INTERNAL,
}


def dropped_leg(drop: Drop) -> LegDropped:
    return LegDropped(_CAUSES[drop.cause], drop.detail)
