"""Who chose which backend: the one grammar of a choice, and the levels that may make one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from hal._env import did_you_mean
from hal._errors import SelectionError

# Capitals are let through, for `verify` to say what was meant.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(/[A-Za-z0-9_-]+)?")


@dataclass(frozen=True)
class Choice:
    """One level's choice, parsed from ``cpu``, ``ascend,rope_kv_write=reference`` or ``acme>cpu``."""

    source: str
    """Where it came from, as shown in messages: ``HAL_BACKEND=ascend``."""
    default: str | None
    per_op: Mapping[str, str]

    def get(self, op: str) -> str | None:
        """A name, or a chain of them: ``acme>cpu`` is acme where it can, else cpu, else an error."""
        return self.per_op.get(op, self.default)


def parse(text: str, source: Callable[[str], str]) -> Choice:
    """A choice from its text. Names are checked against what exists by `verify`.

    Raises:
        SelectionError: two bare names, an op twice, an empty side, an odd character, a name twice in a chain or
            ``auto`` in one, no text at all.
    """
    shown = source(text)
    if not isinstance(text, str):
        raise SelectionError(
            f"hal: {shown}: expected a text such as 'cpu' or 'cpu,rope_kv_write=reference'; got {text!r}"
        )
    default: str | None = None
    per_op: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, equals, name = (x.strip() for x in part.partition("="))
        if not equals:
            op, name = "", op
        chain = [link.strip() for link in name.split(">")]
        if not all(map(_NAME.fullmatch, chain)) or (equals and not op):
            raise SelectionError(
                f"hal: {shown}: expected BACKEND or OP=BACKEND[/IMPL], separated by commas, or a chain FIRST>NEXT in "
                f"the place of a backend; got {part!r}"
            )
        if len(chain) > 1 and ("auto" in chain or len(set(chain)) < len(chain)):
            raise SelectionError(f"hal: {shown}: a chain names each backend once, and never auto; got {part!r}")
        name = ">".join(chain)
        if equals:
            if op in per_op:
                raise SelectionError(f"hal: {shown}: {op} is given twice")
            per_op[op] = name
        elif default is not None:
            raise SelectionError(
                f"hal: {shown}: two backends for all ops, {default} and {name}; at most one may be bare"
            )
        else:
            default = name
    return Choice(shown, default, per_op)


def verify(
    choice: Choice, impls: Mapping[str, Collection[str]], ops: Collection[str], blocked: Collection[str] = ()
) -> None:
    """Raises a `SelectionError` with did-you-mean where the choice names what does not exist.

    Args:
        impls: backend -> the full names of its implementations (``cuda``, ``cuda/flashinfer``).
        blocked: the entry points that HAL_PLUGINS kept from loading.
    """
    for op in choice.per_op:
        if op not in ops:
            raise SelectionError(
                f"hal: {choice.source}: unknown op {op}{did_you_mean(op, ops)}; known: {', '.join(ops)}"
            )
    chains = filter(None, (choice.default, *choice.per_op.values()))
    for name in (link for chain in chains for link in chain.split(">")):
        known = ("auto", "reference", *impls)
        backend, slash, _ = name.partition("/")
        if backend not in known:
            if backend in blocked:
                raise SelectionError(f"hal: {choice.source}: HAL_PLUGINS keeps {backend} from loading; add it there")
            raise SelectionError(
                f"hal: {choice.source}: unknown backend {backend}{did_you_mean(backend, known)}"
                f"; known: {', '.join(known)}"
            )
        if slash and name not in impls.get(backend, ()):
            names = sorted(n for n in impls.get(backend, ()) if "/" in n)
            raise SelectionError(
                f"hal: {choice.source}: {backend} has no implementation {name}{did_you_mean(name, names)}"
                f"; known: {', '.join(names) or 'none with a name of its own'}"
            )


asker: ContextVar[str] = ContextVar("hal.engines.layer", default="")
"""The engine's layer whose call this is, for what hal says of it; see `hal.engines.layer`."""
