import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES_AND_ABOVE = {"prefect", "tasks", "flows", "transformers", "datasets", "pandas", "pyarrow", "tqdm"}


def imports(file: Path) -> set[str]:
    """The top-level names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found.add((node.module or "").split(".")[0])
    return found


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert len(found) > 3
    return found


@pytest.mark.parametrize("file", files("model"), ids=lambda file: file.name)
def test_the_model_needs_torch_numpy_safetensors_and_pydantic_only(file):
    found = imports(file)
    if file.name == "hf.py":  # cram's models as models of transformers
        found -= {"transformers", "huggingface_hub"}
    assert not found & STAGES_AND_ABOVE
    assert found <= {"torch", "numpy", "safetensors", "pydantic", "model"} | sys.stdlib_module_names


@pytest.mark.parametrize("file", files("tasks"), ids=lambda file: file.name)
def test_stages_do_not_import_flows(file):
    assert "flows" not in imports(file)


@pytest.mark.parametrize(
    ("imported", "heavy"),
    [
        ("flows.cram, flows.cli.main", "torch transformers datasets pandas scipy sklearn"),
        ("model.distributed, model.finetuning, model.export", "prefect transformers"),
        ("model.settings, flows.deltas", "torch"),
        ("flows.cli.main", "torch prefect pydantic"),
        ("flows.cli.arguments as names; names.stage_names(), names.recipe_names()", "torch prefect"),
    ],
)
def test_a_module_loads_without_slow_packages(imported: str, heavy: str):
    code = f"import sys, {imported}; print(sorted({set(heavy.split())} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def modules() -> dict[str, Path]:
    found = [path for folder in ("flows", "tasks", "model") for path in files(folder)]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in found}


def imported(file: Path) -> set[str]:
    """The modules that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_imports_have_no_cycle():
    known = modules()
    graph = {name: (imported(path) & set(known)) - {name} for name, path in known.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_rooms_of_helpers_do_not_import_stages():
    stages = {name for name in modules() if re.fullmatch(r"tasks\.\w+", name)}
    stages -= {"tasks.store", "tasks.home", *(name for name, path in modules().items() if path.name == "__init__.py")}
    climbs = {
        name: found
        for name, path in modules().items()
        if name.count(".") == 2 and name.startswith("tasks.") and (found := imported(path) & stages)
    }
    assert climbs == {}
