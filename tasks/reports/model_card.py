"""Model cards of pretrained and finetuned models: the README.md of their folders, as the Hugging Face hub reads it.

Cards are made from the manifests of everything that led to the model. The hub shows the scores in their head.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple

from model.clock import about_stops
from model.files import KEPT, TENTHS, TOKENS
from model.layouts import transformers_classifier, transformers_model
from model.settings import Architecture
from model.wording import counted
from tasks.corpus import hub
from tasks.glue.metrics import beats, verdict
from tasks.glue.table import PROBES, Task, task_of
from tasks.reports.funnel import overlap, stage_of, text_sections
from tasks.reports.losses import doubts, nats
from tasks.reports.markdown import Marked, code, render
from tasks.reports.pairs import card_table
from tasks.reports.rows import ScoreRow
from tasks.reports.rules import beginning
from tasks.reports.scores import HELPERS, METRICS, WEAK, data_notes, is_partial, settings, settings_rows
from tasks.reports.trees import as_text

LONG = 100  # characters of a list in a table
GLUE = "nyu-mll/glue"
HUB_METRICS = {  # names on the hub
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "macro_f1": "f1",
    "micro_f1": "f1",
    "span_f1": "seqeval",
}


class Kept(NamedTuple):
    """A model that training kept on its way."""

    kind: str  # TENTHS or TOKENS of model.files
    number: int  # percent of the budget, or millions of tokens
    tokens: int = 0  # read until then
    steps: int = 0

    @property
    def branch(self) -> str:
        """Its branch on the hub."""
        if self.kind == TENTHS:
            return f"budget-{self.number}"
        return f"tokens-{self.number}M" if self.number else "step0"

    @property
    def when(self) -> str:
        """When it was kept, in words."""
        if self.kind == TENTHS:
            return f"after {self.number} % of the budget, before the rate of training had fallen to its end"
        if not self.steps:
            return "before the first step of training"
        return f"after {counted(self.tokens, 'token')} ({counted(self.steps, 'step')})"


class Published(NamedTuple):
    """The folder of a card. The defaults are those of an artifact."""

    with_code: bool | None = None  # whether it has the code of the model's classes; None: it is an artifact
    place: str = "FOLDER"  # its name on the hub
    kept: Kept | None = None  # the model on its way that a branch there has; None: the last one
    branches: tuple[Kept, ...] = ()  # all such
    licence: str = ""  # of the model, by the hub's name
    embeds: bool = False  # it opens with sentence-transformers
    onnx: bool = False

    @property
    def branch(self) -> str:
        """Its branch."""
        return self.kept.branch if self.kept else "main"

    def head(self, name: str | None, pipeline: str, tags: list[str], repositories: list[str]) -> dict:
        """The head of the card. `name`: the model's classes in transformers, if any; `repositories`: of its data."""
        return {
            "library_name": "transformers" if name or self.with_code else "cram",
            "license": self.licence or None,
            "pipeline_tag": pipeline,
            "tags": ["cram", *tags],
            "datasets": repositories or None,
        }

    def values(self) -> dict:
        """For the templates; `opened`: what opens the model, as arguments of a pipeline."""
        opened = f'model="{self.place}"'
        if self.kept:
            opened += f', revision="{self.branch}"'
        if self.with_code:
            opened += ", trust_remote_code=True"
        names: dict[str, list[str]] = {kind: [] for kind in KEPT}
        for kept in self.branches:
            names[kept.kind].append(kept.branch)
        shown = {"place": Marked(self.place), "opened": Marked(opened)}
        return self._asdict() | shown | {"of_tenths": names[TENTHS], "of_tokens": names[TOKENS]}


ARTIFACT = Published()


# Of both kinds of card


def assemble(template: str, values: dict, head: dict, results: list[dict], how: Published) -> str:
    """A card as the hub reads it: a head in YAML with the `results`, if there are any, and a template's text."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    scores = [EvalResult(**result) for result in results]
    data = ModelCardData(model_name="cram" if scores else None, eval_results=scores or None, **head)
    text = render(template, HELPERS | how.values() | values)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}", ignore_metadata_errors=False))


def result(task: Task, name: str, split: str, metric: str, value: float, how: str) -> dict:
    """The arguments of an EvalResult: a score on a task of GLUE, or on one of the user's own."""
    if task.own:
        dataset = {"dataset_type": name, "dataset_name": name}
    else:
        dataset = {"dataset_type": GLUE, "dataset_name": f"GLUE {task.title}", "dataset_config": name}
    return {
        "task_type": task.pipeline,
        **dataset,
        "dataset_split": split,
        "metric_type": HUB_METRICS.get(metric, metric),
        "metric_value": value,
        "metric_name": f"{METRICS[metric]} times 100, {how}",
    }


