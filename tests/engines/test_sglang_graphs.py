"""What CUDA graphs of SGLang read, decode's and drafts', without a device: a capture's tensors, later steps' lists.

In a process with hal's attention alone. A replay is played by calling the ops again on the tensors that a capture
found; what must come is plain torch over the slots that a query sees.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROWS, WIDTH, HEADS, DIM, DRAFTS, TOPK, STEPS = 6, 40, 2, 8, 4, 2, 3
TABLE = torch.randperm(ROWS * WIDTH, generator=torch.Generator().manual_seed(1)).view(ROWS, WIDTH).int()
PARTS = ["decode", "verify", "extend", "trees", "chain", "branches", "asked"]
LENS = (([5, 1, 0], [30, 3, 1]), ([2, 4, 3], [7, 32, 36]), ([1, 1, 0], [1, 1, 1]))
"""Rows of the table and their lengths, by step; a length of 1 in row 0 is what SGLang pads with."""


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")
def test_graphs_and_drafts() -> None:
    from engines import workers

    done = subprocess.run(
        [sys.executable, __file__],
        env=workers.environment(HAL_BACKEND="cpu", HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert [word for word in done.stdout.split() if word in PARTS] == PARTS, done.stdout + done.stderr


def attention(trees: bool = False) -> Any:
    import hal
    from hal.engines.sglang.attention import HalAttention, _kind

    made = HalAttention.__new__(HalAttention)
    made.device, made.index, made.trees, made.scaled = torch.device("cpu"), torch.int32, trees, False
    made.req_to_token, made.kv_indices = TABLE, torch.empty(0, dtype=torch.int32)
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, ROWS * WIDTH, HEADS, DIM, generator=g)
    made.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda i: k, get_value_buffer=lambda i: v)
    made.layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=0.3,
        sliding_window_size=-1,
        logit_cap=0.0,
    )
    made.ops = {_kind(made.layer): (hal, {"scale": 0.3})}
    return made


def attended(made: Any, lists: list[list[int]]) -> None:
    """A query for each list sees its slots."""
    g = torch.Generator().manual_seed(len(lists))
    q = torch.randn(len(lists), HEADS * DIM, generator=g)
    found = made.forward_extend(q, None, None, made.layer, None)
    k, v = (f(0) for f in (made.token_to_kv_pool.get_key_buffer, made.token_to_kv_pool.get_value_buffer))
    for one, slots, out in zip(q.view(-1, HEADS, DIM), lists, found.view(-1, HEADS, DIM), strict=True):
        p = torch.einsum("hd,shd->hs", one, k[slots]).mul(0.3).softmax(dim=1)
        torch.testing.assert_close(out, torch.einsum("hs,shd->hd", p, v[slots]))


def batch(mode: Any, rows: list[int], lens: list[int], **more: Any) -> Any:
    """As SGLang has it where nothing was copied to the host."""
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(rows),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=None,
        **more,
    )


def seen(row: int, end: int) -> list[int]:
    return TABLE[row, : max(end, 0)].tolist()


def replays(made: Any, mode: Any, width: int, lists: Any, **more: Any) -> None:
    """What the capture's tensors, and an eager step, make each token see: `lists` of row, length and which it is."""
    from hal.engines.sglang.attention import Step

    made.init_cuda_graph_state(4, 4 * width)
    made.init_forward_metadata_out_graph(batch(mode, [0, 0, 0], [1, 1, 1], **more), in_capture=True)
    captured: Step = made.forward_metadata
    for rows, lens in LENS:
        given = batch(mode, rows, lens, extend_seq_lens=torch.full((3,), width), **more)
        want = [lists(r, n, j) for r, n in zip(rows, lens, strict=True) for j in range(width)]
        made.init_forward_metadata_out_graph(given)
        kept(made, captured)
        attended(made, want)
        made.init_forward_metadata(given)
        attended(made, want)


def kept(made: Any, captured: Any) -> None:
    """Nothing of a capture is freed when the next step's lists come."""
    for name, tensor in vars(captured).items():
        again = getattr(made.forward_metadata, name)
        assert (again is None and tensor is None) or again.data_ptr() == tensor.data_ptr(), name
    made.forward_metadata = captured


def lists_in_graphs() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from hal.engines import EngineError

    replays(attention(), ForwardMode.DECODE, 1, lambda row, n, j: seen(row, n))
    print("decode")
    drafts = SimpleNamespace(draft_token_num=DRAFTS, num_tokens_per_req=DRAFTS)
    replays(attention(), ForwardMode.TARGET_VERIFY, DRAFTS, lambda row, n, j: seen(row, n + j + 1), spec_info=drafts)
    print("verify")
    extended = attention()
    replays(
        extended, ForwardMode.DRAFT_EXTEND_V2, DRAFTS, lambda row, n, j: seen(row, n - DRAFTS + j + 1), spec_info=drafts
    )
    with pytest.raises(EngineError, match="graphs of prompts"):
        extended.init_forward_metadata_out_graph(batch(ForwardMode.EXTEND, [0], [1]), in_capture=True)
    print("extend")


