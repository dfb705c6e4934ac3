"""Comparison of two filters: which documents each of them kept, by the measurements that both wrote.

Documents are matched by id and source, and the copies of an id in their order. A comparison takes about 1 GB of memory
per million documents.
"""

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model import InputError
from tasks.corpus.parts import TOTAL, by_number, row_name, tables
from tasks.store import Artifact

if TYPE_CHECKING:  # importing it takes half a second
    import pandas as pd

KEPT = "kept"
NOT_GIVEN = "not given"  # in place of a verdict on a document that the filter's input did not have
KEY = ["id", "source", "copy"]
MEASURED = ["id", "source", "characters", "tokens_per_char", "verdict"]
TEXT_CHARACTERS = 200


def measurements(filtered: Artifact, side: str) -> "pd.DataFrame":
    """A row for each document that a filter measured: KEY, and with the prefix `side` the measurements and its part.

    Raises InputError if the measurements are missing or damaged.
    """
    read = []
    for path in by_number(filtered.path.glob("measured-*.parquet")):
        try:
            table = pq.read_table(path, columns=MEASURED)
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{path.name} of {filtered.name} is damaged: {error}. Delete the artifact and run the filter again."
            ) from error
        part = path.name.replace("measured", "part")
        read.append(table.append_column("part", pa.repeat(part, len(table))))
    if not read:
        raise InputError(f"{filtered.name} has no measured-*.parquet. Expected the artifact of a filter; run it again.")
    documents = pa.concat_tables(read).to_pandas()
    documents["copy"] = documents.groupby(["id", "source"]).cumcount()
    return documents.rename(columns=lambda name: name if name in KEY else f"{side} {name}")


def sources(both: "pd.DataFrame") -> list[dict]:
    """What each filter kept, and only it kept: a row per source, the largest first, below the row of their sum."""
    import pandas as pd

    a, b = (both[f"{side} verdict"] == KEPT for side in "AB")
    kept = pd.DataFrame(
        {
            "source": both["source"],
            "A keeps": a,
            "B keeps": b,
            "A keeps, B does not": a & ~b,
            "B keeps, A does not": b & ~a,
            "characters, A keeps": both["A characters"].where(a, 0),
            "characters, B keeps": both["B characters"].where(b, 0),
        }
    )
    groups = kept.groupby("source")
    counts = groups.sum().astype(int).assign(documents=groups.size())
    counts = counts.sort_values(["documents", "source"], ascending=[False, True]).drop(columns="documents")
    rows = counts.rename(index=row_name).reset_index().to_dict("records")
    return [{"source": TOTAL} | counts.sum().to_dict(), *rows]


def changes(both: "pd.DataFrame") -> list[dict]:
    """The documents that only one filter kept, by the verdicts of both: those of A first, then by frequency."""
    verdicts = both[["A verdict", "B verdict"]].fillna(NOT_GIVEN).set_axis(["A", "B"], axis=1)
    by_a = verdicts["A"] == KEPT
    verdicts["characters"] = both["A characters"].where(by_a, both["B characters"])
    changed = verdicts[by_a != (verdicts["B"] == KEPT)]
    counts = changed.groupby(["A", "B"])["characters"].agg(documents="size", characters="sum").astype(int).reset_index()
    counts["added"] = counts["A"] != KEPT
    counts = counts.sort_values(["added", "documents", "A", "B"], ascending=[True, False, True, True])
    return counts.drop(columns="added").to_dict("records")


def samples(both: "pd.DataFrame", filtered: Artifact, keeps: str, drops: str, most: int) -> list[dict]:
    """Documents that one side kept and the other dropped, those whose keys have the smallest hashes, with their text.

    `filtered` is the artifact of the side that kept them.
    """
    import pandas as pd

    changed = both[
        (both[f"{keeps} verdict"] == KEPT) & both[f"{drops} verdict"].ne(KEPT) & both[f"{drops} part"].notna()
    ]
    hashes = pd.util.hash_pandas_object(changed[KEY], index=False)
    shown = changed.loc[hashes.nsmallest(most).index]
    texts = [
        table.filter(pc.is_in(table["id"], pa.array(of_part["id"])))
        for part, of_part in shown.groupby(f"{keeps} part")
        for table in tables(filtered.path / part, ("id", "text"))
    ]
    if not texts:
        return []
    found = pa.concat_tables(texts).to_pandas()
    found[f"{keeps} characters"] = found["text"].str.len()  # tells copies of an id apart
    found["text"] = found["text"].str[:TEXT_CHARACTERS]
    on = ["id", f"{keeps} characters"]
    shown = shown.merge(found.drop_duplicates(on), how="left", on=on).fillna({"text": ""}).round(4)
    about = ["tokens_per_char", "verdict"]
    return shown[["id", "source", *(f"{side} {name}" for side in "AB" for name in about), "text"]].to_dict("records")


def compare(a: Artifact, b: Artifact, most: int = 5) -> dict[str, list[dict]]:
    """What two filters kept: `sources`, `changes`, and samples of documents `dropped` (kept by A alone) and `added`."""
    both = measurements(a, "A").merge(measurements(b, "B"), how="outer", on=KEY)
    return {
        "sources": sources(both),
        "changes": changes(both),
        "dropped": samples(both, a, "A", "B", most),
        "added": samples(both, b, "B", "A", most),
    }
