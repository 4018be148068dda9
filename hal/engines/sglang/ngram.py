"""Drafts without a model: what followed the same tokens before. In the place of SGLang's corpus, which is C++."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from hal.engines.sglang import limits


class Corpus:
    """Tokens by the tokens before them, of all requests.

    Args:
        capacity: of how many runs of tokens the followers are kept; the ones that were not seen for longest go first.
        max_trie_depth: the length of the longest run, its follower included.
        draft_token_num: tokens a request, its last one included.
        max_bfs_breadth: how many followers of a run are kept and drafted, the newest first; 1 makes chains.
    """

    def __init__(
        self, capacity: int, max_trie_depth: int, draft_token_num: int, max_bfs_breadth: int, **others: Any
    ) -> None:
        self.capacity, self.depth, self.drafted = capacity, max_trie_depth, draft_token_num
        self.breadth = max_bfs_breadth
        # By hash: two runs that share one are a wrong draft at worst, and drafts are verified.
        self.after: dict[int, list[int]] = {}

    def insert(self, batch_tokens: list[list[int]]) -> None:
        """Each request's last tokens, at most `max_trie_depth`."""
        for tokens in batch_tokens:
            for end in range(1, len(tokens)):
                for start in range(max(0, end + 1 - self.depth), end):
                    run = hash(tuple(tokens[start:end]))
                    others = [t for t in self.after.pop(run, ()) if t != tokens[end]]
                    self.after[run] = [tokens[end], *others][: self.breadth]
        while len(self.after) > self.capacity:
            del self.after[next(iter(self.after))]

    def _followers(self, known: list[int]) -> list[int]:
        """Of the longest run that was seen, then of shorter ones."""
        found: dict[int, None] = {}
        for n in range(min(self.depth - 1, len(known)), 0, -1):
            found.update(dict.fromkeys(self.after.get(hash(tuple(known[-n:])), ())))
            if len(found) >= self.breadth:
                break
        return list(found)[: self.breadth]

    def match_stateful(
        self, state_ids: list[int], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(each request's last token and its drafts, ``[bs * n]``; the trees' masks, ``[bs * n * n]``).

        What is near the last token, and newest after what is before it, comes first. Where nothing is known to follow,
        tokens of id 0: drafts as good as any, as all are verified.
        """
        found = np.zeros((len(batch_tokens), self.drafted), dtype=np.int64)
        masks = np.zeros((len(batch_tokens), self.drafted, self.drafted), dtype=np.int64)
        for row, mask, tokens in zip(found, masks, batch_tokens, strict=True):
            # Those to come: cost, a number that decides between equal ones, parent, and the run that ends with it.
            waiting = [(0, 0, 0, tokens[-self.depth + 1 :])]
            count = 1
            for node in range(self.drafted):
                if not waiting:
                    waiting = [(0, 0, node - 1, [0])]
                cost, _, parent, known = heapq.heappop(waiting)
                row[node] = known[-1]
                mask[node] = mask[parent]
                mask[node, node] = 1
                for rank, token in enumerate(self._followers(known)):
                    heapq.heappush(waiting, (cost + 1 + rank, count, node, [*known, token]))
                    count += 1
        return found.reshape(-1), masks.reshape(-1)

    def synchronize(self) -> None:
        """Nothing is inserted in the background."""

    def erase_states(self, state_ids: list[int]) -> None:
        """A request has no state here."""

    def reset(self) -> None:
        self.after.clear()

    def list_corpora(self) -> dict[str, int]:
        return {}

    def load_external_corpus_named(self, corpus_id: str, chunks: Any, max_tokens: int) -> tuple[int, int]:
        raise limits.refusal(["a corpus of n-grams from outside"])

    def remove_corpus(self, corpus_id: str) -> None:
        raise limits.refusal(["a corpus of n-grams from outside"])


def get_ngram_corpus_cls() -> type[Corpus]:
    """What SGLang makes its corpus of."""
    return Corpus


def ask_for_masks_of_drafts() -> None:
    """SGLang makes masks over prefixes too, which see all of it: never again in this process."""
    from sglang.srt.speculative import ngram_worker

    assert ngram_worker.USE_FULL_MASK in (True, False)
    ngram_worker.USE_FULL_MASK = False
