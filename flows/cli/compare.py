"""`cram compare`: several reports side by side, in the terminal and as a page."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flows.cli.tables import console
from model import InputError
from tasks.text.printable import printable

if TYPE_CHECKING:  # importing it imports Prefect, whose settings the command line makes first
    from tasks.store import Artifact

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

    def rows(self, protocol: str, glue: bool = True) -> dict[str, dict]:
        """The scores with pretraining on all of the training data, by column: of GLUE's tasks, or of the probes."""
        from tasks.reports.scores import NAMES

        kind = (protocol, True, 1.0, glue)
        return {
            row["column"]: row
            for row in self.about["scores"]
            if (row["protocol"], row["pretrained"], row["share"], row["task"] in NAMES) == kind
        }


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN …", help="Reports: report/KEY, a key, the start of one, or `latest`."),
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the comparison as an HTML page.")
    ] = None,
) -> None:
    """Compare reports side by side: scores with their spread, costs, and differing parameters.

    Differences are relative to the first report, and only given for scores on the same data.
    """
    from rich.markdown import Markdown

    from tasks.reports.page import page

    told = named(different([report_called(name) for name in runs]))
    if html is not None:  # before anything is printed: what is wrong with the path is then told alone
        with tempfile.TemporaryDirectory() as folder:
            draw(told, Path(folder))
            pictures = {path.name: path.read_text() for path in Path(folder).iterdir()}
        write(html, page(text(told, pictures), "Comparison", pictures))
    console.print(Markdown(printable(text(told), lines=True)))
    if html is not None:
        console.print(f"HTML page: {printable(html)}", soft_wrap=True, highlight=False, markup=False)


def report_called(name: str) -> "Artifact":
    """The report that a command-line argument names. Raises InputError for anything else."""
    from flows.recipes import STAGES
    from tasks.store import ROOT, find

    key = name.removeprefix("report/")
    if "/" in key:
        stage = key.partition("/")[0]
        what = f"an artifact of {stage}" if stage in STAGES and key == name else "a path"
        raise InputError(f"{name} is {what}; expected a report in {ROOT}, as report/KEY. `cram ls report` lists them.")
    return find("report", key)


