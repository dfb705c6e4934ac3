"""Minimal pairs: how often a pretrained model prefers the good sentence of two, without finetuning.

Reads   a pretrain artifact; a set of pairs, such as BLiMP (tasks/glue/pairs.py)
Writes  pairs.parquet   a row for each pair: group, field, row, the sentences and their tokens, whether they are
                        permutations, whether BabyLM's blimp_filtered has the pair, and the scores of both sentences by
                        both metrics (model/likelihood.py): nats
"""

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from model.errors import InputError
from model.wording import counted
from tasks.adopt import start_stats
from tasks.corpus.containers import Encoding
from tasks.glue import pairs as sets
from tasks.glue.pair_scores import PAIRS, statistics
from tasks.glue.pairs import PairSet
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.text.sequences import length_of
from tasks.text.tokenizer import load_tokenizer
from tasks.workers.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

    from model.likelihood import Sentences

SCORES = "scores.npy"  # of each pass, until the artifact is published
SHOWN_CHARACTERS = 60
log = logging.getLogger(__name__)


class MinimalPairs(Params):
    """Which pairs, and how they are scored."""

    data: list[str] | None = Field(
        None,
        description="Sets of pairs: files (.csv, .tsv, .jsonl, .parquet), folders, or data sets of the hub (OWNER/NAME "
        "or OWNER/NAME/FOLDER). []: none. null: nyu-mll/blimp if GLUE comes from the hub too, else none.",
    )
    good: str = Field("", description="Column of the good sentence. '': the usual names are tried.")
    bad: str = Field("", description="Column of the bad sentence. '': the usual names are tried.")
    group: str = Field("", description="Column of the group. '': the usual names are tried, then the file's name.")
    field: str = Field("", description="Column of the field that a group belongs to. '': field, if there is one.")
    encoding: Encoding = Field("", description="Of files that aren't UTF-8, such as windows-1252.")
    per_group: int = Field(0, ge=0, description="Pairs of each group, drawn at random; 0: all.")
    before: Literal["trained", "cls", "sep"] = Field(
        "trained",
        description="Special token before a sentence. trained: the one that the model has seen there in pretraining. "
        "cls: [CLS], as public pipelines. sep: [SEP].",
    )

    def runs(self) -> "list[PairsRun]":
        """A run for each set. Raises InputError for two sets of one name."""
        shared = self.model_dump(exclude={"data"})
        runs = [PairsRun(data=data, **shared) for data in dict.fromkeys(self.data or [])]
        names = [run.label() for run in runs]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"minimal_pairs.data has two sets named {name}. Rename one of them.")
        return runs


class PairsRun(PairSet, Params, frozen=True, extra="forbid"):
    """One set of pairs."""

    per_group: int = 0
    before: Literal["trained", "cls", "sep"] = "trained"

    def identity(self) -> dict:
        """What identifies the pairs, and how they are scored."""
        return super().identity() | {"per_group": self.per_group, "before": self.before}

    def label(self) -> str:
        """The name of the set."""
        return sets.name_of(self.data)

    def check(self) -> None:
        """Read the pairs before the model is pretrained. Raises InputError for bad data."""
        sets.read(self.pairs())

    def check_sources(self, sources: list[Artifact]) -> None:
        """Encode the pairs before the model is pretrained. Raises InputError for a sentence that it couldn't read."""
        check_readable(self, str(self.identity()), sources[0])

    def pairs(self) -> PairSet:
        """The set alone."""
        return PairSet(**self.model_dump(include={*PairSet.model_fields}))


@functools.lru_cache(maxsize=64)  # a plan asks, then the run; and in a study each model of the same text
def check_readable(params: PairsRun, _identity: str, sequences: Artifact) -> None:
    """Raise InputError for a sentence that a model of these sequences couldn't read. `_identity`: of the pairs."""
    texts = texts_of(sets.draw(sets.read(params.pairs()), params.per_group))
    sentences = encode(texts, sequences.path)
    check_lengths(sentences, texts, length_of(sequences.path), f"A model of {sequences.name}")


@stage(version=5, resumes=True)
def minimal_pairs(params: PairsRun, model: Artifact, out: Path) -> dict:
    """Score both sentences of every pair, and count how often the good one has the higher probability."""
    refuse_new_head(model)
    every = sets.read(params.pairs())
    table = sets.draw(every.assign(**facts_of(every)), params.per_group)
    before = params.before
    if before == "trained":
        before = trained_before(model)
    work = out / WORK
    work.mkdir(exist_ok=True)
    scored = score_pairs(table, model, before, work)
    pq.write_table(pa.Table.from_pandas(scored, preserve_index=False), out / PAIRS, compression="zstd")
    name = sets.BLIMP if "filtered" in scored else params.label()  # wherever it is from
    stats = statistics(scored, name)
    warn_of_same_tokens(stats, model)
    return stats | {"of_pairs": len(every), "before": before}


def refuse_new_head(model: Artifact) -> None:
    """Raise InputError for a model that can't predict masked words."""
    if model.stats.get("new_head"):
        raise InputError(
            f"{model.name} came without a head that predicts masked words, so it can't judge sentences. Pretrain it "
            "first (pretrain.start), or name another model."
        )


