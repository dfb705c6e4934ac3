"""Sections of reports and cards, as Markdown: what manifests say, in tables and sentences."""

from collections.abc import Iterable, Sequence

from model.quantities import counted, duration, span
from tasks.glue.tasks import TASKS
from tasks.reports.common import (
    METRICS,
    ROLES,
    TITLES,
    WEAK,
    as_words,
    escaped_note,
    marked,
    partial_notes,
    picture,
    settings,
    short,
    spread_words,
    titled,
    weak_notes,
)
from tasks.reports.markdown import Marked, code, escape, items, table
from tasks.reports.rules import REFERENCE, protocol_words
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


def head(title: str, rows: list[dict], pretrained: dict, asked: dict) -> list[str]:
    """The heading, what was done in a sentence, and the few numbers that say how it went. `asked`: as for settings_section."""
    stats, own = pretrained["stats"], chosen(rows, "cramming")
    shown_rows = own or chosen(rows, "modern")
    done = (
        f"An encoder of {short(stats['parameters'])} parameters, pretrained from scratch in "
        f"{duration(stats['seconds_on_the_clock'])} on {escape(stats['machine']['device'])}"
    )
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["task"] in NAMES))
    done += f", then finetuned on {counted(len(tasks), 'task')} of GLUE." if tasks else "."
    figures = []
    for protocol in PUBLISHED:
        of_protocol = chosen(rows, protocol)
        found = averages(of_protocol)
        what = "GLUE, average of nine" + ("" if protocol == "cramming" else ", protocol modern")
        nine = [row for row in of_protocol if row["column"] in COLUMNS]
        if found["paper"] is not None and any(row["beats_majority"] for row in nine):
            figures.append((f"{found['paper']:.1f}", what))
    if not figures:
        figures = [
            (f"{row['score']:.1f}", f"{row['column']}, {METRICS[row['metric']]}" + ("" if own else ", protocol modern"))
            for row in shown_rows
            if not row["partial"] and row["beats_majority"]
        ]
    figures += [
        (f"{stats['heldout_loss']:.2f}", "held-out loss, nats per token"),
        (short(stats["tokens"]), "tokens read"),
        (f"{100 * stats['mfu']:.0f} %", "MFU"),
    ]
    beside = ""
    if averages(own)["paper"] is not None:
        known = [f"{row.model} {row.average}" for row in PUBLISHED["cramming"] if row.model in HEADLINE]
        other = {name: value for name, value in REFERENCE.items() if asked[name] != value}
        here = {name: "by task" if isinstance(asked[name], dict) else asked[name] for name in other}
        apart = ", ".join(f"{name} {value}, here {here[name]}" for name, value in other.items())
        how = f"finetuned otherwise ({apart})" if other else "with the same finetuning"
        beside = f"Published averages, {how}: {'; '.join(known)}."
    return [
        f"# {escape(title)}",
        f"{done} {beside}".strip(),
        items([f"**{number}** {what}" for number, what in figures]),
        *weak_notes(shown_rows, mark=""),
    ]


def score_lines(title: str, ours: dict[bool, list[dict]], published: Sequence[Published]) -> list[list]:
    """The rows of a protocol's table: our runs, pretrained and not; the majority baseline; published models."""
    lines = []
    for pretrained, rows in ours.items():
        if rows:
            name = escape(title) if pretrained else Marked(f"{escape(title)}, no pretraining")
            scores = {r["column"]: marked(f"{r['score']:.1f}", r["partial"], r["beats_majority"]) for r in rows}
            mean = averages(rows)
            own = [scores.get(c) for c in COLUMNS]
            lines.append([Marked(f"**{name}** (this run)"), mean["paper"], mean["official"], *own])
    simple = {
        row["column"]: marked(f"{row['majority'][row['metric']]:.1f}", row["partial"])
        for row in ours[True] or ours[False]
    }
    lines.append(["majority class or mean (this data)", None, None, *(simple.get(c) for c in COLUMNS)])
    sources = sources_of(published)
    for row in published:
        name = Marked(f"*{escape(row.model)}* (published \\[{sources.index(row.source) + 1}\\])")
        means = (row.average, None) if row.numbers == len(COLUMNS) else (None, f"{row.average:.1f} (of {row.numbers})")
        lines.append([name, *means, *(row.scores.get(c) for c in COLUMNS)])
    return lines


def sources_of(published: Sequence[Published]) -> list[str]:
    """The different sources of published rows, in their order."""
    return list(dict.fromkeys(row.source for row in published))


