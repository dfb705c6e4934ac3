"""Sections of reports and cards, as Markdown: what manifests say, in tables and sentences."""

from collections.abc import Iterable

from model.quantities import budget, counted, duration, span
from model.settings import Finetuning
from tasks.glue import metrics
from tasks.glue.tasks import MOST_EPOCHS, TASKS
from tasks.reports.markdown import Marked, code, escape, items, table
from tasks.reports.scores import (
    COLUMNS,
    NAMES,
    PUBLISHED,
    average_by_seed,
    averages,
    chosen,
    column,
    is_partial,
    label,
    present,
    weak,
)

RULE_HOURS, RULE_SEEDS = 24.0, 5
RULE_WORDS = 13  # in a row, that a document has in common with downstream data: appendix C of the GPT-3 paper
REFERENCE = Finetuning().model_dump()  # of the published rows
LAST_STEP = 1.001  # a budget ends with the step in which it is spent
HELD_OUT, MEASURED = "held out", "of these, measured for the held-out loss"  # rows of the funnel
WEAK = "†"  # marks a score that doesn't beat the majority baseline
YES, NO, UNKNOWN = "✓", "✗", "?"
METRICS = {name: about.removesuffix(" correlation") for name, about in metrics.NAMES.items()}
HEADLINE = ("BERT-base, fully trained", "crammed BERT, A6000, final")  # published rows that are named beside ours
TITLES = {
    "cramming": "GLUE by the rules of cramming",
    "modern": "GLUE by today's protocol (not by the rules)",
}
ROLES = {
    "cramming": "RTE, SST-2, QNLI, MNLI: accuracy; QQP, MRPC: F1; STS-B: Pearson; CoLA: Matthews; all times 100.",
    "modern": "Metrics as above. The published averages are of eight numbers, MNLI counted once, with metrics of their authors' "
    "choice: compare them with ours with care.",
}


def stage_of(lineage: dict[str, dict], name: str) -> dict | None:
    """The manifest of a stage, if it is known."""
    return next((about for about in lineage.values() if about["stage"] == name), None)


def picture(name: str, what: str) -> str:
    """A picture that lies beside the page."""
    return f"![{escape(what)}]({name})"


def short(number: float) -> str:
    """A large number in a few characters."""
    for unit, of in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= of:
            return f"{number / of:.1f}{unit}"
    return f"{number:g}"


def budget_of(params: dict) -> str:
    """The budget of a pretrain stage in words."""
    return budget(params["budget"], params["budget_unit"])


def marked(text: str, partial: bool, beats: bool = True) -> Marked:
    """With an asterisk where it is of partial data, and a dagger where it is a score that doesn't beat the baseline."""
    return Marked(escape(text) + ("\\*" if partial else "") + ("" if beats else WEAK))


def weak_notes(rows: Iterable[dict], mark: str = f"{WEAK} ") -> list[str]:
    """Which scores don't beat the majority baseline; `mark` is what they have in a table."""
    return [f"{mark}{what.capitalize()}: {', '.join(shown)}." for what, shown in weak(rows).items()]


def spread_words(low: float, high: float, seeds: int) -> str | None:
    """The range of the seeds; None of one seed, which has none."""
    return span(low, high) if seeds > 1 else None


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