def tree(lineage: dict[str, dict]) -> Marked:
    """What led to a model, as a tree; empty if nothing did."""
    return Marked(as_text("this model", lineage) if lineage else "")


def recipe(about: dict, lineage: dict[str, dict]) -> dict:
    """The model's origin, shape, budget and loss, and all parameters that differ from the paper's final recipe.

    `about`: the manifest of its pretrain stage.
    """
    stats = about["stats"]
    params = about["params"]
    start = stats.get("start")
    is_adopted = "adopted" in stats
    return {
        "architecture": Architecture(**params["architecture"]),
        "params": params,
        "stats": stats,
        "began": start and beginning(start),
        "adopted": is_adopted,
        "tags": [] if start or is_adopted else ["pretrained-from-scratch"],
        "doubts": doubts(stats, params),
        "overlap": overlap(lineage),
        "stops": about_stops(stats),
        "nats": nats,
        "changes": changes(about, lineage),
    }


def changes(about: dict, lineage: dict[str, dict]) -> list[list[str]]:
    """Name, value and usual value of each param of all stages that differs from the usual."""
    before = [manifest for manifest in lineage.values() if manifest["stage"] != "pretrain"]
    rows = []
    for manifest in (*before, about):
        rows += deltas(manifest["params"], manifest.get("usual", {}), manifest["stage"])
    return rows


def deltas(here: dict, usual: dict, prefix: str) -> list[list[str]]:
    """Name, value and usual value of each param that differs from the usual, also of those within others."""
    rows = []
    for name, value in usual.items():
        if isinstance(value, dict) and isinstance(here.get(name), dict):
            rows += deltas(here[name], value, f"{prefix}.{name}")
        elif name in here and here[name] != value:
            rows.append([code(f"{prefix}.{name}"), as_json(here[name]), as_json(value)])
    return rows


def as_json(value: object) -> str:
    """A value as JSON; of a long list (files with their digests), its length."""
    whole = json.dumps(value)
    if isinstance(value, list) and len(whole) > LONG:
        return counted(len(value), "item")
    return code(whole)


def sources(lineage: dict[str, dict]) -> list[dict]:
    """The sources of the text, with their terms."""
    corpus = stage_of(lineage, "download")
    places = corpus["params"].get("sources", {}) if corpus else {}
    return [
        {"name": name, "repository": None, "terms": terms_of(name, place), **place} for name, place in places.items()
    ]


def terms_of(source: str, place: dict) -> str:
    """The terms of a source's text. `place`: its repository, if it is on the hub."""
    known = hub.SOURCES.get(source)
    if known and known.licence:
        return known.licence
    return "as its card on the hub says" if "repository" in place else "those of the authors"


def normaliser(lineage: dict[str, dict]) -> dict:
    """The settings that say what the tokenizer reads; without those that characters "ascii" ignores."""
    for manifest in lineage.values():
        if "adopted" in manifest["stats"]:
            return manifest["stats"]["normaliser"]
    vocabulary = stage_of(lineage, "vocabulary")
    return vocabulary["params"] if vocabulary else {}


# Pretrained models


def card(
    about: dict,
    lineage: dict[str, dict],
    glue: dict | None = None,
    own: dict | None = None,
    judged: Iterable[dict] = (),
    how: Published = ARTIFACT,
) -> str:
    """The card of a pretrained model.

    `about`: `stage`, `params`, `stats` and `environment` of its pretrain stage, as in its manifest. `lineage`: the
    manifests of what led to it, by name, with or without its own. `glue`, `own`: its scores, from `score_section` and
    `own_section`. `judged`: the statistics of sets of minimal pairs.
    """
    before = {name: manifest for name, manifest in lineage.items() if manifest["stage"] != "pretrain"}
    lineage = before | {"pretrain": about}
    made = recipe(about, lineage)
    architecture = made["architecture"]
    text = about_text(lineage)
    name, why_not = transformers_model(architecture)
    tags = ["masked-lm", *made["tags"]]
    if name:
        tags.append(name.lower())
    head = how.head(name, "fill-mask", tags, text["repositories"]) | {"mask_token": "[MASK]"}
    values = {
        **made,
        **text,
        "transformers_class": name and f"{name}ForMaskedLM",
        "why_not": why_not,
        "leaves_out_biases": name == "ModernBert" and (architecture.norm_bias or architecture.bias),
        "environment": about["environment"],
        "glue": glue,
        "own": own,
        "pairs": card_table(judged),
        "pictures": (),
        "lineage_tree": tree(before),
    }
    scores: list[dict] = []
    if not how.kept:  # the scores are of the whole budget
        scores = results(glue) + results(own)
    return assemble("card", values, head, scores, how)


