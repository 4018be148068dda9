"""vLLM's NixlConnector: what its platform gets wrong on a CPU, and reads of blocks that are another request's by then.

KV itself is moved by vLLM's connector alone.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger("vllm.hal")

REMEMBERED = 1 << 16
"""Requests of prefills whose blocks a worker knows that it has read."""
SEAM = ("_read_blocks_for_req", "_handle_failed_transfer", "_recv_failures", "_bidirectional_kv_xfer_enabled")


def on() -> None:
    """The connector binds each worker to the last core of its node, and so all threads that it starts from then on:
    the workers of a node would share one core, NIXL's own threads included."""
    if current_platform.is_cpu() and hasattr(type(current_platform), "discover_numa_topology"):
        type(current_platform).discover_numa_topology = classmethod(lambda cls: [])
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector
    if hasattr(create, "of_hal"):
        return

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        connector = create(*args, **kwargs)
        worker: Any = getattr(connector, "connector_worker", None)
        if all(hasattr(worker, name) for name in SEAM) and not worker._bidirectional_kv_xfer_enabled:
            read_once(worker)
        return connector

    created.of_hal = True  # type: ignore[attr-defined]
    KVConnectorFactory.create_connector = created


def read_once(worker: Any) -> None:
    """A prefill frees its blocks when they have been read. Who reads them once more, because a request was sent twice,
    gets what another has written there since: vLLM's prefill logs that, its decode answers with wrong tokens."""
    read, seen = worker._read_blocks_for_req, OrderedDict[tuple[str, str], str]()

    def once(req_id: str, meta: Any) -> None:
        # Without blocks of its own it only says that the prefill may free them.
        if any(meta.local_block_ids):
            of = meta.remote.engine_id, meta.remote.request_id
            first = seen.setdefault(of, req_id)
            if first != req_id:
                logger.error(
                    "hal: request %s: the blocks of the prefill's request %s were read already, by request %s: "
                    "kv_transfer_params are good for one request — send it to a prefill again",
                    req_id,
                    of[1],
                    first,
                )
                worker._handle_failed_transfer(req_id, None, worker._recv_failures, record_failed_transfer=False)
                return
            if len(seen) > REMEMBERED:
                seen.popitem(last=False)
        read(req_id, meta)

    worker._read_blocks_for_req = once