def glue_section(
    rows: list[dict], title: str, protocol: str, params: list[dict], pictures: Iterable[str] = ()
) -> list[str]:
    """The table of one protocol: ours, the simple baselines, and the published rows; then each score by itself.

    `params`: of the protocol's runs on all of the training data.
    """
    lines, ours = [], {pretrained: chosen(rows, protocol, pretrained) for pretrained in (True, False)}
    own = ours[True] or ours[False]
    if not own:
        return []
    for pretrained, some in ours.items():
        if some:
            name = escape(title) if pretrained else Marked(f"{escape(title)}, no pretraining")
            scores = {
                row["column"]: marked(f"{row['score']:.1f}", row["partial"], row["beats_majority"]) for row in some
            }
            mean = averages(some)
            of_own = [scores.get(c) for c in COLUMNS]
            lines.append([Marked(f"**{name}** (this run)"), mean["paper"], mean["official"], *of_own])
    simple = {row["column"]: marked(f"{row['majority'][row['metric']]:.1f}", row["partial"]) for row in own}
    lines.append(["majority class or mean (this data)", None, None, *(simple.get(c) for c in COLUMNS)])
    sources = list(dict.fromkeys(row.source for row in PUBLISHED[protocol]))
    for row in PUBLISHED[protocol]:
        name = Marked(f"*{escape(row.model)}* (published \\[{sources.index(row.source) + 1}\\])")
        means = (row.average, None) if row.numbers == len(COLUMNS) else (None, f"{row.average:.1f} (of {row.numbers})")
        lines.append([name, *means, *(row.scores.get(c) for c in COLUMNS)])
    notes = weak_notes(ours[True])
    notes += [f"{note[:-1]} (no pretraining)." for note in weak_notes(ours[False])]
    notes += [f"Sources of the published rows: {'; '.join(f'[{i + 1}] {source}' for i, source in enumerate(sources))}."]
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
    notes += [f"WNLI, which enters no average: {row['score']:.1f}." for row in own if row["task"] == "wnli"]
    header = ["model", "average", "GLUE's own", *COLUMNS]
    shown = [picture("scores.svg", "Our scores beside published ones")] if "scores.svg" in pictures else []
    return [
        f"## {TITLES[protocol]}",
        protocol_words(protocol, params),
        table(header, lines),
        *(shown if protocol == "cramming" else []),
        ROLES[protocol],
        *map(_escaped, notes),
        *detail_section([*ours[True], *ours[False]]),
        *settings_section(settings([run for run in params if run["task"] in NAMES])),
    ]


def settings(params: list[dict]) -> dict:
    """How the runs of a protocol finetuned: each field of `Finetuning` with its value, or with that of each task."""
    told = {}
    for name in (name for name in Finetuning.model_fields if params):
        of_task = {run["task"]: run[name] for run in params}
        told[name] = of_task if len(set(of_task.values())) > 1 else next(iter(of_task.values()))
    return told


def settings_section(asked: dict) -> list[str]:
    """The same as a table."""
    tasks = list(dict.fromkeys(task for value in asked.values() if isinstance(value, dict) for task in value))
    lines = [
        [code(name), *([_said(value[task]) for task in tasks] if isinstance(value, dict) else [_said(value)] * max(1, len(tasks)))]
        for name, value in asked.items()
    ]  # fmt: skip
    return ["### How it was finetuned", table(["setting", *(NAMES.get(t, t) for t in tasks or ["all tasks"])], lines)]


def _said(value: object) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _escaped(note: str) -> str:
    """A note of ours, in which brackets are not links; its emphasis stays."""
    return note.replace("[", "\\[").replace("]", "\\]")


def partial_notes(rows: list[dict]) -> list[str]:
    """What is partial of the data of each number."""
    found = {}
    for row in rows:
        if row["partial"]:
            sizes = ", ".join(
                f"{have:,} of {counted(official, f'{split} example')}"
                for split, (have, official) in row["examples"].items()
            )
            found[row["column"]] = sizes
    return [
        f"\\* {name} is on partial data: {sizes}. It enters no average and compares with nothing published."
        for name, sizes in found.items()
    ]


def titled(note: str, task: str) -> str:
    """A note on data, which begins with the task's name, with its title in place of it."""
    rest = note.removeprefix(task)
    return f"{NAMES[task]}{rest}" if task in NAMES and rest != note else note


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


def funnel(lineage: dict[str, dict]) -> list[dict]:
    """Documents, characters and tokens through each stage."""
    found = []
    for name, about in lineage.items():
        stats = about["stats"]
        if "documents" in stats and about["stage"] != "measure":  # which passes no documents on
            row = {"stage": about["stage"], "artifact": name}
            row |= {what: stats.get(what) for what in ("documents", "characters", "tokens", "sequences")}
            if about["stage"] == "filter":
                row["tokens"] = stats["measured_with"]["tokens_kept"]
            found.append(row)
        if about["stage"] == "tokenize":
            held, counts = stats["heldout"], ("documents", "characters", "tokens", "sequences")
            for stage, of in ((HELD_OUT, held), (MEASURED, held["measured"])):
                found.append({"stage": stage, "artifact": name} | {what: of.get(what) for what in counts})
        if about["stage"] == "pretrain":
            found.append({"stage": f"trained on ({stats['epochs']:.2f} epochs)", "artifact": name, "documents": None,
                          "characters": None, "tokens": stats["tokens"], "sequences": None})  # fmt: skip
    return found


