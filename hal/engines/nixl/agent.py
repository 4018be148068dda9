"""NIXL's agent of a link. What NIXL raises becomes a `LinkError`."""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from typing import Any

from hal.engines.nixl.errors import LinkError
from hal.engines.nixl.wire import Wire

MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
PREFIX = "hal:"


def api() -> Any:
    """NIXL's Python API.

    Raises:
        LinkError: it is not installed.
    """
    for name in MODULES:
        try:
            found = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            # It tells of every agent, on stdout.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return found
    raise LinkError("hal: link: NIXL is not installed — pip install 'hal-kernels[nixl]'")


def version() -> str:
    from importlib import metadata

    for name in ("nixl-cu12", "nixl-cu13", "nixl"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


class Agent:
    """Registers the staging memory of `wire`, by NIXL's backend UCX."""

    def __init__(self, wire: Wire) -> None:
        nixl = api()
        self.name = f"hal-{uuid.uuid4().hex}"
        self.wire = wire
        # NIXL's own thread would spin; a link is polled.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.nixl = nixl.nixl_agent(self.name, config)
        self.registered = self.nixl.register_memory(wire.regions(), wire.memory)
        self._left: list[Any] = []

    def metadata(self) -> bytes:
        found: bytes = self.nixl.get_agent_metadata()
        return found

    def meet(self, metadata: bytes) -> str:
        found = self.nixl.add_remote_agent(metadata)
        return found.decode() if isinstance(found, bytes) else str(found)

    def forget(self, name: str) -> None:
        try:
            self.nixl.remove_remote_agent(name)
        except Exception:  # it is gone either way, and NIXL has no class of its errors
            return

    def write(self, here: Any, there: Any, memory: str, to: str, token: str, of: int = 1) -> Any:
        """Begins to write; `to` is notified after the last byte. Returns a handle for `moving`.

        Args:
            of: how many writes there are for this token: writes do not overtake one another by NIXL's word.
        """
        src = self.nixl.get_xfer_descs(here, self.wire.memory)
        dst = self.nixl.get_xfer_descs(there, memory)
        try:
            handle = self.nixl.initialize_xfer("WRITE", src, dst, to, f"{PREFIX}{token}/{of}".encode())
            state = self.nixl.transfer(handle)
        except Exception as e:
            raise LinkError(f"hal: link: NIXL can't write to {to}: {e}") from e
        if state == "ERR":
            self.release(handle)
            raise LinkError(f"hal: link: NIXL can't write to {to}")
        return handle

    def moving(self, handle: Any) -> bool:
        """Raises:
        LinkError: it failed.
        """
        try:
            state = self.nixl.check_xfer_state(handle)
        except Exception as e:
            raise LinkError(f"hal: link: NIXL's transfer failed: {e}") from e
        if state == "ERR":
            raise LinkError("hal: link: NIXL's transfer failed")
        return bool(state == "PROC")

    def release(self, handle: Any) -> bool:
        """False: it can't be stopped now; `sweep` tries again."""
        try:
            handle.release()
        except Exception:
            self._left.append(handle)
            return False
        return True

    def sweep(self) -> None:
        left, self._left = self._left, []
        for handle in left:
            self.release(handle)

    def notifications(self) -> list[tuple[str, str, int]]:
        """(who wrote, the token, of how many writes) of each write that is complete."""
        found = []
        for name, messages in self.nixl.get_new_notifs().items():
            for m in messages:
                text = m.decode(errors="replace")
                token, _, of = text.removeprefix(PREFIX).partition("/")
                if text.startswith(PREFIX) and of.isdecimal():
                    found.append((name, token, int(of)))
        return found

    def close(self) -> None:
        self.sweep()
        try:
            self.nixl.deregister_memory(self.registered)
        except Exception:  # a handle that could not be stopped holds it: the process's end frees it
            return
