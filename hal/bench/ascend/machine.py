"""What the model takes an Ascend chip to be: published figures with their sources, and what is assumed for the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One device as the driver shows it: of an A3's two dies, each is one.

    Attributes:
        name: the chip.
        cube_cores: AI cores, each a cube core with two vector cores.
        vector_cores: all of them.
        bandwidth: of its memory, bytes a second.
        flops: dense, of fp16 and bf16, a second; fp32 runs at a quarter.
        hertz: what `flops` needs of `cube_cores` that do a 16x16x16 product (8192 FLOP) a cycle.
    """

    name: str
    cube_cores: int
    vector_cores: int
    bandwidth: float
    flops: float

    @property
    def hertz(self) -> float:
        return self.flops / (self.cube_cores * 8192)


MACHINES = (Machine("910B3", 20, 40, 1.6e12, 313e12), Machine("A3-die", 24, 48, 1.6e12, 376e12))
"""Cores: of the target that AscendNPU IR 1.2.0 writes into a module for Ascend910B3 and Ascend910_9391. 910B3: 64 GB of
HBM at 1.6 TB/s and 313 TFLOPS, as sold in the Atlas 800T A2. A3 (910C): two dies of 376 TFLOPS and 1.6 TB/s,
"Serving Large Language Models on Huawei CloudMatrix384" (arXiv:2506.12708)."""

VECTOR_BYTES = 256
"""Of one repeat of a vector instruction (Ascend C's programming guide)."""
LINE = 512
"""Bytes of a copy's unit in global memory: copies not aligned to it reach 70 % of the bandwidth (Ascend C's best
practices, atlas_ascendc_best_practices_10_0014). Each line that a row touches is counted whole."""

# Assumed: no published figure, none measured by us.
CORE_BYTES = 64
"""A cycle, at most, between one core and global memory."""
COPY_CYCLES = 30
"""To issue a copy: one of 16 KiB then reaches 90 % of CORE_BYTES (Ascend C's guide wants 16 KiB for a good part)."""
ROW_CYCLES = 4
"""For each further row of a strided copy."""
LATENCY = 600
"""Cycles until the first byte of a copy that nothing hides, and of a scalar read from a line that is not cached."""
HIT_CYCLES = 4
DIVISION_CYCLES = 20
VECTOR_CYCLES = 24
"""To start a vector instruction that waits for the one before it, as the compiler's barriers make it."""
SLOW = 4
"""Times a repeat of exp, log, square root or division takes longer."""
HAND_OVER = 600
"""Cycles from a cube core to a vector core or back: a flag, and the first bytes through global memory."""
LAUNCH = 5e-6
"""Seconds to start a kernel on an idle queue."""

ASSUMPTIONS = (
    f"a core moves at most {CORE_BYTES} B a cycle, a copy costs {COPY_CYCLES} cycles and {ROW_CYCLES} a row more, by "
    f"{LINE}-byte lines; nothing is found in L2",
    f"{LATENCY} cycles to a first byte that nothing hides: copies overlap with arithmetic only straight in a counted"
    " loop, where the compiler double-buffers",
    f"a vector instruction takes {VECTOR_CYCLES} cycles and 1 for each {VECTOR_BYTES} B ({SLOW} for exp, log, square"
    " root, division)",
    f"a scalar instruction takes 1 cycle, a division {DIVISION_CYCLES}, a read {HIT_CYCLES} from a line just read, else"
    f" {LATENCY}",
    f"cube and vector cores take turns: {HAND_OVER} cycles a hand-over, and its bytes twice; one vector core of"
    " two works",
    f"a launch takes {LAUNCH * 1e6:.0f} us",
)
