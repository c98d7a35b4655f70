"""The Ray Serve application: two pools of workers, and the routers in front of them.

Ray starts, places, watches, replaces and counts the replicas. What clients send and what workers
hand over never passes through it.
"""

import asyncio
import logging
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

import model_store
from deploy.cluster_config import POOLS, ClusterConfig, Pool
from deploy.core_claims import CoreClaim, this_machine
from deploy.cores import WAIT_PASSIVELY, ray_cpus, ray_gpus
from deploy.ray_directory import RayWorkerDirectory
from deploy.serve_api import APPLICATION, ROUTER
from router import long_lived_heap
from router.config import RouterConfig
from worker.config import WorkerConfig
from worker.process import configure_threads

if TYPE_CHECKING:
    from worker.server import WorkerServer

# Beyond the drain limit, for what follows it: sessions and engine end.
_STOP_MARGIN_S = 15.0
# Serve's own wait for requests that came through it: there are none.
_SERVE_DRAIN_S = 0.1
_HEALTH_CHECK_PERIOD_S = 2.0
_RUNTIME = {
    "runtime_env": {
        "env_vars": {
            **WAIT_PASSIVELY,
            # One event loop in a replica: gRPC's poller serves one well.
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        }
    }
}


@dataclass(slots=True, frozen=True)
class RayCluster:
    """What the Ray cluster has, as far as it decides how the workers share it."""

    nodes: int
    gpus: float
    # Of the nodes, where workers listen.
    addresses: frozenset[str]


@dataclass(slots=True, frozen=True)
class WorkerPlan:
    """What every replica of a pool is told. The model's path is resolved where it runs."""

    pool: Pool
    config: WorkerConfig
    cores: int | None
    gpus: float
    workers_per_node: int


class WorkerReplica:
    """A prefill or decode worker in the process of a Serve replica."""

    async def __init__(self, plan: WorkerPlan) -> None:
        """Raises whatever keeps the worker from starting; Serve shows it and tries again."""
        logging.basicConfig(level=logging.INFO)
        self._claim = _claim_cores(plan)
        config = _worker_config(plan, self._claim)
        configure_threads(config)
        self._drain_limit_s = config.drain_limit_s
        self._server: WorkerServer = await _server_class(plan.pool).start(config)

    def record_replica_metadata(self) -> dict[str, str]:
        return {
            "address": self._server.address,
            "worker_id": self._server.worker_id,
            "metrics_address": self._server.metrics_address,
        }

    def check_health(self) -> None:
        self._server.check_health()

    async def __del__(self) -> None:
        """Serve awaits this before it ends the process; its own drain knows none of our requests."""
        await self._server.drain(self._drain_limit_s)
        await self._server.stop()


class RouterReplica:
    """A router in the process of a Serve replica."""

    async def __init__(self, config: RouterConfig, *pools: DeploymentHandle) -> None:
        """`pools` makes the pools part of the application; nothing is sent through them."""
        logging.basicConfig(level=logging.INFO)
        from router.router_server import RouterServer

        config = config.model_copy(update={"model_path": model_store.resolve(str(config.model_path))})
        self._drain_limit_s = config.drain_limit_s
        self._server: RouterServer = await RouterServer.start(config, RayWorkerDirectory(APPLICATION))
        self._failed = asyncio.create_task(self._server.failed())
        long_lived_heap.settle()

    def record_replica_metadata(self) -> dict[str, str]:
        return {
            "grpc_address": _reachable(self._server.grpc_address),
            "http_address": _reachable(self._server.http_address),
        }

    def check_health(self) -> None:
        """Raises what ended the router."""
        if self._failed.done():
            self._failed.result()

    async def __del__(self) -> None:
        await self._server.drain(self._drain_limit_s)
        await self._server.stop()


def _claim_cores(plan: WorkerPlan) -> CoreClaim | None:
    """None for a worker that computes on a GPU and was given no cores: nothing to divide."""
    if plan.gpus > 0 and plan.cores is None:
        return None
    return CoreClaim.take(this_machine(), plan.workers_per_node, plan.cores)


def _worker_config(plan: WorkerPlan, claim: CoreClaim | None) -> WorkerConfig:
    share = {} if claim is None else {"cores": claim.share.cores, "threads": claim.share.threads}
    here = {
        "model_path": model_store.resolve(str(plan.config.model_path)),
        "host": ray.util.get_node_ip_address(),
    }
    return WorkerConfig.model_validate(plan.config.model_dump() | here | share)


def _server_class(pool: Pool) -> "type[WorkerServer]":
    """Imports torch, which reads the environment once: only after `configure_threads`."""
    if pool == "prefill":
        from prefill_worker.server import PrefillWorker

        return PrefillWorker
    from decode_worker.server import DecodeWorker

    return DecodeWorker


def _reachable(address: str) -> str:
    """An address to connect to, of one that may listen on every interface."""
    host, port = address.rsplit(":", 1)
    return f"{ray.util.get_node_ip_address()}:{port}" if host in ("0.0.0.0", "[::]") else address


def look_at_ray() -> RayCluster:
    """The cluster that this process is connected to."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return RayCluster(
        nodes=max(1, len(nodes)),
        gpus=ray.cluster_resources().get("GPU", 0.0),
        addresses=frozenset(node["NodeManagerAddress"] for node in nodes),
    )


def worker_plan(config: ClusterConfig, pool: Pool, cluster: RayCluster) -> WorkerPlan:
    workers = sum(config.pool(each).workers for each in POOLS)
    return WorkerPlan(
        pool=pool,
        config=config.worker_config(pool),
        cores=config.pool(pool).cores,
        gpus=ray_gpus(config.pool(pool).gpus, cluster.gpus, workers),
        workers_per_node=ceil(workers / cluster.nodes),
    )


def build_application(config: ClusterConfig, cluster: RayCluster) -> serve.Application:
    pools = [_worker_application(config, worker_plan(config, pool, cluster)) for pool in POOLS]
    router_config = config.router_config()
    router = serve.deployment(
        name=ROUTER,
        num_replicas=config.router.replicas,
        max_replicas_per_node=1,
        graceful_shutdown_timeout_s=router_config.drain_limit_s + _STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=_SERVE_DRAIN_S,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        ray_actor_options={"num_cpus": config.router.cpus, **_RUNTIME},
    )(RouterReplica)
    return router.bind(router_config, *pools)


def _worker_application(config: ClusterConfig, plan: WorkerPlan) -> serve.Application:
    worker = serve.deployment(
        name=plan.pool,
        num_replicas=config.pool(plan.pool).workers,
        graceful_shutdown_timeout_s=plan.config.drain_limit_s + _STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=_SERVE_DRAIN_S,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        ray_actor_options={"num_cpus": ray_cpus(plan.cores, plan.gpus), "num_gpus": plan.gpus, **_RUNTIME},
    )(WorkerReplica)
    return worker.bind(plan)


def deploy(config: ClusterConfig) -> None:
    """Hands the application to the Ray cluster that this process is connected to; waits for nothing.

    Raises:
        ConfigError: workers could be reached from other machines, and nothing protects them.
    """
    cluster = look_at_ray()
    config.check_workers_at(cluster.addresses)
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(
        target=build_application(config, cluster),
        name=APPLICATION,
        route_prefix=None,
        external_scaler_enabled=True,
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
