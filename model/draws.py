"""Random numbers that depend on the number of a sequence and a key alone, not on how sequences are batched."""

import numpy as np

WORDS = 4  # 64-bit words per count of the Philox generator


def draws(first: int, sequences: int, words: int, key: int | np.ndarray) -> np.ndarray:
    """(sequences, words) uint64: those of the sequences from number `first` on."""
    counts = -(-words // WORDS)
    generator = np.random.Philox(key=key)
    generator.advance(first * counts)
    return generator.random_raw(sequences * counts * WORDS).reshape(sequences, counts * WORDS)[:, :words]


def random_order(draws_BS: np.ndarray, last_BS: np.ndarray) -> np.ndarray:
    """(B, S): the places of each sequence in the order of their draws, those in `last_BS` after all others."""
    order_BS = draws_BS >> np.uint64(1) | last_BS.astype(np.uint64) << np.uint64(63)
    return np.argsort(order_BS, axis=1, kind="stable")
