"""Tables, pictures and Markdown of artifacts on the page of a Prefect run."""

import base64
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from flows.summary import telling
from tasks.reports.markdown import escape
from tasks.store import Artifact
from tasks.workers.progress import reporter

DESCRIPTIONS = {  # by the key of the Prefect artifact
    "decontaminate-table": "Sentences of the downstream tasks that occur in the corpus, by task.",
    "measure-table": "Tokens per character of the documents, by source: the median, 5 % and 95 %.",
    "filter-table": "Documents that the filter read and kept, by source. sources.parquet also has the reasons.",
    "filter-histogram": "Documents by tokens per character: kept and dropped.",
    "vocabulary-table": "Vocabulary entries by kind, and how many of them rarely occur.",
    "pretrain-loss": "Loss during pretraining, on training text and on held-out text.",
    "pretrain-readme": "Model card of the pretrained model: use, recipe, budget, training data, limits.",
    "scores": "Scores by task, the median over seeds. majority: the score of always answering the most frequent class.",
    "report": "The report: scores beside published ones, rules, budget, data funnel. report.html has the figures too.",
    "study-table": "Losses and costs of the runs of a study, means over seeds.",
    "study": "The study: losses, differences, costs, what the paper found. study.html has the curves too.",
    "report-readme": "Model card of the pretrained model, with its scores.",
}
COLUMNS = {  # to show of tables that are too wide for the page
    "measure-table": ("source", "documents", *(f"tokens_per_char, {q}" for q in ("5%", "50%", "95%"))),
    "filter-table": ("source", "documents", "kept", "kept, % of documents", "median tokens_per_char"),
}
ONE_DECIMAL = ("score", "majority")
MARKUP = re.compile(r"[\[<]")  # begins a picture, a link or HTML in Markdown
HEAD = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)  # YAML at the head of a model card, which is for the hub


def described(key: str, artifact: Artifact) -> str:
    """The description of a Prefect artifact, with the command that shows the artifact behind it."""
    return f"{DESCRIPTIONS.get(key, f'Made by the stage {artifact.stage}.')} Details: cram show {artifact.name}"


def cell(name: str, value: object) -> str:
    """A value of this column, with separated thousands; text from data loads and links nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.1f}" if name in ONE_DECIMAL else f"{value:,}"
    # Prefect's older pages read cells as Markdown; the newer ones would show escapes, so usual names have none
    return escape(value) if MARKUP.search(str(value)) else str(value)


def table(key: str, rows: list[dict]) -> list[dict[str, str]]:
    """The rows of a table as text, without columns that are too many or have their usual value in every row."""
    chosen = [name for name in COLUMNS.get(key, ()) if name in rows[0]] or list(rows[0])
    return [{name: cell(name, row[name]) for name in telling(rows, chosen)} for row in rows]


def markdown(path: Path) -> str:
    """The text of a Markdown file, without the YAML at its head, which Prefect would show as a heading."""
    return HEAD.sub("", path.read_text())


def parts(artifact: Artifact) -> Iterator[tuple[str, Callable[[], object]]]:
    """The parts of an artifact for the page of the Prefect run: the key of each, and a call that puts it there."""
    from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

    stage = artifact.stage
    if rows := artifact.stats.get("table"):
        key = "scores" if stage == "report" else f"{stage}-table"
        yield key, partial(create_table_artifact, table(key, rows), key=key, description=described(key, artifact))
    for path in sorted(artifact.path.glob("*.png")):
        key, data = f"{stage}-{path.stem}", base64.b64encode(path.read_bytes()).decode()
        url = f"data:image/png;base64,{data}"
        yield key, partial(create_image_artifact, url, key=key, description=described(key, artifact))
    for path in sorted(artifact.path.glob("*.md") if stage != "finetune" else []):  # of which a run has many
        key = stage if path.stem == stage else f"{stage}-{path.stem.lower()}"
        yield key, partial(create_markdown_artifact, markdown(path), key=key, description=described(key, artifact))


def show(artifact: Artifact) -> None:
    """Have the reporter put the parts of an artifact, cached or not, on the page of the run."""
    for key, call in parts(artifact):
        reporter.send(f"{key} of {artifact.name}", call)
