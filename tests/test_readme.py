"""The manuals and the deployment agree with the code."""

import importlib
import json
import re
from pathlib import Path

import pytest
import typer
import yaml

from flows.cli.main import app
from flows.recipes import RECIPES, STAGES, resolve
from model.settings import Architecture, Training

HOME = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "tasks", "model", "artifacts")
MANUALS = {path: (HOME / path).read_text() for path in ("README.md", *(f"{room}/README.md" for room in ROOMS))}
FRONT, ALL = MANUALS["README.md"], "\n".join(MANUALS.values())
PACKAGES = ("flows", "tasks", "model", "benchmarks", "tests")
MODULES = [path for package in ("flows", "tasks", "model") for path in sorted((HOME / package).rglob("*.py"))]
EXAMPLE = re.compile(r"override(?: |=)'?(\{.*?\}\})'")


def section(manual: str, heading: str) -> str:
    """The text below a heading of the second level."""
    return MANUALS[manual].split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """The first cells of a table, of the rows that name code there."""
    return re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)


def anchor(heading: str) -> str:
    """GitHub's link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_manuals_are_short_and_the_front_page_links_to_each():
    assert len(FRONT.splitlines()) <= 150
    assert (HOME / "docs" / "report.png").stat().st_size < 120_000
    for path, text in MANUALS.items():
        assert len(text.splitlines()) <= 250, path
        assert path == "README.md" or f"]({path})" in FRONT


@pytest.mark.parametrize("path", MANUALS)
def test_every_link_of_a_manual_exists(path: str):
    folder = (HOME / path).parent
    links = re.findall(r"\]\(([^)\s]+)\)", MANUALS[path]) + re.findall(r'src="([^"]+)"', MANUALS[path])
    for link in links:
        if link.startswith("https:"):
            continue
        name, _, heading = link.partition("#")
        target = folder / name if name else HOME / path
        assert target.is_file(), link
        assert not heading or heading in map(anchor, re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)), link


def test_the_tables_of_stages_have_every_stage_in_order():
    for manual, heading in (("README.md", "The pipeline"), ("artifacts/README.md", "Files")):
        assert tuple(cell.strip("`") for cell in first_cells(section(manual, heading))) == STAGES


def test_every_recipe_is_described():
    rows = [re.findall(r"`([\w-]+)`", cell) for cell in first_cells(section("flows/README.md", "Recipes"))]
    pockets = [name for name in RECIPES if name.startswith("pocket")]  # one rule, so one row that names them all
    assert sorted(rows) == sorted([pockets, *([name] for name in RECIPES if name not in pockets)])
    named = {name for cell in first_cells(section("README.md", "Recipes")) for name in re.findall("`([^`]+)`", cell)}
    assert named <= set(RECIPES)
    assert f"all {len(RECIPES)} recipes" in FRONT


def test_every_command_of_the_manuals_exists():
    click = typer.main.get_command(app)
    used = re.findall(r"\.venv/bin/cram ([a-z]\w*)", ALL)
    assert set(used) == set(click.commands) - {"up", "down"}  # which are make's
    options = {name: {option for p in command.params for option in p.opts} for name, command in click.commands.items()}
    for name, rest in re.findall(r"\bcram (\w+)\b([^#`|\n]*)", ALL):
        if name in options:
            assert set(re.findall(r"(?<= )--[a-z-]+", rest)) <= options[name], rest
    known = set().union(*options.values(), ["--help", "--install-completion"])
    ours = re.findall(r"`(--[a-z][a-z-]+)[^`]*`", ALL)
    assert set(ours) - {"--watch", "--memory-limit", "--nthreads"} <= known  # those are Prefect's and Dask's


def test_every_function_and_import_of_the_manuals_exists():
    named = re.findall(r"`((?:flows|tasks|model)\.\w+)\.(\w+)[`(]", ALL)
    imports = re.findall(r"^from ((?:flows|tasks|model)[\w.]*) import (.+)$", ALL, re.MULTILINE)
    assert len(named) >= 4
    assert len(imports) >= 3
    for module, name in [*named, *((module, name) for module, names in imports for name in names.split(", "))]:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_every_override_of_the_manuals_is_accepted():
    overrides = [text for manual in MANUALS.values() for text in EXAMPLE.findall(manual.replace("\n", " "))]
    options = [cell.strip("`") for cell in first_cells(section("tasks/README.md", "GLUE")) if cell.startswith('`"')]
    assert len(overrides) >= 15
    assert len(options) >= 6
    for text in [*overrides, *(f'{{"finetune": {{{option}}}}}' for option in options)]:
        resolve("pocket", json.loads(text))


def test_every_field_of_the_manuals_exists():
    found = set(re.findall(rf"`((?:{'|'.join(STAGES)})\.[a-z_.]+)`", ALL))
    assert len(found) >= 20
    for name in (name for name in found if not name.endswith((".html", ".md", ".json", ".py"))):  # which are files
        value = RECIPES["crammed-bert"]
        for field in name.rstrip(".").split("."):
            assert field in type(value).model_fields, name
            value = getattr(value, field)


@pytest.mark.parametrize(("settings", "heading"), [(Architecture, "Architectures"), (Training, "Training")])
def test_every_field_of_the_model_and_its_training_is_described(settings: type, heading: str):
    described = {name for cell in first_cells(section("model/README.md", heading)) for name in re.findall(r"\w+", cell)}
    assert described == set(settings.model_fields)


def choices(stage: str, field: str) -> set[str]:
    """The names that a field accepts."""
    schema = type(getattr(RECIPES["crammed-bert"], stage)).model_json_schema()["properties"][field]
    return set(schema.get("enum") or next(kind["enum"] for kind in schema["oneOf"] if "enum" in kind))


@pytest.mark.parametrize(
    ("manual", "heading", "stage", "field"),
    [
        ("tasks/README.md", "Sources", "download", "source"),
        ("tasks/README.md", "Decontamination", "decontaminate", "method"),
        ("tasks/README.md", "Vocabulary and sequences", "vocabulary", "model"),
        ("tasks/README.md", "Vocabulary and sequences", "tokenize", "sort"),
        ("model/README.md", "Training", "pretrain", "optimizer"),
        ("model/README.md", "Training", "pretrain", "schedule"),
        ("model/README.md", "Training", "pretrain", "budget_unit"),
    ],
)
def test_every_choice_of_a_field_is_described(manual: str, heading: str, stage: str, field: str):
    assert choices(stage, field) <= set(re.findall(r"\b[a-z][\w-]*", section(manual, heading)))


def test_the_table_of_sources_has_all_sources():
    table = section("tasks/README.md", "Sources").split("### ")[0]
    assert {cell.strip("`") for cell in first_cells(table)} == choices("download", "source")


def test_the_manuals_and_the_code_have_the_same_variables():
    code = "\n".join(p.read_text() for p in MODULES)
    in_code = set(re.findall(r"[\"'](CRAM_[A-Z_]+)[\"']", code))
    table = {cell.strip("`") for cell in first_cells(section("flows/README.md", "Environment"))}
    assert table - {"CRAM_REAL_DATA"} == in_code
    assert set(re.findall(r"CRAM_[A-Z_]+", ALL)) <= table


def test_the_tree_names_all_directories():
    tree = "\n".join(re.findall(r"^    (.+)$", section("README.md", "The repository"), re.MULTILINE))
    folders = {name.rstrip("/") for name in re.findall(r"(?:^|(?<=\s))\w+/(?:\w+/)*(?=\s)", tree)}
    for name in [*folders, *re.findall(r"^\w+\.\w+", tree, re.MULTILINE)]:
        assert (HOME / name).exists(), name
    with_code = {path.parent.relative_to(HOME).as_posix() for name in PACKAGES for path in (HOME / name).rglob("*.py")}
    assert with_code | {"artifacts", "docs"} == folders


def test_the_deployment_points_to_the_flow():
    (deployment,) = yaml.safe_load((HOME / "prefect.yaml").read_text())["deployments"]
    module, name = deployment["entrypoint"].rsplit(".", 1)
    flow = getattr(importlib.import_module(module), name)
    assert f"{flow.name}/{deployment['name']}" == "cram/full"
    assert "prefect deployment run cram/full" in FRONT


def test_the_make_commands_of_the_manuals_are_targets():
    used = set(re.findall(r"`make (\w+)`", ALL) + re.findall(r"^    make (\w+)", ALL, re.MULTILINE))
    assert used >= {"demo", "test", "up", "down"}
    for target in used:
        assert re.search(rf"^{target}:", (HOME / "Makefile").read_text(), re.MULTILINE), target
