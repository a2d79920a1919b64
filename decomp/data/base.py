"""What every data source offers, and windows of a token stream in a seekable random order (SPEC R3).

An order is never stored: example number e lies in epoch ``e // n``, and a permutation of ``range(n)`` keyed by
(seed, epoch) says which window it is. Reaching step one million costs what reaching step one costs.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from jaxtyping import Int, UInt64

from decomp.config.errors import UserError

_ROUNDS = 6
_M64 = 2**64


class Data(Protocol):
    """Batches of tokens by number; training and evaluation never share a document (SPEC R3, R4)."""

    @property
    def corpus_hash(self) -> str:
        """Hash of the text; a run refuses to resume on another corpus."""
        ...

    @property
    def n_train_tokens(self) -> int: ...

    @property
    def n_eval_tokens(self) -> int: ...

    def batch(self, step: int) -> Int[np.ndarray, "B T"]:
        """Training tokens of one step, int32: a pure function of (seed, step) in O(1)."""
        ...

    def eval_batch(self, index: int) -> Int[np.ndarray, "B T"]:
        """Held-out tokens, int32: the same for every seed."""
        ...


def name_key(*parts: object) -> int:
    """64-bit key from names and numbers (SPEC R1); stable across processes, unlike ``hash``."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mix(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """splitmix64's finaliser: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: UInt64[np.ndarray, " n"], half_bits: int, key: int) -> UInt64[np.ndarray, " n"]:
    """A keyed bijection of ``range(4**half_bits)``: each round adds a hash of one half to the other."""
    half, low = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = x >> half, x & low
    for i in range(_ROUNDS):
        round_key = np.uint64((key + (i + 1) * 0x9E3779B97F4A7C15) % _M64)
        left, right = right, left ^ (_mix(right ^ round_key) & low)
    return (left << half) | right


def permute(index: Int[np.ndarray, " n"], size: int, key: int) -> Int[np.ndarray, " n"]:
    """Images of ``index`` under a pseudorandom permutation of ``range(size)`` chosen by ``key``.

    The bijection of the next power of four is walked until it falls inside ``size``: fewer than four rounds of
    walking on average, without a table.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    x = _feistel(np.asarray(index, np.uint64), half_bits, key)
    while (outside := x >= np.uint64(size)).any():
        x[outside] = _feistel(x[outside], half_bits, key)
    return x.astype(np.int64)


class Windows:
    """Windows of ``length`` tokens of a stream, each once per epoch, in an order keyed by (key, epoch).

    Window borders move by a random offset from epoch to epoch, so that no token is always the first of its window.

    Raises UserError where the stream is shorter than one window.
    """

    def __init__(self, tokens: Int[np.ndarray, " N"], length: int, key: int, what: str, jitter: bool = True) -> None:
        self.tokens, self.length, self.key = tokens, length, key
        self.jitter = jitter and len(tokens) >= 2 * length
        # The same number of windows whatever the offset: the epoch of an example is then a plain division.
        self.count = (len(tokens) - (length - 1 if self.jitter else 0)) // length
        if self.count < 1:
            raise UserError(
                f"data.seq_len={length}: the {what} has only {len(tokens)} tokens; choose data.seq_len <= {len(tokens)}"
            )

    def starts(self, example: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """First token of each example, numbered from 0 through all epochs."""
        epochs, within = np.divmod(example, self.count)
        out = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen, key = epochs == epoch, name_key(self.key, "epoch", epoch)
            offset = name_key(key, "offset") % self.length if self.jitter else 0
            out[chosen] = permute(within[chosen], self.count, key) * self.length + offset
        return out

    def take(self, first: int, n: int) -> Int[np.ndarray, "n T"]:
        """Examples ``first .. first + n - 1``, int32; one vectorised gather from the stream."""
        starts = self.starts(np.arange(first, first + n, dtype=np.int64))
        return self.tokens[starts[:, None] + np.arange(self.length)].astype(np.int32)
