"""Drafts without a model: what followed the same tokens before. In the place of SGLang's corpus, which is C++."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hal.engines.sglang import limits


class ChainCorpus:
    """Tokens by the tokens before them, of all requests; SGLang's corpus of one branch.

    Args:
        capacity: of how many runs of tokens the follower is kept; the ones that were not seen for longest go first.
        max_trie_depth: the length of the longest run, its follower included.
        draft_token_num: tokens a request, its last one included.
    """

    def __init__(
        self, capacity: int, max_trie_depth: int, draft_token_num: int, max_bfs_breadth: int, **others: Any
    ) -> None:
        assert max_bfs_breadth == 1, "trees are refused at start"
        self.capacity, self.depth, self.drafted = capacity, max_trie_depth, draft_token_num
        # By hash: two runs that share one are a wrong draft at worst, and drafts are verified.
        self.after: dict[int, int] = {}

    def insert(self, batch_tokens: list[list[int]]) -> None:
        """Each request's last tokens, at most `max_trie_depth`."""
        for tokens in batch_tokens:
            for end in range(1, len(tokens)):
                for start in range(max(0, end + 1 - self.depth), end):
                    run = hash(tuple(tokens[start:end]))
                    self.after.pop(run, None)
                    self.after[run] = tokens[end]
        while len(self.after) > self.capacity:
            del self.after[next(iter(self.after))]

    def match_stateful(
        self, state_ids: list[int], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(each request's last token and its drafts, ``[bs * n]``; the chain's masks, ``[bs * n * n]``).

        Where nothing is known to follow, tokens of id 0: drafts as good as any, as all are verified.
        """
        found = np.zeros((len(batch_tokens), self.drafted), dtype=np.int64)
        for row, tokens in zip(found, batch_tokens, strict=True):
            known = list(tokens)
            while len(known) < len(tokens) + self.drafted - 1:
                runs = (hash(tuple(known[-n:])) for n in range(min(self.depth - 1, len(known)), 0, -1))
                follower = next((self.after[run] for run in runs if run in self.after), None)
                if follower is None:
                    break
                known.append(follower)
            chain = known[len(tokens) - 1 :]
            row[: len(chain)] = chain
        mask = np.tril(np.ones((self.drafted, self.drafted), dtype=np.int64))
        return found.reshape(-1), np.tile(mask.reshape(-1), len(batch_tokens))

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


def get_ngram_corpus_cls() -> type[ChainCorpus]:
    """What SGLang makes its corpus of."""
    return ChainCorpus
