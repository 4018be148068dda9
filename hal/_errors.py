"""The exceptions and the one warning that hal raises. Standard library only."""

from __future__ import annotations


class HalError(Exception):
    """Base of every error that hal raises on purpose."""


class ArgumentError(HalError, ValueError):
    """An argument breaks the op's contract. Raised before anything is written.

    Attributes:
        op: the op's name, e.g. ``"rope_kv_write"``.
        argument: the argument at fault, e.g. ``"cos_sin_cache"``.
        expected: what the contract asks for.
        got: what came.
    """

    def __init__(self, op: str, argument: str, expected: str, got: str) -> None:
        super().__init__(op, argument, expected, got)
        self.op = op
        self.argument = argument
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return f"hal: {self.op}: {self.argument}: expected {self.expected}; got {self.got}"


class SelectionError(HalError, ValueError):
    """A backend, op or variable that selection was given does not exist or is malformed."""


class NoBackendError(HalError, RuntimeError):
    """No backend may run this call; the message says why of each."""


class BackendError(HalError, RuntimeError):
    """A backend broke: its manifest, its probe, its binding, or its machinery."""


class FallbackWarning(UserWarning):
    """`auto` passed over a backend that should have run the call. Shown once per reason."""


for _public in (HalError, ArgumentError, SelectionError, NoBackendError, BackendError, FallbackWarning):
    # What a traceback shows, and what a user catches.
    _public.__module__ = "hal"
