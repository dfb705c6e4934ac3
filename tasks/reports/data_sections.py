"""Sections on the training text: what each stage passed on and dropped, the vocabulary, downstream data in the text."""

from collections.abc import Iterable

from model.quantities import counted
from tasks.reports.common import picture, stage_of
from tasks.reports.markdown import escape, table
from tasks.reports.scores import (
    NAMES,
)

RULE_WORDS = 13  # in a row, that a document has in common with downstream data: appendix C of the GPT-3 paper
HELD_OUT, MEASURED = "held out", "of these, measured for the held-out loss"  # rows of the funnel


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
        lines = [[short_cell(name, row[name]) for name in header] for row in rows]
        threshold = filtered["params"].get("max_tokens_per_char")
        told = f"Documents with {threshold:g} tokens a character or more are dropped. " if threshold else ""
        sections += [
            "### The filter, by source",
            f"{told}Documents, and the medians of their measures.",
            table(header, lines),
        ]
    return sections


def short_cell(name: str, value: object) -> object:
    """A cell of the filter's table: medians with three decimals."""
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
        f"{removal(about)}{f' (found for {by_task})' if by_task else ''}: {about['documents_found']:,} had {n} words in a row that stand in a "
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


def removal(about: dict) -> str:
    """What was taken out of the corpus for it."""
    dropped = f"{counted(about['dropped'], 'document')} dropped"
    cut = about.get("cut")
    return (
        f"{counted(cut['characters'], 'character')} cut from {counted(cut['documents'], 'document')}, and {dropped}"
        if cut
        else dropped
    )
