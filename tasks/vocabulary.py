"""Vocabulary: WordPiece, BPE or Unigram, trained from scratch on the corpus; always the same bytes from a corpus.

Reads   the parts of a corpus.
Writes  tokenizer.json and tokenizer_config.json, which transformers.AutoTokenizer loads
        entries.parquet   id, entry, kind, and how often it occurs in the text it was trained on
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from model import InputError
from tasks.stage import Params, stage
from tasks.store import WORK, Artifact
from tasks.text.encoding import BATCHES_AT_ONCE, DIVIDED_AT_ONCE, Encoder
from tasks.text.tokenizer import SPECIALS, WORD_START, inner, save_tokenizer
from tasks.text.vocabulary_training import Model, count, train
from tasks.workers.pool import library_threads

KINDS = ("letters", "mixed", "digits", "punctuation", "special")  # of entries


class Vocabulary(Params):
    """The vocabulary (section 4.1)."""

    model: Model = Field("wordpiece", description="How words are divided; the paper found no difference.")
    entries: int = Field(
        32_768,
        ge=256,
        le=131_072,
        description="Size, with special tokens. Up to 65,536, ids are stored in 16 bits, beyond in 32.",
    )
    sample_megabytes: float = Field(
        1000, gt=0, description="Text to train on, 10^6 characters; of a larger corpus, a fixed sample."
    )
    min_frequency: int = Field(
        2, ge=1, description="Rarer pairs, in eight million words, are not merged (wordpiece and bpe only)."
    )

    @model_validator(mode="after")
    def _no_idle_setting(self) -> "Vocabulary":
        if self.model == "unigram" and self.min_frequency != 2:
            raise ValueError("min_frequency has no effect on the model unigram, which merges nothing: leave it out")
        return self


def kind_of(entry: str) -> str:
    """What an entry consists of: one of KINDS."""
    text = inner(entry)
    if entry in SPECIALS:
        return "special"
    if text.isalpha():
        return "letters"
    if text.isdigit():
        return "digits"
    return "mixed" if any(map(str.isalnum, text)) else "punctuation"


def usage(tokenizer: Tokenizer, counts: pa.Table) -> pa.Table:
    """Every entry with its kind, and how often it occurs in the counted words."""
    ranked, divider = counts.sort_by("count"), Encoder(tokenizer).words
    words, numbers = ranked["word"].to_pylist(), ranked["count"].to_numpy()
    # words that occur equally often are divided together
    starts = np.union1d(np.flatnonzero(np.diff(numbers, prepend=0)), np.arange(0, len(words), DIVIDED_AT_ONCE))
    batches = list(pairwise([*starts.tolist(), len(words)]))
    times = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    with library_threads():
        for i in range(0, len(batches), BATCHES_AT_ONCE):
            some = batches[i : i + BATCHES_AT_ONCE]
            given = [words[start:end] for start, end in some]
            divided = divider.encode_batch_fast(given, is_pretokenized=True, add_special_tokens=False)
            ids = [np.array(encoding.ids, dtype=np.int64) for encoding in divided]
            weights = np.repeat([numbers[start] for start, _ in some], [len(of_batch) for of_batch in ids])
            times += np.bincount(np.concatenate(ids), weights, len(times)).astype(np.int64)
    entries = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    return pa.table(
        {"id": range(len(entries)), "entry": entries, "kind": [kind_of(e) for e in entries], "occurrences": times}
    )


def rows(used: pa.Table) -> list[dict]:
    """The entries as a table, a row for each kind: how many, how many are rare, and their share of all tokens."""
    kinds, occurrences = np.array(used["kind"].to_pylist()), used["occurrences"].to_numpy()
    table = []
    for kind in KINDS:
        times = occurrences[kinds == kind]
        table.append(
            {
                "kind": kind,
                "entries": len(times),
                "unused": int((times == 0).sum()),
                "in fewer than 100 places": int((times < 100).sum()),
                "% of tokens": round(100 * int(times.sum()) / max(1, int(occurrences.sum())), 2),
            }
        )
    return table


@stage(version=3, resumes=True, name="vocabulary")
def train_vocabulary(params: Vocabulary, corpus: Artifact, out: Path) -> dict:
    """Train the vocabulary. Raises InputError if the text doesn't give as many entries as asked for."""
    if not corpus.stats["characters"]:
        raise InputError(
            "There is no text left to train a vocabulary on: deduplicate, decontaminate and filter dropped all of it. "
            "Look at what they dropped (cram show filter), and drop less."
        )
    counts, used = count(corpus, params.sample_megabytes, out / WORK, "count words")
    tokenizer = train(counts, params.entries, params.min_frequency, params.model)
    size = tokenizer.get_vocab_size()
    if size != params.entries:
        raise InputError(
            f"The corpus of {used['characters']:,} characters gives a vocabulary of {size:,} entries; "
            f"{params.entries:,} were asked for. Give more text (download), or lower vocabulary.entries."
        )
    save_tokenizer(tokenizer, out)
    entries = usage(tokenizer, counts)
    pq.write_table(entries, out / "entries.parquet", compression="zstd")
    unigram, names = params.model == "unigram", [n for n in entries["entry"].to_pylist() if n not in SPECIALS]
    starts = sum(name.startswith(WORD_START) if unigram else not name.startswith("##") for name in names)
    return {
        "entries": size,
        "whole_words": starts,
        "continuations": len(names) - starts,
        "unused": int((entries["occurrences"].to_numpy() == 0).sum()) - len(SPECIALS),
        "trained_on": used | {"words": pc.sum(counts["count"]).as_py() or 0, "different_words": len(counts)},
        "table": rows(entries),
    }
