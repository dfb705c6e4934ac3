"""Published scores of other models: the rows are well formed, and what differs between them is said."""

import statistics

import pytest

from tasks.glue import metrics
from tasks.reports.published import (
    BABYLM_2024,
    BABYLM_2025,
    DEV,
    ELECTRA,
    FILTERED,
    FULL,
    PUBLISHED,
    PUBLISHED_BLIMP,
    SCORERS,
    SMALL,
    TEST,
    Published,
    PublishedBlimp,
    footnotes,
    in_picture,
    read_twice,
)

SECOND = {"MRPC accuracy": "MRPC", "STS-B Spearman": "STS-B", "QQP accuracy": "QQP"}  # the column of the first metric
OF_THE_SERVER = [row for row in SMALL if row.split == TEST]


def name_of(row: Published | PublishedBlimp) -> str:
    return f"{row.model}, {row.source}"


def blocks_of(shape: str) -> int:
    """About the number of parameters in the blocks of a BERT of this shape."""
    layers, hidden = (int(number) for number in shape.split(" x "))
    return 12 * layers * hidden**2


@pytest.mark.parametrize("row", PUBLISHED, ids=name_of)
def test_a_row_of_glue_names_its_source_its_split_and_columns_that_exist(row: Published):
    assert row.source
    assert row.split in (DEV, TEST)
    assert row.scores.keys() <= metrics.COLUMNS.keys()
    assert row.scores or row.average
    numbers = [*row.scores.values(), *(value for _, value in row.others)]
    assert all(0 <= number <= 100 for number in numbers)


@pytest.mark.parametrize("row", SMALL, ids=name_of)
def test_a_small_model_has_its_size_and_how_it_was_judged(row: Published):
    assert row.protocol
    assert row.parameters
    assert blocks_of(row.shape) < row.parameters < 50e6
    assert row.average_of if row.average else not row.average_of


def test_no_row_of_glue_is_there_twice():
    assert len({(row.model, row.source) for row in PUBLISHED}) == len(PUBLISHED)


@pytest.mark.parametrize("row", OF_THE_SERVER, ids=name_of)
def test_the_average_of_the_server_is_that_of_its_nine_tasks(row: Published):
    others = dict(row.others)
    of_tasks = [others["WNLI"], statistics.mean([row.scores["MNLI m"], row.scores["MNLI mm"]])]
    of_tasks += [row.scores[column] for column in ("CoLA", "SST-2", "QNLI", "RTE")]
    of_tasks += [statistics.mean([row.scores[column], others[name]]) for name, column in SECOND.items()]
    assert statistics.mean(of_tasks) == pytest.approx(row.average, abs=0.06)


def test_a_number_in_another_metric_is_in_no_column():
    electra = [row for row in SMALL if row.model.startswith("ELECTRA")]
    assert len(electra) == 2
    for row in electra:
        assert {name for name, _ in row.others} == SECOND.keys()
        assert row.scores.keys().isdisjoint(SECOND.values())


@pytest.mark.parametrize("row", PUBLISHED_BLIMP, ids=name_of)
def test_a_row_of_blimp_names_its_source_its_scorer_and_its_pairs(row: PublishedBlimp):
    assert row.source
    assert row.scorer in SCORERS
    assert row.pairs == (FILTERED if row.track else FULL)
    assert 45 < row.score < 100
    if row.shape:
        assert row.parameters
        assert blocks_of(row.shape) < row.parameters


def test_no_row_of_blimp_is_there_twice():
    rows = {(row.model, row.scorer, row.track, row.causal) for row in PUBLISHED_BLIMP}
    assert len(rows) == len(PUBLISHED_BLIMP)


def test_the_pipelines_of_two_years_are_two_scorers():
    for row in PUBLISHED_BLIMP:
        assert (row.scorer == BABYLM_2024) == (row.source.endswith("pipeline-2024"))
        if row.source.endswith(("pipeline-2025", "babylm-eval")):
            assert row.scorer == BABYLM_2025


def test_berts_score_higher_where_later_pieces_of_a_word_are_masked():
    scores = {(row.model, row.scorer): row.score for row in PUBLISHED_BLIMP}
    for model in ("BERT-base, cased", "RoBERTa-base"):
        assert scores[model, "original"] < scores[model, "within word"]


@pytest.mark.parametrize("parameters", [11e6, 120e6])
def test_the_picture_has_rows_of_our_split_only(parameters: float):
    drawn = in_picture(parameters)
    ours = {row.model: row.scores for row in PUBLISHED if row.split == DEV}
    assert len(drawn) > 1
    assert all(ours[model] == known for model, known in drawn.items())


def test_footnotes_name_what_the_rows_of_a_source_have_in_other_metrics():
    rows = [row for row in SMALL if row.source == ELECTRA]
    [note] = footnotes(rows)
    assert ELECTRA.removeprefix("the ") in note
    assert "ELECTRA-Small++ MRPC accuracy 88.0, STS-B Spearman 87.5, QQP accuracy 89.0" in note
    assert note.count(rows[0].protocol) == 1


def test_a_number_is_no_footnote_where_its_column_has_one():
    [of_server] = footnotes(OF_THE_SERVER)
    assert "accuracy" not in of_server
    assert "WNLI 62.3" not in of_server


def test_weights_that_were_judged_twice_are_named_with_both_averages():
    rows = [
        Published("one", {}, 60.0, "a"), Published("other", {}, 50.0, "b"), Published("one", {}, 70.5, "b"),
        Published("one", {"CoLA": 1.0}, None, "c"),
    ]  # fmt: skip
    [reading] = read_twice(rows)
    assert (reading.model, reading.averages, reading.points) == ("one", [(60.0, 1), (70.5, 2)], 10.5)
