"""Sections of reports and cards: the training text, the rules of the game, the scores. Templates have the sentences."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from model.diagnosis import Course, advice
from model.settings import Finetuning
from model.wording import counted, duration
from tasks.glue.table import MOST_EPOCHS, PROBES, TASKS, Task
from tasks.reports.markdown import Marked, escape, records, table
from tasks.reports.scores import (
    COLUMNS,
    METRICS,
    NAMES,
    PUBLISHED,
    average_by_seed,
    averages,
    glue_rows,
    mark_score,
    median_run,
    own_rows,
    partial_notes,
    settings,
    weak_notes,
)
from tasks.store.artifacts import Artifact

COUNTS = ("documents", "characters", "tokens", "sequences")
HEADLINE = ("BERT-base, fully trained", "crammed BERT, A6000, final")  # published rows that are named beside ours
REFERENCE = Finetuning().model_dump()  # the settings of the published rows
RULE_HOURS, RULE_SEEDS = 24.0, 5
RULE_WORDS = 13  # in a row, that a document has in common with downstream data: appendix C of the GPT-3 paper
OWN_SETTINGS = ("epochs", "batch_size", "learning_rate")  # that a task of one's own can have
MOST_CLASSES = 12  # of a confusion table
# A standard error from so many documents is itself uncertain by a quarter, from three by a half; a word's loss varies by
# some 3 nats, so the mean of so many by 0.1
FEWEST_DOCUMENTS, FEWEST_WORDS = 10, 1000
LAST_STEP = 1.001  # a budget ends with the step in which it is spent
YES, NO, UNKNOWN = "✓", "✗", "?"


# The training text


def stage_of(lineage: dict[str, dict], name: str) -> dict | None:
    """The manifest of a stage, None where it is missing."""
    return next((manifest for manifest in lineage.values() if manifest["stage"] == name), None)


def funnel(lineage: dict[str, dict]) -> list[dict]:
    """Documents, characters, tokens and sequences that each stage passed on."""
    rows = []

    def add(stage: str, name: str, counts: dict) -> None:
        rows.append({"stage": stage, "artifact": name} | {what: counts.get(what) for what in COUNTS})

    for name, manifest in lineage.items():
        stage, stats = manifest["stage"], manifest["stats"]
        if stage == "filter":
            add(stage, name, stats | {"tokens": stats["measured_with"]["tokens_kept"]})
        elif stage == "pretrain" and "tokens" in stats:  # not of an adopted model
            add(f"trained on ({stats['epochs']:.2f} epochs)", name, {"tokens": stats["tokens"]})
        elif "documents" in stats and stage != "measure":  # measure passes no documents on
            add(stage, name, stats)
        if stage == "tokenize":
            add("held out", name, stats["heldout"])
            if shared := stats["heldout"].get("shared"):  # an artifact of an earlier version has no such counts
                add(f"of these, share {shared['words_in_a_row']} words in a row with the training text", name, shared)
            add("of these, measured for the held-out loss", name, stats["heldout"]["measured"])
    return rows


def dropped(lineage: dict[str, dict]) -> list[list]:
    """Stage, reason, documents, characters and the main sources of everything that was dropped."""
    rows = []
    for manifest in lineage.values():
        stage, stats = manifest["stage"], manifest["stats"]
        for reason, counts in stats.get("dropped", {}).items():
            if not stats.get("checked", True):  # decontaminate had nothing to compare with
                rows.append([stage, f"{reason}: not checked", None, None, None])
                continue
            main = sorted(counts["by_source"].items(), key=lambda source: -source[1]["documents"])[:3]
            sources = ", ".join(f"{name} {of_source['documents']:,}" for name, of_source in main)
            rows.append([stage, reason, counts["documents"], counts["characters"], sources or None])
        if stage == "measure" and (removed := stats.get("removed")):
            main = ", ".join(f"{name} {of['characters']:,}" for name, of in list(removed["by_source"].items())[:3])
            rows.append(["vocabulary", "characters it doesn't read", None, removed["characters"], main or None])
        for reason, documents in stats.get("lost", {}).items():
            rows.append([stage, f"unreadable: {reason}", documents, None, None])
    return rows


def contamination(lineage: dict[str, dict]) -> dict:
    """Whether the corpus was searched for text of the downstream data, what was found, and what was removed."""
    manifest = stage_of(lineage, "decontaminate")
    if manifest is None:
        return {"checked": False, "why": "the corpus did not pass the stage decontaminate"}
    stats = manifest["stats"]
    content = {name: stats[name] for name in ("checked", "why", "words", "not_at_hand", "documents_found", "tasks")
               if stats.get(name) is not None}  # fmt: skip
    content["dropped"] = stats["dropped"]["contaminated"]["documents"]
    return content | {"removal": f"{counted(content['dropped'], 'document')} dropped"}


def overlap(lineage: dict[str, dict]) -> str:
    """A sentence about held-out documents that share text with the training text; empty where there are none."""
    tokens = stage_of(lineage, "tokenize")
    if tokens is None:
        return ""
    held = tokens["stats"]["heldout"]
    if "shared" not in held:
        return "Whether these documents share passages with the training text was not checked."
    shared = held["shared"]
    measured = held["measured"]["shared"]
    facts = (
        f"Of {counted(held['documents'], 'held-out document')}, {100 * shared['share_of_documents']:.1f} % share "
        f"{shared['words_in_a_row']} words in a row with the training text, and {100 * shared['share_of_words']:.1f} % "
        "of the words of all of them are in such passages"
    )
    if not measured["documents"]:
        return f"{facts}; the loss is measured on documents without any."
    return (
        f"{facts}. Too few documents have none, so the loss is measured on others too and looks too low: "
        f"{100 * measured['share_of_words']:.1f} % of the measured words are in passages that the model was trained on."
    )


def text_sections(lineage: dict[str, dict]) -> dict:
    """What reports and cards both show of the training text."""
    return {"funnel": funnel(lineage), "funnel_columns": ["stage", *COUNTS], "contamination": contamination(lineage)}


# The model


def beginning(start: dict) -> str:
    """The model that a run began from, and what that began from, as the end of a sentence."""
    before = f" and began from {beginning(start['start'])}" if start["start"] else ""
    known = f"had read {counted(start['tokens'], 'token')}" if start["tokens"] else "was adopted from a folder"
    return f"{start['name']}, which {known}{before}"


def context_doubt(stats: dict, params: dict) -> str:
    """Sentences about a held-out loss that is not below that of token frequencies alone; empty for any other."""
    held = stats.get("heldout", {})
    limits = held.get("by_frequencies", {})
    if not limits or (loss := held["nats_per_byte"]["value"]) < limits["nats_per_byte"]:
        return ""
    course = Course(
        losses=[each["heldout_loss"] for each in stats["evaluations"]],
        by_frequencies=limits["nats_per_token"],
        batch_size=params["batch_size"],
        learning_rate=params["learning_rate"],
        is_rotary=params["architecture"]["positions"] == "rotary",
        width=params["architecture"]["hidden"],
        **{name: stats[name] for name in ("steps", "tokens", "epochs", "training_loss")},
    )
    return (
        f"It learned nothing from context: {loss:.4g} nats per held-out byte; token frequencies alone give "
        f"{limits['nats_per_byte']:.4g}. {advice(course)}"
    )


def text_doubt(stats: dict) -> str:
    """A sentence about a held-out loss of too little text to mean much; empty for any other."""
    held = stats.get("heldout")
    if not held or (held["documents"] >= FEWEST_DOCUMENTS and held["words"] >= FEWEST_WORDS):
        return ""
    return (
        f"The held-out loss rests on {counted(held['words'], 'word')} in {counted(held['documents'], 'document')}, too "
        f"few to compare runs by it: below {FEWEST_WORDS:,} words a few rare ones decide, and below {FEWEST_DOCUMENTS} "
        "documents its standard error means little. Raise tokenize.heldout_fraction, or give more text."
    )


def doubts(stats: dict, params: dict) -> list[str]:
    """What speaks against a model or its held-out loss. `stats`, `params`: those of its pretrain stage."""
    return list(filter(None, (context_doubt(stats, params), text_doubt(stats))))


# The rules of cramming (section 2 of the paper): rows of rule, whether it was kept, and the fact


def pretraining_rules(lineage: dict[str, dict], pretrained: dict, tasks: Iterable[str]) -> list[list[str]]:
    """The rules for pretraining. `tasks`: those that the model is scored on."""
    if "adopted" in pretrained["stats"]:
        return [["pretraining by the rules", UNKNOWN, "the model was adopted from a folder"]]
    machine, seconds = pretrained["stats"]["machine"], pretrained["stats"]["seconds_on_the_clock"]
    words = next((name for name, manifest in lineage.items() if manifest["stage"] == "vocabulary"), None)
    start, taken = pretrained["stats"].get("start"), words and lineage[words]["params"].get("start")
    one, detection = machine["gpus"] == 1, pretrained["params"].get("detection", 0.0)
    no_gpu = one and machine["device"].startswith("CPU")
    return [
        ["masked language modelling from scratch", NO if detection or start else YES,
         (f"began from {beginning(start)}; " if start else f"random weights, seed {pretrained['params']['seed']}; ")
         + (f"a second loss, detection of corrupted tokens, has weight {detection:g}" if detection
            else "no other loss")],
        ["no pretrained model or tokenizer", NO if taken else YES if words else UNKNOWN,
         "the vocabulary is that of a model" if taken else
         f"the vocabulary was trained on this text ({words})" if words else "the vocabulary's manifest is missing"],
        ["one GPU", YES if one else NO,
         f"no GPU: {machine['device']}" if no_gpu else f"{machine['gpus']} x {machine['device']}"],
        [f"at most {RULE_HOURS:g} hours", NO if seconds > 3600 * RULE_HOURS * LAST_STEP else UNKNOWN if start else YES,
         f"{duration(seconds, 5)} on the clock" + (", without that of the model it began from" if start else "")],
        ["no downstream data in the text", *text_rule(contamination(lineage), set(tasks))],
    ]  # fmt: skip


def text_rule(text: dict, tasks: set[str]) -> list[str]:
    """Whether the corpus is known to be free of downstream text, and the fact. `text`: from `contamination`."""
    if not text["checked"]:
        return [UNKNOWN, f"not checked, because {text['why']}"]
    missing = text.get("not_at_hand", [])
    unseen = [
        NAMES.get(task, task)
        for task in dict.fromkeys([*NAMES, *sorted(tasks)])
        if task in tasks.difference(PROBES)
        and (
            task not in text["tasks"]
            or any(f"{task}/{split}" in missing for split in getattr(TASKS.get(task), "validation", ()))
        )
    ]
    facts = [text["removal"], f"{text['words']} words in a row count"]
    facts += [f"not available: {', '.join(missing)}"] if missing else []
    facts += [f"scored on, but not searched for: {', '.join(unseen)}"] if unseen else []
    return [YES if not unseen and text["words"] <= RULE_WORDS else UNKNOWN, "; ".join(facts)]


def finetuning_rules(runs: Sequence[dict]) -> list[list[str]]:
    """The rules for finetuning, from the params of the runs on all of the training data."""
    epochs = sorted({run["epochs"] for run in runs})
    differing = [name for name, value in settings(runs).items() if isinstance(value, list)]
    seeds = sorted(set(Counter(run["task"] for run in runs if run["pretrained"]).values()))
    return [
        [f"at most {MOST_EPOCHS} epochs", YES if epochs[-1] <= MOST_EPOCHS else NO, ", ".join(map(str, epochs))],
        ["one setting for all tasks", NO if differing else YES,
         f"differ: {', '.join(differing)}" if differing else "the same for all"],
        ["each task on its own training data only", YES, "all start from the pretrained model"],
        ["the last epoch is scored", YES, "the last"],
        [f"median of {RULE_SEEDS} seeds", YES if seeds[0] >= RULE_SEEDS else NO,
         f"{' or '.join(map(str, seeds))} per task"],
    ]  # fmt: skip


# Scores


def headline(rows: list[dict], finetuning: dict) -> dict:
    """The `figures` at the top of the page, and the `published` averages to compare with.

    `finetuning`: the settings; `differing` lists those that are not the published ones.
    """
    of_glue, own = glue_rows(rows), [row for row in own_rows(rows) if row["pretrained"]]
    mean, better = averages(of_glue)["paper"], [row for row in of_glue if row["beats_majority"] and not row["partial"]]
    has_mean = mean is not None and better
    shown = ([] if has_mean else better) + [row for row in own if row["beats_majority"]]
    return {
        "figures": [(mean, "GLUE, average of nine")] * bool(has_mean)
        + [(row["score"], f"{row['column']}, {METRICS[row['metric']]}") for row in shown],
        "weak": weak_notes(of_glue + own),
        "published": [f"{row.model} {row.average}" for row in PUBLISHED if row.model in HEADLINE and mean is not None],
        "differing": [
            f"{name} {usual}, here {finetuning[name]}"
            for name, usual in REFERENCE.items()
            if finetuning.get(name) != usual
        ],
    }


def score_section(rows: list[dict], title: str, shown: list[dict]) -> dict:
    """What scores.md.j2 shows of the scores on GLUE; empty if there are none. `shown`: settings as rows of a table."""
    ours = {pretrained: glue_rows(rows, pretrained) for pretrained in (True, False)}
    own, every = ours[True], ours[True] + ours[False]
    if not own:
        return {}
    sources = list(dict.fromkeys(row.source for row in PUBLISHED))
    return {
        "scores": score_table(title, ours, sources),
        "sources": sources,
        "seed_averages": average_by_seed(own),
        "missing": [name for name in COLUMNS if name not in {row["column"] for row in own}],
        "incomplete": [row["column"] for row in own if row["partial"] and row["column"] in COLUMNS],
        "partial_notes": partial_notes(own),
        "wnli": [row["score"] for row in own if row["task"] == "wnli"],
        "settings": shown,
        **every_score(every),
    }


def every_score(rows: list[dict]) -> dict:
    """What scores.md.j2 shows of any tasks: the rows, which of them are weak, and notes."""
    return {
        "rows": rows,
        "weak": weak_notes(row for row in rows if row["pretrained"]),
        "notes": list(dict.fromkeys(note for row in rows for note in row["notes"])),
    }


def score_table(title: str, ours: dict[bool, list[dict]], sources: list[str]) -> Marked:
    """Our models, pretrained and not; the majority baseline; published models."""
    lines: list[dict] = []
    for pretrained, rows in ours.items():
        if rows:
            mean, name = averages(rows), escape(title) + ("" if pretrained else ", no pretraining")
            line = {"model": Marked(f"**{name}** (this run)"), "average": mean["paper"], "GLUE's own": mean["official"]}
            scores = {row["column"]: mark_score(row["score"], row["partial"], row["beats_majority"]) for row in rows}
            lines.append(line | scores)
    simple = {row["column"]: mark_score(row["majority"][row["metric"]], row["partial"]) for row in ours[True]}
    lines.append({"model": "majority class or mean (this data)"} | simple)
    for row in PUBLISHED:
        name = Marked(f"*{escape(row.model)}* (published \\[{sources.index(row.source) + 1}\\])")
        lines.append({"model": name, "average": row.average} | row.scores)
    return records(lines, ["model", "average", "GLUE's own", *COLUMNS])


def own_section(rows: list[dict], runs: Iterable[dict]) -> dict:
    """What scores.md.j2 shows of the user's own tasks; empty if there are none. `runs`: the params of their runs."""
    own = own_rows(rows)
    settings = {run["task"]: {name: f"{run[name]:g}" for name in OWN_SETTINGS} for run in runs}
    return own and every_score(own) | {"settings": list(settings.items())}


