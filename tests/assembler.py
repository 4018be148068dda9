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


def one_by_one(cubin: bytes, folder: Path) -> int:
    """Loops over the lanes of a warp, for what is done for all at once where the assembler knows a number to be the
    same in each, in the innermost loops that copy to shared memory: a third of the time of these."""
    loops = _inner_loops(cubin, folder, r"LDGSTS|STS\.")
    return sum("BRA.U.ANY" in line for code in loops for line in code)


def put_aside(cubin: bytes, folder: Path, loops_with: str = "HGMMA|LDGSTS") -> list[str]:
    """Instructions that put registers aside in local memory, or take them back, within the innermost loops that
    multiply or copy to shared memory, or have others of these: what a kernel does tile after tile of keys."""
    loops = _inner_loops(cubin, folder, loops_with)
    return [line for code in loops for line in code if re.search(r"\b(STL|LDL)\b", line)]


def behind_the_wait(cubin: bytes, folder: Path) -> int:
    """Exponentials behind the wait for a product, in the innermost loops that multiply: what does not run beside it."""
    most = 0
    for code in _inner_loops(cubin, folder, "HGMMA"):
        waits = [i for i, line in enumerate(code) if "WARPGROUP.DEPBAR" in line]
        assert waits, "a loop that multiplies waits for nothing: does the listing look otherwise now?"
        most = max(most, sum("MUFU.EX2" in line for line in code[waits[-1] :]))
    return most


def _inner_loops(cubin: bytes, folder: Path, loops_with: str) -> list[list[str]]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in _listing(cubin, folder).splitlines():
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
    return [code[a : b + 1] for a, b in inner]


def _listing(cubin: bytes, folder: Path) -> str:
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
