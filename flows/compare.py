"""`cram compare`: several reports side by side, in the terminal and as a page."""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from model import InputError

if TYPE_CHECKING:  # importing it imports Prefect, whose settings the command line makes first
    from tasks.stage import Artifact

NEEDED = (
    "averages",
    "scores",
    "params",
    "finetuning",
    "pretraining",
    "artifacts",
)  # of report.json, since the report's version 4


class Run(NamedTuple):
    """A report, and what it is called beside the others."""

    name: str
    about: dict

    def artifact(self, stage: str) -> str | None:
        """The artifact of a stage that led to it."""
        return next((name for name in self.about["artifacts"] if name.startswith(f"{stage}/")), None)

    def rows(self, protocol: str) -> dict[str, dict]:
        """The scores with pretraining on all of the training data, by column."""
        kind = (protocol, True, 1.0)
        found = [row for row in self.about["scores"] if (row["protocol"], row["pretrained"], row["share"]) == kind]
        return {row["column"]: row for row in found}


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN …", help="report/KEY, a key, the beginning of one, or `latest`.")
    ],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a page too.")] = None,
) -> None:
    """Set several reports side by side: scores with their spread, what they cost, and what differs in parameters.

    Differences are to the first, and only of what was measured on the same data.
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from tasks.page import page
    from tasks.stage import find

    found = [find("report", name.removeprefix("report/")) for name in runs]
    if len(set(found)) < max(2, len(found)):
        raise InputError(
            f"{', '.join(a.name for a in found)} {'are' if len(found) > 1 else 'is'} not two or more different reports. Give "
            "several; `cram ls report` lists them."
        )
    if html and not html.absolute().parent.is_dir():
        raise InputError(
            f"There is no directory {html.absolute().parent} to write {html.name} to. Make it, or give another."
        )
    told = named(found)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(Markdown(text(told)))
    if html:
        with tempfile.TemporaryDirectory() as folder:
            draw(told, Path(folder))
            pictures = {path.name: path.read_text() for path in Path(folder).iterdir()}
        html.write_text(page(text(told, pictures), "Comparison", pictures))
        console.print(f"The page: {html}", soft_wrap=True, highlight=False)


def named(found: Sequence["Artifact"]) -> list[Run]:
    """The reports with their titles; where these are the same, with their keys."""
    abouts = [json.loads((artifact.path / "report.json").read_text()) for artifact in found]
    for artifact, about in zip(found, abouts, strict=True):
        if missing := [name for name in NEEDED if name not in about]:
            raise InputError(
                f"{artifact.name} was made by an older version of cram: its report.json has no {missing[0]}. Run its recipe "
                "again; all but finetuning and the report is cached."
            )
    titles = [about["title"] for about in abouts]
    alone = [titles.count(title) == 1 for title in titles]
    return [
        Run(title if single else f"{title} ({artifact.key})", about)
        for artifact, about, title, single in zip(found, abouts, titles, alone, strict=True)
    ]


def text(runs: list[Run], pictures: Sequence[str] = ()) -> str:
    """All of it as Markdown."""
    from tasks.markdown import escape, items
    from tasks.scores import PROTOCOLS
    from tasks.sections import picture

    means = [(run.name, run.about["averages"]["cramming"]["paper"]) for run in runs]
    shown = items(f"**{mean:.1f}** {escape(name)}, GLUE average of nine" for name, mean in means if mean is not None)
    sections = [
        f"# {len(runs)} runs side by side",
        f"{'; '.join(escape(run.name) for run in runs)}. Differences are to the first, of what was measured on the same data.",
        *([shown] if shown else []),
        *(part for protocol in PROTOCOLS for part in scores(runs, protocol)),
        *pretraining(runs),
        *([picture("heldout.svg", "Held-out loss over tokens")] if "heldout.svg" in pictures else []),
        *parameters(runs),
    ]
    return "\n\n".join(sections) + "\n"


def scores(runs: list[Run], protocol: str) -> list[str]:
    """The scores of one protocol: median and range of each run, and differences."""
    from tasks.markdown import Marked, escape, table
    from tasks.scores import COLUMNS
    from tasks.sections import METRICS, TITLES, partial_notes

    rows = [run.rows(protocol) for run in runs]
    seen = dict.fromkeys(name for found in rows for name in found)
    columns = [*(c for c in COLUMNS if c in seen), *(c for c in seen if c not in COLUMNS)]
    if not columns:
        return []
    lines, others = [], False
    for name in columns:
        of_runs = [found.get(name) for found in rows]
        first, metric = of_runs[0], next(row["metric"] for row in of_runs if row)
        away: list[object] = []
        for row in of_runs[1:]:
            same = first and row and all(first[what] == row[what] for what in ("data", "metric", "examples"))
            others |= bool(first and row and not same)
            away.append(f"{row['score'] - first['score']:+.1f}" if same else None)
        lines.append([name, METRICS[metric], *map(spread, of_runs), *away])
    for what, kind in (("average of nine", "paper"), ("GLUE's own average", "official")):
        means = [run.about["averages"][protocol][kind] for run in runs]
        away = [None if None in (means[0], mean) else f"{mean - means[0]:+.1f}" for mean in means[1:]]
        lines.append([Marked(f"**{what}**"), "", *means, *away])
    header = ["number", "metric", *(run.name for run in runs), *(f"{run.name}, difference" for run in runs[1:])]
    notes = []
    for run, found in zip(runs, rows, strict=True):
        notes += [f"{escape(run.name)}: {note}" for note in partial_notes(list(found.values()))]
    if others:
        notes.append("No difference is told where two runs were not finetuned and scored on the same data.")
    told = "Median, with the range of the seeds and their number. A difference within these ranges may be chance."
    return [f"## {TITLES[protocol]}", told, table(header, lines), *notes]


def spread(row: dict | None) -> str | None:
    """A score with the range of its seeds."""
    from tasks.markdown import Marked

    if row is None:
        return None
    low, high = row["metrics"][row["metric"]]["range"]
    mark = "\\*" if row["partial"] else ""
    return Marked(f"{row['score']:.1f}{mark} ({low:.1f} to {high:.1f}, {row['seeds']})")


def same_text(runs: list[Run], per_character: bool) -> bool:
    """Whether held-out losses compare: of the same sequences, or, by character, of the same documents."""
    if not per_character:
        return len({run.artifact("tokenize") for run in runs}) == 1
    fractions = {json.dumps(run.about["params"].get("tokenize", {}).get("heldout_fraction")) for run in runs}
    return len({run.artifact("filter") for run in runs}) == 1 and len(fractions) == 1


def pretraining(runs: list[Run]) -> list[str]:
    """What pretraining cost, and the held-out loss."""
    from tasks.markdown import Marked, escape, table

    def line(what: str, tell: Callable[[dict], str | None], compared: bool = True) -> list[object]:
        told = [tell(run.about["pretraining"]) for run in runs]
        return [what, *(Marked(f"{escape(one)}\\*") if one and not compared else one for one in told)]

    token, character = same_text(runs, False), same_text(runs, True)
    lines = [
        line("held-out loss, nats a token", lambda s: f"{s['heldout_loss']:.4f}", token),
        line("held-out loss, nats a character", lambda s: f"{s['heldout_nats_per_character']:.4f}", character),
        line("tokens", lambda s: f"{s['tokens']:,}"),
        line("hours on the clock", lambda s: f"{s['seconds_on_the_clock'] / 3600:.3f}"),
        line("exaFLOP", lambda s: f"{s['exaflops']:.3g}"),
        line("parameters", lambda s: f"{s['parameters']:,}"),
        line("tokens a second", lambda s: f"{s['tokens_per_second']:,.0f}"),
        line("of the rate of matrix products", lambda s: f"{s['mfu']:.1%}"),
        line("machine", lambda s: f"{s['machine']['gpus']} x {s['machine']['device']}, {s['machine']['dtype']}"),
    ]
    note = "\\* The held-out text, or how it is cut into tokens, is not the same in all runs, so these numbers don't compare."
    header = ["", *(run.name for run in runs)]
    return ["## Pretraining", table(header, lines), *([] if token and character else [note])]


def parameters(runs: list[Run]) -> list[str]:
    """The parameters that are not the same in all runs, of all stages; of finetuning, by the protocols that all ran."""
    from flows.cli import flat
    from tasks.markdown import code, table
    from tasks.scores import PROTOCOLS

    protocols = [name for name in PROTOCOLS if all(run.about["finetuning"][name] for run in runs)]
    found = [
        flat(run.about["params"] | {f"finetune ({name})": run.about["finetuning"][name] for name in protocols})
        for run in runs
    ]
    names = [name for name in dict.fromkeys(n for f in found for n in f) if len({f.get(name) for f in found}) > 1]
    lines = [[code(name), *(code(f[name]) if name in f else None for f in found)] for name in names]
    title = "## What differs in parameters"
    if not lines:
        return [title, "Nothing."]
    return [title, table(["parameter", *(run.name for run in runs)], lines)]


def draw(runs: list[Run], folder: Path) -> None:
    """Held-out losses over tokens, if they compare."""
    import numpy as np

    from tasks import plots

    if same_text(runs, per_character=True):
        of_runs = {run.name: run.about["pretraining"]["evaluations"] for run in runs}
        curves = {
            name: (
                np.array([e["tokens"] for e in some]) / 1e6,
                np.array([e["heldout_nats_per_character"] for e in some]),
            )
            for name, some in of_runs.items()
        }
        plots.lines(curves, "million tokens", "held-out loss, nats per character", folder / "heldout.svg", list(curves))
