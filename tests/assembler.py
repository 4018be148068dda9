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
