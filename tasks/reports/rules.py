"""Whether a run kept the rules of cramming (section 2 of the paper)."""

from collections import Counter
from collections.abc import Iterable, Sequence

from model.wording import counted, duration
from tasks.glue.table import MOST_EPOCHS, PROBES, TASKS
from tasks.reports.funnel import contamination
from tasks.reports.rows import NO, UNKNOWN, YES, Rule
from tasks.reports.scores import NAMES, settings

RULE_HOURS = 24.0
RULE_SEEDS = 5
RULE_WORDS = 13  # in a row, that a document has in common with downstream data: appendix C of the GPT-3 paper
LAST_STEP = 1.001  # a budget ends with the step in which it is spent


def beginning(start: dict) -> str:
    """The model that a run began from, and what that began from, as the end of a sentence."""
    before = f" and began from {beginning(start['start'])}" if start["start"] else ""
    known = f"had read {counted(start['tokens'], 'token')}" if start["tokens"] else "was adopted from a folder"
    return f"{start['name']}, which {known}{before}"


# The rules for pretraining


def pretraining_rules(lineage: dict[str, dict], pretrained: dict, tasks: Iterable[str]) -> list[Rule]:
    """The rules for pretraining. `pretrained`: that stage's manifest. `tasks`: those that the model is scored on."""
    stats = pretrained["stats"]
    if "adopted" in stats:
        return [Rule("pretraining by the rules", UNKNOWN, "the model was adopted from a folder")]
    return [
        scratch_rule(pretrained["params"], stats.get("start")),
        vocabulary_rule(lineage),
        machine_rule(stats["machine"]),
        time_rule(stats["seconds_on_the_clock"], began=bool(stats.get("start"))),
        text_rule(contamination(lineage), set(tasks)),
    ]


def scratch_rule(params: dict, start: dict | None) -> Rule:
    """Whether the model was trained from random weights, with the loss of masked tokens alone."""
    detection = params.get("detection", 0.0)
    begin = f"began from {beginning(start)}" if start else f"random weights, seed {params['seed']}"
    other = f"a second loss, detection of corrupted tokens, has weight {detection:g}" if detection else "no other loss"
    kept = NO if detection or start else YES
    return Rule("masked language modelling from scratch", kept, f"{begin}; {other}")


def vocabulary_rule(lineage: dict[str, dict]) -> Rule:
    """Whether the vocabulary was trained on the model's own text."""
    rule = "no pretrained model or tokenizer"
    for name, manifest in lineage.items():
        if manifest["stage"] == "vocabulary":
            if manifest["params"].get("start"):
                return Rule(rule, NO, "the vocabulary is that of a model")
            return Rule(rule, YES, f"the vocabulary was trained on this text ({name})")
    return Rule(rule, UNKNOWN, "the vocabulary's manifest is missing")


def machine_rule(machine: dict) -> Rule:
    """Whether it was one GPU, or a machine without one."""
    device = machine["device"]
    one = machine["gpus"] == 1
    fact = f"no GPU: {device}" if one and device.startswith("CPU") else f"{machine['gpus']} x {device}"
    return Rule("one GPU", YES if one else NO, fact)


def time_rule(seconds: float, began: bool) -> Rule:
    """Whether pretraining took a day at most. `began`: from another model, whose time is not in `seconds`."""
    rule = f"at most {RULE_HOURS:g} hours"
    fact = f"{duration(seconds, 5)} on the clock"
    kept = YES
    if began:
        fact += ", without that of the model it began from"
        kept = UNKNOWN
    if seconds > 3600 * RULE_HOURS * LAST_STEP:
        kept = NO
    return Rule(rule, kept, fact)


def text_rule(text: dict, tasks: set[str]) -> Rule:
    """Whether the corpus is known to be free of downstream text. `text`: from `contamination`."""
    rule = "no downstream data in the text"
    if not text["checked"]:
        return Rule(rule, UNKNOWN, f"not checked, because {text['why']}")
    facts = [text["removal"], f"{text['words']} words in a row count"]
    missing = text.get("not_at_hand", [])
    if missing:
        facts.append(f"not available: {', '.join(missing)}")
    unseen = not_searched_for(text, tasks)
    if unseen:
        facts.append(f"scored on, but not searched for: {', '.join(unseen)}")
    kept = YES if not unseen and text["words"] <= RULE_WORDS else UNKNOWN
    return Rule(rule, kept, "; ".join(facts))


def not_searched_for(text: dict, tasks: set[str]) -> list[str]:
    """Which of these tasks were not, or not with all of their validation data, searched for in the corpus."""
    missing = text.get("not_at_hand", [])
    found = []
    for task in dict.fromkeys([*NAMES, *sorted(tasks)]):
        if task not in tasks or task in PROBES:
            continue
        splits = TASKS[task].validation if task in TASKS else ()
        if task not in text["tasks"] or any(f"{task}/{split}" in missing for split in splits):
            found.append(NAMES.get(task, task))
    return found


# The rules for finetuning


def finetuning_rules(runs: Sequence[dict]) -> list[Rule]:
    """The rules for finetuning, from the params of the runs on all of the training data."""
    epochs = sorted({run["epochs"] for run in runs})
    differing = [name for name, value in settings(runs).items() if isinstance(value, list)]
    seeds = sorted(set(Counter(run["task"] for run in runs if run["pretrained"]).values()))
    one_setting = f"differ: {', '.join(differing)}" if differing else "the same for all"
    return [
        Rule(f"at most {MOST_EPOCHS} epochs", YES if epochs[-1] <= MOST_EPOCHS else NO, ", ".join(map(str, epochs))),
        Rule("one setting for all tasks", NO if differing else YES, one_setting),
        Rule("each task on its own training data only", YES, "all start from the pretrained model"),
        Rule("the last epoch is scored", YES, "the last"),
        Rule(
            f"median of {RULE_SEEDS} seeds",
            YES if seeds[0] >= RULE_SEEDS else NO,
            f"{' or '.join(map(str, seeds))} per task",
        ),
    ]