def different(found: list["Artifact"]) -> list["Artifact"]:
    """These reports, if they are two or more and no two are the same; else raises InputError."""
    names = [artifact.name for artifact in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice or len(names) < 2:
        problem = f"{twice} is given more than once" if twice else f"{names[0]} alone can't be compared"
        raise InputError(f"{problem}. Give two or more different reports; `cram ls report` lists them.")
    return found


def write(path: Path, content: str) -> None:
    """Write the page. Raises InputError where that can't be done."""
    try:
        path.write_text(content)
    except OSError as error:
        raise InputError(
            f"The page can't be written to '{path}': {error.strerror}. Give --html another file, in a directory where you can write."
        ) from error


def named(found: Sequence["Artifact"]) -> list[Run]:
    """The reports with their titles; where these are the same, with their keys."""
    abouts = [read(artifact) for artifact in found]
    titles = [about["title"] for about in abouts]
    alone = [titles.count(title) == 1 for title in titles]
    return [
        Run(title if single else f"{title} ({artifact.key})", about)
        for artifact, about, title, single in zip(found, abouts, titles, alone, strict=True)
    ]


def read(artifact: "Artifact") -> dict:
    """The report.json of a report. Raises InputError where it is damaged, or was made by an older version of cram."""
    from tasks.store import digest

    path = artifact.path / "report.json"
    recorded = {file["path"]: file["sha256"] for file in artifact.manifest["files"]}
    if digest(path) != recorded[path.name]:
        raise InputError(
            f"{artifact.name} is damaged: the SHA-256 of report.json differs from its manifest. Copy it again, or repeat "
            "the command that made it, with `--refresh report`."
        )
    about = json.loads(path.read_text())
    missing = [name for name in NEEDED if name not in about]
    if not missing and "heldout" not in about["pretraining"]:
        missing = ["pretraining.heldout"]
    if missing:
        raise InputError(
            f"{artifact.name} was made by an older version of cram: its report.json has no {missing[0]}. Run its recipe again."
        )
    return about


def text(runs: list[Run], pictures: Sequence[str] = ()) -> str:
    """All of it as Markdown."""
    from tasks.glue.tasks import PROTOCOLS
    from tasks.reports.common import picture
    from tasks.reports.markdown import escape, items

    means = [(run, run.about["averages"]["cramming"]["paper"]) for run in runs]
    shown = items(
        f"**{mean:.1f}** {escape(run.name)}, GLUE average of nine"
        for run, mean in means
        if mean is not None and any(row["beats_majority"] for row in run.rows("cramming").values())
    )
    sections = [
        f"# {len(runs)} runs side by side",
        f"{'; '.join(escape(run.name) for run in runs)}. Differences are to the first, of what was measured on the same data.",
        *([shown] if shown else []),
        *(part for protocol in PROTOCOLS for part in scores(runs, protocol)),
        *probes(runs),
        *pretraining(runs),
        *(
            [picture("heldout.svg", "Held-out loss over tokens, on a part of the held-out text")]
            if "heldout.svg" in pictures
            else []
        ),
        *parameters(runs),
    ]
    return "\n\n".join(sections) + "\n"


def scores(runs: list[Run], protocol: str) -> list[str]:
    """GLUE's scores by one protocol: median and range of each run, and differences."""
    from tasks.reports.common import TITLES, partial_notes
    from tasks.reports.markdown import Marked, escape, table
    from tasks.reports.scores import COLUMNS

    rows = [run.rows(protocol) for run in runs]
    seen = dict.fromkeys(name for found in rows for name in found)
    columns = [*(c for c in COLUMNS if c in seen), *(c for c in seen if c not in COLUMNS)]
    if not columns:
        return []
    of_runs = {name: [found.get(name) for found in rows] for name in columns}
    away = {name: differences(found) for name, found in of_runs.items()}
    lines = [score_line(name, of_runs[name], away[name]) for name in columns]
    for what, kind in (("average of nine", "paper"), ("GLUE's own average", "official")):
        first, *others = means = [run.about["averages"][protocol][kind] for run in runs]
        of_means = [
            None if None in (first, mean) or None in [away[name][i] for name in COLUMNS] else f"{mean - first:+.1f}"
            for i, mean in enumerate(others)
        ]
        lines.append([Marked(f"**{what}**"), "", *means, *of_means])
    notes = []
    for run, found in zip(runs, rows, strict=True):
        notes += [f"{escape(run.name)}: {note}" for note in partial_notes(list(found.values()))]
    if any(untold(of_runs[name], away[name]) for name in columns):
        notes.append("No difference is shown for runs that were not finetuned and scored on the same data.")
    return [f"## {TITLES[protocol]}", how_to_read(rows), table(header(runs), lines), *notes]


def probes(runs: list[Run]) -> list[str]:
    """The scores of the probes, which are no part of GLUE and enter no average; differences where they are the same ones."""
    from tasks.reports.markdown import table

    rows = [run.rows("cramming", glue=False) for run in runs]  # the only protocol that has them
    of_runs = {name: [found.get(name) for found in rows] for name in dict.fromkeys(n for f in rows for n in f)}
    if not of_runs:
        return []
    same = [all_from_one([runs[0], run], "tokenize") for run in runs[1:]]
    away = {
        name: [told if one else None for told, one in zip(differences(found), same, strict=True)]
        for name, found in of_runs.items()
    }
    lines = [score_line(name, found, away[name]) for name, found in of_runs.items()]
    note = "No difference is shown for models trained on different tokenized corpora, whose held-out documents the probes are made from."
    notes = [note] if any(untold(of_runs[name], away[name]) for name in of_runs) else []
    return ["## Probes (these are not GLUE)", how_to_read(rows), table(header(runs), lines), *notes]


def header(runs: list[Run]) -> list[str]:
    """Of a table of scores."""
    return ["number", "metric", *(run.name for run in runs), *(f"{run.name}, difference" for run in runs[1:])]


def score_line(name: str, of_runs: list[dict | None], away: list[str | None]) -> list[object]:
    """Of a table of scores."""
    from tasks.reports.common import METRICS

    metric = next(row["metric"] for row in of_runs if row)
    return [name, METRICS[metric], *map(spread, of_runs), *away]


def differences(of_runs: list[dict | None]) -> list[str | None]:
    """How far each run but the first is from it in one number; None where it was not measured on the same data."""
    first, *others = of_runs
    return [
        f"{row['score'] - first['score']:+.1f}"
        if first and row and all(first[what] == row[what] for what in ("data", "metric", "examples"))
        else None
        for row in others
    ]


def untold(of_runs: list[dict | None], away: list[str | None]) -> bool:
    """Whether the first run and another both have a number, but no difference."""
    first, *others = of_runs
    return any(first and row and told is None for row, told in zip(others, away, strict=True))


def how_to_read(rows: list[dict[str, dict]]) -> str:
    """What the numbers of a table of scores are."""
    from tasks.reports.common import WEAK

    told = "Median, with the range of the seeds and their number. A difference within these ranges may be chance."
    if any(row["seeds"] == 1 for found in rows for row in found.values()):
        told += " A single seed has no spread: a difference from or to it may be chance, however large it looks."
    if not all(row.get("beats_majority", True) for found in rows for row in found.values()):  # none in older reports
        told += f" {WEAK} No better than always answering the most frequent class, or the mean."
    return told


def spread(row: dict | None) -> str | None:
    """A score with the range of its seeds, if there are several."""
    from model.quantities import span
    from tasks.reports.common import WEAK
    from tasks.reports.markdown import Marked

    if row is None:
        return None
    low, high = row["metrics"][row["metric"]]["range"]
    seeds = f"{span(low, high)}, {row['seeds']}" if row["seeds"] > 1 else "1 seed"
    mark = ("\\*" if row["partial"] else "") + ("" if row.get("beats_majority", True) else WEAK)
    return Marked(f"{row['score']:.1f}{mark} ({seeds})")


def all_from_one(runs: list[Run], stage: str) -> bool:
    """Whether one artifact of a stage led to all of these; no, where it is not known."""
    names = {run.artifact(stage) for run in runs}
    return len(names) == 1 and None not in names


def same_text(runs: list[Run], per_token: bool) -> bool:
    """Whether held-out losses compare: of the same documents and, per token, of one vocabulary too."""
    digests = {run.about["pretraining"]["heldout"]["digest"] for run in runs}
    return len(digests) == 1 and (not per_token or all_from_one(runs, "vocabulary"))


def pretraining(runs: list[Run]) -> list[str]:
    """What pretraining cost, and the held-out loss."""
    from tasks.reports.markdown import Marked, escape, table
    from tasks.reports.training_sections import nats

    def line(what: str, tell: Callable[[dict], str | None], compared: bool = True) -> list[object]:
        told = [tell(run.about["pretraining"]) for run in runs]
        return [what, *(Marked(f"{escape(one)}\\*") if one and not compared else one for one in told)]

    token, text = same_text(runs, per_token=True), same_text(runs, per_token=False)
    lines = [
        line("held-out loss, nats per byte", lambda s: nats(s["heldout"], "byte"), text),
        line("held-out loss, nats per character", lambda s: nats(s["heldout"], "character"), text),
        line("held-out loss, nats per token", lambda s: nats(s["heldout"], "token"), token),
        line("tokens", lambda s: f"{s['tokens']:,}"),
        line("hours on the clock", lambda s: f"{s['seconds_on_the_clock'] / 3600:.3f}"),
        line("exaFLOP", lambda s: f"{s['exaflops']:.3g}"),
        line("parameters", lambda s: f"{s['parameters']:,}"),
        line("tokens a second", lambda s: f"{s['tokens_per_second']:,.0f}"),
        line("MFU", lambda s: f"{100 * s['mfu']:.0f} %"),
        line("machine", lambda s: f"{s['machine']['gpus']} x {s['machine']['device']}, {s['machine']['dtype']}"),
    ]
    notes = []
    if not token:
        what = "vocabularies are not the same" if text else "loss was measured on different held-out documents"
        notes.append(f"\\* The {what}, so these numbers don't compare.")
    if text:
        notes.append(
            "± is the standard error over documents. Runs on the same documents share most of it, so smaller differences can be real."
        )
    return ["## Pretraining", table(["", *(run.name for run in runs)], lines), *notes]


def parameters(runs: list[Run]) -> list[str]:
    """The parameters that are not the same in all runs, of all stages; of finetuning, by the protocols that all ran.

    Of finetuning data it tells digests, of the tasks that all ran.
    """
    from flows.summary import flat
    from tasks.glue.tasks import PROTOCOLS
    from tasks.reports.markdown import code, table

    found = [dict(run.about["params"]) for run in runs]
    for protocol in PROTOCOLS:
        of_runs = [run.about["finetuning"][protocol] for run in runs]
        data = [{row["task"]: row["data"] for row in run.rows(protocol).values()} for run in runs]
        if all(of_runs):
            for about, settings, own in zip(found, of_runs, data, strict=True):
                shared = {task: digest for task, digest in own.items() if all(task in other for other in data)}
                about[f"finetune ({protocol})"] = settings | {"data": shared}
    found = [flat(about) for about in found]
    names = [name for name in dict.fromkeys(n for f in found for n in f) if len({f.get(name) for f in found}) > 1]
    lines = [[code(name), *(code(f[name]) if name in f else None for f in found)] for name in names]
    title = "## What differs in parameters"
    if not lines:
        return [title, "Nothing."]
    return [title, table(["parameter", *(run.name for run in runs)], lines)]


def draw(runs: list[Run], folder: Path) -> None:
    """Held-out losses over tokens, if they compare."""
    import numpy as np

    from tasks.reports import plots

    if same_text(runs, per_token=False):
        of_runs = {run.name: run.about["pretraining"]["evaluations"] for run in runs}
        curves = {
            name: (
                np.array([e["tokens"] for e in some]) / 1e6,
                np.array([e["heldout_nats_per_byte"] for e in some]),
            )
            for name, some in of_runs.items()
        }
        plots.lines(curves, "million tokens", "held-out loss, nats per byte", folder / "heldout.svg", list(curves))
