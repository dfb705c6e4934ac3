"""Models on disk: folders that cram and transformers load.

`Architecture` covers BERT, ModernBERT and EuroBERT. A model of such a layout is written under transformers' names, so
that `AutoModelForMaskedLM.from_pretrained(folder)` gives the same scores without remote code. Any other is written
under cram's own names, which transformers reads after `import model.hf`. The same holds for classifiers, by
`AutoModelForSequenceClassification`, if they have that model's head. In all cases config.json has a key `cram`, from
which `load` or `load_classifier` rebuilds the model.

model.safetensors is fp32 and stores a tied vocabulary head once. Classifiers of transformers have no vocabulary head,
so the encoder of one gets a new head when it is loaded.
"""

import json
from pathlib import Path

from pydantic import BaseModel, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import InputError
from model.bert import Bert, Classifier
from model.conversion import from_transformers, settings, to_transformers
from model.layouts import transformers_classifier, transformers_model
from model.settings import Architecture, HeadName, Pooling, Texts

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ENCODER, HEAD = "bert.", "classifier."  # prefixes of a classifier's tensors; the encoder's is not stored


class Saved(BaseModel, frozen=True, extra="forbid"):
    """The key `cram` in the config.json of a pretrained model."""

    architecture: Architecture
    vocabulary: int = Field(ge=1, lt=2**31)
    length: int = Field(ge=1, lt=2**31)


class SavedClassifier(Saved, frozen=True, extra="forbid"):
    """The key `cram` in the config.json of a classifier."""

    classes: int = Field(ge=1, lt=2**31)
    head: HeadName
    pooling: Pooling = "cls"
    texts: Texts = Field(None, description="In an input; None: not known.")
    max_tokens: int | None = Field(None, ge=8, description="To which inputs were cut in training; None: not known.")

    @model_validator(mode="after")
    def _inputs_fit(self) -> "SavedClassifier":
        if self.pooling == "compare" and self.texts is None:
            raise ValueError("texts is null; pooling 'compare' needs the number of texts in an input, 1 or 2")
        if self.max_tokens and self.max_tokens > self.length:
            raise ValueError(f"max_tokens is {self.max_tokens}, but the model takes {self.length} tokens")
        return self


def described(about: object) -> Saved:
    """The key `cram` in config.json as settings. Raises a ValueError that names the field for anything else."""
    finetuned = isinstance(about, dict) and "classes" in about
    return (SavedClassifier if finetuned else Saved).model_validate(about)


def _write(model: Bert | Classifier, saved: Saved, name: str | None, about: dict, folder: str | Path) -> None:
    """`name`: of transformers' model, if it has one; `about`: more settings for transformers."""
    finetuned, folder = isinstance(model, Classifier), Path(folder)
    bert = model.bert if finetuned else model
    state = {
        key.removeprefix(ENCODER): value.detach().float().cpu().contiguous()
        for key, value in model.state_dict().items()
    }
    if name:
        state = to_transformers(state, name, bert, finetuned)
    config = (settings(name, bert) if name else {"model_type": "cram"}) | about | {"cram": saved.model_dump()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    try:
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is one too
        raise InputError(
            f"The model can't be written to {folder} ({error}). Free space or grant access there, then run again."
        ) from error


def save(bert: Bert, folder: str | Path) -> None:
    """Write config.json and model.safetensors."""
    name = transformers_model(bert.architecture)
    saved = Saved(architecture=bert.architecture, vocabulary=bert.vocabulary, length=bert.length)
    _write(bert, saved, name, {"architectures": [f"{name}ForMaskedLM"]} if name else {}, folder)


def save_classifier(
    classifier: Classifier, folder: str | Path, labels: tuple[str, ...], max_tokens: int | None = None
) -> None:
    """Write config.json, with the classes' names (none for regression), and model.safetensors.

    `max_tokens` to which inputs were cut; None: not known.
    """
    bert, classes, head, pooling = classifier.bert, classifier.classes, classifier.head, classifier.pooling
    if bert.kept is not None:
        raise RuntimeError("The embedding holds only some of the tokens; call restore_tokens before saving.")
    if len(labels) != (classes if classes > 1 else 0):
        raise RuntimeError(f"There are {len(labels)} names for {classes} classes.")
    about = {
        "id2label": dict(enumerate(labels or ("score",))),
        "label2id": {label: number for number, label in enumerate(labels or ("score",))},
        "problem_type": "single_label_classification" if labels else "regression",
    }
    if theirs := transformers_classifier(bert.architecture, head, pooling):
        about["architectures"] = [theirs]
        if pooling != "cls":
            about["classifier_pooling"] = pooling
    sizes = {"architecture": bert.architecture, "vocabulary": bert.vocabulary, "length": bert.length}
    reads = {"head": head, "pooling": pooling, "texts": classifier.texts, "max_tokens": max_tokens}
    saved = SavedClassifier(**sizes, classes=classes, **reads)
    _write(classifier, saved, classifier.layout, about, folder)


def load(folder: str | Path) -> Bert:
    """Load a model that `save` wrote, or that transformers loaded and saved again; of a classifier, the encoder.

    Raises InputError for anything else.
    """
    model = _read(folder)
    return model.bert if isinstance(model, Classifier) else model


def load_classifier(folder: str | Path) -> Classifier:
    """Load a classifier that `save_classifier` wrote, or that transformers loaded and saved again; without dropout.

    Raises InputError for anything else.
    """
    model = _read(folder)
    if isinstance(model, Classifier):
        return model
    raise InputError(
        f"{folder} holds a pretrained model, which has no classes yet. Expected a model of the finetune stage."
    )


def _read(folder: str | Path) -> Bert | Classifier:
    folder = Path(folder)
    try:
        return _load(json.loads((folder / CONFIG).read_text()), folder / WEIGHTS)
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split()).rstrip(".")
        raise InputError(
            f"{folder} holds no model that cram can load: {reason}. Expected {CONFIG} and {WEIGHTS} as the pretrain "
            "and finetune stages write them."
        ) from error


def _load(config: dict, weights: Path) -> Bert | Classifier:
    saved, name = _saved(config)
    finetuned = isinstance(saved, SavedClassifier)
    bert = Bert(saved.architecture, saved.vocabulary, saved.length)
    model = Classifier(bert, saved.classes, 0.0, 0, saved.head, saved.pooling, saved.texts) if finetuned else bert
    state = load_file(weights)
    if name:
        state = from_transformers(state, name, bert, finetuned)
    state = {key.removeprefix(ENCODER): value for key, value in state.items()}  # model.hf writes this prefix
    if finetuned:
        state = {key if key.startswith(HEAD) else ENCODER + key: value for key, value in state.items()}
    model.load_state_dict(state)
    return model


def _saved(config: dict) -> tuple[Saved, str | None]:
    """The description in config.json, and the name of transformers' model if the tensors have its names."""
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is not a JSON object")
    if "cram" not in config:
        raise ValueError(f"{CONFIG} has no key 'cram'")
    saved = described(config["cram"])
    native = not isinstance(saved, SavedClassifier) or saved.head == "native"
    name = transformers_model(saved.architecture) if native else None
    # model.hf saves every layout under cram's own names
    kinds = {"cram": None} | ({name.lower(): name} if name else {})
    if config.get("model_type") not in kinds:
        raise ValueError(f"{CONFIG} says model_type {config.get('model_type')!r}; expected {' or '.join(kinds)}")
    return saved, kinds[config["model_type"]]
