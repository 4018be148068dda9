"""compute-sanitizer over the contract's samples; first a planted access past the end must be reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys

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
    """Launches the planted error, or of the ops named those samples whose indices or shapes are awkward."""
    import torch

    if what == "planted":
        from hal.bench.cuda import _empty

        _empty.past_the_end((1,), torch.zeros(64, device="cuda", dtype=torch.float32), 64, BLOCK=64)
        torch.cuda.synchronize()
        return
    from hal.bench.cuda.harness import ours
    from hal.ops import get_spec
    from hal.ops.proofs.inputs import on_device

    count = 0
    for op in what.split(","):
        spec = get_spec(op)
        for sample in spec.samples:
            if sample.large or not any(k in sample.name for k in KINDS):
                continue
            args = on_device(spec.make(**sample.params), "cuda")
            if op == "kv_transfer":
                args["method"] = "kernel"
            ours(op)(args)()
            torch.cuda.synchronize()
            count += 1
    print(f"samples launched: {count}")


def run(tool: str, what: str) -> tuple[int, str]:
    """(errors that the sanitizer counted, its output)."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = "import sys; from hal.bench.sanitize import child; child(sys.argv[1])"
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-c", program, what]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    return (-1 if found is None else int(found.group(1))), text


def main() -> int:
    """1 unless the planted error is seen and nothing else."""
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
