"""decode_attention where a program has shares of several requests: batches that fill no whole wave of programs.

Under TRITON_INTERPRET=1: what it computes. Compiled: that nothing is put aside tile after tile. On Hopper
(``ci/h200``): what is computed by as many programs as run at once, and in graphs, with counters that nobody clears; of
query tokens over MLA's rows too. Who has which keys: ``test_shares.py``, ``test_tiles.py``.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import put_aside
from launched import launched, same_in_graphs

from hal._remote.target import DirectTarget
from hal.conformance.execute import execute
from hal.ops import get_spec
from hal.ops.proofs.judge import right_any

pytest.importorskip("triton", reason="Triton is not installed here")

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SPEC, TOKENS = get_spec("decode_attention"), get_spec("extend_attention")
SMALL = {"bs": 5, "longest": 1400, "slots": 9000, "kv_heads": 2, "q_heads": 6, "head_dim": 64, "dtype": "bf16"}
"""Of two programs that run at once, of each key head."""
HEADS = [(32, 8, 128), (32, 4, 128), (16, 8, 256), (32, 8, 64), (64, 8, 64)]
"""Query heads, key heads and head_dim, one of each form of `DEEP`."""
LARGE = {"bs": 110, "longest": 1500, "slots": 120_000, "dtype": "bf16", "lengths": "ragged"}
LATENT = {
    "head_dim": 576,
    "v_head_dim": 512,
    "kv_heads": 1,
    "cache_view": "shared",
    "dtype": "bf16",
    "slots": 60_000,
    "prefix": 700,
}


def uneven(args: dict[str, Any]) -> bool:
    """Whether a call starts what may share its keys out so, and that alone; on a GPU, if there is one."""
    if CUDA:
        args = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
    found = [bool(run.static["ENOUGH"]) for run in launched("decode_attention", args)]
    assert len(found) == 1
    return found[0]


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "change",
    [
        {"lengths": "full"},
        {"lengths": "ragged", "bs": 7, "values": "skip"},
        {"lengths": "full", "sliding_window": 800},
        {"lengths": "full", "logit_cap": 5.0, "lse": False, "bs": 3},
        {"lengths": "full", "head_dim": 128, "index": "i64", "dtype": "fp16", "longest": 1000},
    ],
    ids=str,
)
def test_right_where_interpreted(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    from hal.backends.cuda import decode_attention as module

    few = {most: form._replace(per_sm=1, at_once=1) for most, form in module.DEEP.items()}
    for name, value in {"DEEP": few, "_sms": lambda device: 4, "TOGETHER": 3 * 4 * 128}.items():
        monkeypatch.setattr(module, name, value)
    module._plans.clear()
    args = SPEC.make(**{**SMALL, **change})
    wants = SPEC.oracle(args)
    assert uneven(args)
    result = module.decode_attention(**args)
    assert bool(right_any(result, wants["return"]).all())
    if args["lse"] is not None:
        assert bool(right_any(args["lse"], wants["lse"]).all())
    module._plans.clear()


@pytest.mark.skipif(CUDA and not HOPPER, reason="needs no GPU, or a Hopper GPU")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_same_is_started_as_before_but_for_about_as_many_requests_as_programs(heads: tuple[int, int, int]) -> None:
    """Nor where requests are short, or there are many of them."""
    from hal.backends.cuda import decode_attention as module

    q_heads, kv_heads, head_dim = heads
    form = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": "bf16"}

    def begun(bs: int, longest: int) -> bool:
        found = SPEC.make(**form, bs=bs, longest=longest, lengths="full", slots=bs * longest)
        return uneven(found)

    args = SPEC.make(**form)
    deep = module.deep_of(args["q"], args["k_cache"], args["v_cache"])
    assert deep is not None
    at_once = module._sms(0 if CUDA else -1) * deep.at_once // kv_heads
    assert begun(at_once + 1, 600)
    assert not begun(at_once + 1, 300)
    assert not begun(1, 600)
    assert not begun(4 * at_once + 1, 600)


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("heads", HEADS if os.environ.get("CI_ALL") else HEADS[::3], ids=str)
def test_nothing_is_put_aside_tile_after_tile(heads: tuple[int, int, int], tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    q_heads, kv_heads, head_dim = heads
    args = SPEC.make(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype="bf16", bs=16, longest=8, slots=200)
    with inspect.record() as calls:
        inspect.launcher("decode_attention")(**{**args, "kv_indices": torch.zeros(10_000, dtype=torch.int32)})
    call = next(call for call in calls if call[0].static["ENOUGH"])
    cubin = inspect.compile_call(call, 90).asm["cubin"]
    assert inspect.resources(cubin)[1] <= 16
    assert not put_aside(cubin, tmp_path)


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("head_dim", [80, 96])
def test_four_programs_fit_where_heads_are_in_two_tiles(head_dim: int) -> None:
    """Four warps each: of so many registers a multiprocessor has for as many programs as the keys are split for."""
    from hal.backends.cuda import inspect
    from hal.backends.cuda.decode_attention import PER_SM

    args = SPEC.make(q_heads=4, kv_heads=4, head_dim=head_dim, dtype="bf16", bs=16, longest=8, sliding_window=2046)
    with inspect.record() as calls:
        inspect.launcher("decode_attention")(**{**args, "kv_indices": torch.zeros(10_000, dtype=torch.int32)})
    call = next(call for call in calls if call[0].kernel.name == "decode_attention_kernel")
    registers, spills, _ = inspect.resources(inspect.compile_call(call, 90).asm["cubin"])
    assert (spills, registers * 128 * PER_SM <= 65536) == (0, True)


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("change", [{}, {"lengths": "full", "bs": 75}, {"sliding_window": 1100}], ids=str)
def test_right(heads: tuple[int, int, int], change: dict[str, Any]) -> None:
    from hal.backends.cuda import decode_attention as module

    q_heads, kv_heads, head_dim = heads
    fewer = {"bs": 40} if head_dim == 256 else {}
    args = SPEC.make(**{**LARGE, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, **change, **fewer})
    assert uneven(args)
    execute(SPEC, args, DirectTarget.of(SPEC.name, module.decode_attention, "cuda"))


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_graphs_give_the_same(heads: tuple[int, int, int]) -> None:
    from hal.backends.cuda import decode_attention as module

    q_heads, kv_heads, head_dim = heads
    fewer = {"bs": 40} if head_dim == 256 else {}
    args = SPEC.make(**{**LARGE, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, **fewer})
    same_in_graphs(module.decode_attention, args)


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "change",
    [
        {"q_heads": 128, "bs": 41, "longest": 2},
        {"q_heads": 128, "bs": 41, "longest": 2, "lengths": "full", "cache_dtype": "e4m3", "scales": "tensor"},
        {"q_heads": 128, "bs": 75, "longest": 3, "values": "skip"},
        {"q_heads": 16, "bs": 80, "longest": 8},
        {"q_heads": 16, "bs": 80, "longest": 4, "cache_dtype": "e4m3", "scales": "tensor"},
        {"q_heads": 20, "bs": 70, "longest": 9, "dtype": "fp16", "causal": False, "cache": "paged"},
        {"q_heads": 128, "bs": 41, "longest": 2, "prefix": -1},
    ],
    ids=str,
)
def test_tokens_right(change: dict[str, Any]) -> None:
    from hal.backends.cuda import extend_attention as module

    args = TOKENS.make(**{**LATENT, **change})
    assert launched("extend_attention", args)[0].kernel.name == "decode_attention_hopper_kernel"
    execute(TOKENS, args, DirectTarget.of(TOKENS.name, module.extend_attention, "cuda"))
