"""The worked example for one's own text and labels runs as it is written, on small files."""

import csv
import json
import random
import re
import shlex
from pathlib import Path

import pytest
from click.testing import Result
from conftest import document, sentence
from typer.testing import CliRunner

from flows.cli.main import app

GUIDE = (Path(__file__).resolve().parents[1] / "docs/your-text.md").read_text()
TOPICS = {"billing": "The invoice shows a wrong amount.", "login": "The password is refused.", "other": "Thank you."}
# a model of seconds in place of the recipe's of 20 minutes; nothing of the data is changed
TINY = {
    "measure": {"vocabulary_entries": 400},
    "vocabulary": {"entries": 300},
    "filter": {"max_tokens_per_char": 0.6},
    "tokenize": {"length": 32, "heldout_fraction": 0.2},
    "pretrain": {
        "architecture": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 96},
        "budget": 4096,
        "budget_unit": "tokens",
        "batch_size": 8,
    },
    "finetune": {"max_tokens": 32, "epochs": 2},
}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The files that the guide asks for."""
    rng = random.Random(1)
    (tmp_path / "my/letters").mkdir(parents=True)
    for number in range(120):
        (tmp_path / f"my/letters/{number}.txt").write_text(document(rng, 8))
    with (tmp_path / "my/tickets.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["body", "topic"])
        rows.writerows([f"{sentence(rng)} {TOPICS[topic]}", topic] for topic in rng.choices(list(TOPICS), k=240))
    (tmp_path / "my/new.txt").write_text("The invoice is too high.\nNo password helps.\n")
    return tmp_path


def commands() -> list[list[str]]:
    """The commands of the guide's way that call cram, without its name."""
    way = GUIDE.split("\n## From your text to a classifier\n")[1].split("\n## ")[0]
    return [shlex.split(command) for command in re.findall(r"^ {4}cram (.+)$", way, re.MULTILINE)]


def test_the_guide_s_commands_make_a_model_of_text_and_labels_and_its_predictions(mine: Path, store: Path, monkeypatch):
    init, plan, run, predict, export = commands()
    monkeypatch.chdir(mine)

    def cram(*arguments: str, status: int = 0) -> Result:
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == status, done.output
        return done

    assert "tickets" in cram(*init).stdout
    cram(*plan, status=3)  # some would run
    assert not (store / "report").exists()
    assert "tickets" in cram(*run, "--override", json.dumps(TINY)).stdout
    report = store / "report/latest"
    assert "tickets" in (report / "report.html").read_text()
    [row, baseline] = json.loads((report / "report.json").read_text())["scores"]
    assert [row["pretrained"], baseline["pretrained"], row["task"]] == [True, False, "tickets"]
    predicted = cram(*predict)
    answers = [line.split("\t") for line in predicted.stdout.splitlines()]
    assert len(answers) == 2
    assert {label for label, _ in answers} <= set(TOPICS)
    [model] = re.findall(r"finetune/\w+", predicted.stderr)
    cram(*(model if part == "finetune/KEY" else part for part in export))
    assert (mine / export[-1] / "model.safetensors").is_file()
