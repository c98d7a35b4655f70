"""The process that owns a cluster on this machine: starts Ray, deploys, ends Ray.

`python -m deploy.head FOLDER`, where FOLDER holds the configuration. It leads a session of its own,
in which everything runs that it starts, and ends with SIGTERM.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import ray

from deploy.application import deploy
from deploy.cluster_config import ClusterConfig, load_config
from deploy.cluster_state import ClusterFolder, ClusterState
from deploy.core_claims import this_machine
from deploy.process_session import ProcessSession
from deploy.ray_directory import watch_replicas
from deploy.serve_api import APPLICATION, ROUTER

# No tensor passes through Ray: its store holds next to nothing. (Ray's minimum is 75 MB.)
_OBJECT_STORE_BYTES = 100 << 20


class Head:
    """Owns the Ray of one cluster and keeps its state file true."""

    def __init__(self, folder: ClusterFolder, config: ClusterConfig) -> None:
        self._folder = folder
        self._config = config
        session = ProcessSession.of(os.getpid())
        self._state = ClusterState(
            model_name=config.served_name,
            tls_ca=config.tls_ca,
            api_keys_file=config.router_config().api_keys_file,
            token=os.environ["RAY_AUTH_TOKEN"],
            head_pid=session.leader,
            head_start_ticks=session.start_ticks,
            # Short, whatever TMPDIR says: Ray makes sockets in it, whose paths are limited.
            ray_folder=tempfile.mkdtemp(prefix="baton-", dir="/tmp"),
        )
        folder.write(self._state)

    def run(self) -> None:
        """Until SIGTERM."""
        try:
            self._start_ray()
            deploy(self._config)
            asyncio.run(self._stay())
        finally:
            ray.shutdown()
            if self._state.ray_folder:
                shutil.rmtree(self._state.ray_folder, ignore_errors=True)

    def _start_ray(self) -> None:
        context = ray.init(
            address="local",
            num_cpus=this_machine().cpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            namespace=APPLICATION,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=self._state.ray_folder,
        )
        self._update(
            ray_address=ray.get_runtime_context().gcs_address, dashboard_address=context.dashboard_url
        )

    def _update(self, **changes: str | None) -> None:
        self._state = self._state.model_copy(update=changes)
        self._folder.write(self._state)

    async def _stay(self) -> None:
        leave = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
        doors = asyncio.create_task(self._follow_doors())
        leaving = asyncio.create_task(leave.wait())
        await asyncio.wait([doors, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not doors.done():
            doors.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await doors

    async def _follow_doors(self) -> None:
        """A router that is replaced may have other ports."""
        async for replicas in watch_replicas(APPLICATION, (ROUTER,)):
            door = min(replicas.values(), key=lambda replica: replica.replica_id, default=None)
            metadata = {} if door is None else door.metadata
            self._update(grpc_address=metadata.get("grpc_address"), http_address=metadata.get("http_address"))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Until the event loop handles it: an exit that runs `finally` and ends what Ray has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = ClusterFolder(Path(sys.argv[1]))
    Head(folder, load_config(folder.config_file)).run()


if __name__ == "__main__":
    main()
