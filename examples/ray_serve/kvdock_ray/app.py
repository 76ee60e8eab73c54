"""Starting it: Ray on this machine, the replicas, and what is before them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody; Ray reads it when it is imported

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from kvdock_ray.client import Front
from kvdock_ray.replica import Replica
from kvdock_ray.router import PrefixRouter

FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2] / "engine")
"""Where Ray's processes find this package and the engine."""


@contextmanager
def running(replicas: int, port: int | None = None) -> Iterator[None]:
    """Run Ray and Serve on this machine, and stop both: with an HTTP proxy at ``port``, or without one."""
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])
    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 2**27}
    ray.init(address="local", num_cpus=replicas + 1, **options)  # a CPU for each replica, whatever the machine has
    try:
        serve.start(proxy_location="Disabled" if port is None else "HeadOnly", http_options={"port": port or 8000})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def engines(
    make: Callable[[], Any], replicas: int, *, by_prefix: bool = True, routing: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """Return the application of all replicas.

    Args:
        make: makes the model, in each replica.
        replicas: how many.
        by_prefix: whether requests go to where their prompt is cached; otherwise they go as Serve's own router sends them.
        routing: arguments of `Prefixes`.
        settings: arguments of `Engine`.
    """
    how = {"request_router_class": PrefixRouter, "request_router_kwargs": routing or {}} if by_prefix else {}
    options = {"num_replicas": replicas, "max_ongoing_requests": 16, "ray_actor_options": {"num_cpus": 1}}
    return serve.deployment(Replica, name="engine", request_router_config=RequestRouterConfig(**how), **options).bind(make, settings)


def front(engine: Any, make: Callable[[], Any], name: str, max_context: int) -> Any:
    """Return an HTTP endpoint before the application of all replicas; ``make`` makes the tokenizer."""
    options = {"max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0}}
    return serve.deployment(Front, name="front", **options).bind(engine, make, name, max_context)
