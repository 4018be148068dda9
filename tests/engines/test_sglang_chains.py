"""Chains of drafts: what stands in for SGLang's kernels on a CPU, by itself, and what is refused. Needs no SGLang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.engines.sglang import limits, ngram
from hal.engines.sglang import speculative as spec


def verified(
    drafted: list[list[int]], chosen: list[list[int]]
) -> tuple[list[int], list[int], list[list[int]]]:
    bs, n = len(drafted), len(drafted[0])
    predicts, index = torch.zeros(bs * n, dtype=torch.int32), torch.full((bs, n), -1, dtype=torch.int32)
    links, taken = torch.arange(bs * n).view(bs, n), torch.empty(bs, dtype=torch.int32)
    spec.verify_tree_greedy_func(
        predicts, index, taken, torch.tensor(drafted), links, links, links, torch.tensor(chosen)
    )
    return taken.tolist(), predicts.tolist(), index.tolist()


def test_greedy_verification() -> None:
    """Drafts are taken up to the first that the target would not choose, though a later one fits."""
    found = verified([[9, 1, 2, 3], [9, 1, 7, 3], [9, 5, 2, 3]], [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    assert found == (
        [3, 1, 0],
        [1, 2, 3, 4, 1, 2, 0, 0, 1, 0, 0, 0],
        [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]],
    )


def test_sampled_tokens_are_distributed_as_without_drafts() -> None:
    """The first token of 40,000 steps, and the second where a draft came first, within four standard errors."""
    g = torch.Generator().manual_seed(3)
    bs, n, vocabulary = 40_000, 3, 5
    p = torch.rand(n, vocabulary, generator=g)
    p /= p.sum(dim=1, keepdim=True)
    drafted = torch.tensor([4, 2, 1]).expand(bs, n).contiguous()
    predicts, index = torch.zeros(bs * n, dtype=torch.int32), torch.full((bs, n), -1, dtype=torch.int32)
    taken, unused = torch.empty(bs, dtype=torch.int32), torch.zeros(bs, n, dtype=torch.int64)
    spec.tree_speculative_sampling_target_only(
        predicts, index, taken, drafted, unused, unused, unused, torch.rand(bs, n, generator=g),
        torch.rand(bs, generator=g), p.expand(bs, n, vocabulary).contiguous(), torch.zeros(bs, n, vocabulary),
    )  # fmt: skip
    tokens = predicts.view(bs, n)
    for column, rows in ((0, taken >= 0), (1, taken >= 1), (2, taken >= 2)):
        share = torch.bincount(tokens[rows, column], minlength=vocabulary) / rows.sum()
        error = (p[column] * (1 - p[column]) / rows.sum()).sqrt()
        assert bool(((share - p[column]).abs() < 4 * error).all()), (column, share, p[column])
    assert set(taken.tolist()) == {0, 1, 2}


def test_renormalized_probabilities() -> None:
    p = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(
        spec.top_k_renorm_prob(p, torch.tensor([2, 1])), torch.tensor([[0, 4 / 7, 3 / 7, 0], [1.0, 0, 0, 0]])
    )
    torch.testing.assert_close(
        spec.top_p_renorm_prob(p, torch.tensor([0.5, 0.5])),
        torch.tensor([[0, 4 / 7, 3 / 7, 0], [0.5, 0.5, 0, 0]]),
    )


def test_slots_of_what_is_taken() -> None:
    window, front, moved = (
        torch.arange(10, 18),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(8, dtype=torch.int64),
    )
    spec.fill_front_out_cache_loc_func(torch.tensor([3, 1]), window, front)
    spec.fill_accept_out_cache_loc_func(torch.tensor([[0, 1, 2, -1], [4, -1, -1, -1]]), window, moved, 8)
    assert front.tolist() == moved.tolist() == [10, 11, 12, 14, 0, 0, 0, 0]


def test_ngrams() -> None:
    """The longest run that was seen decides, the newest follower of it, and what was not seen for longest goes."""
    corpus = ngram.ChainCorpus(capacity=1000, max_trie_depth=4, draft_token_num=4, max_bfs_breadth=1)
    corpus.insert([[1, 2, 3, 4], [9, 2, 3, 5], [3, 5, 6]])
    found, mask = corpus.match_stateful([0, 1], [[1, 2, 3], [7, 8]], [3, 2])
    assert found.tolist() == [3, 4, 0, 0, 8, 0, 0, 0]
    assert mask.reshape(2, 4, 4).tolist() == [torch.ones(4, 4).tril().int().tolist()] * 2
    assert corpus.match_stateful([0], [[8, 3]], [2])[0].tolist() == [3, 5, 6, 0]
    corpus.capacity = 3
    corpus.insert([])
    assert corpus.match_stateful([0], [[1, 2, 3]], [3])[0].tolist() == [3, 5, 6, 0]
    corpus.reset()
    assert corpus.match_stateful([0], [[3]], [1])[0].tolist() == [3, 0, 0, 0]
    with pytest.raises(RuntimeError, match="n-grams from outside"):
        corpus.remove_corpus("a")


class Asked:
    """Settings that hal takes, but for those given."""

    def __init__(self, **given: Any) -> None:
        for field, taken, _ in (*limits.SETTINGS, *limits.SPECULATIVE):
            setattr(self, field, taken[0])
        self.speculative_algorithm, self.speculative_eagle_topk, self.speculative_ngram_max_bfs_breadth = (
            None,
            1,
            1,
        )
        vars(self).update(given)


TREES = "with trees of drafts: chains alone are verified"


@pytest.mark.parametrize(
    ("algorithm", "given", "why"),
    [
        (None, {"speculative_eagle_topk": 4, "enable_hierarchical_cache": True}, []),
        *((name, {}, []) for name in (*limits.CHAINS, "ngram")),
        ("STANDALONE", {"speculative_eagle_topk": 4}, [f"{TREES} (--speculative-eagle-topk 4)"]),
        ("STANDALONE", {"speculative_eagle_topk": None}, [f"{TREES} (--speculative-eagle-topk None)"]),
        (
            "NGRAM",
            {"speculative_ngram_max_bfs_breadth": 10, "enable_hierarchical_cache": True},
            [
                f"{TREES} (--speculative-ngram-max-bfs-breadth 10)",
                "with HiCache (--enable-hierarchical-cache True)",
            ],
        ),
        ("DFLASH", {}, [""]),
    ],
)
def test_what_is_no_chain_is_refused(algorithm: str | None, given: dict[str, Any], why: list[str]) -> None:
    asked = f"speculative decoding (--speculative-algorithm {algorithm})"
    assert limits.of_settings(Asked(speculative_algorithm=algorithm, **given)) == [
        f"{asked} {reason}".rstrip() for reason in why
    ]