def about_text(lineage: dict[str, dict]) -> dict:
    """What the card of a pretrained model shows of the text that it was trained on, and of its tokens."""
    tokens = stage_of(lineage, "tokenize")
    of_text = sources(lineage)
    repositories = {source["repository"] for source in of_text if source["repository"]}
    return text_sections(lineage) | {
        "sources": of_text,
        "repositories": sorted(repositories),
        "normaliser": normaliser(lineage),
        "length": tokens and tokens["params"].get("length"),
    }


def results(section: dict | None) -> list[dict]:
    """The scores of a pretrained model for its card's head: those on complete data, of a section if there is one."""
    found = []
    rows: list[ScoreRow] = section["rows"] if section else []
    for row in rows:
        if row["pretrained"] and not row["partial"]:
            how = f"median of {counted(row['seeds'], 'seed')}"
            for metric, spread in row["metrics"].items():
                value = round(spread["median"], 2)
                found.append(result(task_of(row), row["task"], row["split"], metric, value, how))
    return found


# Finetuned models


def finetuned_card(params: dict, stats: dict, lineage: dict[str, dict], how: Published = ARTIFACT) -> str:
    """The card of a finetuned model.

    `params`, `stats`: those of its finetune stage. `lineage`: the manifests of what led to it, by name.
    """
    task = task_of(stats)
    pretrained = last_pretrained(lineage)
    made = recipe(pretrained, lineage)
    name, why_not = transformers_classifier(made["architecture"], stats["head"], params["pooling"], task.kind)
    repository = params["data"].get("repository")
    repositories = [repository] if repository else []
    origin = made["tags"] if params["pretrained"] else ["not-pretrained"]
    head = how.head(name, task.pipeline, [params["task"], *origin], repositories)
    values = {
        "task": task,
        "params": params,
        "stats": stats,
        "parameters": pretrained["stats"]["parameters"],
        "began": made["began"],
        "adopted": made["adopted"],
        "pair": len(task.columns) > 1,
        "normaliser": normaliser(lineage),
        "lineage_tree": tree(lineage),
        "transformers_class": name,
        "beats": beats,
        "why_not": why_not,
        "settings": settings_rows(settings([params | {"head": stats["head"]}])),
        "notes": notes(task, stats),
        "sources": sources(lineage) if params["pretrained"] else [],
    }
    return assemble("finetuned_card", values, head, finetuned_results(task, params, stats), how)


def last_pretrained(lineage: dict[str, dict]) -> dict:
    """The manifest of the model that finetuning started from."""
    return [manifest for manifest in lineage.values() if manifest["stage"] == "pretrain"][-1]


def finetuned_results(task: Task, params: dict, stats: dict) -> list[dict]:
    """The scores of a finetuned model for the head of its card: those on complete data of tasks but probes."""
    name = params["task"]
    if name in PROBES:
        return []
    how = f"seed {params['seed']}"
    if params["share"] < 1:
        how += f", {params['share']:.0%} of the training data"
    found = []
    for split, of_split in stats["validation"].items():
        if not is_partial(stats, split):
            for metric, value in of_split["metrics"].items():
                found.append(result(task, name, split, metric, float(value), how))
    return found


def notes(task: Task, stats: dict) -> list[str]:
    """What there is to know about the scores of a finetuned model."""
    found = []
    splits = stats["validation"].values()
    if not all(beats(of_split, metric) for of_split in splits for metric in of_split["metrics"]):
        found.append(f"{WEAK} {verdict(task).capitalize()}.")
    for of_split in splits:
        found += of_split["notes"]
    return found + data_notes(stats)
