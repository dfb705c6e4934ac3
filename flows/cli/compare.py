"""`cram compare`: several reports side by side, in the terminal and as a page."""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flows.cli.tables import console
from model import InputError
from tasks.text.printable import printable

# importing these is slow, and importing the store imports Prefect before the command line has set it up
if TYPE_CHECKING:
    import pandas as pd

    from tasks.store import Artifact

# What a comparison reads of report.json; reports have it since version 4.
NEEDED = ("averages", "scores", "params", "finetuning", "pretraining", "artifacts")
INCOMPARABLE = "No difference is shown for runs on different data; probes are made from the held-out text of a model."


class Run(NamedTuple):
    """A report, and its name in the comparison."""

    name: str
    about: dict


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="REPORT REPORT …", help="Reports: report/KEY, a key, the start of one, or `latest`."),
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

    compared = named(different([report_called(name) for name in runs]))
    if html is not None:  # before anything is printed, so that an error in the path is the only output
        with tempfile.TemporaryDirectory() as folder:
            draw(compared, Path(folder))
            pictures = {path.name: path.read_text() for path in Path(folder).iterdir()}
        try:
            html.write_text(page(text(compared, pictures), "Comparison", pictures))
        except OSError as error:
            raise InputError(
                f"The page can't be written to '{html}': {error.strerror}. Give --html another file."
            ) from error
    console.print(Markdown(printable(text(compared), lines=True)))
    if html is not None:
        console.print(f"HTML page: {printable(html)}", soft_wrap=True, highlight=False, markup=False)


def report_called(name: str) -> "Artifact":
    """The report that a command-line argument names. Raises InputError for anything else."""
    from tasks.store import ROOT, find

    stage, _, key = name.rpartition("/")
    if stage not in ("", "report"):
        raise InputError(f"{name} is not a report; expected report/KEY in {ROOT}. `cram ls report` lists them.")
    return find("report", key)


def different(reports: list["Artifact"]) -> list["Artifact"]:
    """These reports, if they are two or more and no two are the same; else raises InputError."""
    names = [report.name for report in reports]
    if len(names) < 2 or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), None)
        problem = f"{twice} is given more than once" if twice else f"{names[0]} alone can't be compared"
        raise InputError(f"{problem}. Give two or more different reports; `cram ls report` lists them.")
    return reports


def named(reports: Sequence["Artifact"]) -> list[Run]:
    """The reports under their titles; those that share a title also with their keys."""
    abouts = [read(report) for report in reports]
    titles = [about["title"] for about in abouts]
    names = [
        title if titles.count(title) == 1 else f"{title} ({report.key})"
        for title, report in zip(titles, reports, strict=True)
    ]
    return list(map(Run, names, abouts))


def read(report: "Artifact") -> dict:
    """The report.json of a report. Raises InputError if it is damaged or was made by an older version of cram."""
    from tasks.store import verify

    verify(report)
    about = json.loads((report.path / "report.json").read_text())
    missing = [name for name in NEEDED if name not in about]
    if not missing and "nats_per_word" not in about["pretraining"].get("heldout", {}):
        missing = ["pretraining.heldout.nats_per_word"]
    if missing:
        raise InputError(
            f"{report.name} is of an older version of cram: its report.json has no {missing[0]}. Run its recipe again."
        )
    return about


def text(runs: list[Run], pictures: Sequence[str] = ()) -> str:
    """The comparison as Markdown."""
    from tasks.glue.tasks import PROTOCOLS
    from tasks.reports.common import picture
    from tasks.reports.markdown import escape, items

    scores = all_scores(runs)
    glue = scores[scores["glue"]]
    above = set(glue[(glue["protocol"] == "cramming") & glue["beats_majority"]]["run"])
    means = [(run.about["averages"]["cramming"]["paper"], run) for number, run in enumerate(runs) if number in above]
    headline = [f"**{mean:.1f}** {escape(run.name)}, GLUE average of nine" for mean, run in means if mean is not None]
    curve = [picture("heldout.svg", "Held-out loss over tokens, on a part of the held-out text")]
    sections = [
        f"# {len(runs)} runs side by side",
        f"{'; '.join(escape(run.name) for run in runs)}. Differences are relative to the first run, on the same data.",
        *([items(headline)] if headline else []),
        *(part for protocol in PROTOCOLS for part in glue_section(runs, protocol, glue[glue["protocol"] == protocol])),
        *score_section(runs, scores[~scores["glue"]], "Probes (these are not GLUE)"),
        *pretraining(runs),
        *(curve if "heldout.svg" in pictures else []),
        *parameters(runs, glue),
    ]
    return "\n\n".join(sections) + "\n"


