"""Reports side by side: what is compared, what is not, and what is said of it."""

import json
from pathlib import Path

import pytest
from conftest import store_of_its_own
from test_report import BERT, HELDOUT, finetuned, lineage, made, rows_of, section, with_scores, written

from flows.cli.compare import NEEDED, compare, named, text
from model import InputError
from tasks.reports import common
from tasks.store import Artifact

CRAMMING, MODERN = common.TITLES["cramming"], common.TITLES["modern"]


def report_of(runs: list[Artifact], title: str) -> Artifact:
    """A report of these runs."""
    return Artifact(stage="report", key=written(runs, title)[2].name)


def variant(key: str, stage_name: str = "tokenize", **params) -> dict[str, dict]:
    """The manifests of another model, made from the same artifacts up to a stage, whose params differ in these."""
    manifests, own = lineage(key), lineage()
    order = [about["stage"] for about in own.values()]
    shared = order.index(stage_name)
    found = dict(list(own.items())[:shared]) | dict(list(manifests.items())[shared:])
    found[f"{stage_name}/00000000000{key}"]["params"] |= params
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Artifact]:
    """Reports of four models."""
    with store_of_its_own(tmp_path_factory.mktemp("compare") / "artifacts"):
        better = {name: value + 0.5 for name, value in BERT.items()}
        few = [
            run
            for run in with_scores(better, model=variant("c", sort="random"))
            if run.stats["task"] not in ("qqp", "rte")
        ]
        other = lineage("d", heldout=HELDOUT | {"digest": "d2"})
        few += [finetuned("rte", 61.0, model=variant("c", sort="random"), have=100)]
        yield {
            "a": report_of(
                [*with_scores(BERT, seeds=3, spread=1.0), finetuned("rte", 80.0, protocol="modern")], "first"
            ),
            "b": report_of(with_scores(better, model=variant("b", "pretrain", learning_rate=2e-3)), "second"),
            "c": report_of(few, "first"),
            "d": report_of(
                [finetuned("cola", 50.0, model=other, data={"other": "file"}, learning_rate=1e-4)], "fourth"
            ),
        }


def told(reports: dict[str, Artifact], names: str) -> str:
    """The comparison of these."""
    return text(named([reports[name] for name in names]))


def test_scores_stand_side_by_side_with_spreads_and_differences(reports):
    page = told(reports, "ab")
    rows = rows_of(section(page, CRAMMING))
    assert rows["number"] == ["metric", "first", "second", "second, difference"]
    assert rows["CoLA"] == ["Matthews", "56.5 (55.5 to 57.5, 3)", "57.0 (1 seed)", "+0.5"]
    assert rows["**average of nine**"] == ["", "80.9", "81.4", "+0.5"]
    assert "- **81.4** second, GLUE average of nine" in page


def test_protocols_are_compared_apart(reports):
    rows = rows_of(section(told(reports, "ab"), MODERN))
    assert rows["RTE"] == ["accuracy", "80.0 (1 seed)", "–", "–"]
    assert "MNLI m" not in rows
    assert f"## {MODERN}" not in told(reports, "bd")


def test_partial_data_is_marked_and_not_compared(reports):
    page = told(reports, "bc")
    rows = rows_of(section(page, CRAMMING))
    assert rows["RTE"][2:] == ["61.0\\* (1 seed)", "–"]
    assert rows["QQP"][2:] == ["–", "–"]
    assert rows["SST-2"][2:] == ["92.4 (1 seed)", "+0.0"]
    assert rows["**average of nine**"][1:] == ["81.4", "–", "–"]
    assert "first: \\* RTE is on partial data: 2,490 of 2,490 train examples, 100 of 277 validation examples." in page
    assert "No difference is shown for runs that were not finetuned and scored on the same data." in page


def test_scores_on_other_data_are_not_compared(reports):
    assert rows_of(section(told(reports, "ad"), CRAMMING))["CoLA"][3] == "–"


