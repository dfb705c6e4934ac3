"""How two artifacts differ: reports by scores, filters by the documents that only one of them keeps."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from model.errors import InputError
from tasks.corpus.parts import TOTAL, document_at, row_name
from tasks.glue.pair_scores import METRIC_WORDS, NORMAL, accuracy_of, parts_of
from tasks.glue.pair_scores import METRICS as PAIR_METRICS
from tasks.reports.losses import nats, vocabularies_differ
from tasks.reports.pairs import are_same_pairs, difference_of, read_pairs, right_in
from tasks.reports.rows import ScoreRow
from tasks.reports.scores import COLUMNS, METRICS, glue_rows, label
from tasks.store.artifacts import Artifact
from tasks.store.manifests import verify, verify_files

if TYPE_CHECKING:  # importing pandas takes half a second
    import pandas as pd

LOSS = "held-out nats per byte"
KEPT = "kept"  # a verdict of a filter
NOT_GIVEN = "not given"  # its verdict on documents that its input did not have
KEY = ["id", "source", "copy"]  # of a document: the copies of an id are numbered in their order
MEASURED = ["id", "source", "characters", "tokens_per_char", "verdict"]  # what is read of each document
TEXT_CHARACTERS = 200  # of a sample


# Reports


class Measured(NamedTuple):
    """A score or a loss of a report."""

    value: float
    low: float  # the ends of its 95 % interval; NaN if it has none
    high: float
    data: str  # what it was measured on
    text: str  # to show


def compare_scores(a: dict, b: dict) -> list[dict[str, str]]:
    """The scores of two reports, their differences, and whether the intervals separate them.

    `a`, `b`: their report.json.
    """
    has_bounds = have_other_vocabularies(a, b)
    of_a = scores_of(a, has_bounds)
    of_b = scores_of(b, has_bounds)
    rows = []
    for name in of_a | of_b:
        in_a = of_a.get(name)
        in_b = of_b.get(name)
        row = {
            "score": name,
            "A": in_a.text if in_a else "–",
            "B": in_b.text if in_b else "–",
            "B - A": "–",
            "verdict": "",
        }
        if in_a and in_b:
            row["verdict"] = verdict(in_a, in_b, is_loss=name == LOSS)
            if in_a.data == in_b.data:
                digits = 4 if name == LOSS else 1
                row["B - A"] = f"{in_b.value - in_a.value:+.{digits}f}"
        rows.append(row)
    return rows


def verdict(a: Measured, b: Measured, is_loss: bool) -> str:
    """Whether the intervals of two scores are apart. `is_loss`: lower is better."""
    if a.data != b.data:
        return "different data"
    if a.value == b.value:
        return "the same"
    if math.isnan(a.low) or math.isnan(b.low):
        return "no interval"
    if b.low > a.high:
        return "A is better" if is_loss else "B is better"
    if b.high < a.low:
        return "B is better" if is_loss else "A is better"
    return "no clear difference"


def have_other_vocabularies(a: dict, b: dict) -> bool:
    """Whether the losses of two reports are of vocabularies that split words differently."""
    return vocabularies_differ(length_nats(a), length_nats(b))


def length_nats(about: dict) -> float:
    """The nats per byte of a report's held-out loss that are for the numbers of pieces; NaN for an adopted model."""
    return about["pretraining"].get("heldout", {}).get("length_nats_per_byte", math.nan)


def scores_of(about: dict, has_bounds: bool) -> dict[str, Measured]:
    """The scores of a report and its held-out loss, by name.

    `has_bounds`: the loss is compared with that of another vocabulary, so that it may be too high by what the numbers
    of pieces cost (model.heldout).
    """
    rows: list[ScoreRow] = about["scores"]
    found = {name_of(row): measured_score(row) for row in rows}
    mean = about["average"]
    if mean is not None:
        data = [row["data"] for row in glue_rows(rows) if row["column"] in COLUMNS]
        found["average of nine"] = Measured(mean, math.nan, math.nan, " ".join(data), f"{mean:.1f}")
    heldout = about["pretraining"].get("heldout")
    if heldout:  # an adopted model has none
        found[LOSS] = measured_loss(heldout, length_nats(about) if has_bounds else 0.0)
    return found


def name_of(row: ScoreRow) -> str:
    """What distinguishes a score from the others of a report."""
    kind = label(row["pretrained"], row["share"]).removeprefix("pretrained").removeprefix(", ")
    words = [row["column"], METRICS[row["metric"]], kind]
    return ", ".join(word for word in words if word)


def measured_score(row: ScoreRow) -> Measured:
    """A score with its interval over examples."""
    low, high = row["metrics"][row["metric"]]["interval"]
    return Measured(row["score"], low, high, row["data"], f"{row['score']:.1f} ({low:.1f} to {high:.1f})")


def measured_loss(heldout: dict, too_high: float) -> Measured:
    """A loss with its interval over documents. `too_high`: nats per byte by which it may be above the true one."""
    loss = heldout["nats_per_byte"]
    value = loss["value"]
    away = NORMAL * (loss["standard_error"] or math.nan)
    return Measured(value, value - too_high - away, value + away, heldout["digest"], nats(heldout, "byte"))


# Minimal pairs


