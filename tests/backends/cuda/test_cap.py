"""The polynomial by which logits under a cap are tanh's, as the device evaluates it, in fp32."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from hal.backends.cuda._cap import NEAR, POLYNOMIAL


def test_right_relative_to_the_result() -> None:
    x = torch.linspace(2.0**-20, NEAR, 1_000_000, dtype=torch.float32, device="cpu").double()
    y = _rounded(x * x)
    found = torch.full_like(y, _rounded(torch.tensor(POLYNOMIAL[0])).item())
    for c in (*POLYNOMIAL[1:], 1.0):
        found = _rounded(found * y + torch.tensor(c, dtype=torch.float32, device="cpu").double())
    found = _rounded(found * x)
    wants = torch.tanh(x)
    assert float(((found - wants) / wants).abs().max()) <= 3.3e-7


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """float64 of what is left of it in fp32: a fused product and sum is rounded once."""
    return x.float().double()
