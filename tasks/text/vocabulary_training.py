"""Training a vocabulary on the words of a corpus: WordPiece and BPE by tokenizers, Unigram by SentencePiece."""

import json
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from model import InputError
from tasks.corpus.parts import parts_of, tables, unit_hash
from tasks.store import Artifact
from tasks.text import words
from tasks.text.encoding import portions
from tasks.text.tokenizer import ALPHABET, LONGEST_WORD, SPECIALS, UNK, tokenizer_of
from tasks.workers.mapping import over_parts
from tasks.workers.pool import library_threads, one_library_thread

TRAINING_WORDS = 8_000_000  # trainers read each word as often as it occurs, so counts are scaled down to this total
LINE_WORDS = 1000  # SentencePiece skips lines of more than a megabyte
Model = Literal["wordpiece", "bpe", "unigram"]


def scaled(counts: pa.Table) -> Iterator[str]:
    """The words, each as often as it was counted, a line at a time; scaled down to TRAINING_WORDS if there are more.

    The word's digest decides whether its count is rounded up or down, so that rare words keep their share of the total.
    """
    ranked = counts.sort_by("word")
    different, numbers = ranked["word"].to_pylist(), ranked["count"].to_numpy()
    scale = min(1.0, TRAINING_WORDS / max(1, numbers.sum()))
    times = (numbers * scale + np.fromiter(map(unit_hash, different), np.float64, len(different))).astype(np.int64)
    all_words = chain.from_iterable(map(repeat, different, times.tolist()))
    while line := list(islice(all_words, LINE_WORDS)):
        yield " ".join(line)


def train(counts: pa.Table, entries: int, min_frequency: int = 2, kind: Model = "wordpiece") -> Tokenizer:
    """Train a vocabulary of at most so many entries on counted words."""
    model = _unigram(counts, entries) if kind == "unigram" else _merged(counts, entries, min_frequency, kind)
    tokenizer = tokenizer_of(model)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def _merged(counts: pa.Table, entries: int, min_frequency: int, kind: Model) -> WordPiece | BPE:
    """WordPiece and BPE, which are trained alike: again and again the most frequent pair becomes an entry.

    The trainer breaks ties by the order in which it first sees the characters within words, which differs from run to
    run. So these characters get ids beforehand, as special tokens, and become plain entries afterwards.
    Nothing depends on the number of threads.
    """

    def lines() -> Iterator[str]:  # several threads count the words in them
        yield from scaled(counts)
        one_library_thread()  # the merges are too little work for more

    wordpiece = kind == "wordpiece"
    learner = Tokenizer(WordPiece(unk_token="[UNK]") if wordpiece else BPE(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = (WordPieceTrainer if wordpiece else BpeTrainer)(
        vocab_size=entries,
        min_frequency=min_frequency,
        special_tokens=[*SPECIALS, *(f"##{c}" for c in ALPHABET)],
        initial_alphabet=ALPHABET,
        limit_alphabet=len(ALPHABET),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    with library_threads():
        learner.train_from_iterator(lines(), trainer)
    learned = json.loads(learner.to_str())["model"]
    if wordpiece:
        return WordPiece(learned["vocab"], unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
    merges = [tuple(pair) for pair in learned["merges"]]
    return BPE(learned["vocab"], merges, unk_token="[UNK]", continuing_subword_prefix="##")


def _unigram(counts: pa.Table, entries: int) -> Unigram:
    """Unigram, trained by SentencePiece: the trainer in tokenizers gives other scores and ties in every run."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    learned = BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=scaled(counts),
            model_writer=learned,
            model_type="unigram",
            vocab_size=entries - len(SPECIALS) + 3,  # our special tokens replace its <unk>, <s> and </s>
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            required_chars="".join(ALPHABET),
            character_coverage=1.0,
            max_sentence_length=1 << 20,
            num_threads=1,  # sums would depend on their number
            minloglevel=2,
        )
    except RuntimeError as error:  # too few words
        raise InputError(
            f"No Unigram vocabulary of {entries:,} entries can be trained on this text: {error}"
        ) from error
    model = SentencePieceProcessor(model_proto=learned.getvalue())
    scored = [(model.id_to_piece(i), model.get_score(i)) for i in range(3, model.get_piece_size())]
    return Unigram([*((token, 0.0) for token in SPECIALS), *scored], unk_id=UNK)


def count_words(texts: list[str]) -> pa.Table:
    """How often each word of at most LONGEST_WORD characters occurs in the texts: words.COUNTS."""
    counts = pa.concat_tables(words.count(some) for some, _ in portions(texts))
    return summed([counts.filter(pc.less_equal(pc.binary_length(counts["word"]), LONGEST_WORD))])


def summed(counts: Iterable[pa.Table]) -> pa.Table:
    """The sum of counts of words."""
    joined = pa.concat_tables([words.COUNTS.empty_table(), *counts])
    different = joined["word"].combine_chunks().dictionary_encode()  # several times as fast as Arrow's group_by
    sums = np.bincount(different.indices.to_numpy(), joined["count"].to_numpy(), len(different.dictionary))
    return pa.table([different.dictionary, sums.astype(np.int64)], schema=words.COUNTS)


def count_part(part: Path, fraction: float, out: Path) -> dict:
    """Write the counts of the words in a fraction of a part's documents, always the same ones."""
    counts, used = [], {"documents": 0, "characters": 0}
    for table in tables(part, ("text",)):
        every = table["text"].to_pylist()
        texts = [text for text in every if fraction >= 1 or unit_hash(text, salt=1) < fraction]
        used["documents"] += len(texts)
        used["characters"] += sum(map(len, texts))
        counts.append(count_words(texts))
    pq.write_table(summed(counts), out, compression="zstd")
    return used


def count(corpus: Artifact, megabytes: float, work: Path, label: str) -> tuple[pa.Table, dict]:
    """How often each word occurs in a sample of about so much text, 10^6 characters; and the size of the sample."""
    fraction = 1e6 * megabytes / max(1, corpus.stats["characters"])
    work.mkdir(exist_ok=True)
    jobs = [(part, fraction, work / f"{part.stem}.words.parquet") for part in parts_of(corpus)]
    used = over_parts(count_part, jobs, work / "counted", label)
    counts = summed(pq.read_table(file, schema=words.COUNTS) for _, _, file in jobs)
    return counts, {name: sum(u[name] for u in used) for name in ("documents", "characters")}
