"""get_last_loc in numpy."""

import torch


def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    """The contract is hal's: ``help(hal.get_last_loc)``. Any index value is safe: only valid ones are used."""
    table, requests, lens = (t.numpy() for t in (req_to_token, req_pool_indices, prefix_lens))
    rows, width = table.shape
    ok = (requests >= 0) & (requests < rows) & (lens > 0) & (lens <= width)
    out = torch.full_like(prefix_lens, -1)
    out.numpy()[ok] = table[requests[ok], lens[ok] - 1]
    return out
