"""The training text of a model, from the manifests of the stages: what each passed on, dropped, and shares with tests.

Templates have the sentences.
"""

from model.wording import counted
from tasks.reports.rows import Drop, FunnelRow

COUNTS = ("documents", "characters", "tokens", "sequences")
MAIN_SOURCES = 3  # of what was dropped


def stage_of(lineage: dict[str, dict], name: str) -> dict | None:
    """The manifest of a stage, None where it is missing."""
    return next((manifest for manifest in lineage.values() if manifest["stage"] == name), None)


def text_sections(lineage: dict[str, dict]) -> dict:
    """What reports and cards both show of the training text."""
    return {"funnel": funnel(lineage), "funnel_columns": ["stage", *COUNTS], "contamination": contamination(lineage)}


def funnel(lineage: dict[str, dict]) -> list[FunnelRow]:
    """Documents, characters, tokens and sequences that each stage passed on."""
    return [
        funnel_row(stage, name, counts)
        for name, manifest in lineage.items()
        for stage, counts in passed_on(manifest["stage"], manifest["stats"])
    ]


def funnel_row(stage: str, artifact: str, counts: dict) -> FunnelRow:
    """A row of the funnel."""
    return {
        "stage": stage,
        "artifact": artifact,
        "documents": counts.get("documents"),
        "characters": counts.get("characters"),
        "tokens": counts.get("tokens"),
        "sequences": counts.get("sequences"),
    }


def passed_on(stage: str, stats: dict) -> list[tuple[str, dict]]:
    """What a stage passed on, in words, and how much; empty for a stage that passes no text on."""
    if stage == "filter":
        return [(stage, stats | {"tokens": stats["measured_with"]["tokens_kept"]})]
    if stage == "pretrain" and "tokens" in stats:  # not of an adopted model
        return [(f"trained on ({stats['epochs']:.2f} epochs)", {"tokens": stats["tokens"]})]
    if "documents" not in stats or stage == "measure":  # measure passes no documents on
        return []
    if stage != "tokenize":
        return [(stage, stats)]
    held = stats["heldout"]
    rows = [(stage, stats), ("held out", held)]
    shared = held.get("shared")
    if shared:  # an artifact of an earlier version has no such counts
        words = f"of these, share {shared['words_in_a_row']} words in a row with the training text"
        rows.append((words, shared))
    rows.append(("of these, measured for the held-out loss", held["measured"]))
    return rows


def dropped(lineage: dict[str, dict]) -> list[Drop]:
    """Everything that was dropped, by stage and reason."""
    rows = []
    for manifest in lineage.values():
        stage = manifest["stage"]
        stats = manifest["stats"]
        rows += documents_dropped(stage, stats)
        removed = stats.get("removed")
        if stage == "measure" and removed:
            rows.append(characters_removed(removed))
        for reason, documents in stats.get("lost", {}).items():
            rows.append(Drop(stage, f"unreadable: {reason}", documents, None, None))
    return rows


def documents_dropped(stage: str, stats: dict) -> list[Drop]:
    """The documents that a stage dropped, by reason."""
    rows = []
    for reason, counts in stats.get("dropped", {}).items():
        if not stats.get("checked", True):  # decontaminate had nothing to compare with
            rows.append(Drop(stage, f"{reason}: not checked", None, None, None))
            continue
        by_source = {name: of_source["documents"] for name, of_source in counts["by_source"].items()}
        main = sorted(by_source.items(), key=lambda source: -source[1])
        rows.append(Drop(stage, reason, counts["documents"], counts["characters"], in_words(main)))
    return rows


def characters_removed(removed: dict) -> Drop:
    """The characters that the vocabulary doesn't read, which the stage measure counts."""
    by_source = {name: of_source["characters"] for name, of_source in removed["by_source"].items()}
    main = list(by_source.items())
    return Drop("vocabulary", "characters it doesn't read", None, removed["characters"], in_words(main))


def in_words(sources: list[tuple[str, int]]) -> str | None:
    """The first of some sources with their counts; None without sources."""
    shown = [f"{name} {count:,}" for name, count in sources[:MAIN_SOURCES]]
    return ", ".join(shown) or None


def contamination(lineage: dict[str, dict]) -> dict:
    """Whether the corpus was searched for text of the downstream data, what was found, and what was removed."""
    manifest = stage_of(lineage, "decontaminate")
    if manifest is None:
        return {"checked": False, "why": "the corpus did not pass the stage decontaminate"}
    stats = manifest["stats"]
    names = ("checked", "why", "words", "not_at_hand", "documents_found", "tasks")
    content = {name: stats[name] for name in names if stats.get(name) is not None}
    content["dropped"] = stats["dropped"]["contaminated"]["documents"]
    content["removal"] = f"{counted(content['dropped'], 'document')} dropped"
    return content


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
