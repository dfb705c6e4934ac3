"""Scores for the page: rows of tables, and what to note about them. The sentences are in the templates."""

from collections.abc import Iterable, Sequence

from model.quantities import counted
from tasks.glue.tasks import PROTOCOLS, TASKS
from tasks.reports.common import METRICS, TITLES, marked, partial_notes, settings_rows, weak_notes
from tasks.reports.markdown import Marked, escape, records, table
from tasks.reports.rules import REFERENCE, from_mnli, varying
from tasks.reports.scores import (
    COLUMNS,
    NAMES,
    PUBLISHED,
    Published,
    average_by_seed,
    averages,
    chosen,
    column,
    label,
    weak,
)

HEADLINE = ("BERT-base, fully trained", "crammed BERT, A6000, final")  # published rows that are named beside ours


def headline(rows: list[dict], settings: dict) -> dict:
    """The `figures` at the top of the page, and the published averages to compare with.

    `settings`: those of protocol cramming. Where they differ from the published ones, `differing` says how.
    """
    figures, suffixes = [], {"cramming": "", "modern": ", protocol modern"}
    for protocol, suffix in suffixes.items():
        nine = [row for row in chosen(rows, protocol) if row["column"] in COLUMNS]
        mean = averages(nine)["paper"]
        if mean is not None and any(row["beats_majority"] for row in nine):
            figures.append((mean, f"GLUE, average of nine{suffix}"))
    shown = chosen(rows, "cramming") or chosen(rows, "modern")
    if not figures:
        figures = [
            (row["score"], f"{row['column']}, {METRICS[row['metric']]}{suffixes[row['protocol']]}")
            for row in shown
            if not row["partial"] and row["beats_majority"]
        ]
    content = {"figures": figures, "weak": weak_notes(shown), "published": [], "differing": []}
    if averages(chosen(rows, "cramming"))["paper"] is not None:
        for name, value in REFERENCE.items():
            if settings[name] != value:
                here = "by task" if isinstance(settings[name], dict) else settings[name]
                content["differing"].append(f"{name} {value}, here {here}")
        content["published"] = [f"{r.model} {r.average}" for r in PUBLISHED["cramming"] if r.model in HEADLINE]
    return content


def protocol_sections(rows: list[dict], title: str, params: dict[str, list[dict]]) -> list[dict]:
    """What scores.md.j2 shows of each protocol; `params`: of its runs on all of the training data."""
    sections = []
    for protocol in PROTOCOLS:
        ours = {pretrained: chosen(rows, protocol, pretrained) for pretrained in (True, False)}
        own = ours[True] or ours[False]
        if not own:
            continue
        runs, published = params[protocol], PUBLISHED[protocol]
        partial = [row["column"] for row in own if row["partial"] and row["column"] in COLUMNS]
        missing = [name for name in COLUMNS if name not in {row["column"] for row in own}]
        sections.append({
            "protocol": protocol, "heading": TITLES[protocol], "varying": varying(runs), "from_mnli": from_mnli(runs),
            "last_epoch": all(run["choose"] == "last" for run in runs),
            "scores": score_table(title, ours, published), "sources": _sources(published),
            "weak": weak_notes(ours[True]), "weak_without": weak_notes(ours[False]),
            "seed_averages": average_by_seed(own), "missing": missing, "incomplete": partial,
            "partial_notes": partial_notes(own), "wnli": [row["score"] for row in own if row["task"] == "wnli"],
            "rows": [*ours[True], *ours[False]], "notes": data_notes([*ours[True], *ours[False]]),
            "settings": settings_rows([run for run in runs if run["task"] in NAMES]),
        })  # fmt: skip
    return sections


