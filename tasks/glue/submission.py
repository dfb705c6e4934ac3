"""Submission: predictions of GLUE's test splits in the leaderboard's format, one file for each, and all of them zipped.

The format (gluebenchmark.com/faq): tab-separated, a header, rows numbered from 0 in the test file's order; classes by
name for MNLI, QNLI and RTE, 0 or 1 for the others, and numbers from 0 to 5 for STS-B.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from model import InputError
from model.quantities import counted
from tasks.glue.tasks import TASKS

FILES = {  # by task and split, in the leaderboard's order of tasks
    ("cola", "test"): "CoLA.tsv",
    ("sst2", "test"): "SST-2.tsv",
    ("mrpc", "test"): "MRPC.tsv",
    ("stsb", "test"): "STS-B.tsv",
    ("mnli", "test_matched"): "MNLI-m.tsv",
    ("mnli", "test_mismatched"): "MNLI-mm.tsv",
    ("qnli", "test"): "QNLI.tsv",
    ("qqp", "test"): "QQP.tsv",
    ("rte", "test"): "RTE.tsv",
    ("wnli", "test"): "WNLI.tsv",
}
DIAGNOSTIC = "AX.tsv"  # 1,104 pairs for MNLI's model: no task of cram, but the leaderboard requires the file
NAMED = ("mnli", "qnli", "rte")  # tasks whose classes are written by name
ARCHIVE = "submission.zip"
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # a fixed time, so that the same predictions give the same bytes


def write(folder: Path, predictions: Mapping[str, Mapping[str, Sequence]]) -> dict:
    """Write a file for each test split, and submission.zip.

    `predictions`: by task and split, in the order of the data; class numbers, or for STS-B scores. Returns the `files`
    written, those of the leaderboard's eleven that are `missing`, and a `note` about these (None if none is missing).
    Raises InputError and writes nothing for unknown tasks or splits, other row counts than the official ones, and
    values that are no classes.
    """
    texts = {}
    for task, splits in predictions.items():
        for split, values in splits.items():
            if (task, split) not in FILES:
                known = ", ".join(" ".join(pair) for pair in FILES)
                raise InputError(f"The GLUE leaderboard takes no {task} {split}; it takes {known}. Leave it out.")
            texts[FILES[task, split]] = rows(task, split, np.asarray(values))
    if not texts:
        raise InputError(
            "There are no predictions to submit; expected those of a test split. Finetune with test: true."
        )
    written = [name for name in FILES.values() if name in texts]
    folder.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in written:
            (folder / name).write_text(texts[name], newline="\n")
            about = zipfile.ZipInfo(name, LONG_AGO)
            archive.writestr(about, texts[name], compress_type=zipfile.ZIP_DEFLATED)
    (folder / ARCHIVE).write_bytes(packed.getvalue())
    missing = [name for name in (*FILES.values(), DIAGNOSTIC) if name not in texts]
    return {"files": [*written, ARCHIVE], "missing": missing, "note": why_incomplete(missing)}


def rows(task: str, split: str, values: np.ndarray) -> str:
    """The text of one file. Raises InputError for predictions that the leaderboard would refuse."""
    about, where = TASKS[task], f"The predictions of {task} {split}"
    if values.shape != (official := about.test[split],):
        size = counted(len(values), "row") if values.ndim == 1 else f"the shape {values.shape}"
        raise InputError(
            f"{where} have {size}, but the official test split has {official:,} rows. Predict all of it, in order."
        )
    allowed = np.isfinite(values) if about.classes == 1 else np.isin(values, np.arange(about.classes))
    if not allowed.all():
        row, wanted = int(np.argmin(allowed)), "a number" if about.classes == 1 else f"0 to {about.classes - 1}"
        raise InputError(f"{where} have {values[row]} in row {row}; expected {wanted}. Finetune it again.")
    if about.classes == 1:
        answers = [f"{value:.3f}" for value in np.clip(values, 0, 5) + 0.0]  # not -0.000
    elif task in NAMED:
        answers = [about.labels[int(value)] for value in values]
    else:
        answers = [str(int(value)) for value in values]
    return "index\tprediction\n" + "".join(f"{row}\t{value}\n" for row, value in enumerate(answers))


def why_incomplete(missing: list[str]) -> str | None:
    """What to do about missing files; None if none is missing."""
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"The leaderboard takes eleven files at once; {', '.join(missing)} {verb} missing. Finetune on those tasks "
        "with test: true, or add files of the same format with any valid label in every row. cram never writes "
        f"{DIAGNOSTIC}, the diagnostic set of 1,104 rows with MNLI's labels."
    )
