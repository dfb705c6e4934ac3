"""The manual and the deployment say what the code does."""

import importlib
import json
import re
from pathlib import Path

import pytest
import typer
import yaml

from flows.cli.main import app
from flows.recipes import RECIPES, STAGES, resolve

HOME = Path(__file__).resolve().parents[1]
README = (HOME / "README.md").read_text()
MODULES = [p for folder in ("flows", "tasks", "model") for p in sorted((HOME / folder).rglob("*.py"))]


def test_the_pipeline_table_has_every_stage_in_order():
    table = README.split("## The pipeline")[1].split("##")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == STAGES
    reading = (HOME / "artifacts" / "README.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", reading, re.MULTILINE)) == STAGES


def test_every_recipe_is_described():
    table = README.split("## Recipes")[1].split("\n## ")[0]
    rows = [re.findall(r"`([\w-]+)`", first) for first in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)]
    pockets = [name for name in RECIPES if name.startswith("pocket")]  # one rule, so one row that names them all
    assert sorted(rows) == sorted([pockets, *([name] for name in RECIPES if name not in pockets)])


def test_every_command_of_the_manual_exists():
    click = typer.main.get_command(app)
    used = re.findall(r"cram (run|ls|show|up|down|\w+) ?", "\n".join(re.findall(r"\.venv/bin/cram .*", README)))
    assert set(used) <= set(click.commands)
    options = {name: {option for p in command.params for option in p.opts} for name, command in click.commands.items()}
    for name, rest in re.findall(r"\bcram (\w+)\b([^#`|\n]*)", README):
        if name in options:
            assert set(re.findall(r"(?<= )--[a-z-]+", rest)) <= options[name], rest


def test_every_function_of_the_manual_exists():
    named = re.findall(r"`((?:flows|tasks|model)\.\w+)\.(\w+)[`(]", README)
    assert len(named) >= 3
    for module, name in named:
        assert callable(getattr(importlib.import_module(module), name)), f"{module}.{name}"


def test_every_override_of_the_manual_is_accepted(tmp_path: Path):
    found = re.findall(r"override(?: |=)'?(\{.*?\}\})'", README.replace("\n", " "))
    assert len(found) >= 3
    for text in found:
        resolve("pocket", json.loads(text))


def test_every_setting_of_the_code_is_in_the_manual_and_the_reverse():
    code = "\n".join(p.read_text() for p in MODULES)
    in_code = set(re.findall(r"[\"'](CRAM_[A-Z_]+)[\"']", code))
    in_readme = set(re.findall(r"`(CRAM_[A-Z_]+)`", README)) - {"CRAM_REAL_DATA"}
    assert in_code == in_readme


def test_the_file_tree_names_every_module():
    tree = README.split("## Files")[1]
    for path in MODULES:
        if path.name != "__init__.py":
            assert path.name in tree, path
    for name in re.findall(r"(\w+\.py)", tree.split("test_<module>")[0]):
        assert list(HOME.glob(f"*/{name}")), name


def test_the_deployment_points_to_the_flow():
    (deployment,) = yaml.safe_load((HOME / "prefect.yaml").read_text())["deployments"]
    module, name = deployment["entrypoint"].rsplit(".", 1)
    flow = getattr(importlib.import_module(module), name)
    assert f"{flow.name}/{deployment['name']}" == "cram/full"


@pytest.mark.parametrize("target", ["demo", "test", "up", "down"])
def test_the_commands_of_the_manual_are_make_targets(target: str):
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (HOME / "Makefile").read_text(), re.MULTILINE)
