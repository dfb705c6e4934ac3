"""The training text of a model, from the manifests of the stages: what each passed on, dropped, and shares with tests.

Templates have the sentences.
"""

import json
from pathlib import Path

from model.wording import counted
from tasks.reports.markdown import short, shortened
from tasks.reports.rows import Bar, Drop, FunnelRow, Sample
from tasks.text.scripts import main_scripts

STAGES_OF_TEXT = ("download", "deduplicate", "decontaminate", "filter", "tokenize")
LEAST_OF_SCRIPT = 0.1  # of the documents, for a script to be named
SAMPLES = (  # files of a stage's folder with what it dropped
    ("download", "lost.jsonl", "could not be read"),
    ("deduplicate", "duplicates.jsonl", "duplicates"),
    ("decontaminate", "contaminated.jsonl", "shared text with test data"),
    ("filter", "dropped.jsonl", "filtered out"),
)
SAMPLES_SHOWN = 2  # of each stage
SAMPLE_CHARACTERS = 160
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


def described(lineage: dict[str, dict], texts: list[str]) -> str:
    """What the training text is, in words. `texts`: those of its held-out documents that are still here."""
    tokens = stage_of(lineage, "tokenize")
    if tokens is None:
        return "text that is not known here"
    stats = tokens["stats"]
    facts = [f"{short(stats['characters'])} characters"]
    if texts:
        facts.append(f"{scripts_in_words(texts)} script")
    read = stage_of(lineage, "download")
    origin = f" from {source_in_words(read['params']['source'])}" if read else ""
    return f"{counted(stats['documents'], 'document')}{origin} ({', '.join(facts)})"


def source_in_words(source: str | dict) -> str:
    """The sources of a text."""
    names = [source] if isinstance(source, str) else list(source)
    return " and ".join("local files" if name == "files" else name for name in names)


def scripts_in_words(texts: list[str]) -> str:
    """The scripts of a tenth of the texts or more, the most frequent first."""
    found = main_scripts(texts)
    names = sorted(set(found), key=lambda name: (-found.count(name), name))
    shown = [name.capitalize() for name in names if found.count(name) >= LEAST_OF_SCRIPT * len(texts)]
    return " and ".join(shown)


def bars(lineage: dict[str, dict]) -> list[Bar]:
    """The documents that each stage kept, set aside for the held-out loss, and dropped."""
    found = []
    for manifest in lineage.values():
        stats = manifest["stats"]
        stage = manifest["stage"]
        if stage in STAGES_OF_TEXT and "documents" in stats:
            lost = sum(stats.get("lost", {}).values())
            gone = sum(counts["documents"] for counts in stats.get("dropped", {}).values())
            held = stats.get("heldout", {}).get("documents", 0)
            found.append(Bar(stage, stats["documents"], held, lost + gone))
    return found


def samples(folders: dict[str, Path]) -> list[Sample]:
    """Some of what each stage dropped. `folders`: by stage, of those that are still here.

    Names of files are left out, since a report may be published.
    """
    found = []
    for stage, file, words in SAMPLES:
        path = folders.get(stage, Path()) / file
        if stage in folders and path.exists():
            found += [Sample(stage, words, shown) for shown in texts_in(path)]
    return found


def texts_in(path: Path) -> list[str]:
    """The first different texts in a file of samples, on one line each and shortened."""
    texts: dict[str, None] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = " ".join(text_of(json.loads(line)).split())
            if text:
                texts[shortened(text, SAMPLE_CHARACTERS)] = None
            if len(texts) == SAMPLES_SHOWN:
                break
    return list(texts)


def text_of(sample: dict) -> str:
    """The text of a sample of any stage."""
    for name in ("text", "passage", "shared", "sample", "sentence"):
        if isinstance(sample.get(name), str):
            return sample[name]
    return text_of(sample["dropped"]) if isinstance(sample.get("dropped"), dict) else ""


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