def trees_in_graphs() -> None:
    """A replay's masks are of two requests, where the graph has three."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    made, mode = attention(trees=True), ForwardMode.TARGET_VERIFY
    made.init_cuda_graph_state(4, 4 * DRAFTS)
    slots = torch.arange(100, 100 + 3 * DRAFTS)
    info = SimpleNamespace(draft_token_num=DRAFTS, custom_mask=torch.ones(500, dtype=torch.bool))
    made.init_forward_metadata_out_graph(
        batch(mode, [0, 0, 0], [1, 1, 1], out_cache_loc=slots, spec_info=info), in_capture=True
    )
    captured = made.forward_metadata
    g = torch.Generator().manual_seed(5)
    for rows, lens in LENS[:2]:
        masks = torch.rand(2, DRAFTS, DRAFTS, generator=g).lt(0.4).tril() | torch.eye(DRAFTS, dtype=torch.bool)
        info.custom_mask = masks.flatten()
        given = batch(mode, rows, lens, out_cache_loc=slots, spec_info=info)
        want = [
            seen(row, n) + (slots.view(3, DRAFTS)[i][masks[i, j]].tolist() if i < 2 else [])
            for i, (row, n) in enumerate(zip(rows, lens, strict=True))
            for j in range(DRAFTS)
        ]
        made.init_forward_metadata_out_graph(given)
        kept(made, captured)
        attended(made, want)
        two = batch(mode, rows[:2], lens[:2], out_cache_loc=slots[: 2 * DRAFTS], spec_info=info)
        made.init_forward_metadata(two)
        attended(made, want[: 2 * DRAFTS])
    print("trees")


def drafts(topk: int, name: str) -> None:
    """Step i of a branch sees the prefix and i + 1 of its drafts: in a graph by what is in the buffers then."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from hal.engines.sglang.speculative import HalDraft

    made = HalDraft.__new__(HalDraft)
    made.branches, made.attn_backends = (topk, STEPS), [attention(topk > 1) for _ in range(STEPS - 1)]
    made.init_cuda_graph_state(4, 4 * topk)
    slots = torch.stack([torch.randperm(ROWS * WIDTH)[: topk * STEPS] for _ in range(3)])
    buffers = batch(ForwardMode.DECODE, [0, 0, 0], [1, 1, 1], out_cache_loc=slots.flatten(), positions=None)
    made.init_forward_metadata_out_graph(buffers, in_capture=True)
    for rows, lens in LENS[:2]:
        buffers.req_pool_indices[:], buffers.seq_lens[:] = torch.tensor(rows), torch.tensor(lens)
        for init in (made.init_forward_metadata_in_graph, made.init_forward_metadata):
            init(buffers)
            for i, step in enumerate(made.attn_backends):
                attended(
                    step,
                    [
                        seen(row, n + i + 1) if topk == 1 else seen(row, n) + own.view(topk, STEPS)[b, : i + 1].tolist()
                        for row, n, own in zip(rows, lens, slots, strict=True)
                        for b in range(topk)
                    ],
                )
    print(name)


def asked_for() -> None:
    """SGLang's factory of drafts' attention gives hal's, and the draft model's own extends in a graph."""
    kernels = ModuleType("sgl_kernel")  # 0.5.17 imports names of it on a CPU
    kernels.__getattr__ = lambda name: Exception if name.startswith("__") else print  # type: ignore[method-assign]
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = kernels
    from sglang.srt.model_executor import cuda_graph_config
    from sglang.srt.speculative import draft_utils, eagle_draft_extend_cuda_graph_runner, eagle_worker_v2

    from hal.engines.sglang import speculative

    speculative.use_own_drafts()
    speculative.use_own_drafts()
    runner = SimpleNamespace(attn_backend=attention())
    factory = draft_utils.DraftBackendFactory.__new__(draft_utils.DraftBackendFactory)
    factory.draft_model_runner, factory.topk, factory.speculative_num_steps = runner, 1, 1
    assert factory.create_decode_backend() is None
    assert factory.create_draft_extend_backend() is runner.attn_backend
    worker = eagle_worker_v2.EagleDraftWorker.__new__(eagle_worker_v2.EagleDraftWorker)
    speculative._own["_capture_cuda_graphs"] = lambda self: None
    eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner = lambda self: ("graph", self)  # type: ignore[assignment,misc]
    worker.cuda_graph_runner_for_draft_extend = None
    for without, want in ((True, None), (False, ("graph", worker))):
        cuda_graph_config.check_cuda_graph_backend = lambda *_, off=without: off
        worker._capture_cuda_graphs()
        assert worker.cuda_graph_runner_for_draft_extend == want
    print("asked")


def main() -> None:
    from hal.engines.sglang import vision

    vision.declare_operators()
    lists_in_graphs()
    trees_in_graphs()
    drafts(1, "chain")
    drafts(TOPK, "branches")
    asked_for()


if __name__ == "__main__":
    main()
