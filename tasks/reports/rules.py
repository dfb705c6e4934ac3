"""The rules of cramming (section 2 of the paper), and which of them a run keeps."""

from collections.abc import Iterable

from model.quantities import duration
from model.settings import Finetuning
from tasks.glue.tasks import MOST_EPOCHS, TASKS
from tasks.reports.common import settings
from tasks.reports.data_sections import RULE_WORDS, contamination, removal
from tasks.reports.markdown import table
from tasks.reports.scores import (
    NAMES,
)
from tasks.reports.training_sections import LAST_STEP

RULE_HOURS, RULE_SEEDS = 24.0, 5
REFERENCE = Finetuning().model_dump()  # of the published rows
YES, NO, UNKNOWN = "✓", "✗", "?"


def rules(lineage: dict[str, dict], pretrained: dict, tasks: Iterable[str]) -> list[list[str]]:
    """The rules of the game for pretraining: the rule, whether it was kept, and the fact. `tasks`: that the model is scored on."""
    stats, text = pretrained["stats"], contamination(lineage)
    machine, seconds = stats["machine"], stats["seconds_on_the_clock"]
    words = next((name for name, about in lineage.items() if about["stage"] == "vocabulary"), None)
    cpu = machine["device"].startswith("CPU")
    checked = (
        f"{removal(text)}; {text['words']} words in a row count"
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