def learning_curve(rows: Iterable[dict]) -> list[dict]:
    """Scores by share of the training data, smallest first, of the columns that have several shares.

    `rows`: from `gather`. `per_doubling`: the gain in points per doubling of the examples, since the row before.
    """
    numbers: dict[str, list[dict]] = {}
    for row in sorted((row for row in rows if row["pretrained"]), key=lambda row: row["share"]):
        numbers.setdefault(row["column"], []).append(row)
    curve = []
    for points in numbers.values():
        for before, row in zip([None, *points], points, strict=False) if len(points) > 1 else ():
            gain = before and (row["score"] - before["score"]) / math.log2(row["share"] / before["share"])
            low, high = row["metrics"][row["metric"]]["range"]
            curve.append(
                {name: row[name] for name in ("column", "partial", "share", "train_examples", "seeds")}
                | {"median": row["score"], "low": low, "high": high, "majority": row["majority"][row["metric"]]}
                | {"per_doubling": None if gain is None else round(gain, 2)}
            )
    return curve


def confusion_counts(members: list[Artifact]) -> list[list[int]] | None:
    """Counts by true class (row) and predicted class, over all validation splits; None for a regression.

    They are those of the run with the median score. `members`: the seeds' runs of a task.
    """
    counts = [about["confusion"] for about in median_run(members).stats["validation"].values()]
    return None if None in counts else np.sum(counts, axis=0).tolist()


def confusion_table(task: Task, counts: list[list[int]]) -> Marked:
    """How often which class was predicted as which, with the recall of each class; of many, the most mistakes."""
    names = [f"{task.title}: true class", "predicted", "examples", "of the class"]
    if len(counts) > MOST_CLASSES:
        wrong = [(n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if n and i != j]
        most = sorted(wrong, key=lambda one: (-one[0], one))[:MOST_CLASSES]
        return table(
            names, [[task.labels[i], task.labels[j], n, f"{100 * n / sum(counts[i]):.1f} %"] for n, i, j in most]
        )
    lines = [
        [name, *row, f"{100 * row[i] / max(1, sum(row)):.1f} %"]
        for i, (name, row) in enumerate(zip(task.labels, counts, strict=True))
    ]
    return table([names[0], *(f"predicted {name}" for name in task.labels), "recall"], lines)
