"""`python -m prefill_worker`."""

from worker.process import main


def _worker_class():
    from prefill_worker.server import PrefillWorker

    return PrefillWorker


main(
    "python -m prefill_worker",
    "A prefill worker: computes prompts and hands their KV cache to decode workers.",
    _worker_class,
)