def funnel_table(lineage: dict[str, dict]) -> str:
    """The same as a table."""
    columns = ["stage", "documents", "characters", "tokens", "sequences"]
    return table(columns, [[row[column] for column in columns] for row in funnel(lineage)])


def funnel_section(lineage: dict[str, dict], pictures: Iterable[str] = ()) -> list[str]:
    """What came through each stage, and what each dropped: by reason, and the filter by source."""
    lines, note = (
        [],
        "Tokens behind the filter are those of its own measuring vocabulary; sequences are drawn from more where a limit says so.",
    )
    for about in lineage.values():
        checked = about["stats"].get("checked", True)  # decontaminate had nothing to compare with
        for reason, counts in about["stats"].get("dropped", {}).items():
            if not checked:
                lines.append([about["stage"], f"{reason}: not checked", None, None, None])
                continue
            worst = sorted(counts["by_source"].items(), key=lambda found: -found[1]["documents"])[:3]
            sources = ", ".join(f"{name} {of['documents']:,}" for name, of in worst)
            lines.append([about["stage"], reason, counts["documents"], counts["characters"], sources or None])
        for reason, documents in about["stats"].get("lost", {}).items():
            lines.append([about["stage"], f"unreadable: {reason}", documents, None, None])
    sections = ["## Data funnel"]
    sections += [picture("funnel.svg", "Characters that came through each stage")] if "funnel.svg" in pictures else []
    sections += [funnel_table(lineage), note]
    if lines:
        header = ["stage", "why", "documents", "characters", "most of it from"]
        sections += ["### What was dropped, and why", table(header, lines)]
    filtered = stage_of(lineage, "filter")
    if filtered and (rows := filtered["stats"].get("table")):
        header = [name for name in rows[0] if not name.startswith("characters")]
        lines = [[_short(name, row[name]) for name in header] for row in rows]
        threshold = filtered["params"].get("max_tokens_per_char")
        told = f"Documents with {threshold:g} tokens a character or more are dropped. " if threshold else ""
        sections += [
            "### The filter, by source",
            f"{told}Documents, and the medians of their measures.",
            table(header, lines),
        ]
    return sections


def _short(name: str, value: object) -> object:
    return f"{value:.3f}" if name.startswith("median") else value


def vocabulary_section(lineage: dict[str, dict]) -> list[str]:
    """What the vocabulary has, and how it is used."""
    about, tokens = stage_of(lineage, "vocabulary"), stage_of(lineage, "tokenize")
    if about is None:
        return []
    stats, params = about["stats"], about["params"]
    learned = stats["trained_on"]
    lines = [
        ["trained on", f"{counted(learned['documents'], 'document')}, {counted(learned['characters'], 'character')}"],
        ["entries", f"{stats['entries']:,} ({params.get('model', 'wordpiece')})"],
        ["words or their beginnings", stats["whole_words"]],
        ["continuations", stats["continuations"]],
    ]
    lines += [["never used in that text", stats["unused"]]] if "unused" in stats else []
    lines += [["different words", learned["different_words"]]] if "different_words" in learned else []
    if tokens:
        lines += [["characters a token", f"{tokens['stats']['characters_per_token']:.2f}"]]
        lines += [["unknown tokens", tokens["stats"]["unknown_tokens"]]]
    kinds = stats.get("table", [])
    by_kind = [table(list(kinds[0]), [list(row.values()) for row in kinds])] if kinds else []
    return ["## Vocabulary", table(["", ""], lines), *by_kind]


def contamination(lineage: dict[str, dict]) -> dict:
    """Whether text of the downstream data was looked for in the corpus, and what was found."""
    about = stage_of(lineage, "decontaminate")
    if about is None:
        return {"checked": False, "why": "the corpus did not pass the stage decontaminate"}
    told = {
        name: about["stats"].get(name) for name in ("checked", "why", "words", "not_at_hand", "documents_found", "cut")
    }
    told |= {"dropped": about["stats"]["dropped"]["contaminated"]["documents"], "tasks": about["stats"].get("tasks")}
    return {name: value for name, value in told.items() if value is not None}


