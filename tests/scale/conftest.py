"""Links for tests: started here or in processes, and ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hal


@pytest.fixture(scope="module")
def tcp() -> Iterator[None]:
    """NIXL over TCP on the loopback, and copies in plain torch."""
    from scale import link_peer

    with pytest.MonkeyPatch.context() as patch:
        for name, value in link_peer.ENVIRONMENT.items():
            patch.setenv(name, value)
        # What the server of forks imports beforehand is found by it alone.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        hal.reload()
        yield
    hal.reload()


@pytest.fixture
def start(tcp: None) -> Iterator[Callable[..., Any]]:
    """Starts links, here or (``remote=True``) in processes; ends them."""
    from scale import link_peer

    made: list[Any] = []

    def begin(remote: bool = False, **given: Any) -> Any:
        made.append(link_peer.Remote(**given) if remote else link_peer.make(given))
        return made[-1]

    yield begin
    for link in made:
        link.kill() if isinstance(link, link_peer.Remote) else link.close()
