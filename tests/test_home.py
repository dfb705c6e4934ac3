"""Where artifacts and Prefect's data are kept, in a checkout and after `pip install DIR`."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tasks.store import home

ROOT = Path(__file__).resolve().parents[1]
PLACES = """
import json
from tasks.store import home

print(json.dumps([str(home.root()), str(home.STATE)]))
"""


def test_a_checkout_keeps_its_own():
    assert home.HOME == home.CODE == ROOT


def test_installed_elsewhere_it_keeps_all_in_the_working_directory(tmp_path: Path):
    site = tmp_path / "site-packages"
    work = tmp_path / "work"
    work.mkdir()
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in (pattern.rstrip("*") for pattern in patterns):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    env = {k: v for k, v in os.environ.items() if k not in ("CRAM_ARTIFACTS", "PREFECT_HOME")}
    command = [sys.executable, "-c", PLACES]
    env = env | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(work / "artifacts"), str(work / ".prefect")]
    assert not list(site.glob("artifacts"))
