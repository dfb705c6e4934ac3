"""Reports side by side: what is compared and what is not."""

import json
from pathlib import Path

import pytest
from conftest import store_of_its_own
from test_report import BERT, HELDOUT, finetuned, lineage, made, rows_of, section, with_scores, written

from flows.cli.compare import NEEDED, Run, compare, named, pretraining, text
from model import InputError
from tasks.reports import common
from tasks.store import Artifact

CRAMMING, MODERN = common.TITLES["cramming"], common.TITLES["modern"]
ELSEWHERE = HELDOUT | {"digest": "d2"}
PARAMETERS, NO_DIFFERENCE = "Differing parameters", "No difference is shown"


def report_of(runs: list[Artifact], title: str) -> Artifact:
    """A report of these runs."""
    return Artifact(stage="report", key=written(runs, title)[2].name)


def variant(key: str, stage_name: str = "tokenize", **params) -> dict[str, dict]:
    """The manifests of another model, made from the same artifacts up to a stage, whose params differ in these."""
    manifests, own = lineage(key), lineage()
    first = [about["stage"] for about in own.values()].index(stage_name)
    found = dict([*list(own.items())[:first], *list(manifests.items())[first:]])
    found[f"{stage_name}/00000000000{key}"]["params"] |= params
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Artifact]:
    """Reports of four models."""
    better = {name: value + 0.5 for name, value in BERT.items()}
    seven = {name: better[name] for name in BERT if name not in ("QQP", "RTE")}
    shuffled, elsewhere = variant("c", sort="random"), lineage("d", heldout=ELSEWHERE)
    with store_of_its_own(tmp_path_factory.mktemp("compare") / "artifacts"):
        a = [*with_scores(BERT, seeds=3, spread=1.0), finetuned("rte", 80.0, protocol="modern")]
        b = with_scores(better, model=variant("b", "pretrain", learning_rate=2e-3))
        c = [*with_scores(seven, model=shuffled), finetuned("rte", 61.0, model=shuffled, have=100)]
        d = [finetuned("cola", 50.0, model=elsewhere, data={"other": "file"}, learning_rate=1e-4)]
        titled = {"a": (a, "first"), "b": (b, "second"), "c": (c, "first"), "d": (d, "fourth")}
        yield {name: report_of(*runs) for name, runs in titled.items()}


def compared(*reports: Artifact) -> str:
    """The page that compares these."""
    return text(named(reports))


def rows_in(page: str, title: str = CRAMMING) -> dict[str, list[str]]:
    return rows_of(section(page, title))


def test_scores_by_protocol_costs_and_differing_parameters_stand_side_by_side(reports):
    page = compared(reports["a"], reports["b"])
    rows = rows_in(page)
    assert rows["number"] == ["metric", "first", "second", "second, difference"]
    assert rows["CoLA"] == ["Matthews", "56.5 (55.5 to 57.5, 3)", "57.0 (1 seed)", "+0.5"]
    assert rows["**average of nine**"] == ["", "80.9", "81.4", "+0.5"]
    assert [*rows][2:-2] == list(BERT), "in the order of the paper"
    assert "- **81.4** second, GLUE average of nine" in page
    modern = rows_in(page, MODERN)
    assert modern["RTE"] == ["accuracy", "80.0 (1 seed)", "–", "–"]
    assert "MNLI m" not in modern
    costs = rows_in(page, "Pretraining")
    expected = {"tokens": "9,000,000,000", "hours on the clock": "23.997", "parameters": "119,589,889"}
    assert {name: costs[name][0] for name in expected} == expected
    assert [*rows_in(page, PARAMETERS).items()][2:] == [("`pretrain.learning_rate`", ["`0.001`", "`0.002`"])]
    rows = rows_in(compared(reports["b"], reports["d"]), PARAMETERS)
    assert rows["`finetune (cramming).learning_rate`"] == ["`4e-05`", "`0.0001`"]


def test_partial_or_other_data_is_marked_and_not_compared(reports):
    page = compared(reports["b"], reports["c"])
    rows = rows_in(page)
    assert rows["RTE"][2:] == ["61.0\\* (1 seed)", "–"]
    assert rows["QQP"][2:] == ["–", "–"]
    assert rows["SST-2"][2:] == ["92.4 (1 seed)", "+0.0"]
    assert rows["**average of nine**"][1:] == ["81.4", "–", "–"]
    assert "first: \\* RTE is on partial data" in page
    assert NO_DIFFERENCE in page
    assert rows_in(compared(reports["a"], reports["d"]))["CoLA"][3] == "–"


def test_an_average_has_a_difference_only_where_all_its_numbers_have(store):
    better, elsewhere = {name: value + 1 for name, value in BERT.items()}, {"train": ["a"]}
    hub, local = report_of(with_scores(BERT), "hub"), report_of(with_scores(better, data=elsewhere), "local")
    mixed = with_scores({name: better[name] for name in BERT if name != "RTE"}, model=lineage("b"))
    mixed += [finetuned("rte", better["RTE"], model=lineage("b"), data=elsewhere)]
    rows = rows_in(compared(hub, local, report_of(mixed, "mixed")))
    assert rows["CoLA"][4:] == ["–", "+1.0"]
    assert rows["RTE"][4:] == ["–", "–"]
    assert rows["**average of nine**"] == ["", "80.9", "81.9", "81.9", "–", "–"]
    assert rows["**GLUE's own average**"][4:] == ["–", "–"]