def contamination_section(about: dict) -> list[str]:
    """The same in words, with a table by task."""
    title = "## Text of the downstream data in the corpus"
    if not about["checked"]:
        return [title, f"Not checked, because {escape(about['why'])}."]
    tasks, n = about["tasks"], about["words"]
    by_task = ", ".join(
        f"{NAMES[name]} {counts['documents']:,}" for name, counts in tasks.items() if counts["documents"]
    )
    short, all_ = (sum(counts[what] for counts in tasks.values()) for what in ("too_short", "sentences"))
    lines = [
        f"{_removed(about)}{f' (found for {by_task})' if by_task else ''}: {about['documents_found']:,} had {n} words in a row that stand in a "
        f"validation or test sentence. Of {counted(all_, 'sentence')}, {short:,} have fewer than {n} words, so they "
        "can't be found "
        "this way."
    ]
    if about["not_at_hand"]:
        lines.append(f"Not at hand, so not looked for: {', '.join(about['not_at_hand'])}.")
    header = ["task", "splits", "sentences", "too short", "n-grams", "sentences found", "in documents"]
    names = ("sentences", "too_short", "ngrams", "sentences_found", "documents")
    rows = [[NAMES[t], ", ".join(c["splits"]), *(c[name] for name in names)] for t, c in tasks.items()]
    return [title, *lines, table(header, rows)]


def _removed(about: dict) -> str:
    """What was taken out of the corpus for it."""
    dropped = f"{counted(about['dropped'], 'document')} dropped"
    cut = about.get("cut")
    return (
        f"{counted(cut['characters'], 'character')} cut from {counted(cut['documents'], 'document')}, and {dropped}"
        if cut
        else dropped
    )


def gpus(machine: dict) -> str:
    """How many GPUs, or processes, in words."""
    return "one" if machine["gpus"] == 1 else f"{machine['gpus']}, though the rule of the game is one"


def budget_section(about: dict) -> list[str]:
    """What was spent, and how fast."""
    stats, params = about["stats"], about["params"]
    machine, held = stats["machine"], stats["heldout"]
    rows = [
        ["budget", budget_of(params)],
        ["spent", f"{duration(stats['seconds_on_the_clock'])}, {counted(stats['tokens'], 'token')}, "
                  f"{counted(stats['steps'], 'step')}"],
        ["speed", f"{stats['tokens_per_second']:,.0f} tokens a second, MFU {100 * stats['mfu']:.0f} %"],
        ["machine", f"{machine['device']}, {machine['dtype']}, {'compiled' if machine['compiled'] else 'eager'}, "
                    f"{counted(machine['micro_batch'], 'sequence')} at once"],
        ["GPUs, or processes", gpus(machine)],
        ["parameters", f"{stats['parameters']:,}"],
        *([f"held-out loss, nats per {unit}", nats(held, unit)] for unit in ("token", "character", "byte")),
    ]  # fmt: skip
    rows += [
        ["skipped", f"{what['problem']}: went on behind sequences {what['sequences'][0]:,} to {what['sequences'][1]:,}"]
        for what in stats["skipped"]
    ]
    return ["## Budget", table(["", ""], rows), heldout_note(held)]


def nats(held: dict, unit: str) -> str:
    """The held-out loss per token, character or byte, with its standard error."""
    value, error = held[f"nats_per_{unit}"].values()
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def heldout_note(held: dict) -> str:
    """What the held-out loss was measured on."""
    one = held["documents"] == 1
    error = (
        "; there is no standard error, which would be over documents"
        if one
        else "; ± is the standard error over documents"
    )
    return (
        f"The held-out loss covers all {held['tokens']:,} tokens of {held['documents']:,} document{'' if one else 's'} "
        f"({held['characters']:,} characters, {held['bytes']:,} bytes) that the model was never trained on, each predicted once "
        f"with a seventh of the tokens masked{error}. Models with different vocabularies compare per character or byte, on the "
        "same documents."
    )


