"""compute-sanitizer over the contract's samples; first a planted access past the end must be reported.

Run on a GPU: ``python -m hal.bench.sanitize``. With ``--case``, runs in the child under the sanitizer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

KINDS = (
    "edge",
    "extreme",
    "skip",
    "too-little",
    "misaligned",
    "pairs",
    "paged-3",
    "partial",
    "odd-rows",
    "page_head",
    "past",
)


def child(what: str) -> None:
    """Launch the planted error, or of the ops named those samples whose indices or shapes are awkward."""
    import importlib
    import inspect

    import torch

    if what == "planted":
        from hal.bench import _empty

        _empty.past_the_end((1,), torch.zeros(64, device="cuda", dtype=torch.float32), 64, BLOCK=64)
        torch.cuda.synchronize()
        return
    from hal import _host, ops
    from hal.kv.pool import KVPool

    count = 0
    for op in what.split(","):
        launcher = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
        spec = ops.get_spec(op)
        kinds = inspect.signature(spec.reference).parameters.values()
        for sample in spec.samples:
            if sample.large or not any(k in sample.name for k in KINDS):
                continue
            args = spec.make(**sample.params)
            for name, value in args.items():
                if isinstance(value, torch.Tensor):
                    raw = _host.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).cuda()
                    args[name] = torch.empty(0, dtype=value.dtype, device="cuda").set_(
                        raw.untyped_storage(), value.storage_offset(), value.shape, value.stride()
                    )
                elif isinstance(value, KVPool):
                    halves: list[Any] = [
                        None if h is None else [t.cuda() for t in h] if isinstance(h, tuple) else h.cuda()
                        for h in (value.k, value.v)
                    ]
                    args[name] = KVPool(halves[0], halves[1], layout=value.layout, page_size=value.page_size)
            if op == "kv_transfer":
                args["method"] = "kernel"
            launcher(
                *(args[p.name] for p in kinds if p.kind is not p.KEYWORD_ONLY),
                **{p.name: args[p.name] for p in kinds if p.kind is p.KEYWORD_ONLY},
            )
            torch.cuda.synchronize()
            count += 1
    print(f"samples launched: {count}")


def run(tool: str, what: str) -> tuple[int, str]:
    """(errors that the sanitizer counted, its output)."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        sys.executable,
        "-m",
        "hal.bench.sanitize",
        "--case",
        what,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    return (-1 if found is None else int(found.group(1))), text


def main() -> int:
    """1 unless the planted error is seen and nothing else."""
    if "--case" in sys.argv:
        child(sys.argv[-1])
        return 0
    from hal.backends.cuda import hal_backend

    planted, text = run("memcheck", "planted")
    print(f"memcheck, an access one element past the end: {planted} errors reported")
    if planted < 1:
        print(text[-2000:])
        return 1
    bad = 0
    for tool in ("memcheck", "initcheck"):
        errors, text = run(tool, ",".join(hal_backend().ops))
        count = re.search(r"samples launched: (\d+)", text)
        print(f"{tool}: {errors} errors in {count.group(1) if count else 'no'} samples")
        if errors or not count:
            print(text[-3000:])
            bad = 1
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
