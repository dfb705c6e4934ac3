"""Settings as somebody types them: --set, --override and their completion."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from chain import refusal_of
from typer.testing import CliRunner

from flows.cli import fields
from flows.cli.fields import field_names, recipes_and_files, settings_to_complete
from flows.cli.main import app
from flows.recipes.files import PARSERS
from flows.recipes.recipe import Recipe, fields_of, resolve
from flows.recipes.typed import changes_of
from model.errors import InputError

TASK = {"name": "own", "data": "own.csv"}


@pytest.mark.parametrize(
    ("text", "stage", "fields"),
    [
        ("pretrain.budget=0.05", "pretrain", {"budget": 0.05}),
        ("pretrain.budget=3 minutes", "pretrain", {"budget": "3 minutes"}),
        ("pretrain.budget='3 minutes'", "pretrain", None),
        ('pretrain.budget="3 minutes"', "pretrain", {"budget": "3 minutes"}),
        (" pretrain.batch_size = 16 ", "pretrain", {"batch_size": 16}),
        ("pretrain.architecture.layers=3", "pretrain", {"architecture": {"layers": 3}}),
        ('pretrain.architecture={"layers": 3}', "pretrain", {"architecture": {"layers": 3}}),
        ("pretrain.clip=null", "pretrain", {"clip": None}),
        ("pretrain.start=latest", "pretrain", {"start": "latest"}),
        ("pretrain.start=123456789012", "pretrain", {"start": "123456789012"}),
        ("pretrain.start=1e5678901234", "pretrain", {"start": "1e5678901234"}),
        ("vocabulary.characters=unicode", "vocabulary", {"characters": "unicode"}),
        ("filter.max_tokens_per_char=by-script", "filter", {"max_tokens_per_char": "by-script"}),
        ("finetune.baseline=true", "finetune", {"baseline": True}),
        ("finetune.tasks=cola", "finetune", {"tasks": ["cola"]}),
        (f"finetune.tasks=[{json.dumps(TASK)}]", "finetune", {"tasks": [TASK]}),
        ('download.files=["my/letters", "b"]', "download", {"files": ["my/letters", "b"]}),
        ("download.files=my/a=b, c.txt", "download", {"files": ["my/a=b, c.txt"]}),
        ("download.files=2024", "download", {"files": ["2024"]}),
        ('download.source={"wikipedia": 3, "books": 1}', "download", {"source": {"wikipedia": 3, "books": 1}}),
        ("report.title=2024", "report", {"title": "2024"}),
        ("decontaminate.data=", "decontaminate", {"data": ""}),
    ],
)
def test_a_typed_value_is_json_if_the_field_takes_it_and_else_text_or_a_list_of_one(text, stage, fields):
    if fields is None:
        with pytest.raises(InputError, match=r"pretrain\.budget"):
            changes_of([], [text])
        return
    assert changes_of([], [text]) == {stage: fields}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pretrain.budgt=3", "pretrain.budgt budget?"),
        ("pretrian.budget=3", "pretrian pretrain?"),
        ("budget=3", "budget pretrain.budget?"),
        ("pretrain.layers=3", "pretrain.layers pretrain.architecture.layers?"),
        ("pretrain.architecture.lairs=3", "pretrain.architecture.lairs layers?"),
        ("download.source.wikipedia=3", "download.source wikipedia whole"),
        ("pretrain.batch_size=many", 'pretrain.batch_size "many" integer 1'),
        ("pretrain.batch_size=0", "pretrain.batch_size 0 integer 1"),
        ("pretrain.architecture=3", "pretrain.architecture 3 layers"),
        ("vocabulary.characters=unicod", 'vocabulary.characters "unicod" unicode?'),
        ("finetune.tasks=colla", 'finetune.tasks.0 "colla" cola?'),
        ("finetune.tasks={}", "finetune.tasks {} list"),
        ("download.files=['my/letters']", "['my/letters'] JSON"),
        ('download.files=["a", 3]', "download.files.1 3 text"),
        ("finetune.baseline=perhaps", 'finetune.baseline "perhaps" true false'),
        ("pretrain.budget=3 parsecs", 'pretrain.budget "3 parsecs" minutes'),
        ("pretrain.tied=" + "[" * 20_000, "pretrain.architecture.tied?"),
        ("report.title=" + '{"a":' * 3, ""),
        ("pretrain.budget", "pretrain.budget STAGE.FIELD=VALUE"),
        ("=3", "STAGE.FIELD=VALUE"),
        ("pretrain..budget=3", "pretrain..budget STAGE.FIELD=VALUE"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_field_what_was_found_and_what_it_takes(text: str, words: str):
    if not words:
        assert changes_of([], [text])
        return
    with pytest.raises(InputError) as refused:
        changes_of([], [text])
    assert [word for word in words.split() if word not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


def test_of_several_changes_the_last_one_wins_and_settings_win_over_overrides():
    overrides = ['{"pretrain": {"budget": 1, "architecture": {"layers": 2}}}', '{"filter": {"min_characters": 3}}']
    overrides += ['{"pretrain": {"budget": 2, "architecture": {"hidden": 64}}}']
    changes = {"pretrain": {"budget": 2, "architecture": {"layers": 2, "hidden": 64}}, "filter": {"min_characters": 3}}
    assert changes_of(overrides, []) == changes
    found = changes_of(
        overrides, ["pretrain.budget=5e6 tokens", "pretrain.budget=3 minutes", "filter.min_characters=4"]
    )
    assert found == {
        "pretrain": {"budget": "3 minutes", "architecture": {"layers": 2, "hidden": 64}},
        "filter": {"min_characters": 4},
    }
    assert changes_of([], []) == {}


def test_settings_win_over_the_unit_of_an_overrides_budget_but_a_unit_that_contradicts_them_is_refused():
    tokens = '{"pretrain": {"budget": 5e9, "budget_unit": "tokens"}}'
    training = resolve("demo", changes_of([tokens], ["pretrain.budget=3 minutes"])).pretrain
    assert (training.budget, training.budget_unit) == (0.05, "hours")
    contradiction = changes_of([], ["pretrain.budget=3 minutes", "pretrain.budget_unit=tokens"])
    with pytest.raises(InputError, match=r"3 minutes.*tokens"):
        resolve("demo", contradiction)


@pytest.mark.parametrize("name", ["a.json", "a.toml", "a.yaml", "-"])
def test_an_override_may_be_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    texts = {
        "a.json": '{"pretrain": {"batch_size": 16}}',
        "a.toml": "[pretrain]\nbatch_size = 16",
        "a.yaml": "pretrain: {batch_size: 16}",
    }
    for file, text in texts.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    for text in (texts["a.json"], texts["a.toml"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        given = name if name == "-" else str(tmp_path / name)
        assert changes_of([given], ["pretrain.clip=null"]) == {"pretrain": {"batch_size": 16, "clip": None}}


@pytest.mark.parametrize("name", ["my.toml", "-"])
def test_a_study_takes_the_tables_of_a_recipe_file_and_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
):
    monkeypatch.chdir(tmp_path)
    text = 'recipe = "demo"\nuntil = "report"\n[pretrain]\nbatch_size = 16\n[use]\nfilter = "latest"\n'
    Path("my.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert changes_of([name], [], tables_only=True) == {"pretrain": {"batch_size": 16}}
    [said] = caplog.messages
    assert "recipe, until, use" in said
    done = CliRunner().invoke(app, ["study", "masking", "--list", "--override", "my.toml"])
    assert done.exit_code == 0, done.exception


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"pretrain": ', "input JSON line 1"),
        ("[pretrain\n", "input TOML line 1"),
        ('recipe = "demo"', "input recipe"),
        ("[pretrain]\nbudgt = 3", "pretrain.budgt budget?"),
    ],
)
def test_wrong_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, words: str):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(InputError) as refused:
        changes_of(["-"], [])
    assert [word for word in words.split() if word not in str(refused.value)] == []


@pytest.mark.parametrize("command", [["run", "demo"], ["run", "my.toml"], ["study", "masking"]])
def test_commands_take_settings_and_refuse_wrong_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text('recipe = "demo"', encoding="utf-8")
    assert "pretrain.budgt" in refusal_of(*command, "--set", "pretrain.budgt=3")
    assert "gone.toml" in refusal_of(*command, "--override", "gone.toml")


def test_every_field_of_a_recipe_is_completed_without_importing_the_recipe():
    assert sorted(field_names()) == sorted(fields_of(Recipe))
    assert "pretrain.architecture.layers=" in settings_to_complete()
    code = "import sys; from flows.cli import fields; fields.field_names()"
    code += "; print(sorted({'pydantic', 'prefect', 'torch', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=fields.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recipes_are_completed_and_recipe_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert set(PARSERS) == set(fields.FILES)
    for name in ("my.toml", "my.txt", "[odd].yaml"):
        Path(name).touch()
    Path("more").mkdir()
    Path("more/own.json").touch()
    assert {"demo", "my.toml", "[odd].yaml"} <= set(recipes_and_files(""))
    assert "more/" in recipes_and_files("mo")
    assert "my.txt" not in recipes_and_files("my")
    assert "more/own.json" in recipes_and_files("more/")
    assert "[odd].yaml" in recipes_and_files("[o")
