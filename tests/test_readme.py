"""The manuals and the deployment agree with the code."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
import typer
import yaml

from flows.cli.main import app
from flows.cram import pipeline
from flows.recipes import recipe
from flows.recipes.deltas import NAMED
from flows.recipes.files import read_recipe_file
from flows.recipes.recipe import RECIPES, STAGES, resolve
from flows.recipes.typed import changes_of
from flows.summary import OTHER_STAGES
from model.settings import Architecture, Training
from tasks.deduplicate import REASONS
from tasks.filter import Filter, rules

HOME = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "tasks", "model", "artifacts")
PAPERS = ("CONTRIBUTING.md", "docs/architecture.md", "docs/paper.md", "docs/your-text.md")
MANUALS = {path: (HOME / path).read_text() for path in ("README.md", *(f"{room}/README.md" for room in ROOMS), *PAPERS)}
RECORDS = ("CHANGELOG.md", "docs/findings.md", "docs/log/README.md")  # which also name what is gone
FRONT = MANUALS["README.md"]
ALL = "\n".join(MANUALS.values())
PACKAGES = ("flows", "tasks", "model", "benchmarks", "tests")
MODULES = [path for package in ("flows", "tasks", "model") for path in sorted((HOME / package).rglob("*.py"))]
# a command begins an indented line or a quotation, or stands after a variable or in a pipe
COMMAND = re.compile(r"(?:^ {4}|`|=\S+ |\| )cram ([a-z][\w-]*)", re.MULTILINE)
EXAMPLE = re.compile(r"override(?: |=)'?(\{.*?\}\})'")
SETTING = re.compile(r"--set (?:'([^']+)'|([\w./=:-]+))")


def section(manual: str, heading: str) -> str:
    """The text below a heading of the second level."""
    return MANUALS[manual].split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_cells(manual: str, heading: str) -> list[str]:
    """The first cells of the tables below a heading, of the rows that name code there."""
    return re.findall(r"^\| (`[^|]+) \|", section(manual, heading).split("\n### ")[0], re.MULTILINE)


def anchor(heading: str) -> str:
    """GitHub's link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", [*MANUALS, *RECORDS])
def test_every_link_of_a_manual_exists(path: str):
    folder = (HOME / path).parent
    text = (HOME / path).read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in (link for link in links if not link.startswith("https:")):
        name, _, heading = link.partition("#")
        target = folder / name if name else HOME / path
        assert target.is_file(), link
        assert not heading or heading in map(anchor, re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)), link


def test_every_recipe_is_described():
    rows = [re.findall(r"`([\w-]+)`", cell) for cell in first_cells("flows/README.md", "Recipes")]
    # one rule, so one row that names them all
    pockets = ["pocket" if name == "crammed-bert" else f"pocket-{name}" for name in NAMED]
    assert sorted(rows) == sorted([pockets, *([name] for name in RECIPES if name not in pockets)])
    named = {name for cell in first_cells("README.md", "Recipes") for name in re.findall("`([^`]+)`", cell)}
    assert named <= set(RECIPES)
    assert f"all {len(RECIPES)} recipes" in FRONT


def test_every_command_of_the_manuals_exists():
    click = typer.main.get_command(app)
    assert set(COMMAND.findall(ALL)) == set(click.commands) - {"up", "down"}  # which are make's
    options = {
        name: {option for p in command.params for option in p.opts + p.secondary_opts}
        for name, command in click.commands.items()
    }
    for name, rest in re.findall(r"\bcram ([\w-]+)\b([^#`|\n]*)", ALL):
        if name in options:
            assert set(re.findall(r"(?<= )--[a-z-]+", rest)) <= options[name], rest
    known = set().union(*options.values(), ["--help", "--install-completion"])
    ours = re.findall(r"`(--[a-z][a-z-]+)[^`]*`", ALL)
    assert set(ours) - {"--watch", "--memory-limit", "--nthreads"} <= known  # those are Prefect's and Dask's


def test_commands_of_the_manuals_need_an_activated_environment_and_no_path():
    assert set(re.findall(r"\.venv/bin/(\w+)", ALL)) == {"activate"}


def test_every_function_and_import_of_the_manuals_exists():
    named = re.findall(r"`((?:flows|tasks|model)\.\w+)\.(\w+)[`(]", ALL)
    imports = re.findall(r"^from ((?:flows|tasks|model)[\w.]*) import (.+)$", ALL, re.MULTILINE)
    assert len(named) >= 3
    assert len(imports) >= 3
    for module, name in [*named, *((module, name) for module, names in imports for name in names.split(", "))]:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_every_override_of_the_manuals_is_accepted(monkeypatch):
    monkeypatch.setattr(recipe, "begin_from_model", lambda recipe, asked: recipe)  # there is no such model here
    overrides = [text for manual in MANUALS.values() for text in EXAMPLE.findall(manual.replace("\n", " "))]
    options = [cell.strip("`") for cell in first_cells("tasks/README.md", "GLUE") if cell.startswith('`"')]
    assert len(overrides) >= 5
    assert len(options) >= 6
    for text in [*overrides, *(f'{{"finetune": {{{option}}}}}' for option in options)]:
        resolve("pocket", json.loads(text))


def test_every_recipe_file_of_the_manuals_is_accepted(tmp_path):
    files = re.findall(r"```toml\n(.*?)```", ALL, re.DOTALL)
    assert files
    for text in files:
        path = tmp_path / "my.toml"
        path.write_text(text)
        asked = read_recipe_file(path)
        resolve(asked.recipe, asked.override)


