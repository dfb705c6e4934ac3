"""The model card: the README.md of a model's folder, as the Hugging Face hub reads it. Of pretrained and finetuned ones.

It is made from the manifests of all that led to the model, and says nothing that they don't.
"""

import json
from collections.abc import Iterable

from model.layouts import transformers_model, why_not_transformers
from model.quantities import counted, span
from model.settings import Architecture
from tasks.corpus import hub
from tasks.glue.metrics import beats, verdict
from tasks.glue.tasks import TASKS, Task
from tasks.reports.common import METRICS, WEAK, budget_of, marked, stage_of
from tasks.reports.data_sections import contamination, contamination_section, funnel_table
from tasks.reports.markdown import Marked, code, escape, items, table
from tasks.reports.training_sections import budget_section

LONG = 100  # characters of a list in a table
FINETUNING = (  # settings that a card shows
    "epochs", "batch_size", "learning_rate", "schedule", "warmup", "weight_decay", "dropout", "max_tokens", "choose", "batches",
    "seed",
)  # fmt: skip
PAPER = "https://arxiv.org/abs/2212.14034"


def header(fields: dict[str, object]) -> str:
    """The block of YAML at the head of a card. JSON is YAML too."""
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def deltas(here: dict, usual: dict, prefix: str) -> list[list[str]]:
    """Name, value and usual value of each param that is not as usual, those within others too."""
    rows = []
    for name, value in usual.items():
        if isinstance(value, dict) and isinstance(here.get(name), dict):
            rows += deltas(here[name], value, f"{prefix}.{name}")
        elif name in here and here[name] != value:
            rows.append([code(f"{prefix}.{name}"), shown(here[name]), shown(value)])
    return rows


def shown(value: object) -> object:
    """A value as JSON; of a long list (files with their digests), how long it is."""
    whole = json.dumps(value)
    return counted(len(value), "item") if isinstance(value, list) and len(whole) > LONG else code(whole)


def opened_with(name: str | None, why_not: str | None) -> tuple[str, str]:
    """How to open a model in transformers, and what its code imports; `name`: of transformers' own class, if it has one."""
    imported = "from transformers import pipeline\n\n"
    if name:
        return f"It is a `{name}` of transformers (5.17 or newer), and needs no remote code:", imported
    intro = f"transformers (5.17 or newer) opens it with cram's repository on the path: {why_not}"
    return intro, "import model.hf  # of cram: registers its models\n" + imported


def use_section(architecture: Architecture) -> list[str]:
    """How to load the model."""
    name = transformers_model(architecture)
    intro, imported = opened_with(name and f"{name}ForMaskedLM", why_not_transformers(architecture))
    lines = [
        "## Use",
        intro,
        f"```python\n{imported}"
        'fill = pipeline("fill-mask", model="FOLDER")  # the folder with this file, or its name on the hub\n'
        'print(fill("the capital of france is [MASK]."))\n'
        "```",
        "`AutoModelForSequenceClassification` and its like finetune it; dropout is 0 unless you set it.",
    ]
    if name == "ModernBert" and (architecture.norm_bias or architecture.bias):
        lines.append(
            "Engines other than transformers may leave out biases of norms and heads, which this model has: compare their "
            "output with that of transformers before you use one."
        )
    return lines


def text_section(lineage: dict[str, dict]) -> list[str]:
    """Where the text comes from and under which terms, what of it was used, and whether downstream data was in it."""
    corpus = next((about for about in lineage.values() if about["stage"] == "download"), None)
    places = corpus["params"].get("sources", {}) if corpus else {}
    lines = []
    for name, place in places.items():
        if name in hub.SOURCES:
            url = f"https://huggingface.co/datasets/{place['repository']}"
            about = (
                f"[{place['repository']}]({url}) at commit `{place['revision']}`. Terms: {hub.SOURCES[name].licence}"
            )
        else:
            own = {"files": f"local files ({len(place.get('files', []))})", "python-docs": "docs of Python packages"}
            about = f"{own.get(name, 'not on the hub')}. Terms: those of their authors"
        lines.append(f"- `{name}`: {about}.")
    told = "\n".join(lines) or "The manifest that says where the text came from was not at hand."
    return ["## Training data", told, funnel_table(lineage), *contamination_section(contamination(lineage))]


def datasets(lineage: dict[str, dict]) -> list[str]:
    """The data sets of the hub that the text came from."""
    places = [about["params"].get("sources", {}) for about in lineage.values() if about["stage"] == "download"]
    return sorted({place["repository"] for known in places for place in known.values() if "repository" in place})


