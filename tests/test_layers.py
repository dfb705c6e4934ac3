"""What may import what, and which commands load without slow packages."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("flows", "tasks", "model")
    for path in (ROOT / folder).rglob("*.py")
}
ALLOWED = {"torch", "numpy", "safetensors", "pydantic", "model"} | sys.stdlib_module_names  # in the model's files

PRIVATE_TO_PREFECT = re.compile(
    r"prefect[\w.]*\._|_engine\b|__var__|_instances|_register_atexit|wrapped_future|transaction\.state"
)


def imported(file: Path) -> set[str]:
    """The modules that a file imports, anywhere in it, and the names it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # hf.py travels with a model, as layers.py does, without their package
            assert node.level == 0 or file.name == "hf.py", f"{file} has a relative import"
            module = ".".join(["model"] * node.level + [node.module or ""]).rstrip(".")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


IMPORTS = {name: imported(path) for name, path in FILES.items()}
PACKAGES = {name: {module.split(".")[0] for module in found} for name, found in IMPORTS.items()}


def test_the_model_needs_torch_numpy_safetensors_and_pydantic_only():
    others = {name: PACKAGES[name] - ALLOWED for name in FILES if name.split(".")[0] == "model"}
    assert others.pop("model.hf") == {"transformers", "huggingface_hub"}  # cram's models for it
    assert {name: found for name, found in others.items() if found} == {}


def test_the_files_that_travel_with_a_model_need_nothing_else_of_cram():
    for module in ("model.hf", "model.layers"):
        own = {name for name in IMPORTS[module] if name.startswith(("model", "flows", "tasks"))}
        assert {name for name in own if name in FILES} <= {"model", "model.layers"}
    assert "from model" not in FILES["model.hf"].read_text() + FILES["model.layers"].read_text()


def test_stages_do_not_import_flows():
    assert "tasks.pretrain" in FILES
    assert not [name for name in FILES if name.startswith("tasks") and "flows" in PACKAGES[name]]


def test_imports_have_no_cycle():
    graph = {name: (found & set(FILES)) - {name} for name, found in IMPORTS.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_rooms_of_helpers_do_not_import_stages():
    rooms = {name for name, path in FILES.items() if path.name == "__init__.py"}
    stages = {name for name in FILES if re.fullmatch(r"tasks\.\w+", name)} - rooms
    helpers = [name for name in FILES if re.fullmatch(r"tasks\.\w+\.\w+", name)]
    assert [name for name in helpers if IMPORTS[name] & stages] == []


def test_prefect_is_used_by_its_public_names():
    own = {name: FILES[name] for name in FILES if "prefect" in PACKAGES[name]}
    assert {"flows.cram", "tasks.stage"} <= set(own)
    for name, path in own.items():
        code = path.read_text()
        assert not PRIVATE_TO_PREFECT.search(code), name
        attributes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
        others = [
            node.attr
            for node in attributes
            if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "os")
        ]
        assert not [attribute for attribute in others if re.match("_(?!_)", attribute)], name


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("flows.cram, flows.cli.main", "torch transformers datasets pandas scipy sklearn"),
        ("model.distributed, model.finetuning, model.export", "prefect transformers"),
        ("flows.cli.main", "torch prefect"),
        ("tasks.store.gc, tasks.store.remote", "torch prefect"),
    ],
)
def test_a_module_loads_without_slow_packages(modules: str, heavy: str):
    code = f"import sys, {modules}; print(sorted({set(heavy.split())} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def opens_text(call: ast.Call) -> bool:
    """Whether a call reads or writes text, as far as its names tell: also of objects whose class ruff doesn't know."""
    is_method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if is_method else getattr(call.func, "id", "")
    if name == "read_text":
        return not call.args  # an argument is the name of a file in a distribution
    if name in ("open", "fdopen"):
        given = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
        has_mode = any(isinstance(value, str) and re.fullmatch(r"[rwax]\+?t?", value) for value in given)
        return has_mode or (is_method and not call.args and not call.keywords)
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return name == "write_text" or "True" in (words.get("text"), words.get("universal_newlines"))


def test_text_is_read_and_written_in_utf_8_whatever_the_locale():
    calls = [
        (name, node)
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text(node)
    ]
    assert len(calls) > 50
    assert not [
        f"{name}, line {call.lineno}"
        for name, call in calls
        if "encoding" not in [word.arg for word in call.keywords] and ast.unparse(call.func) != "tarfile.open"
    ]
