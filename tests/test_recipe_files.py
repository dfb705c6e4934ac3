"""Recipe files, and files with changes to a recipe."""

import json
from pathlib import Path

import pytest

from flows.recipes.files import RecipeFile, read_changes, read_recipe_file
from model.errors import InputError

TOML = """
recipe = "pocket-frontier"
until = "pretrain"
[download]
source = "files"
files = ["letters"]
[pretrain]
budget = 0.05
architecture.layers = 3
[[finetune.tasks]]
name = "tickets"
data = "tickets.csv"
"""
YAML = """
recipe: pocket-frontier
until: pretrain
download: {source: files, files: [letters]}
pretrain:
  budget: 0.05
  architecture: {layers: 3}
finetune:
  tasks:
    - {name: tickets, data: tickets.csv}
"""
OVERRIDE = {
    "download": {"source": "files", "files": ["letters"]},
    "pretrain": {"budget": 0.05, "architecture": {"layers": 3}},
    "finetune": {"tasks": [{"name": "tickets", "data": "tickets.csv"}]},
}
JSON = json.dumps({"recipe": "pocket-frontier", "until": "pretrain", **OVERRIDE})
HERE = ["my.toml", "my.TOML", "my.yaml", "my.yml", "my.json"]


def written(folder: Path, name: str, text: str) -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "text"), zip(HERE, [TOML, TOML, YAML, YAML, JSON], strict=True))
def test_a_recipe_file_says_the_same_in_every_format(tmp_path: Path, monkeypatch, name: str, text: str):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, name, text)
    assert read_recipe_file(Path(name)) == RecipeFile("pocket-frontier", OVERRIDE, "pretrain", {})


@pytest.mark.parametrize(
    ("stage", "field", "given", "found"),
    [
        (
            "download",
            "files",
            ["letters", "/abs/x", "~/y", "more/*.txt"],
            ["{}/letters", "/abs/x", "~/y", "{}/more/*.txt"],
        ),
        ("download", "dataset", "there", "{}/there"),
        ("download", "dataset", "allenai/dolma", "allenai/dolma"),
        ("finetune", "data", "there", "{}/there"),
        ("finetune", "data", "nyu-mll/glue", "nyu-mll/glue"),
        ("decontaminate", "data", "there", "{}/there"),
        (
            "minimal_pairs",
            "data",
            ["gone.csv", "there", "nyu-mll/blimp", "owner/name/folder", "/abs/x.tsv"],
            ["{}/gone.csv", "{}/there", "nyu-mll/blimp", "owner/name/folder", "/abs/x.tsv"],
        ),
        ("minimal_pairs", "data", None, None),
        ("decontaminate", "pairs", [{"data": "gone.csv", "good": "x"}], [{"data": "{}/gone.csv", "good": "x"}]),
        ("pretrain", "start", "there", "{}/there"),
        ("pretrain", "start", "google-bert/bert-base-uncased", "google-bert/bert-base-uncased"),
        ("pretrain", "start", "latest", "latest"),
    ],
)
def test_a_path_in_a_file_counts_from_the_files_folder(tmp_path: Path, stage: str, field: str, given, found):
    for name in ("there", "latest"):
        (tmp_path / name).mkdir()
    file = written(tmp_path, "changes.json", json.dumps({stage: {field: given}}))
    expected = json.loads(json.dumps(found).replace("{}", str(tmp_path)))
    assert read_changes(file) == {stage: {field: expected}}


@pytest.mark.parametrize(
    ("given", "found"),
    [("gone.csv", "{}/gone.csv"), ("there", "{}/there"), ("a/b/c", "{}/a/b/c"), ("owner/name", "owner/name")],
)
def test_the_data_of_a_task_counts_from_the_files_folder_unless_it_is_a_name_on_the_hub(tmp_path, given, found):
    (tmp_path / "there").mkdir()
    task = {"name": "own", "data": given}
    file = written(tmp_path, "changes.json", json.dumps({"finetune": {"tasks": ["cola", task]}}))
    moved = {"name": "own", "data": found.replace("{}", str(tmp_path))}
    assert read_changes(file) == {"finetune": {"tasks": ["cola", moved]}}


