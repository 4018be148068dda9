"""What answers as an engine of `served.main`, until it is asked to wait for ever, it and a process that it starts."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from typing import Any

from scale import served


def waits_for_ever() -> None:
    print("begins to wait", file=sys.stderr, flush=True)
    threading.Event().wait()


def answer(engine: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("wait"):
        multiprocessing.get_context("spawn").Process(target=waits_for_ever).start()
        waits_for_ever()
    return {**engine, **asked}


if __name__ == "__main__":
    served.main(lambda settings: settings, answer)
