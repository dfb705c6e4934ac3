"""The rules of cramming (section 2 of the paper), and which of them a run keeps."""

from collections import Counter
from collections.abc import Iterable

from model.quantities import duration
from model.settings import Finetuning
from tasks.glue.tasks import MOST_EPOCHS, TASKS
from tasks.reports.common import settings
from tasks.reports.data_sections import RULE_WORDS, contamination, removal
from tasks.reports.scores import NAMES

RULE_HOURS, RULE_SEEDS = 24.0, 5
LAST_STEP = 1.001  # a budget ends with the step in which it is spent
REFERENCE = Finetuning().model_dump()  # of the published rows
YES, NO, UNKNOWN = "✓", "✗", "?"


def mark(kept: bool, otherwise: str = NO) -> str:
    """Whether a rule was kept."""
    return YES if kept else otherwise


def rules(lineage: dict[str, dict], pretrained: dict, tasks: Iterable[str]) -> list[list[str]]:
    """The rules for pretraining: the rule, whether it was kept, and the fact. `tasks`: that the model is scored on."""
    machine, seconds = pretrained["stats"]["machine"], pretrained["stats"]["seconds_on_the_clock"]
    words = next((name for name, manifest in lineage.items() if manifest["stage"] == "vocabulary"), None)
    one, detection = machine["gpus"] == 1, pretrained["params"].get("detection", 0.0)  # older models lack it
    no_gpu = one and machine["device"].startswith("CPU")
    return [
        ["masked language modelling from scratch", mark(not detection),
         f"random weights, seed {pretrained['params']['seed']}; "
         + (f"a second loss, detection of corrupted tokens, has weight {detection:g}" if detection
            else "cram always trains from scratch")],
        ["no pretrained model or tokenizer", mark(bool(words), UNKNOWN),
         f"the vocabulary was trained on this text ({words})" if words else "the vocabulary's manifest is missing"],
        ["one GPU", mark(one),
         f"no GPU: {machine['device']}" if no_gpu else f"{machine['gpus']} x {machine['device']}"],
        [f"at most {RULE_HOURS:g} hours", mark(seconds <= 3600 * RULE_HOURS * LAST_STEP),
         f"{duration(seconds, 5)} on the clock"],
        ["no downstream data in the text", *text_rule(contamination(lineage), set(tasks))],
    ]  # fmt: skip


def text_rule(text: dict, tasks: set[str]) -> list[str]:
    """Whether the corpus is known to be free of downstream text, and the fact. `text`: from `contamination`."""
    if not text["checked"]:
        return [UNKNOWN, f"not checked, because {text['why']}"]
    missing = text.get("not_at_hand", [])
    unseen = [
        name
        for task, name in NAMES.items()
        if task in tasks
        and (task not in text["tasks"] or any(f"{task}/{split}" in missing for split in TASKS[task].validation))
    ]
    facts = [removal(text), f"{text['words']} words in a row count"]
    facts += [f"not available: {', '.join(missing)}"] if missing else []
    facts += [f"scored on, but not searched for: {', '.join(unseen)}"] if unseen else []
    return [mark(not unseen and text["words"] <= RULE_WORDS, UNKNOWN), "; ".join(facts)]


def varying(runs: list[dict]) -> list[str]:
    """The settings that are not the same for all tasks."""
    return [name for name, value in settings(runs).items() if isinstance(value, dict)]


def from_mnli(runs: list[dict]) -> list[str]:
    """The tasks that start from the model finetuned on MNLI."""
    return sorted({NAMES.get(run["task"], run["task"]) for run in runs if run["start"] != "pretrained"})


def finetuning_rules(runs: list[dict]) -> list[list[str]]:
    """The rules for finetuning by one protocol, from the params of its runs on all of the training data."""
    epochs, differing, others = sorted({run["epochs"] for run in runs}), varying(runs), from_mnli(runs)
    last = all(run["choose"] == "last" for run in runs)
    pretrained = [run for run in runs if run["pretrained"]]
    seeds = sorted(set(Counter(run["task"] for run in pretrained or runs).values()))
    return [
        [f"at most {MOST_EPOCHS} epochs", mark(epochs[-1] <= MOST_EPOCHS), ", ".join(map(str, epochs))],
        ["one setting for all tasks", mark(not differing),
         f"differ: {', '.join(differing)}" if differing else "the same for all"],
        ["each task on its own training data only", mark(not others),
         f"started from MNLI's model: {', '.join(others)}" if others else "all start from the pretrained model"],
        ["the last epoch is scored", mark(last),
         "the last" if last else "chosen on a tenth of the training data; never on validation data"],
        [f"median of {RULE_SEEDS} seeds", mark(seeds[0] >= RULE_SEEDS), f"{' or '.join(map(str, seeds))} per task"],
    ]  # fmt: skip