def all_scores(runs: list[Run]) -> "pd.DataFrame":
    """The scores with pretraining on all of the training data: a row for each, with the fields of report.json.

    Added are `run` (its index), `glue` (False for a probe), `difference` (to the first run's score, in points; NaN
    unless it was measured on the same data) and `incomparable` (the first run has a score, but on other data).
    """
    import pandas as pd

    from tasks.reports.scores import NAMES

    fields = ["task", "column", "protocol", "metric", "score", "metrics", "seeds", "data", "partial", "examples"]
    scores = pd.DataFrame(
        (
            {"beats_majority": True, **row, "run": number}  # older reports don't say whether a score beats the majority
            for number, run in enumerate(runs)
            for row in run.about["scores"]
            if row["pretrained"] and row["share"] == 1.0
        ),
        columns=["run", *fields, "beats_majority"],
    ).astype({"beats_majority": bool})
    scores["glue"] = scores["task"].isin(NAMES)
    measured = scores[["metric", "data", "examples"]].to_dict("records")
    scores["measured"] = [json.dumps(about, sort_keys=True) for about in measured]
    key = ["protocol", "column"]
    first = scores.loc[scores["run"] == 0, [*key, "measured", "score"]]
    scores = scores.merge(first, how="left", on=key, suffixes=("", " of first"))
    # Probes are made from the held-out documents of a tokenized corpus.
    one_corpus = [number for number, run in enumerate(runs) if all_from_one([runs[0], run], "tokenize")]
    same = (scores["measured"] == scores["measured of first"]) & (scores["glue"] | scores["run"].isin(one_corpus))
    scores["difference"] = (scores["score"] - scores["score of first"]).where(same)
    scores["incomparable"] = scores["score of first"].notna() & ~same
    return scores


def score_section(
    runs: list[Run], scores: "pd.DataFrame", title: str, averages: Iterable[list] = (), notes: Iterable[str] = ()
) -> list[str]:
    """A table of scores: a row for each number, with the score of each run and its difference to the first."""
    from tasks.reports.common import METRICS
    from tasks.reports.markdown import table
    from tasks.reports.scores import COLUMNS

    if scores.empty:
        return []
    order = [*COLUMNS, *scores["column"]]
    lines = []
    for name, of_number in sorted(scores.groupby("column", sort=False), key=lambda group: order.index(group[0])):
        of_runs = {row["run"]: row for row in of_number.to_dict("records")}
        cells = [spread(of_runs[number]) if number in of_runs else None for number in range(len(runs))]
        away = of_number.set_index("run")["difference"].reindex(range(1, len(runs)))
        lines.append([name, METRICS[of_number["metric"].iloc[0]], *cells, *map(points, away)])
    header = ["number", "metric", *(run.name for run in runs), *(f"{run.name}, difference" for run in runs[1:])]
    why = [INCOMPARABLE] if scores["incomparable"].any() else []
    return [f"## {title}", how_to_read(scores), table(header, [*lines, *averages]), *notes, *why]


def points(difference: float) -> str | None:
    """A difference as a cell; None for NaN."""
    return f"{difference:+.1f}" if difference == difference else None


def glue_section(runs: list[Run], protocol: str, scores: "pd.DataFrame") -> list[str]:
    """GLUE's scores by one protocol: median and range of each run, differences, averages."""
    from tasks.reports.common import TITLES, partial_notes
    from tasks.reports.markdown import Marked, escape
    from tasks.reports.scores import COLUMNS

    compared = scores[scores["column"].isin(COLUMNS)].groupby("run")["difference"].count()
    complete = compared.reindex(range(1, len(runs)), fill_value=0) == len(COLUMNS)
    averages = []
    for title, kind in (("average of nine", "paper"), ("GLUE's own average", "official")):
        first, *others = means = [run.about["averages"][protocol][kind] for run in runs]
        away = [
            points(mean - first) if all_nine and None not in (first, mean) else None
            for mean, all_nine in zip(others, complete, strict=True)
        ]
        averages.append([Marked(f"**{title}**"), "", *means, *away])
    notes = [
        f"{escape(run.name)}: {note}"
        for number, run in enumerate(runs)
        for note in partial_notes(scores[scores["run"] == number].to_dict("records"))
    ]
    return score_section(runs, scores, TITLES[protocol], averages, notes)


def how_to_read(scores: "pd.DataFrame") -> str:
    """What the numbers of a table of scores mean."""
    from tasks.reports.common import WEAK

    sentences = [
        "Median, with the range of the seeds and their number. A difference within these ranges may be chance."
    ]
    if (scores["seeds"] == 1).any():
        sentences += ["A single seed has no spread: a difference from or to it may be chance, however large it looks."]
    if not scores["beats_majority"].all():
        sentences += [f"{WEAK} No better than always answering the most frequent class, or the mean."]
    return " ".join(sentences)