def test_a_folder_with_a_model_that_a_recipe_file_uses_is_beside_it(tmp_path: Path):
    (tmp_path / "model").mkdir()
    text = 'recipe = "demo"\n[use]\npretrain = "model"\ntokenize = "latest"\n'
    found = read_recipe_file(written(tmp_path, "my.toml", text))
    assert found.use == {"pretrain": str(tmp_path / "model"), "tokenize": "latest"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "", "a.toml recipe"),
        ("a.yaml", "", "a.yaml recipe"),
        ("a.toml", "recipe = demo", "a.toml line 1 quotes"),
        ("a.toml", '\nrecipe = "demo"\nuntil = filter', "a.toml line 3"),
        ("a.json", '{"recipe": "demo",}', "a.json line 1"),
        ("a.yaml", "recipe: demo\npretrain: {", "a.yaml line"),
        ("a.yaml", "recipe: demo\nrecipe: modern", "a.yaml 'recipe' twice"),
        ("a.yaml", "recipe: \x07", "a.yaml"),
        ("a.json", '{"recipe": "demo", "recipe": "modern"}', "a.json 'recipe' twice"),
        ("a.json", "[1]", "a.json [1]"),
        ("a.toml", 'recipe = "dem"', "a.toml 'dem' demo?"),
        ("a.toml", "recipe = [1]", "a.toml [1]"),
        ("a.toml", 'recipe = "demo"\nuntil = "filtr"', "a.toml 'filtr' filter?"),
        ("a.toml", 'recipe = "demo"\nuntil = 3', "a.toml 3"),
        ("a.toml", 'recipe = "demo"\nuntill = "filter"', "a.toml untill until?"),
        ("a.toml", 'recipe = "demo"\n[pretrian]\nbudget = 1', "a.toml pretrian pretrain?"),
        ("a.toml", 'recipe = "demo"\n[pretrain]\nbudgt = 1', "a.toml pretrain.budgt budget?"),
        ("a.toml", 'recipe = "demo"\n[pretrain]\nbatch_size = "many"', "a.toml pretrain.batch_size many"),
        ("a.toml", 'recipe = "demo"\n[pretrain]\nuntil = "filter"', "a.toml until pretrain before"),
        ("a.toml", 'recipe = "demo"\npretrain = 3', "a.toml pretrain 3"),
        ("a.toml", 'recipe = "demo"\n[use]\npretrian = "latest"', "a.toml use pretrian pretrain?"),
        ("a.toml", 'recipe = "demo"\nuse = "latest"', "a.toml use latest"),
        ("a.toml", 'recipe = "demo"\n[[finetune.tasks]]\nname = "own"', "a.toml finetune.tasks.0.data"),
    ],
)
def test_a_mistake_in_a_recipe_file_is_named_with_the_file_and_the_line_or_field(tmp_path, name, text, words):
    with pytest.raises(InputError) as refused:
        read_recipe_file(written(tmp_path, name, text))
    assert [word for word in words.split() if word not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


def test_a_file_that_is_absent_unreadable_or_of_the_wrong_kind_is_refused(tmp_path: Path):
    written(tmp_path, "mine.toml", TOML)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes('title = "schön"'.encode("latin-1"))
    cases = {"mine.tml": "suffix", "mien.toml": "mine.toml", "folder.toml": "read", "latin.toml": "UTF-8"}
    for name, word in cases.items():
        with pytest.raises(InputError, match=word) as refused:
            read_recipe_file(tmp_path / name)
        assert name in str(refused.value)
    with pytest.raises(InputError, match=r"mine\.toml.*cram run"):
        read_changes(tmp_path / "mine.toml")
