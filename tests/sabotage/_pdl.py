"""A kernel under programmatic launch that does not wait for the one before it. Needs Triton and sm_90."""

from __future__ import annotations

from typing import Any

import torch

from sabotage._healthy import fault


@fault("get_last_loc", r"between a slow producer", "overlap", device=("cuda",))
def programmatic_launch_without_a_wait(good: Any) -> Any:
    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        from sabotage._pdl_kernel import last_loc

        out = torch.empty_like(prefix_lens)
        rows, width = req_to_token.shape
        if out.numel():
            last_loc[(out.numel(),)](
                req_to_token,
                req_pool_indices,
                prefix_lens,
                out,
                rows,
                width,
                req_to_token.stride(0),
                launch_pdl=True,
            )
        return out

    return run
