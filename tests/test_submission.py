"""Files for GLUE's leaderboard: names, labels, order, and what it would refuse."""

import csv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from model import InputError
from tasks.glue import submission
from tasks.glue.tasks import TASKS

OFFICIAL = {  # names and rows that the leaderboard takes
    "CoLA.tsv": 1063, "SST-2.tsv": 1821, "MRPC.tsv": 1725, "STS-B.tsv": 1379, "MNLI-m.tsv": 9796, "MNLI-mm.tsv": 9847,
    "QNLI.tsv": 5463, "QQP.tsv": 390965, "RTE.tsv": 3000, "WNLI.tsv": 146,
}  # fmt: skip
MNLI, ENTAILED = ["entailment", "neutral", "contradiction"], ["entailment", "not_entailment", "entailment"]
NAMES = {"MNLI-m.tsv": MNLI, "MNLI-mm.tsv": MNLI, "QNLI.tsv": ENTAILED, "RTE.tsv": ENTAILED}  # of the classes 0, 1, 2


def predicted(task: str, split: str) -> np.ndarray:
    """Predictions of the official number, all classes among them."""
    count, classes = TASKS[task].test[split], TASKS[task].classes
    return np.linspace(-0.5, 5.5, count) if classes == 1 else np.arange(count) % classes


def everything() -> dict:
    tested = {task: about.test for task, about in TASKS.items() if about.test}
    return {task: {split: predicted(task, split) for split in splits} for task, splits in tested.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("submission") / "new"
    return folder, submission.write(folder, everything())


def test_every_file_has_its_rows_numbered_from_zero_and_the_leaderboards_labels(whole):
    folder, _ = whole
    assert {path.name for path in folder.iterdir()} == {*OFFICIAL, "submission.zip"}
    for name, count in OFFICIAL.items():
        with (folder / name).open(newline="") as file:
            header, *rows = csv.reader(file, delimiter="\t")
        assert header == ["index", "prediction"]
        numbers, labels = zip(*rows, strict=True)
        assert numbers == tuple(map(str, range(count)))
        assert b"\r" not in (folder / name).read_bytes()
        if name == "STS-B.tsv":
            assert all(len(label) == 5 for label in labels), "three decimals"
            wanted = np.clip(predicted("stsb", "test"), 0, 5)
            assert np.array(labels, dtype=float) == pytest.approx(wanted, abs=0.0005 + 1e-9)
        else:
            assert list(labels[:3]) == NAMES.get(name, ["0", "1", "0"])


def test_the_archive_holds_the_same_files_and_the_same_bytes_each_time(whole, tmp_path: Path):
    folder, _ = whole
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        assert archive.namelist() == list(OFFICIAL), "flat, in the leaderboard's order"
        for name in OFFICIAL:
            assert archive.read(name) == (folder / name).read_bytes()
    submission.write(tmp_path, dict(reversed(everything().items())))
    assert (tmp_path / "submission.zip").read_bytes() == (folder / "submission.zip").read_bytes()


def test_missing_files_are_named(whole, tmp_path: Path):
    assert whole[1]["missing"] == ["AX.tsv"]
    assert "AX.tsv is missing" in whole[1]["note"]
    some = submission.write(tmp_path, {"rte": {"test": predicted("rte", "test")}})
    assert some["files"] == ["RTE.tsv", "submission.zip"]
    assert some["missing"] == [*(name for name in OFFICIAL if name != "RTE.tsv"), "AX.tsv"]


@pytest.mark.parametrize(
    ("predictions", "named"),
    [
        ({"rte": {"test": np.zeros(2999, int)}}, "rte test .*2,999 rows.* 3,000"),
        ({"rte": {"test": np.zeros((3000, 2))}}, r"rte test .*\(3000, 2\).* 3,000"),
        ({"rte": {"validation": np.zeros(277, int)}}, "no rte validation"),
        ({"mnli": {"test": np.zeros(9796, int)}}, "no mnli test;.* mnli test_matched"),
        ({"word-order": {"test": np.zeros(10, int)}}, "no word-order test"),
        ({"wnli": {"test": np.full(146, 2)}}, "wnli test have 2 in row 0.* 0 to 1"),
        ({"wnli": {"test": np.full(146, 0.5)}}, "0.5 in row 0"),
        ({"stsb": {"test": np.append(np.zeros(1378), np.nan)}}, "nan in row 1378.* a number"),
        ({}, "no predictions"),
        ({"cola": {}}, "no predictions"),
    ],
)
def test_what_it_would_refuse_is_refused_and_nothing_written(tmp_path: Path, predictions: dict, named: str):
    good = {"wnli": {"test": predicted("wnli", "test")}} if predictions.get("rte") else {}
    with pytest.raises(InputError, match=named):
        submission.write(tmp_path / "out", good | predictions)
    assert not (tmp_path / "out").exists()
