"""An op of two launches on CPU tensors, whose plans are kept, and a driver that writes down what is started of them."""

from typing import Any

import pytest
import torch
import triton.language as tl
from launch.rig import BASE, CPU, EMPTY, Driver, helper
from triton import knobs

from hal.triton import launch
from hal.triton.plans import MOST, Plan, Scratch, Size, Step, length, plans

__all__ = ["helper", "rig"]

A, B = BASE[:256].view(8, 32), BASE[256:384]
WARM = [(7, (9, 1, 1)), (8, (128, 1, 1))]
"""A call, and what starts once its kind is known."""


def first(a, b, part, n, m, scale, BLOCK: tl.constexpr):
    pass


def second(a, part, n: tl.int64, BLOCK: tl.constexpr):
    pass


class Rig:
    """The op. Its kernels compile at once to numbers."""

    def __init__(self, helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = Driver()
        helper.drive(CPU, *self.driver.addresses(), knobs.runtime, knobs.compilation, EMPTY)
        monkeypatch.setattr(launch, "_helper", lambda: helper)
        monkeypatch.setattr(launch, "lane", lambda: "device")
        self.slow: list[tuple[str, Any, tuple[Any, ...]]] = []
        self.prepared: list[tuple[Any, ...]] = []
        self.made: list[tuple[Any, ...]] = []
        self.by_python = 0

        def run(bound: launch.Launch, grid: Any, args: tuple[Any, ...], warmup: bool = False) -> None:
            (self.prepared if warmup else self.slow).append((bound.kernel.name, grid, args))
            codes = "pppild" if bound.kernel.name == "first" else "ppl"
            if bound.native is not None:
                bound.native.add(args, 7 if bound.kernel.name == "first" else 8, 4, 96, True, codes)

        monkeypatch.setattr(launch.Launch, "_run", run)
        kernels = [launch.jit(do_not_specialize=f)(k) for k, f in ((first, ("n", "m")), (second, ("n",)))]

        def make(a: Any, b: Any, scale: float, mode: int) -> Plan:
            self.made.append((a, b, scale, mode))
            if a.shape[0] > MOST:
                raise ValueError("too long")
            one, two = (k.bind(BLOCK=64) for k in kernels)
            part = Scratch(length("a", times=4))
            n = length("a", by=3, per=2)
            return Plan(
                (
                    Step(one, length("b", per=16) + 1, ("a", "b", Scratch(Size()), n, mode, "scale")),
                    Step(two, length("b"), ("b", part, length("b", times=2)), (("b", 64, 2**31),)),
                ),
                length("a", times=8),
            )

        self.plans = plans(make)
        lent = torch.zeros(4096, dtype=torch.float32, device="cpu")

        def workspace(device: torch.device, size: int) -> torch.Tensor:
            self.by_python += 1
            self.plans._scratch = {(0, 0): lent}
            return lent

        monkeypatch.setattr(self.plans, "_workspace", workspace)
        self.lent = lent

    def __call__(self, a: Any, b: Any, scale: Any = 0.5, mode: Any = 3) -> list[Any]:
        """What the driver was told; of calls that went by Python, nothing."""
        self.driver.started.clear()
        self.driver.count = {7: 6, 8: 3}
        self.plans.start(a, b, scale, mode)
        return [(f, c[:3]) for f, c, _ in self.driver.started]


@pytest.fixture
def rig(helper: Any, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(helper, monkeypatch)
