"""SGLang's attention on hal: `decode_attention` and `extend_attention` over the pool's slots, listed once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from torch import Tensor

import hal
from hal.engines import layer as asking_layer
from hal.engines._masks import attend_trees
from hal.engines.sglang import limits, ngram, speculative, switched_on
from hal.engines.sglang.pools import FP8, HalMHAPool, HalMLAPool


@dataclass
class Step:
    """One step's lists, as hal's attention ops take them. `qo_indptr`: None where each request has one new token.

    With `tree_slots` the lists are of prefixes: `attend_trees` takes them all.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    qo_indptr: Tensor | None = None
    tree_slots: Tensor | None = None


class HalAttention(AttentionBackend):
    """All of a model's layers. A layer's ops are chosen when it is made, by examples of its calls.

    Raises:
        EngineError: the model, its pool or SGLang's settings ask for what the ops lack.
        NoBackendError: no backend of hal's can; the error says who was asked, and why not.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = torch.device(runner.device)
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.latent: bool = runner.use_mla_backend
        pool = self.token_to_kv_pool
        self.fp8 = pool.dtype if pool.dtype in FP8 else None
        # SGLang's latent rows have no scales.
        self.scaled = self.fp8 is not None and not self.latent
        self._check(runner)
        self.dtype = runner.dtype
        self.trees = limits.has_trees(runner.server_args)
        # What SGLang has on the device it need not wait for on the host.
        self.needs_cpu_seq_lens = self.device.type == "cpu"
        if runner.server_args.speculative_algorithm == "NGRAM":
            ngram.ask_for_masks_of_drafts()
        elif runner.server_args.speculative_algorithm is not None and not switched_on():
            speculative.use_own_drafts()
        self.index = torch.int32
        self.kv_indices = torch.empty(0, dtype=self.index, device=self.device)
        self.forward_metadata: Step | None = None
        self.ops: dict[tuple[Any, ...], Any] = {}
        for name, module in runner.model.named_modules():
            if isinstance(module, RadixAttention) and self._is_ours(module):
                with asking_layer("sglang", name):
                    self._bind(module)

    def _check(self, runner: Any) -> None:
        args = runner.server_args
        reasons = limits.of_settings(args) + limits.of_model(runner.model, limits.has_trees(args))
        if self.device.type == "npu" and switched_on():
            reasons += limits.of_npu_model(runner.model)
        elif self.device.type not in ("cpu", "cuda"):
            reasons.append(f"the device {self.device}")
        expected: tuple[type, ...] = HalMLAPool, HalMHAPool
        if switched_on():
            from hal.engines.sglang import rotary, seams

            seams.check()
            rotary.check_instances(runner.model)
        else:
            expected += MHATokenToKVPool, MLATokenToKVPool
        pool = self.token_to_kv_pool
        if type(pool) not in expected:
            reasons.append(f"a KV cache of the kind {type(pool).__name__}")
        elif self.fp8 is None and pool.dtype != runner.dtype:
            reasons.append(f"a KV cache of {pool.dtype} beside a model of {runner.dtype}")
        if reasons:
            raise limits.refusal(reasons)

    # --- a step ---------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any, drafted: int = 0) -> None:
        """`drafted`: how many tokens past ``seq_lens`` each request reads; verifying reads all of its drafts."""
        mode, bs = forward_batch.forward_mode, forward_batch.seq_lens.shape[0]
        if mode.is_target_verify():
            drafted = forward_batch.spec_info.draft_token_num
            if self.trees:
                self.init_trees(forward_batch, _seen(forward_batch, drafted))
                return
        lists = self._list(forward_batch, drafted)
        qo_indptr = None
        if mode.is_target_verify():
            qo_indptr = torch.arange(bs + 1, dtype=self.index, device=self.device) * drafted
        elif not mode.is_decode_or_idle():
            lens = forward_batch.extend_seq_lens
            qo_indptr = torch.zeros(bs + 1, dtype=lens.dtype, device=self.device)
            torch.cumsum(lens, 0, out=qo_indptr[1:])
        self.forward_metadata = Step(*lists, qo_indptr)

    def init_trees(self, forward_batch: Any, tree_slots: Tensor) -> None:
        """A step whose new tokens see their request's prefix, and of each other ``[n, most]`` the slots given."""
        tree_slots = tree_slots.to(self.index).contiguous()
        self.forward_metadata = Step(*self._list(forward_batch, 0), tree_slots=tree_slots)

    def _list(self, forward_batch: Any, drafted: int) -> tuple[Tensor, Tensor]:
        """(where each request's slots begin, the slots): of its ``seq_lens`` and so many more."""
        seq_lens = forward_batch.seq_lens
        bs = seq_lens.shape[0]
        total = most = bs * self.req_to_token.shape[1]
        if forward_batch.seq_lens_cpu is not None:
            total = int(forward_batch.seq_lens_cpu.sum()) + bs * drafted
        if total > self.kv_indices.shape[0]:
            self.kv_indices = torch.empty(max(total, min(2 * total, most)), dtype=self.index, device=self.device)
        kv_indptr = torch.empty(bs + 1, dtype=self.index, device=self.device)
        hal.build_kv_indices(
            self.req_to_token,
            forward_batch.req_pool_indices,
            seq_lens + drafted if drafted else seq_lens,
            kv_indptr,
            self.kv_indices,
        )
        return kv_indptr, self.kv_indices

    @property
    def verify_mask(self) -> VerifyMask:
        """None is kept, a chain is verified without; of a tree the mask of its tokens alone is asked for."""
        return VerifyMask(torch.empty(0, dtype=torch.bool, device=self.device), TreeMaskMode.QLEN_ONLY, 0, False)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing that was listed before the drafts were there depends on them, in chains: trees refuse that stream."""

    # A graph reads a step's lists where its capture found them. They are written before it is replayed, not in it: by
    # then SGLang may write the table for the next step.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graph_indptr = torch.zeros(max_bs + 1, dtype=self.index, device=self.device)
        self.graph_indices = torch.zeros(max_bs * self.req_to_token.shape[1], dtype=self.index, device=self.device)
        new = max_num_tokens // max_bs
        self.graph_qo_indptr = torch.arange(max_bs + 1, dtype=self.index, device=self.device) * new
        if self.trees:
            self.graph_trees = torch.full((max_num_tokens, new), -1, dtype=self.index, device=self.device)

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False, drafted: int = 0, tree_slots: Tensor | None = None
    ) -> None:
        """`drafted` and `tree_slots`: as above.

        Raises:
            EngineError: a graph of other than decode and of equally many new tokens of each request.
        """
        mode, bs = forward_batch.forward_mode, forward_batch.batch_size
        qo_indptr = None
        if tree_slots is not None:
            tree_slots = tree_slots.to(self.index).contiguous()
        if mode.is_target_verify():
            drafted = new = forward_batch.spec_info.draft_token_num
        elif mode.is_draft_extend_v2():
            new = forward_batch.spec_info.num_tokens_per_req
        elif mode.is_decode_or_idle():
            new = 0
        else:
            raise limits.refusal(["graphs of prompts (--cuda-graph-backend-prefill disabled runs without)"])
        if mode.is_target_verify() and self.trees:
            drafted, tree_slots = 0, self.graph_trees[: bs * new, :new]
            seen = _seen(forward_batch, new)[: bs * new]
            tree_slots.fill_(-1)[: seen.shape[0]] = seen
        elif new:
            qo_indptr = self.graph_qo_indptr[: bs + 1]
        lens = forward_batch.seq_lens[:bs]
        step = Step(self.graph_indptr[: bs + 1], self.graph_indices, qo_indptr, tree_slots)
        hal.build_kv_indices(
            self.req_to_token,
            forward_batch.req_pool_indices[:bs],
            lens + drafted if drafted else lens,
            step.kv_indptr,
            step.kv_indices,
        )
        self.forward_metadata = step

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return self.device.type != "cpu"

    # --- a layer --------------------------------------------------------------------------------------

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, others)

    forward_extend = forward_decode
    forward_mixed = forward_decode

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save: bool,
        others: dict[str, Any],
    ) -> Tensor:
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise limits.refusal([f"attention with {', '.join(unknown)}"])
        step = self.forward_metadata
        assert step is not None
        pool, layer_id = self.token_to_kv_pool, layer.layer_id
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if self.scaled else {}
        if save and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, **scales)
        heads, v_dim = layer.tp_q_head_num, layer.v_head_dim
        q = q.view(-1, heads, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], heads * v_dim)
        ops, options = self.ops[_kind(layer)]
        k_cache, v_cache = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        lists = step.kv_indptr, step.kv_indices
        if step.tree_slots is not None:
            attend_trees(
                ops,
                q,
                k_cache,
                v_cache,
                step.kv_indptr,
                step.kv_indices,
                step.tree_slots,
                out.view(-1, heads, v_dim),
                **options,
                **scales,
            )
        elif step.qo_indptr is None:
            ops.decode_attention(q, k_cache, v_cache, *lists, out.view(-1, heads, v_dim), **options, **scales)
        else:
            ops.extend_attention(
                q, k_cache, v_cache, step.qo_indptr, *lists, out.view(-1, heads, v_dim), **options, **scales
            )
        return out

    def _is_ours(self, layer: Any) -> bool:
        """Latent attention has a layer of heads of their own beside it, for a prefill that hal's is not."""
        if not self.latent:
            return True
        return bool(layer.tp_k_head_num == 1 and layer.qk_head_dim == self.token_to_kv_pool.kv_cache_dim)

    def _bind(self, layer: Any) -> None:
        if _kind(layer) in self.ops:
            return
        # SGLang's window, as hal's, does not count the token itself.
        options = {
            "scale": float(layer.scaling),
            "sliding_window": layer.sliding_window_size,
            "logit_cap": float(layer.logit_cap or 0.0),
        }
        pool = self.token_to_kv_pool
        k_cache, v_cache = (buffer(layer.layer_id)[:1] for buffer in (pool.get_key_buffer, pool.get_value_buffer))
        q = torch.zeros(1, layer.tp_q_head_num, layer.qk_head_dim, dtype=self.dtype, device=self.device)
        out = torch.zeros(1, layer.tp_q_head_num, layer.v_head_dim, dtype=self.dtype, device=self.device)
        index = torch.zeros(2, dtype=self.index, device=self.device)
        one = torch.ones((), dtype=torch.float32, device=self.device)
        scales = {"k_scale": one, "v_scale": one} if self.scaled else {}
        attend = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "kv_indptr": index,
            "kv_indices": index,
            "out": out,
            **options,
            **scales,
        }
        if self.trees:
            attend["lse"] = torch.zeros(1, layer.tp_q_head_num, dtype=torch.float32, device=self.device)
        ops = hal.bind(
            self.device, like={"decode_attention": attend, "extend_attention": {**attend, "qo_indptr": index}}
        )
        self.ops[_kind(layer)] = ops, options


def _seen(forward_batch: Any, drafted: int) -> Tensor:
    """What `attend_trees` takes: the slots of the drafts that each sees, ``[bs * drafted, drafted]``.

    A graph's masks are of the requests that there are, its slots of those that it pads to; a capture's masks are any.
    """
    slots = forward_batch.out_cache_loc.view(-1, 1, drafted)
    masks = forward_batch.spec_info.custom_mask
    bs = min(masks.shape[0] // drafted**2, slots.shape[0])
    masks = masks[: bs * drafted**2].view(bs, drafted, drafted)
    return torch.where(masks, slots[:bs], -1).flatten(0, 1)


def _kind(layer: Any) -> tuple[Any, ...]:
    """What a layer's ops depend on."""
    return (
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        layer.v_head_dim,
        layer.scaling,
        layer.sliding_window_size,
        layer.logit_cap,
    )
