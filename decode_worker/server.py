"""The worker that routers let take hand-offs, and decode."""

from protos import worker_pb2
from worker.server import WorkerServer


class DecodeWorker(WorkerServer):
    role = worker_pb2.ROLE_DECODE
    role_name = "decode"
