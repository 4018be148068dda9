"""What the assembler says of compiled kernels that Triton does not show."""

import re
import subprocess
from pathlib import Path


def serialized(ptx: str, folder: Path) -> list[str]:
    """Its warnings that `wgmma` of a kernel for Hopper, meant to run beside other code, runs one after the other, or is
    waited for earlier than is written: C7510 to C7519. Such a kernel is right, and as little as half as fast."""
    from triton import knobs

    source = folder / "kernel.ptx"
    source.write_text(ptx, "utf-8")
    command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.findall(r"\(C751\d\).*", done.stdout + done.stderr)


def put_aside(cubin: bytes, folder: Path, loops_with: str = "HGMMA|LDGSTS") -> list[str]:
    """Instructions that put registers aside in local memory, or take them back, within the innermost loops that
    multiply or copy to shared memory, or have others of these: what a kernel does tile after tile of keys."""
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    # A loop ends by a branch under a condition: what waits stands behind the code, and goes back to it without one.
    back = [(i, re.match(r"@\S+ +BRA\S* .*`\((\.L_x_\d+)\)", line)) for i, line in enumerate(code)]
    loops = [(labels[to[1]], i) for i, to in back if to and labels[to[1]] <= i]
    loops = [(a, b) for a, b in loops if any(re.search(loops_with, line) for line in code[a : b + 1])]
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    assert inner, f"no loop with {loops_with} was found: does the listing look otherwise now?"
    return [line for a, b in inner for line in code[a : b + 1] if re.search(r"\b(STL|LDL)\b", line)]
