"""The model card: the README.md of a model's folder, as the Hugging Face hub reads it.

It is made from the manifests of all that led to the model, and says nothing that they don't.
"""

import json
from collections.abc import Iterable

from model import export
from model.settings import Architecture
from tasks import hub
from tasks.corpus import Download
from tasks.decontaminate import Decontaminate
from tasks.dedup import Deduplicate
from tasks.filter import Filter
from tasks.pretrain import Pretrain
from tasks.report import budget_section, contamination, contamination_section, funnel, markdown
from tasks.tokens import Tokenize
from tasks.vocabulary import Vocabulary

PAPER = "https://arxiv.org/abs/2212.14034"
USUAL: dict[str, dict] = {  # the params of the paper's final recipe, as far as manifests have them
    "download": Download().model_dump(mode="json"),
    "deduplicate": Deduplicate().identity(),
    "decontaminate": Decontaminate().model_dump(mode="json", include={"method", "words"}),
    "filter": Filter().identity(),
    "vocabulary": Vocabulary().identity(),
    "tokenize": Tokenize().identity(),
    "pretrain": Pretrain().identity(),
}


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
            rows.append([f"`{prefix}.{name}`", f"`{json.dumps(here[name])}`", f"`{json.dumps(value)}`"])
    return rows


def use_section(architecture: Architecture) -> list[str]:
    """How to load the model; if only with cram, why."""
    name, title = export.transformers_model(architecture), "## Use"
    if name is None:
        return [
            title,
            f"Only cram loads it, with its repository on the path: {export.why_not_transformers(architecture)} The tokenizer is "
            "one of transformers.",
            "```python\n"
            "from pathlib import Path\n\n"
            "from model.export import load\n"
            "from transformers import AutoTokenizer\n\n"
            'folder = "FOLDER"  # with this file\n'
            "tokenizer, bert = AutoTokenizer.from_pretrained(folder), load(Path(folder)).eval()\n"
            'ids = tokenizer("the capital of france is [MASK].", return_tensors="pt").input_ids\n'
            "scores = bert.logits(bert.encode(ids))[ids == tokenizer.mask_token_id]\n"
            "print(tokenizer.convert_ids_to_tokens(scores.topk(5).indices[0]))\n"
            "```",
        ]
    lines = [
        title,
        f"It is a `{name}ForMaskedLM` of transformers (5.17 or newer), and needs no remote code:",
        "```python\n"
        "from transformers import pipeline\n\n"
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
    columns = ["stage", "documents", "characters", "tokens", "sequences"]
    passed = [[row[column] for column in columns] for row in funnel(lineage)]
    told = "\n".join(lines) or "The manifest that says where the text came from was not at hand."
    return ["## Training data", told, markdown(columns, passed), *contamination_section(contamination(lineage))]


def datasets(lineage: dict[str, dict]) -> list[str]:
    """The data sets of the hub that the text came from."""
    places = [about["params"].get("sources", {}) for about in lineage.values() if about["stage"] == "download"]
    return sorted({place["repository"] for known in places for place in known.values() if "repository" in place})


def limits(length: int | None) -> list[str]:
    """What the model can't do or was never examined for."""
    longest = f"It was trained on sequences of {length} tokens, and knows nothing of longer ones." if length else ""
    return [
        "## Limits",
        "\n".join(
            f"- {line}"
            for line in (
                longest,
                "Its tokenizer lowers case, strips accents and drops whatever is not printable ASCII: it is for English text.",
                "It fills masks and is meant to be finetuned. It doesn't write text, and its states are no sentence embeddings "
                "as they are.",
                "It was not examined for what it says of people. It will repeat the errors and prejudices of its text.",
                "It is one run with one seed.",
            )
            if line
        ),
    ]


def card(about: dict, lineage: dict[str, dict], scores: Iterable[str] = ()) -> str:
    """The card of a model.

    `about`: `stage`, `params`, `stats` and `environment` of its pretrain stage, as its manifest has them. `lineage`: the
    manifests of what led to it, by name, with or without its own. `scores`: more sections, as tasks.report makes them.
    """
    lineage = {name: m for name, m in lineage.items() if m["stage"] != "pretrain"} | {"pretrain": about}
    params, stats, environment = about["params"], about["stats"], about["environment"]
    architecture = Architecture(**params["architecture"])
    name, hubs = export.transformers_model(architecture), datasets(lineage)
    length = next((m["params"].get("length") for m in lineage.values() if m["stage"] == "tokenize"), None)
    size, budget = f"{stats['parameters'] / 1e6:,.1f} million", f"{params['budget']:g} {params['budget_unit']}"
    fields = {
        "library_name": "transformers" if name else "cram",
        "pipeline_tag": "fill-mask",
        "tags": ["cram", "masked-lm", "pretrained-from-scratch", *([name.lower()] if name else [])],
        "mask_token": "[MASK]",
    } | ({"datasets": hubs} if hubs else {})
    changes = [row for m in lineage.values() for row in deltas(m["params"], USUAL.get(m["stage"], {}), m["stage"])]
    shape = (
        f"{architecture.layers} x {architecture.hidden}, {architecture.heads} heads, {architecture.activation}, "
        f"{architecture.norm_order}-norm, {architecture.positions} positions, {stats['parameters']:,} parameters"
    )
    sections = [
        header(fields),
        f"# Encoder of {size} parameters, pretrained in {budget}",
        f"A BERT-class encoder, trained from scratch by cram to fill masks in text, on {stats['machine']['device']}. "
        f"No pretrained model or tokenizer had a part in it. It follows ["
        f'"Cramming: Training a Language Model on a Single GPU in One Day"]({PAPER}).',
        *use_section(architecture),
        "## Recipe",
        f"{shape}. "
        + (
            "What differs from `crammed-bert`, the paper's final recipe:"
            if changes
            else "Everything is as in `crammed-bert`, the paper's final recipe."
        ),
        *([markdown(["parameter", "here", "crammed-bert"], changes)] if changes else []),
        *budget_section(about),
        f"The held-out loss is that of {stats['heldout_predictions']:,} masked tokens of documents that were never trained on. "
        "Per character it can be compared between vocabularies, on the same text.",
        f"Software: torch {environment['packages'].get('torch', '(unknown)')}, Python {environment['python']}, cram at commit "
        f"`{environment['commit']}`.",
        *text_section(lineage),
        *scores,
        *limits(length),
        "## Licence",
        "None is given here: whoever publishes the model chooses one (`license` at the head of this file), having read the "
        "terms of the text above.",
    ]
    return "\n\n".join(sections) + "\n"
