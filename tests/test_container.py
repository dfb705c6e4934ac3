"""The image: its steps, as far as they are cheap, and all of it where Docker is."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import tiny_override, write_jsonl
from test_cli import HOME, new_user

DOCKERFILE = (HOME / "Dockerfile").read_text()
IMAGE = "cram-test"
BASE = re.search("^FROM (.+)$", DOCKERFILE, re.MULTILINE)[1]


def steps(name: str) -> list[str]:
    """The arguments of the instructions of this name, with lines joined."""
    lines = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", lines).splitlines()
    return [line.removeprefix(f"{name} ") for line in joined if line.startswith(f"{name} ")]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `docker build` sends and the image has: what .dockerignore lets through."""
    rules = [line for line in (HOME / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*", "nothing but what is named"
    folder = tmp_path_factory.mktemp("image")
    left_out = shutil.ignore_patterns(*(rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")))
    for rule in (rule.removeprefix("!") for rule in rules if rule.startswith("!")):
        source = HOME / rule
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / rule, **({"ignore": left_out} if source.is_dir() else {}))
    return folder


def test_every_instruction_is_known_and_every_source_is_sent(context: Path):
    known = ("FROM", "ARG", "RUN", "WORKDIR", "ENV", "COPY", "CMD")
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    assert {line.split()[0] for line in lines if line and not line.startswith("#")} <= set(known)
    for sources in (step.split()[:-1] for step in steps("COPY")):
        assert all((context / source).exists() for source in sources)
    assert steps("ARG") == ["DEVICE=cuda"]
    for step in steps("RUN"):
        subprocess.run(["sh", "-n", "-c", step], check=True)
    needed = [project_file()["readme"], *project_file()["license-files"]]
    assert all((context / name).exists() for name in needed), "the build of the package reads them"


def project_file() -> dict:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((HOME / "pyproject.toml").read_text())["project"]


def test_the_packages_of_the_image_are_those_of_the_project(context: Path, tmp_path: Path):
    [step] = [step for step in steps("RUN") if "requirements.txt" in step and "tomllib" in step]
    shutil.copy(context / "pyproject.toml", tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", step], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    assert (tmp_path / "requirements.txt").read_text().splitlines() == project_file()["dependencies"]


def test_what_the_image_has_is_enough_to_run(context: Path, tmp_path: Path):
    env = new_user(tmp_path) | {"PYTHONPATH": str(context)}
    program = "import flows.cli.main as m; print(m.__file__); m.main()"
    command = [sys.executable, "-P", "-c", program, "params", "filter"]
    done = subprocess.run(command, cwd=context, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(context) in done.stdout.splitlines()[0]
    assert "max_tokens_per_char" in done.stdout


def test_the_deployments_in_containers_are_those_of_the_process_pool_in_this_image(context: Path):
    usual, contained = (yaml.safe_load((HOME / name).read_text()) for name in ("prefect.yaml", "flows/docker.yaml"))
    entries = [
        {d["name"].removesuffix("-in-docker"): d["entrypoint"] for d in of["deployments"]} for of in (usual, contained)
    ]
    assert entries[0] == entries[1]
    assert {d["work_pool"]["name"] for d in contained["deployments"]} == {"docker"}
    [pull] = contained["pull"]
    assert pull["prefect.deployments.steps.set_working_directory"]["directory"] == steps("WORKDIR")[0]
    settings = dict(pair.split("=") for step in steps("ENV") for pair in step.split())
    for deployment in contained["deployments"]:
        [volume] = deployment["work_pool"]["job_variables"]["volumes"]
        assert volume.rsplit(":", 1)[1] == settings["CRAM_ARTIFACTS"]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The image for CPUs, built here; it downloads some gigabytes."""
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("there is no Docker here")
    build = ["docker", "build", "--network", "host", "--build-arg", "DEVICE=cpu", "-t", IMAGE, str(HOME)]
    done = subprocess.run(build, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    yield IMAGE
    subprocess.run(["docker", "image", "rm", IMAGE], capture_output=True)


def test_the_image_runs_a_recipe_as_any_user_and_its_store_is_the_volume(
    image: str, tmp_path: Path, toy_texts: list[str]
):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    changes = tiny_override(Path("/text") / shard.name, budget=2 / 3600)
    (tmp_path / "artifacts").mkdir()
    for folder in (tmp_path, tmp_path / "artifacts"):
        folder.chmod(0o777)
    run = f"docker run --rm --user 1234:1234 --network none -v {tmp_path}/artifacts:/artifacts -v {tmp_path}:/text:ro"
    command = [*run.split(), image, "cram", "run", "demo", "--override", json.dumps(changes)]
    for state in ("tokens", "cached"):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert state in done.stderr
    assert (tmp_path / "artifacts" / "report" / "latest" / "report.html").stat().st_uid == 1234
