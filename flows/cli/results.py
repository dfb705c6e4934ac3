"""What `cram run` prints at its end: the scores, blanks that the model fills in, and where everything is."""

import json

from flows.cli.tables import console, print_rows, print_scores, say, shorten
from flows.summary import relative, telling
from model import InputError
from tasks.store import LINEAGE, Artifact, named

CANDIDATES = 3  # per blank
# By the source of the corpus, since a model knows the words of its text.
BLANKS = {
    "python-docs": (
        "By [MASK], the first element is returned.",
        "See the documentation for more [MASK].",
        "If the argument is [MASK], the default value is used.",
    )
}
GENERAL_BLANKS = (
    "She opened the [MASK] and went inside.",
    "Paris is the capital of [MASK].",
    "He has lived there for many [MASK].",
)


def print_results(artifact: Artifact) -> None:
    """Print what came out of a run: its last artifact."""
    table = artifact.stats.get("table", [])
    if table:
        say("")
    if artifact.stage == "report":
        about = json.loads((artifact.path / "report.json").read_text())
        print_score_table(table)
        print_blanks(named(about["pretrained"]))
        say(f"\nFull report: {relative(artifact.path / 'report.html')}")
        return
    print_rows(table)
    if artifact.stage == "pretrain":
        print_blanks(artifact)
    console.print(f"\n{artifact.stage}: [bold]{shorten(artifact.path)}[/]", soft_wrap=True, highlight=False)


def print_score_table(table: list[dict]) -> None:
    """Print one row per task: its score with and without pretraining, and that of the most frequent class."""
    untrained = {comparable(row): row["score"] for row in table if not row["pretrained"]}
    rows = [
        {
            "task": row["task"],
            "protocol": row["protocol"],
            "share": row["share"],
            "partial data": row["partial data"],
            "metric": row["metric"],
            "score": row["score"],
            "": "†" if row["verdict"] else "",
            "without pretraining": untrained.get(comparable(row), ""),
            "majority": row["majority"],
        }
        for row in table
        if row["pretrained"]
    ]
    if not rows:  # runs without pretraining only
        print_scores(table)
        return
    names = telling(rows)
    print_rows([{name: row[name] for name in names} for row in rows])
    for verdict in dict.fromkeys(row["verdict"] for row in table if row["pretrained"] and row["verdict"]):
        say(f"† {verdict}")


def comparable(row: dict) -> tuple:
    """What scores with and without pretraining have in common."""
    return row["task"], row["protocol"], row["share"]


def print_blanks(model: Artifact) -> None:
    """Print some sentences with a blank, and the most likely tokens by a pretrained model."""
    from flows.cli.inference import Filler, model_folder  # torch: not for every command line

    say(f"\nBlanks filled in by {model.name}:")
    try:
        fill = Filler(model_folder("pretrain", model.name))
        for text in BLANKS.get(source_of(model), GENERAL_BLANKS):
            [candidates] = fill(text, CANDIDATES, "The text")
            say(f"  {text}\n      " + "   ".join(f"{token} {share:.0%}" for token, share in candidates))
    except (InputError, RuntimeError) as problem:  # a model of very short texts, or a full GPU: the run has succeeded
        say(f"  none: {problem}")


def source_of(model: Artifact) -> str:
    """The source of a model's text; empty if it is not known, or a mixture."""
    manifests = json.loads((model.path / LINEAGE).read_text()).values()
    sources = [about["params"].get("source") for about in manifests if about["stage"] == "download"]
    return sources[0] if sources and isinstance(sources[0], str) else ""
