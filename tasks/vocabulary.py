"""Vocabulary: WordPiece, BPE or Unigram, trained from scratch on the corpus; the same bytes from the same corpus every time.

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


class Vocabulary(Params):
    """The vocabulary (section 4.1)."""

    model: Model = Field("wordpiece", description="How a word is divided: the paper found all three alike.")
    entries: int = Field(
        32_768, ge=256, le=131_072, description="With special tokens. Ids are stored in 16 bits up to 65,536."
    )
    sample_megabytes: float = Field(
        1000, gt=0, description="Train on the words of so much text, 10^6 characters; of more, a fixed sample is taken."
    )
    min_frequency: int = Field(
        2, ge=1, description="Pairs seen less often are not merged (wordpiece, bpe), in eight million words."
    )

    @model_validator(mode="after")
    def _no_idle_setting(self) -> "Vocabulary":
        if self.model == "unigram" and self.min_frequency != 2:
            raise ValueError("min_frequency has no meaning for the model unigram, which merges nothing: leave it out")
        return self


def kind_of(entry: str) -> str:
    """What an entry consists of: letters, digits, punctuation, or several of these."""
    text = inner(entry)
    if entry in SPECIALS:
        return "special"
    if text.isalpha():
        return "letters"
    if text.isdigit():
        return "digits"
    return "mixed" if any(map(str.isalnum, text)) else "punctuation"


def usage(tokenizer: Tokenizer, counts: pa.Table) -> pa.Table:
    """Every entry with its kind, and how often it occurs in the words that were counted."""
    ranked, divider = counts.sort_by("count"), Encoder(tokenizer).words
    found, numbers = ranked["word"].to_pylist(), ranked["count"].to_numpy()
    # words that occur as often are divided together
    starts = np.union1d(np.flatnonzero(np.diff(numbers, prepend=0)), np.arange(0, len(found), DIVIDED_AT_ONCE))
    batches = list(pairwise([*starts.tolist(), len(found)]))
    times = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    with library_threads():
        for i in range(0, len(batches), BATCHES_AT_ONCE):
            some = batches[i : i + BATCHES_AT_ONCE]
            given = [found[start:end] for start, end in some]
            divided = divider.encode_batch_fast(given, is_pretokenized=True, add_special_tokens=False)
            ids = [np.array(encoding.ids, dtype=np.int64) for encoding in divided]
            weights = np.repeat([numbers[start] for start, _ in some], [len(of_batch) for of_batch in ids])
            times += np.bincount(np.concatenate(ids), weights, len(times)).astype(np.int64)
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return pa.table(
        {
            "id": [place for _, place in entries],
            "entry": [entry for entry, _ in entries],
            "kind": [kind_of(entry) for entry, _ in entries],
            "occurrences": times,
        }
    )


def rows(used: pa.Table) -> list[dict]:
    """Entries by kind as a table: how many, how many of these hardly occur, and their share of all tokens."""
    entries, total = used.to_pylist(), max(1, sum(used["occurrences"].to_pylist()))
    found = []
    for kind in dict.fromkeys(("letters", "mixed", "digits", "punctuation", "special")):
        times = [e["occurrences"] for e in entries if e["kind"] == kind]
        found.append(
            {
                "kind": kind,
                "entries": len(times),
                "unused": sum(n == 0 for n in times),
                "in fewer than 100 places": sum(n < 100 for n in times),
                "% of tokens": round(100 * sum(times) / total, 2),
            }
        )
    return found


@stage(version=3, resumes=True, name="vocabulary")
def train_vocabulary(params: Vocabulary, corpus: Artifact, out: Path) -> dict:
    """Train the vocabulary; fails if the text doesn't give as many entries as asked for."""
    if not corpus.stats["characters"]:
        raise InputError(
            "There is no text left to make a vocabulary of: the stages before (deduplicate, decontaminate, filter) dropped all of it. "
            "Look at what they dropped (cram show filter), and drop less."
        )
    counts, used = count(corpus, params.sample_megabytes, out / WORK, "count words")
    tokenizer = train(counts, params.entries, params.min_frequency, params.model)
    found = tokenizer.get_vocab_size()
    if found != params.entries:
        raise InputError(
            f"The corpus of {used['characters']:,} characters gives a vocabulary of {found:,} entries; "
            f"{params.entries:,} were asked for. Give more text (download), or lower vocabulary.entries."
        )
    save_tokenizer(tokenizer, out)
    entries = usage(tokenizer, counts)
    pq.write_table(entries, out / "entries.parquet", compression="zstd")
    names = [name for name in entries["entry"].to_pylist() if name not in SPECIALS]
    starts = [
        name for name in names if (name.startswith(WORD_START) if params.model == "unigram" else name[:2] != "##")
    ]
    return {
        "entries": found,
        "whole_words": len(starts),
        "continuations": len(names) - len(starts),
        "unused": sum(n == 0 for n in entries["occurrences"].to_pylist()) - len(SPECIALS),
        "trained_on": used | {"words": pc.sum(counts["count"]).as_py() or 0, "different_words": len(counts)},
        "table": rows(entries),
    }
