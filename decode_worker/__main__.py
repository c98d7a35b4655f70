"""`python -m decode_worker`."""

from worker.process import main


def _worker_class():
    from decode_worker.server import DecodeWorker

    return DecodeWorker


main(
    "python -m decode_worker",
    "A decode worker: takes prompts over from prefill workers and writes token after token.",
    _worker_class,
)