def curves_section(about: dict, at_hand: bool, pictures: Iterable[str] = ()) -> list[str]:
    """Loss and speed over the run, and the held-out loss in numbers."""
    evaluations = about["stats"]["evaluations"]
    lines = [
        [f"{e['fraction']:.0%}", e["step"], e["tokens"], f"{e['seconds'] / 3600:.3f}", f"{e['heldout_loss']:.4f}",
         f"{e['heldout_nats_per_byte']:.4f}"]
        for e in evaluations
    ]  # fmt: skip
    missing = "The model's own folder was not at hand here, so this is the held-out loss alone, without training loss and speed over the run."
    note = "Held-out losses over the run are measured on a part of the held-out tokens, the same ones each time."
    header = ["of the budget", "step", "tokens", "hours", "held-out nats per token", "per byte"]
    sections = ["## Loss"]
    sections += [picture("loss.svg", "Training and held-out loss over tokens")] if "loss.svg" in pictures else []
    sections += [table(header, lines), note, *([] if at_hand else [missing])]
    if "speed.svg" in pictures:
        sections += [
            "## Throughput",
            picture("speed.svg", "Tokens a second, and MFU"),
        ]
        sections += [f"Over all of the run: {about['stats']['tokens_per_second']:,.0f} tokens a second; median step: "
                     f"MFU {100 * about['stats']['mfu']:.0f} %, the share of the rate that matrix products reach "
                     "there."]  # fmt: skip
    return sections


def rules(lineage: dict[str, dict], pretrained: dict, tasks: Iterable[str]) -> list[list[str]]:
    """The rules of the game for pretraining: the rule, whether it was kept, and the fact. `tasks`: that the model is scored on."""
    stats, text = pretrained["stats"], contamination(lineage)
    machine, seconds = stats["machine"], stats["seconds_on_the_clock"]
    words = next((name for name, about in lineage.items() if about["stage"] == "vocabulary"), None)
    cpu = machine["device"].startswith("CPU")
    checked = (
        f"{_removed(text)}; {text['words']} words in a row count"
        if text["checked"]
        else f"not checked, because {text['why']}"
    )
    if text.get("not_at_hand"):
        checked += f"; not at hand: {', '.join(text['not_at_hand'])}"
    missing = text.get("not_at_hand", ())
    unseen = [
        name
        for task, name in NAMES.items()
        if task in tasks and text["checked"]
        and (task not in text["tasks"] or any(f"{task}/{split}" in missing for split in TASKS[task].validation))
    ]  # fmt: skip
    if unseen:
        checked += f"; scored on, but not looked for: {', '.join(unseen)}"
    free = text["checked"] and not unseen and text["words"] <= RULE_WORDS
    return [
        ["masked language modelling from scratch", YES, f"random weights, seed {pretrained['params']['seed']}; cram has no other way"],
        ["no pretrained model or tokenizer", YES if words else UNKNOWN,
         f"the vocabulary was trained on this text ({words})" if words else "the vocabulary's manifest was not at hand"],
        ["one GPU", YES if machine["gpus"] == 1 else NO,
         f"no GPU: {machine['device']}" if cpu and machine["gpus"] == 1 else f"{machine['gpus']} x {machine['device']}"],
        [f"at most {RULE_HOURS:g} hours", YES if seconds <= 3600 * RULE_HOURS * LAST_STEP else NO,
         f"{duration(seconds, 5)} on the clock"],
        ["no downstream data in the text", YES if free else UNKNOWN, checked],
    ]  # fmt: skip


def varying(runs: list[dict]) -> list[str]:
    """The settings that are not the same for all tasks."""
    return [name for name, value in settings(runs).items() if isinstance(value, dict)]


def from_mnli(runs: list[dict]) -> list[str]:
    """The tasks that start from the model finetuned on MNLI."""
    return sorted({NAMES.get(run["task"], run["task"]) for run in runs if run["start"] != "pretrained"})


def protocol_words(protocol: str, runs: list[dict]) -> str:
    """What a protocol was, as it was run."""
    others, last = from_mnli(runs), all(run["choose"] == "last" for run in runs)
    told = [
        "settings by task" if varying(runs) else "one setting for all tasks",
        f"{', '.join(others)} from the model finetuned on MNLI" if others else "each task trained on its own training data alone",
        "the last epoch scored on the validation data" if last else "the epoch chosen on a tenth of the training data",
    ]  # fmt: skip
    free = " It is not bound by the rules of the game, so nothing here compares with the table of those that are."
    return f"Protocol `{protocol}`: {', '.join(told)}; median of seeds.{free if protocol == 'modern' else ''}"


