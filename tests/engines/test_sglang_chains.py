"""Chains and trees of drafts: what stands in for SGLang's kernels on a CPU, by itself, and what is refused.

Needs no SGLang.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hal.engines.sglang import limits, ngram, trees, vision
from hal.engines.sglang import speculative as spec

vision.declare_operators()


def tree(parents: list[int], bs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The masks of so many requests with the same tree, and what SGLang's functions are given of it."""
    n = len(parents)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        at = i
        while at >= 0:
            mask[i, at], at = True, parents[at]
    masks, lens = mask.repeat(bs, 1, 1), torch.arange(10, 10 + bs)
    links = torch.empty(4, bs, n, dtype=torch.int64)
    trees.reconstruct_indices_from_tree_mask_func(masks.flatten(), lens, links[0].flatten(), *links[1:], bs, n)
    return masks, dict(zip(("index", "next_token", "next_sibling"), links[1:], strict=True))


def verified(
    parents: list[int], drafted: list[list[int]], chosen: list[list[int]]
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """(how many drafts are taken, which nodes, the tokens that come of them)"""
    bs, n = len(drafted), len(parents)
    predicts, index = torch.zeros(bs * n, dtype=torch.int32), torch.full((bs, n), 7, dtype=torch.int32)
    taken = torch.empty(bs, dtype=torch.int32)
    links = tree(parents, bs)[1].values()
    trees.verify_tree_greedy_func(predicts, index, taken, torch.tensor(drafted), *links, torch.tensor(chosen))
    found = [[i for i in row if i >= 0] for row in index.tolist()]
    return taken.tolist(), [[i % n for i in row] for row in found], [predicts[row].tolist() for row in found]


def test_greedy_verification_of_chains() -> None:
    """Drafts are taken up to the first that the target would not choose, though a later one fits."""
    found = verified(
        [-1, 0, 1, 2], [[9, 1, 2, 3], [9, 1, 7, 3], [9, 5, 2, 3]], [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    )
    assert found == ([3, 1, 0], [[0, 1, 2, 3], [0, 1], [0]], [[1, 2, 3, 4], [1, 2], [1]])


def test_greedy_verification_of_trees() -> None:
    """The way may begin with a node's second child, and end where a third does not fit."""
    parents, drafts = [-1, 0, 0, 1, 2, 2, 5], [9, 1, 2, 3, 4, 5, 6]
    chosen = [[2, 0, 5, 0, 0, 6, 8], [1, 8, 5, 0, 0, 6, 8], [3, 3, 5, 0, 0, 6, 8]]
    found = verified(parents, [drafts] * 3, chosen)
    assert found == ([3, 1, 0], [[0, 2, 5, 6], [0, 1], [0]], [[2, 5, 6, 8], [1, 8], [3]])


def test_a_draft_models_tree() -> None:
    """Of three steps of two branches the likeliest six candidates, each with those that it came after."""
    topk, steps, n, bs = 2, 3, 7, 40
    g = torch.Generator().manual_seed(5)
    p, scores, states = torch.rand(bs, topk, generator=g), None, torch.arange(bs)[:, None] * 1000
    tokens = torch.arange(bs * topk).view(bs, topk) % topk
    came_after: dict[tuple[int, int], int] = {}
    lists: list[tuple[Tensor, ...]] = []
    for i in range(steps):
        ids, states, scores, info = spec.select_top_k_tokens(i, p, tokens, states, scores, topk)
        lists.append(info)
        assert (states[:, 0] // 1000).tolist() == torch.arange(bs).repeat_interleave(topk).tolist()
        if i:  # a state goes on with the branch that its token came after
            assert (states[:, 0] % 1000).tolist() == [came_after[n // topk, t] + 1 for n, t in enumerate(ids.tolist())]
        # Each branch's candidates are numbers of their own: of the step, the branch and the candidate.
        states = states // 1000 * 1000 + ids[:, None] + 1
        p = torch.rand(bs * topk, topk, generator=g)
        tokens = (torch.arange(bs * topk * topk) % (topk * topk)).view(bs * topk, topk) + 10 * (i + 1)
        for branch, row in enumerate(tokens.tolist()):
            came_after.update({(branch // topk, t): int(ids[branch]) for t in row})
    order = torch.cat([x[0].flatten(1) for x in lists], dim=1).topk(n - 1).indices.sort().values
    parents, candidates = (torch.cat([x[2] for x in lists[:-1]], dim=1), torch.cat([x[1] for x in lists], dim=1))
    mask, links = torch.ones(bs * n * n, dtype=torch.bool), torch.empty(3, bs, n, dtype=torch.int64)
    positions, lens = torch.empty(bs * n, dtype=torch.int64), torch.arange(bs)
    trees.build_tree_kernel_efficient_func(parents, order, lens, mask, positions, *links, topk, steps, n, None)
    drafted = torch.cat([torch.full((bs, 1), -1), candidates.gather(1, order)], dim=1).tolist()
    for b in range(bs):
        for node, token in enumerate(drafted[b]):
            way = [token]
            while way[-1] >= 0:
                way.append(came_after.get((b, way[-1]), -1))
            seen = mask.view(bs, n, n)[b, node].nonzero().flatten().tolist()
            assert sorted(drafted[b][i] for i in seen) == sorted(way)
            assert positions.view(bs, n)[b, node] == b + len(way) - 1


@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, 0, 0, 1]])
def test_sampled_tokens_are_distributed_as_without_drafts(parents: list[int]) -> None:
    """The first token of 40,000 steps, and the next ones where a draft came first, within four standard errors."""
    g = torch.Generator().manual_seed(3)
    bs, n, vocabulary = 40_000, len(parents), 5
    p = torch.rand(n, vocabulary, generator=g)
    p /= p.sum(dim=1, keepdim=True)
    drafted = torch.tensor([4, 2, 1, 3][:n]).expand(bs, n).contiguous()
    predicts, index = torch.zeros(bs * n, dtype=torch.int32), torch.full((bs, n), -1, dtype=torch.int32)
    taken = torch.empty(bs, dtype=torch.int32)
    trees.tree_speculative_sampling_target_only(
        predicts,
        index,
        taken,
        drafted,
        *tree(parents, bs)[1].values(),
        torch.rand(bs, n, generator=g),
        torch.rand(bs, generator=g),
        p.expand(bs, n, vocabulary).contiguous(),
        torch.zeros(bs, n, vocabulary),
    )
    way = torch.where(index >= 0, index % n, -1)
    for node in range(n):
        rows, column = (way == node).nonzero(as_tuple=True)
        at = index[rows, column]
        share = torch.bincount(predicts[at], minlength=vocabulary) / len(rows)
        error = (p[node] * (1 - p[node]) / len(rows)).sqrt()
        assert bool(((share - p[node]).abs() < 4 * error).all()), (node, share, p[node])
    assert set(taken.tolist()) == {0, 1, 2}


def test_renormalized_probabilities() -> None:
    p = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(
        spec.top_k_renorm_prob(p, torch.tensor([2, 1])), torch.tensor([[0, 4 / 7, 3 / 7, 0], [1.0, 0, 0, 0]])
    )
    torch.testing.assert_close(
        spec.top_p_renorm_prob(p, torch.tensor([0.5, 0.5])), torch.tensor([[0, 4 / 7, 3 / 7, 0], [0.5, 0.5, 0, 0]])
    )


def test_slots_of_what_is_taken() -> None:
    window, front, moved = (torch.arange(10, 18), torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    spec.fill_front_out_cache_loc_func(torch.tensor([3, 1]), window, front)
    spec.fill_accept_out_cache_loc_func(torch.tensor([[0, 1, 2, -1], [4, -1, -1, -1]]), window, moved, 8)
    assert front.tolist() == moved.tolist() == [10, 11, 12, 14, 0, 0, 0, 0]


def test_ngrams() -> None:
    """The longest run that was seen decides, the newest follower of it, and what was not seen for longest goes."""
    corpus = ngram.Corpus(capacity=1000, max_trie_depth=4, draft_token_num=4, max_bfs_breadth=1)
    corpus.insert([[1, 2, 3, 4], [9, 2, 3, 5], [3, 5, 6]])
    found, mask = corpus.match_stateful([0, 1], [[1, 2, 3], [7, 8]], [3, 2])
    assert found.tolist() == [3, 4, 0, 0, 8, 0, 0, 0]
    assert mask.reshape(2, 4, 4).tolist() == [torch.ones(4, 4).tril().int().tolist()] * 2
    assert corpus.match_stateful([0], [[8, 3]], [2])[0].tolist() == [3, 5, 6, 0]
    corpus.capacity = 3
    corpus.insert([])
    assert corpus.match_stateful([0], [[1, 2, 3]], [3])[0].tolist() == [3, 5, 6, 0]
    wide = ngram.Corpus(capacity=1000, max_trie_depth=4, draft_token_num=6, max_bfs_breadth=2)
    wide.insert([[1, 2, 3, 4], [9, 2, 3, 5], [3, 5, 6]])
    found, mask = wide.match_stateful([0], [[1, 2, 3]], [3])
    assert found.tolist() == [3, 4, 5, 6, 0, 0]  # 5 follows 3 too, 6 follows 5
    assert [[j for j in range(6) if row[j]] for row in mask.reshape(6, 6)] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 2, 3],
        [0, 2, 3, 4],
        [0, 2, 3, 4, 5],
    ]
    corpus.reset()
    assert corpus.match_stateful([0], [[3]], [1])[0].tolist() == [3, 0, 0, 0]
    with pytest.raises(RuntimeError, match="n-grams from outside"):
        corpus.remove_corpus("a")


class Asked:
    """Settings that hal takes, but for those given."""

    def __init__(self, **given: Any) -> None:
        for field, taken, _ in (*limits.SETTINGS, *limits.SPECULATIVE):
            setattr(self, field, taken[0])
        self.speculative_algorithm = None
        self.speculative_eagle_topk = self.speculative_ngram_max_bfs_breadth = 1
        vars(self).update(given)


@pytest.mark.parametrize(
    ("algorithm", "given", "why"),
    [
        (None, {"speculative_eagle_topk": 4, "enable_hierarchical_cache": True}, []),
        *((name, {}, []) for name in (*limits.ALGORITHMS, "ngram")),
        ("NGRAM", {"speculative_eagle_topk": 4, "speculative_ngram_max_bfs_breadth": 4}, []),
        (
            "EAGLE",
            {"speculative_eagle_topk": 4, "enable_hierarchical_cache": True},
            ["with HiCache (--enable-hierarchical-cache True)"],
        ),
        ("DFLASH", {}, [""]),
    ],
)
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, algorithm: str | None, given: dict[str, Any], why: list[str]
) -> None:
    monkeypatch.setattr(limits, "switched_on", lambda: True)
    asked = f"speculative decoding (--speculative-algorithm {algorithm})"
    assert limits.of_settings(Asked(speculative_algorithm=algorithm, **given)) == [
        f"{asked} {reason}".rstrip() for reason in why
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, []),
        ({"device": "cpu"}, ["by hal's attention alone, but on CUDA (HAL_ENGINES=sglang has it on a CPU)"]),
        ({"get_attention_backends": lambda: ("fa3", "hal")}, ["beside the attention fa3"]),
        ({"speculative_adaptive": True}, ["with adaptive speculation (--speculative-adaptive True)"]),
    ],
)
def test_what_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], why: list[str]) -> None:
    """Where hal has the attention alone, beside SGLang's own platform."""
    monkeypatch.setattr(limits, "switched_on", lambda: False)
    own = {"speculative_algorithm": "EAGLE", "device": "cuda", "get_attention_backends": lambda: ("hal", "hal")}
    asked = "speculative decoding (--speculative-algorithm EAGLE)"
    assert limits.of_settings(Asked(**{**own, **given})) == [f"{asked} {reason}" for reason in why]
