"""How SGLang's Ascend path finds hal: registered operators, replaced functions, and SGLang's own code on them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hal._errors import ArgumentError
from hal.engines import EngineError
from hal.engines.sglang import npu

I32, I64 = torch.int32, torch.int64
CHILD = Path(__file__).with_name("sglang_npu_child.py")
L, P, HP, PAGE, H, D = 3, 6, 9, 4, 2, 8
pytestmark = pytest.mark.usefixtures("fresh")


def slots_of(page: int) -> torch.Tensor:
    return page * PAGE + torch.arange(PAGE)


def test_refused_names_say_why() -> None:
    from hal.engines.sglang.npu.refused import REASONS

    for name, why in REASONS.items():
        with pytest.raises(npu.Unsupported, match=name) as e:
            getattr(npu, name)(1, x=2)
        assert why in str(e.value)
        assert isinstance(e.value, EngineError)
        assert not hasattr(torch.ops.npu, name)
    with pytest.raises(AttributeError, match="no attribute 'mla_prolog'"):
        npu.mla_prolog  # noqa: B018


@pytest.fixture
def named() -> Iterator[None]:
    npu.register()
    yield
    npu.unregister()


def test_operators(named: None) -> None:
    npu.register()
    table = torch.zeros(2, 4, dtype=I32)
    row, start, end = torch.tensor([1], dtype=I32), torch.tensor([1]), torch.tensor([3])
    torch.ops.npu.cache_loc_assign(row, table, start, end, torch.tensor([5, 6], dtype=I32))
    out = torch.empty(2, dtype=I32)
    torch.ops.npu.cache_loc_update(row, table, start, end, out)
    assert out.tolist() == [5, 6]
    pages = torch.zeros(1, dtype=I64)
    slots = torch.empty(3, dtype=I64)
    torch.ops.npu.alloc_extend(
        torch.tensor([0]), torch.tensor([3]), torch.tensor([-1]), torch.tensor([7, 8]), 2, slots, pages
    )
    assert (slots.tolist(), pages.tolist()) == ([14, 15, 16], [2])
    device, host = torch.ones(L, P, PAGE, H, D), torch.zeros(HP, L, PAGE, H, D)
    torch.ops.npu.transfer_kv_dim_exchange(
        device, host, torch.empty(0), torch.empty(0), slots_of(1), slots_of(2), PAGE, 2, 2
    )
    assert host.any(dim=(1, 2, 3, 4)).nonzero().tolist() == [[2]]
    with pytest.raises(ArgumentError, match="device_indices"):
        torch.ops.npu.transfer_kv_dim_exchange(
            device, host, torch.empty(0), torch.empty(0), slots_of(P), slots_of(2), PAGE, 2, 2
        )


def test_a_name_that_is_taken_is_left_alone() -> None:
    theirs = torch.library.Library("npu", "FRAGMENT")
    theirs.define("alloc_extend(Tensor x) -> Tensor")
    try:
        with pytest.raises(EngineError, match=r"alloc_extend already, of sgl_kernel_npu.*leave sgl_kernel_npu out"):
            npu.register()
        assert not hasattr(torch.ops.npu, "cache_loc_assign")
    finally:
        theirs._destroy()


def test_importing_registers_nothing() -> None:
    code = (
        "import sys, torch, hal.engines.sglang.npu as n\n"
        "assert not any(hasattr(torch.ops.npu, name) for name in n.OPS)\n"
        "assert not {m.partition('.')[0] for m in sys.modules} & {'sglang', 'sgl_kernel_npu', 'torch_npu'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def package(root: Path, kvcacheio: str) -> None:
    """A stand-in for sgl_kernel_npu: hal's functions by name, each of which raises."""
    for path, names in npu.MODULES.items():
        file = root / "sgl_kernel_npu" / f"{path.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in {file.parent, root / "sgl_kernel_npu"}:
            (folder / "__init__.py").touch()
        lines = [f"def {n}({', '.join(npu._parameters(getattr(npu, n)) or ())}): raise SystemError" for n in names]
        file.write_text("\n".join(lines) if path != "kvcacheio" else kvcacheio)


def test_replacing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"sgl_kernel_npu\.kvcacheio does not load"):
        npu.replace()
    monkeypatch.syspath_prepend(str(tmp_path))
    package(tmp_path, "def transfer_kv_dim_exchange(device_indices, compression): pass")
    with pytest.raises(EngineError, match="compression"):
        npu.replace()
    theirs = sys.modules["sgl_kernel_npu.kvcacheio"]
    assert theirs.transfer_kv_dim_exchange is not npu.transfer_kv_dim_exchange
    theirs.transfer_kv_dim_exchange = lambda device_indices, page_size: None  # type: ignore[attr-defined]
    done = npu.replace()
    assert len(done) == sum(map(len, npu.MODULES.values()))
    assert theirs.transfer_kv_dim_exchange is npu.transfer_kv_dim_exchange
    assert "sgl_kernel_npu.mem_cache.allocator.alloc_extend_kernel" in done


def test_sglangs_own_ascend_code_runs_on_hal(tmp_path: Path) -> None:
    """Its allocator, its speculative slots and its host pool's copies, unchanged, on a CPU."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here")
    package(tmp_path, "def transfer_kv_dim_exchange(device_indices): pass\nclass TransferDirection: H2D, D2H = 1, 2")
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "right on reference, cpu"