def compare_pairs(a: Artifact, b: Artifact) -> list[dict[str, str]]:
    """How the accuracies of two models differ, pair by pair: a row for each part of the set, then for each field.

    Fields are those of A, or of B if A names none. Raises InputError unless both scored the same pairs.
    """
    for artifact in (a, b):
        verify(artifact)
    tables = (read_pairs(a), read_pairs(b))
    if not are_same_pairs(*(right_in(table, PAIR_METRICS[0]) for table in tables)):
        raise InputError(
            "The two artifacts scored different pairs, or in different groups. Compare models on the same set "
            "(minimal_pairs.data)."
        )
    rows = [pair_row(part, [table[chosen] for table in tables]) for part, chosen in parts_of(tables[0]).items()]
    field = tables[0]["field"] if tables[0]["field"].any() else tables[1]["field"]
    for name in sorted(set(field) - {""}):
        rows.append(pair_row(name, [table[field == name] for table in tables]))
    return rows


def pair_row(name: str, tables: Sequence["pd.DataFrame"]) -> dict[str, str]:
    """The accuracies of two models on the same pairs, and their difference with its standard error, by both metrics."""
    row = {"pairs of": name}
    for metric, words in METRIC_WORDS.items():
        of_a, of_b = (right_in(table, metric) for table in tables)
        difference = difference_of(of_b, of_a)
        row[f"{words} A"] = f"{accuracy_of(of_a.right, of_a.groups).value:.1f}"
        row[f"{words} B"] = f"{accuracy_of(of_b.right, of_b.groups).value:.1f}"
        row[f"{words} B - A"] = f"{difference.value:+.1f} ± {difference.standard_error:.1f}"
    return row


# Filters


def join_measurements(a: Artifact, b: Artifact) -> "pd.DataFrame":
    """A row for each document that one of two filters read, with the measurements of both."""
    return measurements(a, "A").merge(measurements(b, "B"), how="outer", on=KEY)


def measurements(filtered: Artifact, side: str) -> "pd.DataFrame":
    """A row for each document that a filter read: KEY, and its measurements and place in columns prefixed by `side`."""
    import pandas as pd

    files = [file for file in filtered.manifest["files"] if file["path"].startswith("measured-")]
    verify_files(filtered.path, files, filtered.name)
    parts = []
    for path in sorted(filtered.path / file["path"] for file in files):
        measured = pd.read_parquet(path, columns=MEASURED)
        parts.append(measured.assign(part=path.name.replace("measured", "part")))
    documents = pd.concat(parts).reset_index(drop=True)
    documents["copy"] = documents.groupby(["id", "source"]).cumcount()
    is_kept = documents["verdict"].eq(KEPT)
    documents["row"] = is_kept.groupby(documents["part"]).cumsum() - 1  # of the part, if the document is kept
    return documents.rename(columns=lambda name: name if name in KEY else f"{side} {name}")


def count_kept(both: "pd.DataFrame") -> "pd.DataFrame":
    """What each filter kept, and only it kept: a row per source, the largest first, below the row of their sum."""
    import pandas as pd

    in_a = both["A verdict"] == KEPT
    in_b = both["B verdict"] == KEPT
    kept = pd.DataFrame(
        {
            "A keeps": in_a,
            "B keeps": in_b,
            "A keeps, B does not": in_a & ~in_b,
            "B keeps, A does not": in_b & ~in_a,
            "characters, A keeps": both["A characters"].where(in_a, 0),
            "characters, B keeps": both["B characters"].where(in_b, 0),
        }
    )
    groups = kept.groupby(both["source"])
    largest_first = groups.size().sort_values(ascending=False, kind="stable").index
    counts = groups.sum().astype(int).loc[largest_first].rename(index=row_name)
    total = counts.sum().to_frame(TOTAL).T
    return pd.concat([total, counts]).reset_index(names="source")


def count_changed_verdicts(both: "pd.DataFrame") -> "pd.DataFrame":
    """The documents that only one filter kept, by the verdicts of both, the most frequent first."""
    verdicts = both[["A verdict", "B verdict"]].fillna(NOT_GIVEN).set_axis(["A", "B"], axis=1)
    kept = verdicts == KEPT
    changed = verdicts[kept["A"] != kept["B"]]
    return changed.value_counts().reset_index(name="documents")


def sample_documents(both: "pd.DataFrame", filtered: Artifact, keeps: str, drops: str, most: int) -> "pd.DataFrame":
    """Sample documents that side `keeps` kept and `drops` dropped: those with the smallest hashes of their keys.

    `filtered` is the artifact of the side that kept them.
    """
    import pandas as pd

    is_kept = both[f"{keeps} verdict"].eq(KEPT)
    is_dropped = both[f"{drops} verdict"].fillna(KEPT).ne(KEPT)  # one that its input did not have isn't
    hashes = pd.util.hash_pandas_object(both.loc[is_kept & is_dropped, KEY], index=False)
    shown = both.loc[hashes.nsmallest(most).index]
    texts = []
    for part, row in zip(shown[f"{keeps} part"], shown[f"{keeps} row"], strict=True):
        document = document_at([filtered.path / part], int(row))
        texts.append(document.text[:TEXT_CHARACTERS])
    return shown.assign(text=texts)