def trained_before(model: Artifact) -> Literal["cls", "sep"]:
    """The special token before the documents that a model was trained on.

    cram's sequences have [SEP] between documents. Public models were trained with [CLS] before each text, and so were
    those that began from one.
    """
    is_public = "public" in model.stats or "public" in start_stats(model)
    return "cls" if is_public else "sep"


def facts_of(table: "pd.DataFrame") -> dict[str, Any]:
    """What is known of each pair of a whole set, as columns: `permutation`, and `filtered` if the set is BLiMP."""
    facts = {"permutation": sets.are_permutations(table)}
    filtered = sets.filtered_by_babylm(table)
    if filtered is not None:
        facts["filtered"] = filtered
    return facts


# Scores


def score_pairs(table: "pd.DataFrame", model: Artifact, before: str, work: Path) -> "pd.DataFrame":
    """The pairs with columns for the tokens and the scores of both sentences, such as good_original.

    `work`: a folder, in which an interrupted attempt has left its scores.
    """
    from model import export, likelihood, machine  # load torch
    from model.layouts import HEADS

    texts = texts_of(table)
    bert = export.load(model.path, HEADS)
    sentences = encode(texts, model.path)
    check_lengths(sentences, texts, bert.length, model.name)
    first = getattr(bert.specials, before)
    here = machine.detect()
    lengths = sentences.pass_lengths
    scores = kept_scores(work, len(lengths))
    with Progress("minimal pairs", int(lengths.sum()), "token") as bar:
        found = likelihood.score_sentences(bert, sentences, first, here, bar.update, scores)
    check_finite(scores, model)
    of_sentences = {"tokens": sentences.lengths} | found
    columns = {"same_tokens": same_tokens(sentences)}
    for name, values in of_sentences.items():
        of_good, of_bad = np.split(values, 2)
        columns |= {f"good_{name}": of_good, f"bad_{name}": of_bad}
    return table.assign(**columns)


def texts_of(table: "pd.DataFrame") -> list[str]:
    """The good sentences of all pairs, then the bad ones."""
    return [*table["good"], *table["bad"]]


def kept_scores(work: Path, passes: int) -> np.ndarray:
    """(passes,) fp32 in a file: the scores that an interrupted attempt left there, NaN where there are none."""
    path = work / SCORES
    if not path.exists():
        new = work / f"new-{SCORES}"
        np.save(new, np.full(passes, np.nan, dtype=np.float32))
        new.replace(path)
    return np.load(path, mmap_mode="r+")


def check_finite(scores: np.ndarray, model: Artifact) -> None:
    """Raise InputError for scores that are not finite."""
    if not np.isfinite(scores).all():
        raise InputError(f"{model.name} gives scores that are not finite, so it can't judge sentences. Train it again.")


def encode(texts: list[str], folder: Path) -> "Sentences":
    """The tokens of sentences, and the number of the word of each. folder: with the tokenizer."""
    from model.likelihood import Sentences  # loads torch

    tokenizer = load_tokenizer(folder)
    tokens = [np.zeros(0, np.int64)]
    words = [np.zeros(0, np.int64)]
    sizes = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        tokens.append(np.array(encoding.ids, dtype=np.int64))
        words.append(np.array(encoding.word_ids, dtype=np.int64))
        sizes.append(len(encoding.ids))
    return Sentences(np.concatenate(tokens), np.concatenate(words), np.cumsum(sizes))


def check_lengths(sentences: "Sentences", texts: list[str], length: int, model: str) -> None:
    """Raise InputError for a sentence that the model can't read, or that doesn't fit in `length` tokens."""
    from model.likelihood import FRAME  # loads torch

    lengths = sentences.lengths
    longest = length - FRAME
    if not lengths.min():
        text = texts[int(lengths.argmin())]
        raise InputError(
            f"{model} can't read {counted(int((lengths == 0).sum()), 'sentence')} of the pairs, such as {text!r}. Name "
            "pairs in its script (minimal_pairs.data), or another model."
        )
    if lengths.max() > longest:
        text = texts[int(lengths.argmax())]
        raise InputError(
            f"A sentence has {lengths.max()} tokens, but {model} takes {longest}: {text[:SHOWN_CHARACTERS]!r} …. "
            "Shorten it, or leave out its pair (minimal_pairs.data)."
        )


def same_tokens(sentences: "Sentences") -> np.ndarray:
    """(pairs,) whether both sentences of a pair are the same tokens. The good ones come first, then the bad ones."""
    good, bad = np.split(sentences.originals, 2)
    return good == bad


def warn_of_same_tokens(stats: dict[str, Any], model: Artifact) -> None:
    """Log a warning if the model's vocabulary makes many pairs of different sentences the same."""
    lost = stats["same_tokens"] - stats["same_sentences"]
    if lost > sets.LARGEST_SHARE * stats["pairs"]:
        log.warning(
            "%s can't tell the sentences of %s apart: its vocabulary reads both as the same tokens. These are ties.",
            model.name,
            counted(lost, "pair"),
        )
