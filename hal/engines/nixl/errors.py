"""What goes wrong between two pools."""

from __future__ import annotations

from hal._errors import HalError


class LinkError(HalError, RuntimeError):
    """A peer or a transfer failed. Nothing that was not complete has been written to a pool."""


class LinkFull(LinkError):
    """The staging memory has no room for the request now; it will when others have ended."""