def score_table(title: str, ours: dict[bool, list[dict]], published: Sequence[Published]) -> Marked:
    """A protocol's table: our models, pretrained and not; the majority baseline; published models."""
    lines: list[dict] = []
    for pretrained, rows in ours.items():
        if rows:
            mean, name = averages(rows), escape(title) + ("" if pretrained else ", no pretraining")
            line = {"model": Marked(f"**{name}** (this run)"), "average": mean["paper"], "GLUE's own": mean["official"]}
            scores = {row["column"]: marked(row["score"], row["partial"], row["beats_majority"]) for row in rows}
            lines.append(line | scores)
    own = ours[True] or ours[False]
    simple = {row["column"]: marked(row["majority"][row["metric"]], row["partial"]) for row in own}
    lines.append({"model": "majority class or mean (this data)"} | simple)
    sources = _sources(published)
    for row in published:
        name = Marked(f"*{escape(row.model)}* (published \\[{sources.index(row.source) + 1}\\])")
        means = {"average": row.average} if row.numbers == len(COLUMNS) else {}
        means = means or {"GLUE's own": f"{row.average:.1f} (of {row.numbers})"}
        lines.append({"model": name} | means | row.scores)
    return records(lines, {name: name for name in ("model", "average", "GLUE's own", *COLUMNS)})


def _sources(published: Sequence[Published]) -> list[str]:
    return list(dict.fromkeys(row.source for row in published))


def data_notes(rows: list[dict]) -> list[str]:
    """What there is to know about undefined metrics, the data, and truncated inputs."""
    notes = []
    for row in rows:
        name = row["column"] + ("" if row["pretrained"] else ", no pretraining")
        notes += [f"{name}: {note}" for note in row["notes"]]
        title = NAMES.get(row["task"], row["task"])
        notes += [title + n.removeprefix(row["task"]) if n.startswith(row["task"]) else n for n in row["data_notes"]]
        if row["cut"]:
            notes.append(f"{row['column']}: {counted(row['cut'], 'input')} truncated to the model's limit.")
    return list(dict.fromkeys(notes))


def probes(rows: list[dict], params: list[dict]) -> dict:
    """The scores of the probes with and without pretraining; `params`: of the runs on all of the training data."""
    probing = [row for row in rows if row["task"] not in NAMES and row["share"] == 1.0]
    lines: dict[str, dict] = {}
    for row in probing:  # those with pretraining come first
        sizes = (row["examples"][split][0] for split in ("train", "validation"))
        line = lines.setdefault(row["task"], {
            "probe": row["task"], "pretrained": None, "no pretraining": None,
            "majority": float(row["majority"][row["metric"]]),
            "train / validation examples": " / ".join(f"{size:,}" for size in sizes), "seeds": row["seeds"],
        })  # fmt: skip
        line[label(row["pretrained"])] = marked(row["score"], False, row["beats_majority"])
    settings = settings_rows([run for run in params if run["task"] not in NAMES])
    return {"rows": list(lines.values()), "weak": bool(weak(probing)), "settings": settings}


def confusion_tables(rows: list[dict]) -> list[Marked]:
    """For each task, how often which class was predicted as which, in the run with the median score."""
    tables = []
    for row in rows:
        if row["confusion"] and row["pretrained"] and row["share"] == 1.0:
            labels = TASKS[row["task"]].labels or tuple(map(str, range(len(row["confusion"]))))
            lines = [
                [name, *counts, f"{100 * counts[i] / max(1, sum(counts)):.1f} %"]
                for i, (name, counts) in enumerate(zip(labels, row["confusion"], strict=True))
            ]
            name = Marked(f"{marked(row['column'], row['partial'])}, {row['protocol']}: true class")
            tables.append(table([name, *(f"predicted {name}" for name in labels), "recall"], lines))
    return tables


def curve_rows(points: list[dict], partial: Iterable[str]) -> list[dict]:
    """Scores by share of the training data, for what was run on several: `points` of errors.learning_curve."""
    several = {(point["task"], point["split"]) for point in points if point["share"] < 1.0}
    rows = []
    for point in points:
        kind = (point["protocol"], point["pretrained"], (point["task"], point["split"]) in several)
        if kind == ("cramming", True, True):
            name = column(point["task"], point["split"])
            rows.append({
                "number": marked(name, name in partial), "share": f"{point['share']:.0%}",
                "examples": point["train_examples"], "median": point["median"],
                "range of seeds": (point["low"], point["high"]) if point["seeds"] > 1 else None,
                "gain per doubling": point["per_doubling"], "majority": point["majority"], "seeds": point["seeds"],
            })  # fmt: skip
    return rows
