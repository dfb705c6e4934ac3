"""How two artifacts differ: reports by scores, filters by the documents that only one of them keeps."""

import math
from typing import TYPE_CHECKING

import numpy as np

from tasks.corpus.parts import TOTAL, document_at, row_name
from tasks.reports.losses import nats
from tasks.reports.scores import COLUMNS, METRICS, glue_rows, label
from tasks.store.artifacts import Artifact
from tasks.store.manifests import verify_files

if TYPE_CHECKING:  # importing pandas takes half a second
    import pandas as pd

KEPT, NOT_GIVEN = "kept", "not given"  # verdicts of a filter; the second on documents that its input did not have
KEY = ["id", "source", "copy"]  # of a document: the copies of an id are numbered in their order
TEXT_CHARACTERS = 200  # of a sample
LOSS = "held-out nats per byte"
NORMAL = 1.96  # standard errors on either side of a mean in a 95 % interval


def length_nats(about: dict) -> float:
    """The nats per byte of a report's held-out loss that are for the numbers of pieces; NaN for an adopted model."""
    return about["pretraining"].get("heldout", {}).get("length_nats_per_byte", math.nan)


def vocabularies_differ(a: dict, b: dict) -> bool:
    """Whether two reports have losses of vocabularies that split words differently."""
    return length_nats(a) < length_nats(b) or length_nats(a) > length_nats(b)


def scores(about: dict, too_high: float = 0.0) -> "pd.DataFrame":
    """The scores of a report and its held-out loss: value, 95 % interval, data, and text to show, by name.

    `too_high`: nats per byte by which the loss may be above the true one (model.heldout).
    """
    import pandas as pd

    rows: dict[str, tuple] = {}
    for row in about["scores"]:
        kind = label(row["pretrained"], row["share"]).removeprefix("pretrained").removeprefix(", ")
        name = ", ".join(filter(None, [row["column"], METRICS[row["metric"]], kind]))
        low, high = row["metrics"][row["metric"]]["interval"]
        rows[name] = row["score"], low, high, row["data"], f"{row['score']:.1f} ({low:.1f} to {high:.1f})"
    if (mean := about["average"]) is not None:
        data = [row["data"] for row in glue_rows(about["scores"]) if row["column"] in COLUMNS]
        rows["average of nine"] = mean, math.nan, math.nan, " ".join(data), f"{mean:.1f}"
    if heldout := about["pretraining"].get("heldout"):  # an adopted model has none
        value, error = heldout["nats_per_byte"]["value"], heldout["nats_per_byte"]["standard_error"] or math.nan
        least = value - too_high - NORMAL * error
        rows[LOSS] = value, least, value + NORMAL * error, heldout["digest"], nats(heldout, "byte")
    return pd.DataFrame.from_dict(rows, orient="index", columns=["value", "low", "high", "data", "text"])


def compare_scores(a: dict, b: dict) -> "pd.DataFrame":
    """The scores of two reports, their differences, and whether the intervals tell them apart."""
    import pandas as pd

    too_high = [length_nats(about) if vocabularies_differ(a, b) else 0.0 for about in (a, b)]
    both = pd.concat(map(scores, (a, b), too_high), axis=1, keys=["A", "B"])
    a, b, is_loss = both["A"], both["B"], both.index == LOSS
    away, higher, lower = b["value"] - a["value"], b["low"] > a["high"], b["high"] < a["low"]
    verdicts = {
        "": away.isna(),
        "different data": a["data"] != b["data"],
        "the same": away == 0,
        "no interval": a["low"].isna() | b["low"].isna(),
        "B is better": np.where(is_loss, lower, higher),
        "A is better": np.where(is_loss, higher, lower),
    }
    verdict = np.select([*map(np.asarray, verdicts.values())], [*verdicts], "no difference told apart")
    shown = [f"{value:+.{4 if loss else 1}f}" for value, loss in zip(away, is_loss, strict=True)]
    away = np.where(np.isin(verdict, ["", "different data"]), "–", shown)
    table = pd.DataFrame({"A": a["text"], "B": b["text"], "B - A": away, "verdict": verdict}).fillna("–")
    return table.reset_index(names="score")


def measurements(filtered: Artifact, side: str) -> "pd.DataFrame":
    """A row for each document that a filter read: KEY, and its measurements and place in columns prefixed by `side`."""
    import pandas as pd

    files = [file for file in filtered.manifest["files"] if file["path"].startswith("measured-")]
    verify_files(filtered.path, files, filtered.name)
    columns = ["id", "source", "characters", "tokens_per_char", "verdict"]
    documents = pd.concat(
        pd.read_parquet(path, columns=columns).assign(part=path.name.replace("measured", "part"))
        for path in sorted(filtered.path / file["path"] for file in files)
    ).reset_index(drop=True)
    documents["copy"] = documents.groupby(["id", "source"]).cumcount()
    documents["row"] = documents["verdict"].eq(KEPT).groupby(documents["part"]).cumsum() - 1  # of the part, if kept
    return documents.rename(columns=lambda name: name if name in KEY else f"{side} {name}")


def join_measurements(a: Artifact, b: Artifact) -> "pd.DataFrame":
    """A row for each document that one of two filters read, with the measurements of both."""
    return measurements(a, "A").merge(measurements(b, "B"), how="outer", on=KEY)


def count_kept(both: "pd.DataFrame") -> "pd.DataFrame":
    """What each filter kept, and only it kept: a row per source, the largest first, below the row of their sum."""
    import pandas as pd

    a, b = (both[f"{side} verdict"] == KEPT for side in "AB")
    kept = {"A keeps": a, "B keeps": b, "A keeps, B does not": a & ~b, "B keeps, A does not": b & ~a}
    kept |= {
        f"characters, {side} keeps": both[f"{side} characters"].where(own, 0) for side, own in (("A", a), ("B", b))
    }
    groups = pd.DataFrame(kept).groupby(both["source"])
    order = groups.size().sort_values(ascending=False, kind="stable").index
    counts = groups.sum().astype(int).loc[order].rename(index=row_name)
    return pd.concat([counts.sum().to_frame(TOTAL).T, counts]).reset_index(names="source")


def count_changed_verdicts(both: "pd.DataFrame") -> "pd.DataFrame":
    """The documents that only one filter kept, by the verdicts of both, the most frequent first."""
    verdicts = both[["A verdict", "B verdict"]].fillna(NOT_GIVEN).set_axis(["A", "B"], axis=1)
    kept = verdicts == KEPT
    return verdicts[kept["A"] != kept["B"]].value_counts().reset_index(name="documents")


def sample_documents(both: "pd.DataFrame", filtered: Artifact, keeps: str, drops: str, most: int) -> "pd.DataFrame":
    """Sample documents that side `keeps` kept and `drops` dropped: those with the smallest hashes of their keys.

    `filtered` is the artifact of the side that kept them.
    """
    import pandas as pd

    is_changed = both[f"{keeps} verdict"].eq(KEPT) & both[f"{drops} verdict"].fillna(KEPT).ne(KEPT)
    hashes = pd.util.hash_pandas_object(both.loc[is_changed, KEY], index=False)
    shown = both.loc[hashes.nsmallest(most).index]
    places = zip(shown[f"{keeps} part"], shown[f"{keeps} row"], strict=True)
    texts = [document_at([filtered.path / part], int(row)).text[:TEXT_CHARACTERS] for part, row in places]
    return shown.assign(text=texts)