def finetuning_rules(runs: list[dict]) -> list[list[str]]:
    """The same for finetuning by one protocol, of the params of its runs on all of the training data."""
    epochs, differing, others = sorted({run["epochs"] for run in runs}), varying(runs), from_mnli(runs)
    choices = {run["choose"] for run in runs}
    tasks: dict[str, int] = {}
    for run in [run for run in runs if run["pretrained"]] or runs:
        tasks[run["task"]] = tasks.get(run["task"], 0) + 1
    seeds = sorted(set(tasks.values()))
    return [
        [f"at most {MOST_EPOCHS} epochs", YES if epochs[-1] <= MOST_EPOCHS else NO, ", ".join(map(str, epochs))],
        ["one setting for all tasks", NO if differing else YES, f"differ: {', '.join(differing)}" if differing else "the same for all"],
        ["each task on its own training data only", NO if others else YES,
         f"started from MNLI's model: {', '.join(others)}" if others else "all start from the pretrained model"],
        ["the last epoch is scored", YES if choices == {"last"} else NO,
         "the last" if choices == {"last"} else "chosen on a tenth of the training data; never on validation data"],
        [f"median of {RULE_SEEDS} seeds", YES if seeds[0] >= RULE_SEEDS else NO, f"{' or '.join(map(str, seeds))} a task"],
    ]  # fmt: skip


def rules_section(pretraining: list[list[str]], params: dict[str, list[dict]]) -> list[str]:
    """The rules of the game, one by one; the finetuning ones for each protocol by itself, of its runs' params."""
    header = ["rule", "kept", "fact"]
    sections = ["## Rules of the game", table(header, pretraining)]
    for protocol, runs in params.items():
        if runs:
            sections += [f"### Finetuning, protocol {protocol}", table(header, finetuning_rules(runs))]
            if protocol == "modern":
                sections.append(
                    "This protocol breaks rules by design; its table is for comparisons with those who do the same."
                )
    return sections


def lineage_section(lineage: dict[str, dict]) -> list[str]:
    """Every artifact that led to the model, with its key."""
    lines = [
        [Marked(f"[{name}](../../{name}/)"), about.get("version"), f"{about['seconds']:,.1f}" if "seconds" in about else None,
         about.get("finished", "")[:19].replace("T", " ") or None]
        for name, about in lineage.items()
    ]  # fmt: skip
    return ["## Lineage", table(["artifact", "version", "seconds", "finished (UTC)"], lines)]


def runs_section(runs: list[dict]) -> list[str]:
    """Every finetuning run: `name`, `stats`, `params` and `seconds` of each."""
    lines = []
    for run in runs:
        stats = run["stats"]
        scores = ", ".join(f"{one['metrics'][stats['metric']]:.1f}" for one in stats["validation"].values())
        sizes = [(present(stats), stats["official_train_examples"])]
        sizes += [(about["examples"], about["official_examples"]) for about in stats["validation"].values()]
        what = label(stats["pretrained"], stats["share"]) + (" (MNLI)" if run["params"]["start"] == "mnli" else "")
        lines.append([
            Marked(f"[{run['name']}](../../{run['name']}/)"), stats["protocol"], NAMES.get(stats["task"], stats["task"]),
            stats["seed"], marked(scores, is_partial(stats["task"], sizes)), what, f"{stats['chosen_epoch']} of {run['params']['epochs']}", stats["steps"],
            round(stats["examples_per_second"]), f"{stats['seconds_of_training']:,.1f}",
        ])  # fmt: skip
    header = ["artifact", "protocol", "task", "seed", "score", "start", "epoch", "steps", "examples/s", "seconds"]
    return ["## Every run", table(header, lines)]


def environment_section(manifests: dict[str, dict]) -> list[str]:
    """Software and machine of each of these stages, where they are known."""
    known = {name: about["environment"] for name, about in manifests.items() if about and "environment" in about}
    packages = list(dict.fromkeys(package for one in known.values() for package in one["packages"]))
    machines = [manifests[name].get("stats", {}).get("machine", {}) for name in known]
    lines = [
        ["Python", *(one["python"] for one in known.values())],
        *([package, *(one["packages"].get(package) for one in known.values())] for package in packages),
        ["system", *(one.get("machine", {}).get("system") for one in known.values())],
        ["cores", *(one.get("machine", {}).get("cores") for one in known.values())],
        ["device", *(one.get("device") for one in machines)],
        ["precision", *(one.get("dtype") for one in machines)],
        ["commit of cram", *(code(one["commit"]) for one in known.values())],
    ]
    return ["## Environment", table(["", *known], lines)] if known else []
