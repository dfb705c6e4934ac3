"""Published scores of other models on GLUE and BLiMP, with what a reader must know to compare them with ours.

A number stands in the column of a metric only if it was published in that metric. Rows that were judged in different
ways say so, and never stand in one chart.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tasks.glue import metrics
from tasks.reports.markdown import Marked, escape

# GLUE

DEV = "dev"  # the validation data
TEST = "test"  # the data whose labels only GLUE's server has


class Published(NamedTuple):
    """A row of a published table of GLUE; scores are times 100."""

    model: str  # rows of one name are the same weights, judged in different ways
    scores: dict[str, float]  # by column; those not found are missing
    average: float | None  # as published; of the nine columns unless `average_of` says otherwise
    source: str
    parameters: float | None = None  # None: not found
    shape: str = ""  # layers x width
    cost: str = ""  # of pretraining, as published; empty: not found
    split: str = DEV
    protocol: str = ""  # of finetuning, a sentence; empty: the paper's, one setting for all tasks
    average_of: str = ""
    others: tuple[tuple[str, float], ...] = ()  # numbers of the row that fit no column: task and metric, value
    note: str = ""  # another sentence


class PublishedBlimp(NamedTuple):
    """A published score on BLiMP. Compare rows only if they have the same `scorer` and the same `pairs`."""

    model: str
    score: float  # the share of pairs whose better sentence was chosen, times 100; chance is 50
    scorer: str  # a key of SCORERS
    pairs: int  # FILTERED or FULL
    source: str
    track: int | None = None  # words of text that the rules of BabyLM's track allow; None: in no track
    epochs: int | None = None  # over these words: the most that was allowed, or as many as were made; None: no limit
    parameters: float | None = None  # None: not found
    shape: str = ""  # layers x width; empty: not found
    causal: bool = False  # scored from left to right; otherwise by masks
    note: str = ""


def _by_column(*values: float) -> dict[str, float]:
    return dict(zip(metrics.COLUMNS, values, strict=True))


V1 = "arXiv 2212.14034v1, as quoted by others"
FINAL = "the authors' final version, as quoted by others"
RELEASED = "the model card of JonasGeiping/crammed-bert"
AGAIN = "He and Hofmann 2023, arXiv 2311.01906, tables 1 and 2"
LATER = "arXiv 2505.12789, as quoted by others"
SMALL_BERTS = "the README of google-research/bert"
ETTIN = "the table of encoders in JHU-CLSP/ettin-encoder-vs-decoder"
ELECTRA = "the README of google-research/electra"
BEST_OF_20 = "The best of 20 settings for each task (5 batch sizes, 4 rates), 4 epochs"
MNLI_FIRST = (
    "By ModernBERT's rules: in its code each task has its own setting, RTE, MRPC and STS-B start from a model that was "
    "finetuned on MNLI, and STS-B is Spearman. The table has one number for MNLI and doesn't name its half"
)
MEDIAN = "The median of many seeds, 10 epochs for RTE and STS-B, 3 for the others"
WITH_WNLI = "nine tasks, with WNLI, each the mean of its metrics"
OF_EIGHT = "eight tasks, of which the table names two"
CONSTANT = "A CoLA of 0.0 is that of always giving the same answer"
PAPER = [
    Published("BERT-base, fully trained", _by_column(83.2, 83.4, 91.9, 86.7, 59.2, 90.6, 87.7, 89.3, 56.5), 80.9, V1,
              110e6, "12 x 768"),
    Published("RoBERTa-base, fully trained",
              _by_column(86.6, 86.4, 93.7, 90.4, 77.3, 92.1, 88.3, 91.4, 60.2), 85.1, V1, 125e6, "12 x 768"),
    Published("BERT-base, no pretraining", _by_column(34.1, 34.1, 79.9, 17.8, 47.3, 50.0, 68.6, 77.9, 0.0), 45.5, V1,
              110e6, "12 x 768", "none"),
    Published("crammed BERT, A6000, v1", _by_column(83.9, 84.1, 92.2, 84.6, 53.8, 89.5, 87.3, 87.5, 44.5), 78.6, V1,
              120e6, "16 x 768", "24 hours of an A6000"),
    Published("crammed BERT, A6000, as released (best of 5 runs)",
              _by_column(84.1, 84.6, 92.0, 87.4, 58.5, 90.2, 87.5, 88.9, 53.3), 80.7, RELEASED,
              120e6, "16 x 768", "24 hours of an A6000"),
    Published("crammed BERT, A6000, final", {}, 80.4, FINAL, 120e6, "16 x 768", "24 hours of an A6000"),
    Published("crammed BERT, A4000, final", {}, 79.2, FINAL, 120e6, "16 x 768", "24 hours of an A4000"),
    Published("crammed BERT, 2080 Ti, run again",
              _by_column(81.2, 81.6, 89.9, 87.6, 56.3, 88.9, 87.1, 88.3, 49.4), 78.9, AGAIN,
              120e6, "16 x 768", "24 hours of a 2080 Ti"),
    Published("conditioned embeddings, 1 GPU, 24 hours",
              {"SST-2": 92.5, "RTE": 55.6, "QNLI": 91.1, "QQP": 87.4, "MRPC": 86.3, "CoLA": 53.7}, 79.7, LATER,
              cost="24 hours of a GPU"),
]  # fmt: skip
SMALL = [  # the split that ours are on first
    Published("BERT-Mini", {"MNLI m": 77.2, "SST-2": 88.3}, 76.4, ETTIN, 11.3e6, "4 x 256", "", DEV, MNLI_FIRST,
              OF_EIGHT),
    Published("ELECTRA-Small-OWT", {"MNLI m": 78.9, "SST-2": 88.3, "RTE": 68.5, "QNLI": 87.9, "CoLA": 56.8}, None,
              ELECTRA, 14e6, "12 x 256", "1 M steps, 4 days of a V100", DEV, MEDIAN,
              others=(("MRPC accuracy", 87.4), ("STS-B Spearman", 86.8), ("QQP accuracy", 88.3))),
    Published("ELECTRA-Small++", {"MNLI m": 81.3, "SST-2": 91.2, "RTE": 66.7, "QNLI": 88.4, "CoLA": 57.0}, None,
              ELECTRA, 14e6, "12 x 256", "4 M steps", DEV, MEDIAN,
              others=(("MRPC accuracy", 88.0), ("STS-B Spearman", 87.5), ("QQP accuracy", 89.0))),
    Published("Ettin 17M", {"MNLI m": 79.5, "SST-2": 91.2}, 79.2, ETTIN, 17e6, "7 x 256",
              "2 T tokens, 141 hours of 4 H100", DEV, MNLI_FIRST, OF_EIGHT),
    Published("BERT-Small", {"MNLI m": 79.2, "SST-2": 90.1}, 79.0, ETTIN, 29e6, "4 x 512", "", DEV, MNLI_FIRST,
              OF_EIGHT),
    Published("BERT-Tiny", _by_column(70.2, 70.3, 83.2, 74.3, 57.2, 81.5, 62.2, 81.1, 0.0), 64.2, SMALL_BERTS,
              4.4e6, "2 x 128", "", TEST, BEST_OF_20, WITH_WNLI,
              (("MRPC accuracy", 71.1), ("STS-B Spearman", 73.6), ("QQP accuracy", 83.4), ("WNLI", 62.3)), CONSTANT),
    Published("BERT-Mini", _by_column(74.8, 74.3, 85.9, 75.4, 57.9, 84.1, 66.4, 81.1, 0.0), 65.8, SMALL_BERTS,
              11.3e6, "4 x 256", "", TEST, BEST_OF_20, WITH_WNLI,
              (("MRPC accuracy", 71.8), ("STS-B Spearman", 73.3), ("QQP accuracy", 86.2), ("WNLI", 62.3)), CONSTANT),
    Published("BERT-Small", _by_column(77.6, 77.0, 89.7, 78.8, 61.8, 86.4, 68.1, 83.4, 27.8), 71.2, SMALL_BERTS,
              29e6, "4 x 512", "", TEST, BEST_OF_20, WITH_WNLI,
              (("MRPC accuracy", 76.2), ("STS-B Spearman", 77.0), ("QQP accuracy", 87.0), ("WNLI", 62.3))),
    Published("BERT-Medium", _by_column(80.0, 79.1, 89.6, 80.4, 62.2, 87.7, 69.6, 86.6, 38.0), 73.5, SMALL_BERTS,
              41e6, "8 x 512", "", TEST, BEST_OF_20, WITH_WNLI,
              (("MRPC accuracy", 81.6), ("STS-B Spearman", 78.4), ("QQP accuracy", 87.9), ("WNLI", 62.3))),
]  # fmt: skip
PUBLISHED = PAPER + SMALL
SMALL_BELOW = 55e6  # parameters: half of BERT-base; smaller models are shown beside SMALL
IN_PICTURE = (  # models of PAPER, and of SMALL
    "BERT-base, fully trained", "crammed BERT, A6000, as released (best of 5 runs)",
    "BERT-Mini", "ELECTRA-Small-OWT", "Ettin 17M",
)  # fmt: skip


def is_small(parameters: float) -> bool:
    """Whether a model of so many parameters is nearer to the models of SMALL than to BERT-base."""
    return parameters < SMALL_BELOW


def in_picture(parameters: float) -> dict[str, dict[str, float]]:
    """The scores to draw beside a model of so many parameters, by model and column: on the same split as ours."""
    rows = SMALL if is_small(parameters) else PAPER
    return {row.model: row.scores for row in rows if row.split == DEV and row.model in IN_PICTURE}


def sources_of(rows: Iterable[Published] | Iterable[PublishedBlimp]) -> list[str]:
    """The sources of rows, each once; footnotes count from 1 in this order."""
    return list(dict.fromkeys(row.source for row in rows))


def published_name(row: Published | PublishedBlimp, sources: list[str]) -> Marked:
    """The name of a published model, with the number of its source."""
    return Marked(f"*{escape(row.model)}* (published \\[{sources.index(row.source) + 1}\\])")


def footnotes(rows: list[Published]) -> list[str]:
    """What differs from our scores, sentences for each source of `rows`, in the order of `sources_of`."""
    notes = []
    for source in sources_of(rows):
        of_source = [row for row in rows if row.source == source]
        notes.append(f"{source[0].upper()}{source[1:]}, {of_source[0].split} data. {what_differs(of_source)}")
    return notes


def what_differs(rows: list[Published]) -> str:
    """What differs from ours in the rows of one source, and their numbers that fit no column."""
    facts = []
    others = []
    for row in rows:
        average = f"The average is of {row.average_of}" if row.average_of else ""
        facts += [row.protocol, average, row.note]
        unseen = [f"{name} {value}" for name, value in row.others if is_unseen(name, row)]
        if unseen:
            others.append(f"{row.model} {', '.join(unseen)}")
    if others:
        facts.append(f"In other metrics than the columns': {'; '.join(others)}")
    return " ".join(f"{fact}." for fact in dict.fromkeys(facts) if fact)


def is_unseen(name: str, row: Published) -> bool:
    """Whether a number that fits no column is all that a row has for a task of the columns."""
    task, _, metric = name.partition(" ")
    return bool(metric) and task not in row.scores


class TwoReadings(NamedTuple):
    """Averages that were published for the same weights."""

    model: str
    averages: list[tuple[float, int]]  # each with the number of its source

    @property
    def points(self) -> float:
        """How far apart the averages are."""
        values = [average for average, _ in self.averages]
        return max(values) - min(values)


def read_twice(rows: list[Published]) -> list[TwoReadings]:
    """The models of which several averages were published, judged in different ways."""
    sources = sources_of(rows)
    found: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        if row.average is not None:
            found.setdefault(row.model, []).append((row.average, sources.index(row.source) + 1))
    return [TwoReadings(model, averages) for model, averages in found.items() if len(averages) > 1]


# BLiMP

FILTERED = 59_875  # pairs: BabyLM's part of BLiMP
FULL = 67_000
BABYLM_2025 = "BabyLM 2025"
BABYLM_2024 = "BabyLM 2024"
BEST_TEMPERATURE = "best temperature"
LEFT_TO_RIGHT = "left to right"
ORIGINAL = "original"
WITHIN_WORD = "within word"
PEOPLE = "people"
SCORERS = {  # of BLiMP: how the better sentence of a pair is chosen
    BABYLM_2025: "masked models: the sum of the log probabilities, one token masked at a time; causal ones: of the "
    "sentence; an equal score counts as right; the mean over 67 paradigms",
    BABYLM_2024: "the mean of the log probabilities over tokens",
    BEST_TEMPERATURE: "GPT-BERT's own: at the temperature that is best for the model",
    LEFT_TO_RIGHT: "the probability of the sentence, of models that read from left to right",
    ORIGINAL: "the sum of the log probabilities, one token masked at a time",
    WITHIN_WORD: "as original, with the later pieces of the same word masked too",
    PEOPLE: "people choose the better sentence",
}


SMALL_TRACK = 10_000_000
TRACK = 100_000_000
PIPELINE_2024 = "the README of babylm/evaluation-pipeline-2024"
PIPELINE_2025 = "the README of babylm/evaluation-pipeline-2025"
PIPELINE_2026 = "the README of babylm-org/babylm-eval"
AMLM = "Edman and Fraser 2025, 2025.babylm-main.31, tables 3 and 5"
DIFFUSION = "2025.babylm-main.38, table 4"
CO4 = "2025.babylm-main.24, table 1"
BITMAR = "2025.babylm-main.11, table 2"
GPT_BERT = "the paper of GPT-BERT, as quoted by others"
AUTHORS = "the summary of results in alexwarstadt/blimp"
KAUF = "Kauf and Ivanova 2023, the table of scores in carina-kauf/better-mlm-scoring"
SALAZAR = "the README of awslabs/mlm-scoring"
OWN_TEXT = "width 384; in part synthetic paraphrases as text"
PUBLISHED_BLIMP = [
    PublishedBlimp("GPT-BERT, mixed", 71.3, BABYLM_2025, FILTERED, PIPELINE_2025, SMALL_TRACK, 10, 31e6),
    PublishedBlimp("GPT-BERT, masked focus", 70.4, BABYLM_2025, FILTERED, PIPELINE_2025, SMALL_TRACK, 10, 31e6),
    PublishedBlimp("GPT-BERT, causal focus", 69.1, BABYLM_2025, FILTERED, PIPELINE_2025, SMALL_TRACK, 10, 31e6),
    PublishedBlimp("GPT-BERT, causal focus", 71.7, BABYLM_2025, FILTERED, PIPELINE_2025, SMALL_TRACK, 10, 31e6,
                   causal=True),
    PublishedBlimp("DeBERTa, plain masks", 66.4, BABYLM_2025, FILTERED, AMLM, SMALL_TRACK, 10,
                   note="width 384; 66.9 with 16,384 entries in place of 40,000"),
    PublishedBlimp("DeBERTa, plain masks, own text", 70.7, BABYLM_2025, FILTERED, AMLM, SMALL_TRACK, 10,
                   note=OWN_TEXT),
    PublishedBlimp("AMLM-Hard-Decay", 71.4, BABYLM_2025, FILTERED, AMLM, SMALL_TRACK, 10,
                   note=f"won the track's tasks of language; {OWN_TEXT}"),
    PublishedBlimp("GPT-2 small, baseline of 2025", 67.3, BABYLM_2025, FILTERED, PIPELINE_2025, SMALL_TRACK, 10, 124e6,
                   "12 x 768", causal=True),
    PublishedBlimp("GPT-2 small, baseline of 2026", 65.1, BABYLM_2025, FILTERED, PIPELINE_2026, SMALL_TRACK, 10, 124e6,
                   "12 x 768", causal=True, note="by the pipeline of 2026, whose rule is that of 2025"),
    PublishedBlimp("Co4, alpha", 53.6, BABYLM_2025, FILTERED, CO4, SMALL_TRACK, 2, 8e6, causal=True),
    PublishedBlimp("BitMar", 48.7, BABYLM_2025, FILTERED, BITMAR, TRACK, 10, 14e6, causal=True,
                   note="reads pictures too; 100 million tokens, not words"),
    PublishedBlimp("GPT-BERT, mixed", 80.5, BABYLM_2025, FILTERED, DIFFUSION, TRACK, 10, 119e6),
    PublishedBlimp("masked diffusion", 76.9, BABYLM_2025, FILTERED, DIFFUSION, TRACK, 10, 126.6e6,
                   note="won the track's tasks of language"),
    PublishedBlimp("GPT-2 small, baseline of 2025", 75.1, BABYLM_2025, FILTERED, PIPELINE_2025, TRACK, 10, 124e6,
                   "12 x 768", causal=True),
    PublishedBlimp("GPT-2 small, baseline of 2026", 74.5, BABYLM_2025, FILTERED, PIPELINE_2026, TRACK, 10, 124e6,
                   "12 x 768", causal=True, note="by the pipeline of 2026, whose rule is that of 2025"),
    PublishedBlimp("BabyLlama", 69.8, BABYLM_2024, FILTERED, PIPELINE_2024, SMALL_TRACK, 20, 58e6, causal=True),
    PublishedBlimp("LTG-BERT", 60.6, BABYLM_2024, FILTERED, PIPELINE_2024, SMALL_TRACK, 20, 24e6),
    PublishedBlimp("BabyLlama", 73.1, BABYLM_2024, FILTERED, PIPELINE_2024, TRACK, 20, causal=True),
    PublishedBlimp("LTG-BERT", 69.2, BABYLM_2024, FILTERED, PIPELINE_2024, TRACK, 20, 99e6),
    PublishedBlimp("GPT-BERT of 2024", 81.2, BEST_TEMPERATURE, FILTERED, GPT_BERT, SMALL_TRACK, None, 30e6),
    PublishedBlimp("GPT-BERT of 2024", 86.1, BEST_TEMPERATURE, FILTERED, GPT_BERT, TRACK, None, 119e6),
    PublishedBlimp("5-gram", 61.0, LEFT_TO_RIGHT, FULL, AUTHORS, causal=True),
    PublishedBlimp("LSTM", 70.1, LEFT_TO_RIGHT, FULL, AUTHORS, causal=True),
    PublishedBlimp("Transformer-XL", 70.0, LEFT_TO_RIGHT, FULL, AUTHORS, causal=True),
    PublishedBlimp("GPT-2", 83.3, LEFT_TO_RIGHT, FULL, AUTHORS, causal=True),
    PublishedBlimp("people", 88.6, PEOPLE, FULL, SALAZAR),
    PublishedBlimp("BERT-base, cased", 84.2, ORIGINAL, FULL, KAUF, parameters=108e6, shape="12 x 768"),
    PublishedBlimp("BERT-base, cased", 84.7, WITHIN_WORD, FULL, KAUF, parameters=108e6, shape="12 x 768"),
    PublishedBlimp("RoBERTa-base", 85.4, ORIGINAL, FULL, KAUF, parameters=125e6, shape="12 x 768"),
    PublishedBlimp("RoBERTa-base", 86.7, WITHIN_WORD, FULL, KAUF, parameters=125e6, shape="12 x 768"),
]  # fmt: skip


def blimp_footnotes(rows: Sequence[PublishedBlimp]) -> list[str]:
    """The sources of rows in the order of `sources_of`, each with what is to be said of its rows."""
    notes = []
    for source in sources_of(rows):
        facts = [f"{row.model}: {row.note}" for row in rows if row.source == source and row.note]
        about = f": {'; '.join(dict.fromkeys(facts))}" if facts else ""
        notes.append(f"{source[0].upper()}{source[1:]}{about}.")
    return notes