def spread(row: dict) -> str:
    """A score with the range of its seeds, if there are several."""
    from model.quantities import span
    from tasks.reports.common import WEAK
    from tasks.reports.markdown import Marked

    low, high = row["metrics"][row["metric"]]["range"]
    seeds = f"{span(low, high)}, {row['seeds']}" if row["seeds"] > 1 else "1 seed"
    mark = ("\\*" if row["partial"] else "") + ("" if row["beats_majority"] else WEAK)
    return Marked(f"{row['score']:.1f}{mark} ({seeds})")


def all_from_one(runs: list[Run], stage: str) -> bool:
    """Whether all of these were made from one artifact of a stage; False if that is unknown."""
    names = {next((name for name in run.about["artifacts"] if name.startswith(f"{stage}/")), None) for run in runs}
    return len(names) == 1 and None not in names


def same_text(runs: list[Run]) -> bool:
    """Whether held-out losses can be compared: they need the same documents."""
    return len({run.about["pretraining"]["heldout"]["digest"] for run in runs}) == 1


def pretraining(runs: list[Run]) -> list[str]:
    """The cost of pretraining, and the held-out loss."""
    from tasks.reports.markdown import Marked, escape, table
    from tasks.reports.training_sections import nats

    def line(name: str, cell: Callable[[dict], str], comparable: bool = True) -> list[object]:
        cells = [cell(run.about["pretraining"]) for run in runs]
        return [name, *(one if comparable else Marked(f"{escape(one)}\\*") for one in cells)]

    text = same_text(runs)
    lines = [
        line("held-out loss, nats per byte", lambda s: nats(s["heldout"], "byte"), text),
        line("held-out loss, nats per character", lambda s: nats(s["heldout"], "character"), text),
        line("held-out loss, nats per word", lambda s: nats(s["heldout"], "word"), text),
        line("of it per byte for the number of pieces", lambda s: f"{s['heldout']['length_nats_per_byte']:.4f}", text),
        line("bytes deleted or unknown", lambda s: f"{100 * s['heldout']['unread']:.2f} %", text),
        line("tokens", lambda s: f"{s['tokens']:,}"),
        line("hours on the clock", lambda s: f"{s['seconds_on_the_clock'] / 3600:.3f}"),
        line("exaFLOP", lambda s: f"{s['exaflops']:.3g}"),
        line("parameters", lambda s: f"{s['parameters']:,}"),
        line("tokens per second", lambda s: f"{s['tokens_per_second']:,.0f}"),
        line("MFU", lambda s: f"{100 * s['mfu']:.0f} %"),
        line("machine", lambda s: f"{s['machine']['gpus']} x {s['machine']['device']}, {s['machine']['dtype']}"),
    ]
    notes = []
    if not text:
        notes.append("\\* These numbers can't be compared: they were measured on different held-out documents.")
    else:
        notes.append(
            "± is the standard error over documents. Runs on the same documents share most of it, so smaller "
            "differences can be real."
        )
    return ["## Pretraining", table(["", *(run.name for run in runs)], lines), *notes]


def parameters(runs: list[Run], glue: "pd.DataFrame") -> list[str]:
    """The parameters of all stages that differ between runs; those of finetuning for protocols that all runs have.

    Of the finetuning data, digests are compared, for the tasks that all runs have. `glue`: the scores.
    """
    import pandas as pd

    from flows.summary import flat
    from tasks.glue.tasks import PROTOCOLS
    from tasks.reports.markdown import code, table

    stages = [dict(run.about["params"]) for run in runs]
    for protocol in PROTOCOLS:
        settings = [run.about["finetuning"][protocol] for run in runs]
        of_protocol = glue[glue["protocol"] == protocol]
        shared = of_protocol[of_protocol.groupby("task")["run"].transform("nunique") == len(runs)]
        for number, (params, of_run) in enumerate(zip(stages, settings, strict=True)):
            data = shared[shared["run"] == number].set_index("task")["data"].to_dict()
            params |= {f"finetune ({protocol})": of_run | {"data": data}} if all(settings) else {}
    values = pd.concat([pd.Series(flat(params), dtype=object) for params in stages], axis=1)
    differing = values[values.nunique(axis=1, dropna=False) > 1]
    lines = [
        [code(name), *(None if pd.isna(value) else code(value) for value in of_runs)]
        for name, *of_runs in differing.itertuples()
    ]
    listed = table(["parameter", *(run.name for run in runs)], lines) if lines else "None."
    return ["## Differing parameters", listed]


def draw(runs: list[Run], folder: Path) -> None:
    """Draw the held-out losses over tokens, if they can be compared."""
    import pandas as pd

    from tasks.reports import plots

    if same_text(runs):
        evaluations = {run.name: pd.DataFrame(run.about["pretraining"]["evaluations"]) for run in runs}
        curves = {
            name: (of_run["tokens"].to_numpy() / 1e6, of_run["heldout_nats_per_byte"].to_numpy())
            for name, of_run in evaluations.items()
        }
        plots.lines(curves, "million tokens", "held-out loss, nats per byte", folder / "heldout.svg", list(curves))