ENGLISH = "Its tokenizer lowers case, strips accents and drops whatever is not printable ASCII: it is for English text."
UNEXAMINED = "It was not examined for what it says of people. It will repeat the errors and prejudices of its text."
LICENCE = [
    "## Licence",
    "None is given here: whoever publishes the model chooses one (`license` at the head of this file), having read the terms of "
    "the text above.",
]


def limits(length: int | None) -> list[str]:
    """What the model can't do or was never examined for."""
    longest = [f"It was trained on sequences of {length} tokens, and knows nothing of longer ones."] if length else []
    purpose = "It fills masks and is meant to be finetuned. It doesn't write text, and its states are no sentence embeddings as they are."
    return ["## Limits", items([*longest, ENGLISH, purpose, UNEXAMINED, "It is one run with one seed."])]


def software(environment: dict) -> str:
    """With what it was made."""
    return (
        f"Software: torch {environment['packages'].get('torch', '(unknown)')}, Python {environment['python']}, cram at commit "
        f"`{environment['commit']}`."
    )


def recipe_section(about: dict, lineage: dict[str, dict]) -> list[str]:
    """The model's shape, and all parameters that differ from the paper's final recipe. `about`, `lineage`: as for `card`."""
    lineage = {name: m for name, m in lineage.items() if m["stage"] != "pretrain"} | {"pretrain": about}
    changes = [row for m in lineage.values() for row in deltas(m["params"], m.get("usual", {}), m["stage"])]
    architecture = Architecture(**about["params"]["architecture"])
    shape = (
        f"{architecture.layers} x {architecture.hidden}, {counted(architecture.heads, 'head')}, "
        f"{architecture.activation}, "
        f"{architecture.norm_order}-norm, {architecture.positions} positions, {about['stats']['parameters']:,} parameters"
    )
    differs = "What differs from `crammed-bert`, the paper's final recipe:"
    same = "Everything is as in `crammed-bert`, the paper's final recipe."
    told = table(["parameter", "here", "crammed-bert"], changes)
    return ["## Recipe", f"{shape}. {differs if changes else same}", *([told] if changes else [])]


def card(about: dict, lineage: dict[str, dict], scores: Iterable[str] = ()) -> str:
    """The card of a model.

    `about`: `stage`, `params`, `stats` and `environment` of its pretrain stage, as its manifest has them. `lineage`: the
    manifests of what led to it, by name, with or without its own. `scores`: more sections, as tasks.reports.sections makes them.
    """
    lineage = {name: m for name, m in lineage.items() if m["stage"] != "pretrain"} | {"pretrain": about}
    params, stats, environment = about["params"], about["stats"], about["environment"]
    architecture = Architecture(**params["architecture"])
    name, hubs = transformers_model(architecture), datasets(lineage)
    length = next((m["params"].get("length") for m in lineage.values() if m["stage"] == "tokenize"), None)
    size, budget = f"{stats['parameters'] / 1e6:,.1f} million", budget_of(params)
    fields = {
        "library_name": "transformers" if name else "cram",
        "pipeline_tag": "fill-mask",
        "tags": ["cram", "masked-lm", "pretrained-from-scratch", *([name.lower()] if name else [])],
        "mask_token": "[MASK]",
    } | ({"datasets": hubs} if hubs else {})
    sections = [
        header(fields),
        f"# Encoder of {size} parameters, pretrained in {budget}",
        f"A BERT-class encoder, trained from scratch by cram to fill masks in text, on {stats['machine']['device']}. "
        f"No pretrained model or tokenizer had a part in it. It follows ["
        f'"Cramming: Training a Language Model on a Single GPU in One Day"]({PAPER}).',
        *use_section(architecture),
        *recipe_section(about, lineage),
        *budget_section(about),
        software(environment),
        *text_section(lineage),
        *scores,
        *limits(length),
        *LICENCE,
    ]
    return "\n\n".join(sections) + "\n"


