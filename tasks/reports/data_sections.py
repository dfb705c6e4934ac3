"""What reports and cards say of the training text: the funnel, what was dropped, the vocabulary, contamination."""

from model.quantities import counted
from tasks.reports.common import stage_of

RULE_WORDS = 13  # in a row, that a document has in common with downstream data: appendix C of the GPT-3 paper
HELD_OUT, MEASURED = "held out", "of these, measured for the held-out loss"  # rows of the funnel
COUNTS = ("documents", "characters", "tokens", "sequences")


def funnel(lineage: dict[str, dict]) -> list[dict]:
    """Documents, characters, tokens and sequences that each stage passed on."""
    rows = []

    def add(stage: str, name: str, counts: dict) -> None:
        rows.append({"stage": stage, "artifact": name} | {what: counts.get(what) for what in COUNTS})

    for name, manifest in lineage.items():
        stage, stats = manifest["stage"], manifest["stats"]
        if stage == "filter":
            add(stage, name, stats | {"tokens": stats["measured_with"]["tokens_kept"]})
        elif stage == "pretrain":
            add(f"trained on ({stats['epochs']:.2f} epochs)", name, {"tokens": stats["tokens"]})
        elif "documents" in stats and stage != "measure":  # measure passes no documents on
            add(stage, name, stats)
        if stage == "tokenize":
            add(HELD_OUT, name, stats["heldout"])
            add(MEASURED, name, stats["heldout"]["measured"])
    return rows


def dropped(lineage: dict[str, dict]) -> list[list]:
    """Stage, reason, documents, characters and the main sources of all that was dropped."""
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
        for reason, documents in stats.get("lost", {}).items():
            rows.append([stage, f"unreadable: {reason}", documents, None, None])
    return rows


def filtered(lineage: dict[str, dict]) -> dict:
    """The filter's table by source without its characters, and its threshold."""
    manifest = stage_of(lineage, "filter")
    if manifest is None:
        return {"filtered": [], "threshold": None}
    rows = [
        {
            name: f"{value:.3f}" if name.startswith("median") else value
            for name, value in row.items()
            if not name.startswith("characters")
        }
        for row in manifest["stats"].get("table", [])
    ]
    return {"filtered": rows, "threshold": manifest["params"].get("max_tokens_per_char")}


def contamination(lineage: dict[str, dict]) -> dict:
    """Whether the corpus was searched for text of the downstream data, and what was found."""
    manifest = stage_of(lineage, "decontaminate")
    if manifest is None:
        return {"checked": False, "why": "the corpus did not pass the stage decontaminate"}
    stats = manifest["stats"]
    names = ("checked", "why", "words", "not_at_hand", "documents_found", "cut", "tasks")
    content = {name: stats.get(name) for name in names}
    content["dropped"] = stats["dropped"]["contaminated"]["documents"]
    return {name: value for name, value in content.items() if value is not None}


def removal(contamination: dict) -> str | None:
    """What was removed from the corpus because it contains downstream text; None if it was not searched."""
    if not contamination["checked"]:
        return None
    dropped, cut = f"{counted(contamination['dropped'], 'document')} dropped", contamination.get("cut")
    if not cut:
        return dropped
    return f"{counted(cut['characters'], 'character')} cut from {counted(cut['documents'], 'document')}, and {dropped}"


def text_sections(lineage: dict[str, dict]) -> dict:
    """What the templates of reports and cards say of the training text in common."""
    content = contamination(lineage)
    columns = {name: name for name in ("stage", *COUNTS)}
    return {
        "funnel": funnel(lineage),
        "funnel_columns": columns,
        "contamination": content,
        "removal": removal(content),
    }
