"""Pages of one pool of keys and values to a pool in another process or on another host, by NIXL: `Link`.

Needs the extra ``hal-kernels[nixl]``. vLLM's NixlConnector and SGLang's disaggregation do not go through it: it is for
engines that have no connector of their own.
"""

from __future__ import annotations

from hal.engines.nixl.errors import LinkError, LinkFull
from hal.engines.nixl.link import Link, wait
from hal.engines.nixl.peers import Peer
from hal.engines.nixl.slots import Stamped
from hal.engines.nixl.transfer import Transfer

__all__ = ["Link", "LinkError", "LinkFull", "Peer", "Stamped", "Transfer", "wait"]