def score_notes(ours: dict[bool, list[dict]], published: Sequence[Published]) -> list[str]:
    """What to know about a protocol's table: weak scores, sources, averages, what is missing or partial."""
    own = ours[True] or ours[False]
    notes = weak_notes(ours[True])
    notes += [f"{note[:-1]} (no pretraining)." for note in weak_notes(ours[False])]
    numbered = (f"[{i}] {source}" for i, source in enumerate(sources_of(published), 1))
    notes += [f"Sources of the published rows: {'; '.join(numbered)}."]
    notes += [
        "*Average* is the paper's: the mean of these nine numbers, in which MNLI counts twice. *GLUE's own* is the official one: "
        "the mean of eight tasks, each the mean of its metrics."
    ]
    by_seed = average_by_seed(own)
    if len(by_seed) > 1:
        notes.append(
            f"Ours is the average of medians. That of each seed by itself, for the {len(by_seed)} that every number has: "
            f"{span(by_seed[0], by_seed[-1])}."
        )
    missing = [c for c in COLUMNS if c not in {row["column"] for row in own}]
    partial = [row["column"] for row in own if row["partial"] and row["column"] in COLUMNS]
    if missing or partial:
        what = [f"{', '.join(missing)} {'were' if len(missing) > 1 else 'was'} not run"] if missing else []
        what += [f"{', '.join(partial)} {'are' if len(partial) > 1 else 'is'} on partial data"] if partial else []
        notes.append(f"No average of ours: it needs all nine numbers, and {' and '.join(what)}.")
    notes += partial_notes(own)
    return [*notes, *(f"WNLI, which enters no average: {row['score']:.1f}." for row in own if row["task"] == "wnli")]


def glue_section(
    rows: list[dict], title: str, protocol: str, params: list[dict], pictures: Iterable[str] = ()
) -> list[str]:
    """The table of one protocol: ours, the simple baselines, and the published rows; then each score by itself.

    `params`: of the protocol's runs on all of the training data.
    """
    ours = {pretrained: chosen(rows, protocol, pretrained) for pretrained in (True, False)}
    if not (ours[True] or ours[False]):
        return []
    shown = "scores.svg" in pictures and protocol == "cramming"
    return [
        f"## {TITLES[protocol]}",
        protocol_words(protocol, params),
        table(["model", "average", "GLUE's own", *COLUMNS], score_lines(title, ours, PUBLISHED[protocol])),
        *([picture("scores.svg", "Our scores beside published ones")] if shown else []),
        ROLES[protocol],
        *map(escaped_note, score_notes(ours, PUBLISHED[protocol])),
        *detail_section([*ours[True], *ours[False]]),
        *settings_section(settings([run for run in params if run["task"] in NAMES])),
    ]


def settings_section(asked: dict) -> list[str]:
    """The same as a table."""
    tasks = list(dict.fromkeys(task for value in asked.values() if isinstance(value, dict) for task in value))
    lines = [
        [code(name), *([as_words(value[task]) for task in tasks] if isinstance(value, dict) else [as_words(value)] * max(1, len(tasks)))]
        for name, value in asked.items()
    ]  # fmt: skip
    return ["### How it was finetuned", table(["setting", *(NAMES.get(t, t) for t in tasks or ["all tasks"])], lines)]


def detail_section(rows: list[dict]) -> list[str]:
    """Each score with its spread over seeds and its bootstrap interval."""
    lines, notes = [], []
    for row in rows:
        for metric, about in row["metrics"].items():
            (low, high), (least, most) = about["interval"], about["range"]
            median = marked(f"{about['median']:.1f}", False, low > row["majority"][metric])
            lines.append([
                marked(row["column"], row["partial"]), METRICS[metric], median,
                spread_words(least, most, row["seeds"]), span(low, high), float(row["majority"][metric]), row["seeds"],
                row["examples"]["train"][0], row["examples"]["validation"][0], label(row["pretrained"]),
            ])  # fmt: skip
        cut = f"{row['column']}: {counted(row['cut'], 'input')} longer than the model's limit, and cut."
        begun = row["column"] + ("" if row["pretrained"] else ", no pretraining")
        notes += [f"{begun}: {note}" for note in row["notes"]]
        notes += [titled(note, row["task"]) for note in row["data_notes"]] + ([cut] if row["cut"] else [])
    header = [
        "number",
        "metric",
        "median",
        "range of seeds",
        "95 % interval",
        "majority",
        "seeds",
        "train",
        "validation",
        "start",
    ]
    return [
        "### Every score, with its spread",
        table(header, lines),
        "The interval is a bootstrap over the validation examples, of the seed whose score is the median (of an even number, the lower one in the middle); the range is that of "
        f"the seeds. Train and validation: examples. {WEAK} The interval holds the majority baseline's score or lies "
        "below it.",
        *([items([escape(note) for note in dict.fromkeys(notes)])] if notes else []),
    ]


