"""Latent attention's two ways over a request's tokens, and which multiplies less. Plain numbers: imports nothing.

A cache of latents holds one row a token, ``lora + rope`` wide, which all heads share. Over the *latent* rows, queries
are made as wide as a row, and outputs are brought back from a latent. *Unfolded*, each token's keys and values of
heads are made of its row first; queries stay as they are. Heads' keys are narrower, so a product of a query and a key
costs less, but every cached token is unfolded anew.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2 and appendix C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Widths:
    """Elements of a token, of one head where it has heads.

    Attributes:
        lora: of a latent (``kv_lora_rank``).
        nope: of a key's part that is made of the latent (``qk_nope_head_dim``).
        rope: of a key's part that is rotated and that all heads share (``qk_rope_head_dim``).
        v: of a value (``v_head_dim``).
    """

    lora: int
    nope: int
    rope: int
    v: int

    @property
    def fold(self) -> int:
        """Multiply-adds of a head that unfold a row; as many widen a query and bring its output back."""
        return self.lora * (self.nope + self.v)

    def latent(self, new: int, cached: int) -> int:
        """Multiply-adds of a head, over latent rows, for so many new tokens after so many cached ones."""
        return new * self.fold + _pairs(new, cached) * (2 * self.lora + self.rope)

    def unfolded(self, new: int, cached: int) -> int:
        """Likewise, where every token's row is unfolded first."""
        return (new + cached) * self.fold + _pairs(new, cached) * (self.nope + self.rope + self.v)

    def room(self, tokens: int) -> int:
        """Of how many tokens heads' keys and values fit where projections of `tokens` tokens do.

        Of a token there are the projection, of which values are a part, and the keys, for which it is copied.
        """
        return tokens * (self.nope + self.v) // (2 * self.nope + self.rope + self.v)


def _pairs(new: int, cached: int) -> int:
    """Of a query and a key that it sees."""
    return new * cached + new * (new + 1) // 2


def first_unfolded(new: Sequence[int], lengths: Sequence[int], widths: Widths, room: int) -> int:
    """From which request on all are unfolded: vLLM takes those at the end of a batch apart from those before.

    Args:
        new: new tokens of each request.
        lengths: cached and new tokens of each.
        widths: of a token.
        room: no request with more tokens is unfolded.

    Returns:
        The request at which the batch multiplies least, the last such; ``len(new)``: none is unfolded.
    """
    saved = most = 0
    first = len(new)
    for i in reversed(range(len(new))):
        if lengths[i] > room:
            break
        cached = lengths[i] - new[i]
        saved += widths.latent(new[i], cached) - widths.unfolded(new[i], cached)
        if saved > most:
            most, first = saved, i
    return first


def groups(lengths: Sequence[int], room: int) -> list[range]:
    """Requests that follow each other, as many at a time as have room; each alone has."""
    found: list[range] = []
    begin = tokens = 0
    for i, n in enumerate(lengths):
        if i > begin and tokens + n > room:
            found.append(range(begin, i))
            begin, tokens = i, 0
        tokens += n
    if begin < len(lengths):
        found.append(range(begin, len(lengths)))
    return found