def test_an_average_has_a_difference_only_where_all_its_numbers_have(store):
    better = {name: value + 1 for name, value in BERT.items()}
    hub, local = report_of(with_scores(BERT), "hub"), report_of(with_scores(better, data={"train": ["a"]}), "local")
    mixed = [finetuned("rte", better["RTE"], model=lineage("b"), data={"train": ["a"]})]
    mixed += [run for run in with_scores(better, model=lineage("b")) if run.stats["task"] != "rte"]
    page = text(named([hub, local, report_of(mixed, "mixed")]))
    rows = rows_of(section(page, CRAMMING))
    assert rows["CoLA"][4:] == ["–", "+1.0"]
    assert rows["RTE"][4:] == ["–", "–"]
    assert rows["**average of nine**"] == ["", "80.9", "81.9", "81.9", "–", "–"]
    assert rows["**GLUE's own average**"][4:] == ["–", "–"]


def test_finetuning_data_is_among_what_differs(store):
    runs = [finetuned("cola", 50.0), finetuned("rte", 60.0)]
    others = [finetuned("cola", 51.0, data={"train": ["a"]}), finetuned("rte", 61.0), finetuned("sst2", 90.0)]
    page = text(named([report_of(runs, "hub"), report_of(others, "local")]))
    lines = section(page, "What differs in parameters").strip().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| `finetune (cramming).data.cola`"]


def test_predicting_the_test_data_too_leaves_scores_comparable(store):
    files = {"train": ["a"], "validation": ["b"]}
    tested = finetuned("cola", 60.0, model=lineage("b"), test=True, data=files | {"test": ["c"]})
    runs = [report_of([finetuned("cola", 50.0, data=files)], "a"), report_of([tested], "b")]
    page = text(named(runs))
    assert rows_of(section(page, CRAMMING))["CoLA"][3] == "+10.0"
    assert ".data" not in page


def test_probes_are_no_glue_and_have_differences_within_one_corpus_only(store):
    data, models = {"probes": 1}, {"same": variant("b", "pretrain", seed=1), "other": lineage("c")}
    runs = [report_of([finetuned("word-order", 60.0, data=data)], "first")]
    runs += [report_of([finetuned("word-order", 70.0, model=model, data=data)], name) for name, model in models.items()]
    page = text(named(runs))
    rows = rows_of(section(page, "Probes (these are not GLUE)"))
    assert rows["word-order"] == ["accuracy", "60.0 (1 seed)", "70.0 (1 seed)", "70.0 (1 seed)", "+10.0", "–"]
    assert "No difference is shown for models trained on different tokenized corpora" in page
    assert "average" not in page
    assert f"## {CRAMMING}" not in page
    assert "No difference is shown" not in text(named(runs[:2]))


def test_one_seed_is_said_to_tell_no_spread(store):
    several = [report_of(with_scores(BERT, 2, 1.0, model=lineage(key)), key) for key in "ab"]
    one = report_of(with_scores(BERT, model=lineage("c")), "c")
    assert "A single seed has no spread" in section(text(named([several[0], one])), CRAMMING)
    assert "One seed" not in text(named(several))


TOKEN, BYTE = "held-out loss, nats per token", "held-out loss, nats per byte"


def heldout_rows(models: list[dict]) -> tuple[bool, bool]:
    """Whether held-out losses are compared per token and per byte, of reports of these models."""
    runs = named([report_of([finetuned("cola", 50.0, model=model)], str(name)) for name, model in enumerate(models)])
    rows = rows_of(section(text(runs), "Pretraining"))
    assert [cell.removesuffix("\\*") for cell in rows[TOKEN]] == ["2.1000 ± 0.0500"] * 2
    assert [cell.removesuffix("\\*") for cell in rows[BYTE]] == ["0.4800 ± 0.0120"] * 2
    marked = [[cell.endswith("\\*") for cell in rows[name]] for name in (TOKEN, BYTE)]
    assert all(len(set(row)) == 1 for row in marked)
    assert ("don't compare" in text(runs)) == any(map(any, marked))
    return not any(marked[0]), not any(marked[1])


def test_held_out_losses_are_compared_on_the_same_documents_and_per_token_with_one_vocabulary(store):
    model, elsewhere = lineage(), HELDOUT | {"digest": "d2"}
    assert heldout_rows([model, variant("b", "pretrain", learning_rate=2e-3)]) == (True, True)
    assert heldout_rows([model, variant("c", sort="random", length=64)]) == (True, True)
    assert heldout_rows([model, variant("d", "vocabulary", entries=4096)]) == (False, True)
    assert heldout_rows([model, lineage("e", heldout=elsewhere)]) == (False, False)
    same_vocabulary = variant("f", "pretrain")
    same_vocabulary["pretrain/00000000000f"]["stats"]["heldout"] = elsewhere
    assert heldout_rows([model, same_vocabulary]) == (False, False)