def probe_section(rows: list[dict], params: list[dict]) -> list[str]:
    """The probes: with and without pretraining, and the majority baseline. `params`: of the runs on all of the training data."""
    probing = [row for row in rows if row["task"] not in NAMES and row["share"] == 1.0]
    by = {(row["task"], row["pretrained"]): row for row in probing}
    lines = []
    for task in dict.fromkeys(row["task"] for row in probing):
        with_, without = by.get((task, True)), by.get((task, False))
        row = with_ or without
        sizes = f"{row['examples']['train'][0]:,} / {row['examples']['validation'][0]:,}"
        scores = [
            marked(f"{found['score']:.1f}", False, found["beats_majority"]) if found else None
            for found in (with_, without)
        ]
        lines.append([task, *scores, float(row["majority"][row["metric"]]), sizes, row["seeds"]])
    header = ["probe", "pretrained", "no pretraining", "majority", "train / validation examples", "seeds"]
    if not lines:
        return []
    return [
        "## Probes (these are not GLUE)",
        "Accuracy in per cent, median over seeds, on small tasks made from held-out documents.",
        table(header, lines),
        *([f"{WEAK} No better than always answering the most frequent class."] if weak(probing) else []),
        *settings_section(settings([run for run in params if run["task"] not in NAMES])),
    ]


def confusion_section(rows: list[dict]) -> list[str]:
    """For each task, how often which class was taken for which, in the run with the median score."""
    tables = []
    for row in rows:
        if row["confusion"] and row["pretrained"] and row["share"] == 1.0:
            labels = TASKS[row["task"]].labels or tuple(map(str, range(len(row["confusion"]))))
            lines = [
                [name, *counts, f"{100 * counts[i] / max(1, sum(counts)):.1f} %"]
                for i, (name, counts) in enumerate(zip(labels, row["confusion"], strict=True))
            ]
            what = marked(row["column"], row["partial"]) + f", {row['protocol']}: true class"
            tables.append(table([Marked(what), *(f"predicted {name}" for name in labels), "found"], lines))
    told = "Of the seed whose score is the median. Rows are the true classes."
    told += " \\*: of partial data, as said above." if any(row["partial"] for row in rows) else ""
    return ["## Confusion tables", told, *tables] if tables else []


def curve_section(rows: list[dict], partial: set[str], pictures: Iterable[str] = ()) -> list[str]:
    """The scores by share of the training data: `rows` of tasks.reports.errors.learning_curve; `partial`: columns."""
    if all(row["share"] == 1.0 for row in rows):
        return []
    several = {(row["task"], row["split"]) for row in rows if row["share"] < 1.0}
    lines = [
        [marked(name := column(row["task"], row["split"]), name in partial), f"{row['share']:.0%}", row["train_examples"], row["median"],
         spread_words(row["low"], row["high"], row["seeds"]), row["per_doubling"], row["majority"], row["seeds"]]
        for row in rows
        if row["protocol"] == "cramming" and row["pretrained"] and (row["task"], row["split"]) in several
    ]  # fmt: skip
    header = ["number", "share", "examples", "median", "range of seeds", "a doubling gave", "majority", "seeds"]
    shown = [picture("curve.svg", "Score by share of the training data")] if "curve.svg" in pictures else []
    told = "Score against the share of the training data at hand, protocol `cramming`. Shares are drawn by the seed."
    told += " \\*: of partial data, as said above." if partial else ""
    return ["## Learning curve", told, *shown, table(header, lines)]


def cola_section(found: dict) -> list[str]:
    """Where CoLA's predictions are wrong: one split of what tasks.reports.errors.analyse found."""

    def score(row: dict) -> list[object]:
        low, high = row["interval"] or (None, None)
        return [
            row["examples"],
            row["matthews"],
            None if low is None else span(low, high),
            row["accuracy"],
            row["acceptable"],
            row["predicted acceptable"],
        ]

    header = ["examples", "Matthews", "95 % interval", "accuracy", "% acceptable", "% predicted so"]
    lengths = [[row["words"], *score(row)] for row in found["by_length"]]
    kinds = [[row["kind"], *score(row), row["difference"]] for row in found["by_kind"] if row["examples"]]
    cutoffs = [[row["cutoff"], *score(row), row["auc"]] for row in found["cutoffs"]]
    errors = [
        [row["error"], row["examples"], row["of"], row["rate"], row["share_of_errors"]] for row in found["errors"]
    ]
    seeds = [[row["right"], row["examples"], row["share"], row["acceptable"]] for row in found["seeds"]]
    worst = [
        part
        for row in found["errors"]
        if row["most_confident"]
        for part in (
            f"Most confident among *{escape(row['error'])}*:",
            items([escape(one["text"]) for one in row["most_confident"]]),
        )
    ]
    return [
        "## CoLA: where it errs",
        "Of the seed whose score is the median, by length of the sentence in words:",
        table(["words", *header], lengths),
        "### By kind of sentence",
        table(["kind", *header, "to all others"], kinds),
        "### Errors",
        table(["error", "examples", "of", "% of these", "% of all errors"], errors),
        *worst,
        "### Cutoffs and seeds",
        table(["cutoff", *header, "AUC"], cutoffs),
        table(["right in seeds", "examples", "%", "% acceptable"], seeds),
        *map(escape, found["notes"]),
    ]
