"""The child process in which cases run: reads a job, writes one JSON line as each case begins and ends.

Its working directory is empty, its environment was cleaned, no test framework decides anything. Its
death, or silence, fails the case that was running; the parent starts another for the rest.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import threading
import time
from typing import Any


def main(job_path: str) -> None:
    end_with_parent()
    with open(job_path, encoding="utf-8") as f:
        job: dict[str, Any] = json.load(f)
    with open(job["results"], "a", encoding="utf-8", buffering=1) as out:

        def say(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")

        faulthandler.enable(file=sys.stderr, all_threads=False)
        _run(job, say)


def end_with_parent() -> None:
    """A runner that is killed can't end its workers, and a case may run for ever: a worker without it ends itself."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="hal-conformance-parent", daemon=True).start()


def _run(job: dict[str, Any], say: Any) -> None:
    for module in job["imports"]:
        importlib.import_module(module)
    from hal._errors import HalError
    from hal.conformance._cases import cases_of
    from hal.conformance._proofs import run_case
    from hal.conformance._target import RegistryTarget
    from hal.registry._table import live

    try:
        target = RegistryTarget.of(job["backend"], job["lane"], job["device"])
    except HalError as e:
        say(fatal=str(e))
        return
    say(ready=True, device=_device_name(target.device), declared=_declared(target, job["ops"]))
    specs = {op: live.current().spec(op) for op in job["ops"]}
    cases = {c.id: c for spec in specs.values() for c in cases_of(spec)}
    for case_id in job["cases"]:
        case = cases[case_id]
        say(begin=case_id)
        result = run_case(
            case,
            target,
            specs[case.op],
            trial=lambda case_id=case_id: say(trial=case_id),  # type: ignore[misc]
            fixed=job["fixed"],
            examples=job["examples"],
            imports=job["imports"],
        )
        say(end=result.to_json())
    say(done=True)


def _declared(target: Any, ops: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What the manifest says of each implementation, for the report."""
    out = {}
    for op in ops:
        if target.ready(op) is None:
            out[op] = [
                {"impl": b.impl, "graph_safe": b.graph_safe, "deterministic": b.deterministic}
                for b in target.implementations(op)
            ]
    return out


def _device_name(device: Any) -> str:
    import platform

    import torch

    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


if __name__ == "__main__":
    main(sys.argv[1])
