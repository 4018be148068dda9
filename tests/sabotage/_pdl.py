"""Kernels under programmatic launch that do not wait for the one before as they must. Need Triton and sm_90."""

from __future__ import annotations

from typing import Any

import torch

from sabotage._healthy import fault

RACES = r"between a slow producer"


def _last_loc(waits: int) -> Any:
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
                WAITS=waits,
                launch_pdl=True,
            )
        return out

    return run


@fault("get_last_loc", RACES, "overlap", device=("cuda",))
def programmatic_launch_without_a_wait(good: Any) -> Any:
    return _last_loc(0)


@fault("get_last_loc", RACES, "overlap", device=("cuda",))
def programmatic_launch_reads_before_the_wait(good: Any) -> Any:
    return _last_loc(1)


@fault("get_last_loc", RACES, "overlap", device=("cuda",))
def programmatic_launch_where_one_program_waits(good: Any) -> Any:
    return _last_loc(2)