def test_every_setting_of_the_manuals_is_accepted():
    found = [quoted or bare for manual in MANUALS.values() for quoted, bare in SETTING.findall(manual)]
    settings = [text for text in found if text != "STAGE.FIELD=VALUE"]
    assert len(settings) >= 15
    for text in settings:
        changes_of([], [text])


def test_every_field_of_the_manuals_exists():
    found = set(re.findall(rf"`((?:{'|'.join(STAGES)})\.[a-z_.]+)`", ALL))
    assert len(found) >= 20
    for name in (name for name in found if not name.endswith((".html", ".md", ".json", ".py"))):  # which are files
        value = RECIPES["crammed-bert"]
        for field in name.rstrip(".").split("."):
            assert field in type(value).model_fields, name
            value = getattr(value, field)


def choices(stage: str, field: str) -> set[str]:
    """The names that a field accepts."""
    schema = type(getattr(RECIPES["crammed-bert"], stage)).model_json_schema()["properties"][field]
    return set(schema.get("enum") or next(kind["enum"] for kind in schema["oneOf"] if "enum" in kind))


VARIABLES = {name for path in MODULES for name in re.findall(r"[\"'](CRAM_[A-Z_]+)[\"']", path.read_text())}


@pytest.mark.parametrize(
    ("manual", "heading", "names"),
    [
        ("artifacts/README.md", "Files", STAGES + OTHER_STAGES),
        ("flows/README.md", "Environment", VARIABLES | {"CRAM_REAL_DATA"} | set(re.findall("CRAM_[A-Z_]+", ALL))),
        ("tasks/README.md", "Sources", choices("download", "source")),
        ("model/README.md", "Architectures", set(Architecture.model_fields)),
        ("model/README.md", "Training", set(Training.model_fields)),
    ],
)
def test_a_table_names_all_that_exists_and_nothing_else(manual: str, heading: str, names: tuple | set):
    named = [name for cell in first_cells(manual, heading) for name in re.findall(r"[\w-]+", cell)]
    assert type(names)(named) == names  # stages in order


@pytest.mark.parametrize(
    ("manual", "heading", "stage", "field"),
    [
        ("tasks/README.md", "Vocabulary and sequences", "tokenize", "sort"),
        ("model/README.md", "Training", "pretrain", "optimizer"),
        ("model/README.md", "Training", "pretrain", "schedule"),
        ("model/README.md", "Training", "pretrain", "budget_unit"),
    ],
)
def test_every_choice_of_a_field_is_described(manual: str, heading: str, stage: str, field: str):
    assert choices(stage, field) <= set(re.findall(r"\b[a-z][\w-]*", section(manual, heading)))


def test_the_manual_names_every_reason_for_which_documents_are_lost_or_dropped():
    code = "".join(path.read_text() for path in (HOME / "tasks" / "corpus").glob("*.py"))
    lost = re.findall(r'(?:Unreadable\(|Loss\(\w+, \w+, )f?"([^"{]+)', code)
    limits = {"min_characters": 1, "max_characters": 9, "max_zstd_ratio": 9}
    assert limits.keys() | {"max_tokens_per_char"} == Filter.model_fields.keys(), "a limit is missing here"
    dropped = [*REASONS.values(), *rules(Filter(**limits))]
    assert min(len(lost), len(dropped)) >= 5
    table = section("tasks/README.md", "What is counted")
    for reason in [*lost, *dropped]:
        assert f"`{reason}" in table


def test_the_tree_of_the_front_page_names_all_files_and_rooms():
    tree = section("README.md", "The repository").split("```")[1]
    rooms = re.findall(r"^ *(\w+)/", tree, re.MULTILINE)
    files = re.findall(r"\b(\w+\.py)\b", tree)
    packages = ("flows", "tasks", "model")
    assert set(rooms) == {path.parent.name for package in packages for path in (HOME / package).rglob("*.py")}
    there = [path.name for package in packages for path in (HOME / package).glob("*.py")]
    assert sorted(files) == sorted(name for name in there if name != "__init__.py")


def test_the_front_page_shows_the_pipeline_as_it_is():
    [code] = [block for block in FRONT.split("```") if "corpus = download(" in block]
    lines = [line.strip() for line in inspect.getsource(pipeline).splitlines()]
    first = lines.index("corpus = download(r.download)")
    assert code.splitlines()[1:] == lines[first:]


def deployed(file: str) -> set[str]:
    """The deployments of a file, by flow and name."""
    found = set()
    for deployment in yaml.safe_load((HOME / file).read_text())["deployments"]:
        module, name = deployment["entrypoint"].rsplit(".", 1)
        found.add(f"{getattr(importlib.import_module(module), name).name}/{deployment['name']}")
    return found


def test_the_deployments_and_the_make_commands_of_the_manuals_exist():
    usual = deployed("prefect.yaml")
    run = set(re.findall(r"prefect deployment run (\S+)", ALL))
    assert usual < run <= usual | deployed("flows/docker.yaml")
    used = set(re.findall(r"(?:`|^    )make (\w+)", ALL, re.MULTILINE))
    assert used >= {"demo", "test", "up", "down"}
    for target in used:
        assert re.search(rf"^{target}:", (HOME / "Makefile").read_text(), re.MULTILINE), target