def label_section(params: dict, stats: dict, architecture: Architecture) -> list[str]:
    """How to get labels (or the score) of a text from a finetuned model."""
    from model import export  # torch: not for every command line

    task = TASKS[params["task"]]
    example = ["the first text", "the second text"][: len(task.columns)]
    model = export.transformers_classifier(architecture, stats["head"])
    given = "\\t".join(example)
    own = f"```sh\nprintf '{given}\\n' | cram predict FOLDER  # the folder with this file{', a tab between the texts' if example[1:] else ''}\n```"
    intro, imported = opened_with(model, export.why_not_transformers_classifier(architecture, stats["head"]))
    text = json.dumps(dict(zip(("text", "text_pair"), example, strict=False)) if example[1:] else example[0])
    plain = "" if task.labels else ', function_to_apply="none"'
    return [
        "## Use",
        intro,
        f"```python\n{imported}"
        'classify = pipeline("text-classification", model="FOLDER")  # the folder with this file, or its name on the hub\n'
        f"print(classify({text}{plain}))\n"
        "```",
        "Or with cram:",
        own,
    ]


def validation_section(task: Task, stats: dict) -> list[str]:
    """The scores of a finetuned model, with what to know about them."""
    lines = [
        [escape(split), METRICS[metric], marked(f"{value:.1f}", False, beats(about, metric)),
         span(*about["intervals"][metric]),
         float(about["majority"][metric]), f"{about['examples']:,} of {about['official_examples']:,}"
         if about["official_examples"] else f"{about['examples']:,}"]
        for split, about in stats["validation"].items() for metric, value in about["metrics"].items()
    ]  # fmt: skip
    notes = [note for about in stats["validation"].values() for note in about["notes"]] + stats["data"]["notes"]
    if not all(beats(about, metric) for about in stats["validation"].values() for metric in about["metrics"]):
        notes = [f"{WEAK} {verdict(task).capitalize()}.", *notes]
    return [
        "## Scores",
        table(["split", "metric", "score", "95 % interval", "majority", "examples"], lines),
        "Times 100, of this one seed; the interval is a bootstrap over the examples.",
        *([items(map(escape, notes))] if notes else []),
    ]


def making_section(params: dict, stats: dict, lineage: dict[str, dict]) -> list[str]:
    """What a finetuned model was begun from, what it was trained on, and its settings."""
    begun = "random weights, without pretraining" if not params["pretrained"] else (
        "a model of this pretraining that was finetuned on MNLI" if params["start"] == "mnli" else "the pretrained model"
    )  # fmt: skip
    settings = {name: params[name] for name in FINETUNING} | {"head": stats["head"]}
    official = stats["official_train_examples"]
    used = counted(stats["train_examples"], "training example")
    trained = f"{stats['train_examples']:,} of {official:,} training examples" if official else used
    trained += f", of which {params['share']:.0%} were used" if params["share"] < 1 else ""
    rows = [[code(name), Marked(value) if isinstance(value, str) else f"{value:g}"] for name, value in settings.items()]
    return [
        "## How it was made",
        f"From {begun}, on {trained}, {counted(stats['steps'], 'step')}; epoch {stats['chosen_epoch']} of "
        f"{params['epochs']} is the one kept.",
        table(["setting", "value"], rows),
        "What the encoder was pretrained on, and how:",
        items([Marked(f"`{name}`") for name in lineage]),
    ]


def finetuned_card(params: dict, stats: dict, lineage: dict[str, dict]) -> str:
    """The card of a finetuned model.

    `params`, `stats`: those of its finetune stage. `lineage`: the manifests of what led to it, by name.
    """
    from model import export  # torch: not for every command line

    task, pretrained = TASKS[params["task"]], stage_of(lineage, "pretrain")
    architecture = Architecture(**pretrained["params"]["architecture"])
    model, hub_data = export.transformers_classifier(architecture, stats["head"]), params["data"].get("repository")
    fields = {
        "library_name": "transformers" if model else "cram",
        "pipeline_tag": "text-classification",
        "tags": ["cram", params["task"], "pretrained-from-scratch" if params["pretrained"] else "not-pretrained"],
    } | ({"datasets": [hub_data]} if hub_data else {})
    names = ", ".join(f"{i}: {escape(name)}" for i, name in enumerate(task.labels)) or "one number, from 0 to 5"
    sections = [
        header(fields),
        f"# {task.title}, finetuned with seed {params['seed']}",
        f"An encoder of {pretrained['stats']['parameters'] / 1e6:,.1f} million parameters that cram made from scratch and then "
        f"finetuned on {task.title}, by its protocol `{params['protocol']}`. Labels: {names}.",
        *label_section(params, stats, architecture),
        *validation_section(task, stats),
        *making_section(params, stats, lineage),
        "## Limits",
        items([
            f"It was made for {task.title}'s kind of text and question; inputs beyond {params['max_tokens']} tokens were cut.",
            ENGLISH, UNEXAMINED,
        ]),
        *LICENCE,
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"