def test_averages_of_the_same_partial_data_are_absent_and_have_no_difference(store):
    eight, models = {name: BERT[name] for name in BERT if name != "RTE"}, [lineage(key) for key in "ab"]
    runs = [[*with_scores(eight, model=model), finetuned("rte", 61.0, model=model, have=100)] for model in models]
    rows = rows_in(compared(report_of(runs[0], "a"), report_of(runs[1], "b")))
    assert rows["RTE"][3] == "+0.0"
    assert rows["**average of nine**"] == ["", "–", "–", "–"]


def test_the_test_data_leaves_scores_comparable_and_other_data_is_a_difference(store):
    files = {"train": ["a"], "validation": ["b"]}
    plain = report_of([finetuned("cola", 50.0, data=files), finetuned("rte", 60.0)], "plain")
    tested = finetuned("cola", 60.0, model=lineage("b"), test=True, data=files | {"test": ["c"]})
    page = compared(plain, report_of([tested], "tested"))
    assert rows_in(page)["CoLA"][3] == "+10.0"
    assert ".data" not in page
    others = [finetuned("cola", 51.0, data={"train": ["a"]}), finetuned("rte", 61.0), finetuned("sst2", 90.0)]
    differing = rows_in(compared(plain, report_of(others, "other")), PARAMETERS)
    assert [*differing][2:] == ["`finetune (cramming).data.cola`"], "of the tasks that both ran"


def test_probes_are_no_glue_and_have_differences_within_one_corpus_only(store):
    data, models = {"probes": 1}, {"same": variant("b", "pretrain", seed=1), "other": lineage("c")}
    runs = [report_of([finetuned("word-order", 60.0, data=data)], "first")]
    runs += [report_of([finetuned("word-order", 70.0, model=model, data=data)], name) for name, model in models.items()]
    page = compared(*runs)
    rows = rows_in(page, "Probes (these are not GLUE)")
    assert rows["word-order"] == ["accuracy", "60.0 (1 seed)", "70.0 (1 seed)", "70.0 (1 seed)", "+10.0", "–"]
    assert NO_DIFFERENCE in page
    assert "average" not in page
    assert f"## {CRAMMING}" not in page
    assert NO_DIFFERENCE not in compared(*runs[:2])


@pytest.mark.parametrize(
    ("model", "comparable"),
    [
        (variant("c", sort="random", length=64), True),
        (variant("d", "vocabulary", entries=4096), True),
        (lineage("e", heldout=ELSEWHERE), False),
    ],
    ids=["sequences", "vocabulary", "documents"],
)
def test_held_out_losses_are_compared_on_the_same_documents(model: dict, comparable: bool):
    runs = [
        Run(name, {"pretraining": [*manifests.values()][-1]["stats"], "artifacts": [*manifests]})
        for name, manifests in (("own", lineage()), ("other", model))
    ]
    page = "\n\n".join(pretraining(runs))
    rows, mark = rows_of(page), "" if comparable else "\\*"
    assert rows["held-out loss, nats per word"] == [f"2.1000 ± 0.0500{mark}"] * 2
    assert rows["held-out loss, nats per byte"] == [f"0.4800 ± 0.0120{mark}"] * 2
    assert ("can't be compared" in page) == (not comparable)


def test_the_command_prints_and_writes_a_page(reports, tmp_path: Path, capsys):
    compare([reports["a"].name, reports["b"].key], tmp_path / "page.html")
    printed = capsys.readouterr().out
    assert "second, difference" in printed
    assert "+0.5" in printed
    assert "**" not in printed
    compare([reports["a"].key, reports["d"].key, reports["c"].key], tmp_path / "other.html")
    page, other = ((tmp_path / name).read_text() for name in ("page.html", "other.html"))
    assert page.count("<table>") == 4
    assert ["<svg" in text for text in (page, other)] == [True, False]  # of losses that can be compared
    for name in "ac":  # which have one title
        assert f"first ({reports[name].key})" in other


@pytest.mark.parametrize("others", [[], ["KEY", "B"], ["zzz"], ["finetune/c2dc"], ["artifacts/report/KEY"], ["/tmp"]])
def test_what_is_not_two_reports_is_refused(reports, others: list[str]):
    key = reports["a"].key
    names = [key, *(name.replace("KEY", key).replace("B", reports["b"].key) for name in others)]
    with pytest.raises(InputError, match=names[1] if len(names) == 2 else f"report/{key}"):
        compare(names)


@pytest.mark.parametrize("name", ["", "no/page.html", "report.html/page.html"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_printed(
    reports, tmp_path: Path, capsys, name: str
):
    (tmp_path / "report.html").touch()
    with pytest.raises(InputError, match=f"'{tmp_path / name}'"):
        compare([reports["a"].key, reports["b"].key], tmp_path / name)
    assert capsys.readouterr().out == ""


def test_a_report_of_an_older_version_or_a_damaged_one_is_refused(store):
    old = {"title": "old", "average": None, "scores": []}
    contents = {NEEDED[0]: old, r"pretraining\.heldout": old | {name: {} for name in NEEDED}}
    for number, (missing, content) in enumerate(contents.items()):
        files = {"report.json": json.dumps(content)}
        artifact = made(f"report/00000000000{number}", {"stage": "report", "stats": {}}, files)
        with pytest.raises(InputError, match=f"{artifact.name} is of an older version.*{missing}"):
            named([artifact])
    path = artifact.path / "report.json"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(InputError, match=f"report.json of {artifact.name}"):
        named([artifact])
