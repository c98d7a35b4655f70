"""The worker that routers give prompts to, for their hand-off."""

from protos import worker_pb2
from worker.server import WorkerServer


class PrefillWorker(WorkerServer):
    role = worker_pb2.ROLE_PREFILL
    role_name = "prefill"
