"""vLLM's NixlConnector on a CPU: what its platform gets wrong there. KV itself is moved by vLLM's connector alone."""

from __future__ import annotations

from vllm.platforms import current_platform


def on() -> None:
    """The connector binds each worker to the last core of its node, and so all threads that it starts from then on:
    the workers of a node would share one core, NIXL's own threads included."""
    if current_platform.is_cpu() and hasattr(type(current_platform), "discover_numa_topology"):
        type(current_platform).discover_numa_topology = classmethod(lambda cls: [])
