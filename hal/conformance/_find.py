"""Which plugin has a backend: by the metadata of what is installed; no other one loads where it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hal import _env
from hal._errors import SelectionError
from hal.conformance._worker import Job, Worker
from hal.registry import _points
from hal.registry._points import BUILTIN, RESERVED


class Fatal(Exception):
    """The run could not begin."""


def job_for(
    backend: str,
    lane: str,
    device: str | None = None,
    imports: Sequence[str] = (),
    ops: Sequence[str] | None = None,
    silence: float | None = None,
    *,
    fixed: bool = True,
    seed: int = 0,
) -> Job:
    """What is to be judged, with the entry points that load for it: ours, and the one of the backend's name."""
    name = backend.partition("/")[0]
    own = [] if imports or name in RESERVED or name not in _third_parties() else [name]
    allowed = [p for p in (p.strip() for p in _env.get("HAL_PLUGINS").split(",")) if p]
    if allowed and own and name not in allowed:
        raise SelectionError(f"hal: conformance: HAL_PLUGINS keeps {name} from loading; add it there")
    ops = None if ops is None else tuple(ops)
    return Job(backend, lane, device, tuple(imports), (*BUILTIN, *own), ops, silence, fixed, seed)


def find(job: Job) -> Worker:
    """A worker for the backend, ready to be asked.

    Raises:
        SelectionError: there is no such backend or op.
        Fatal: it can't run.
    """
    worker = Worker(job)
    if "unknown" in worker.about and not job.imports:
        # The entry point has another name, or the op is another plugin's: each is asked, alone.
        for name in _third_parties():
            if name in job.plugins:
                continue
            other = Worker(replace(job, plugins=(*job.plugins, name)))
            if "unknown" not in other.about:
                worker.close()
                worker = other
                break
            other.close()
    if not worker.failed:
        return worker
    about = worker.about
    worker.close()
    if "unknown" in about:
        name = job.backend.partition("/")[0]
        near = _env.did_you_mean(name, _third_parties())
        raise SelectionError(str(about["unknown"]) + (near if "did you mean" not in about["unknown"] else ""))
    text = str(about.get("not_here") or about["fatal"])
    raise Fatal(text.removeprefix("hal: "))


def _third_parties() -> list[str]:
    """The names of the entry points that are not ours, each once."""
    names = (p.name for p in _points.entry_points() if not p.builtin and p.name not in RESERVED)
    return list(dict.fromkeys(names))