def test_held_out_losses_per_token_are_not_compared_where_the_vocabulary_is_not_known(store):
    models = [{name: about for name, about in lineage(key).items() if about["stage"] == "pretrain"} for key in "ab"]
    assert heldout_rows(models) == (False, True)


def test_tokens_hours_parameters_and_speed_are_there(reports):
    rows = rows_of(section(told(reports, "ab"), "Pretraining"))
    assert rows["tokens"][0] == "9,000,000,000"
    assert rows["hours on the clock"][0] == "23.997"
    assert rows["parameters"][0] == "119,589,889"
    assert rows["tokens a second"][0] == "104,178"


def test_what_differs_in_parameters_is_told_of_all_stages(reports):
    rows = rows_of(section(told(reports, "ab"), "What differs in parameters"))
    assert list(rows.items())[2:] == [("`pretrain.learning_rate`", ["`0.001`", "`0.002`"])]
    rows = rows_of(section(told(reports, "bd"), "What differs in parameters"))
    assert rows["`finetune (cramming).learning_rate`"] == ["`4e-05`", "`0.0001`"]


def test_runs_of_one_title_are_told_apart_by_their_keys(reports):
    names = [run.name for run in named([reports["a"], reports["c"], reports["b"]])]
    assert names == [f"first ({reports['a'].key})", f"first ({reports['c'].key})", "second"]


def test_the_command_prints_and_writes_a_page(reports, tmp_path: Path, capsys):
    compare([reports["a"].name, reports["b"].key], tmp_path / "page.html")
    printed = capsys.readouterr().out
    assert "second, difference" in printed
    assert "+0.5" in printed
    assert "**" not in printed
    page = (tmp_path / "page.html").read_text()
    assert page.count("<table>") == 4
    assert "<svg" in page  # of losses that compare
    compare([reports["a"].key, reports["d"].key], tmp_path / "other.html")
    assert "<svg" not in (tmp_path / "other.html").read_text()


def test_bad_input_is_told(reports, tmp_path: Path):
    key = reports["a"].key
    with pytest.raises(InputError, match=f"report/{key} alone can't be compared. Give two or more"):
        compare([key])
    with pytest.raises(InputError, match=f"report/{key} is given more than once. Give two or more different"):
        compare([key, f"report/{key}", reports["b"].key])
    with pytest.raises(InputError, match="No complete artifact of report"):
        compare([key, "zzz"])
    with pytest.raises(InputError, match="finetune/c2dc is an artifact of finetune; expected a report"):
        compare([key, "finetune/c2dc"])
    for path in (str(tmp_path), f"{reports['b'].path}", f"artifacts/report/{key}"):
        with pytest.raises(InputError, match=f"{path} is a path; expected a report"):
            compare([key, path])


@pytest.mark.parametrize("name", ["", "no/page.html", "report.html/page.html"])
def test_a_page_that_cannot_be_written_is_told_before_anything_is_printed(reports, tmp_path: Path, capsys, name: str):
    (tmp_path / "report.html").touch()
    with pytest.raises(InputError, match=f"The page can't be written to '{tmp_path / name}'"):
        compare([reports["a"].key, reports["b"].key], tmp_path / name)
    assert capsys.readouterr().out == ""


def test_a_damaged_report_is_told(store):
    a, b = (report_of([finetuned("cola", score, model=lineage(key))], key) for key, score in (("a", 50.0), ("b", 60.0)))
    path = b.path / "report.json"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(InputError, match=f"{b.name} is damaged: .* report.json .* `--refresh report`"):
        named([a, b])


def test_a_report_of_an_older_version_is_told(store):
    older = {"title": "old", "average": None, "scores": []}
    newer = older | {name: {} for name in NEEDED}  # as reports were before the held-out loss had units
    for number, about in enumerate((older, newer)):
        artifact = made(
            f"report/00000000000{number}", {"stage": "report", "stats": {}}, {"report.json": json.dumps(about)}
        )
        with pytest.raises(InputError, match="older version of cram"):
            named([artifact])
