"""Processes that run engines for the tests: ``python WORKER jobs.json TO``, one for all jobs of a file of tests."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """This process's, with `more`, and of hal's own variables nothing but where compiled kernels are kept."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("HAL_") or k == "HAL_CACHE_DIR"}, **more}


class Worker:
    """``sglang_worker.py`` or ``vllm_worker.py`` at work since this was made; it ends with the tests at the latest."""

    def __init__(
        self, script: str, folder: Path, jobs: Mapping[str, dict[str, Any]], environment: Mapping[str, str]
    ) -> None:
        self.folder, self.results = folder, folder / "results.json" if script == "vllm_worker.py" else None
        (folder / "jobs.json").write_text(json.dumps([{**job, "name": name} for name, job in jobs.items()]))
        command = [sys.executable, HERE / script, folder / "jobs.json", self.results or folder]
        with (folder / "worker.txt").open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        atexit.register(self.process.kill)

    def log(self, job: str) -> str:
        """What the engine said in a job; vLLM's worker has one log for all."""
        self.process.wait()
        return (self.folder / ("worker.txt" if self.results else f"{job}.log")).read_text()

    def outcome(self, job: str) -> dict[str, Any]:
        """What came of a job, be it an error."""
        code = self.process.wait()
        assert not code, (self.folder / "worker.txt").read_text()[-4000:]
        if self.results:
            return json.loads(self.results.read_text())[job]
        return json.loads((self.folder / f"{job}.json").read_text())

    def result(self, job: str) -> dict[str, Any]:
        """What came of a job that is to succeed."""
        found = self.outcome(job)
        assert "error" not in found, found.get("traceback", "") + self.log(job)[-4000:]
        return found
