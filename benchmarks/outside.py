"""What does a user's alternative reach in the same minutes: transformers' Trainer with a model and tokenizer of its own?

    python benchmarks/outside.py --pretrained artifacts/pretrain/KEY... --corpus artifacts/filter/latest \\
        --glue GLUE_DIR --report artifacts/report/KEY... --folder outside

It follows what transformers itself shows. The tokenizer is trained as its course builds a WordPiece one, with 25,000
entries. Documents are encoded, joined and cut into blocks as by run_mlm.py, masked by DataCollatorForLanguageModeling,
and learned by its ModernBERT (or BERT) of our model's sizes, with run_mlm.py's batch of 8, rate of 5e-5 and line to
zero, here over the minutes, in bf16 where the machine has it. Since these settings are for models that are pretrained
already, --batch, --rate and --warm-up give it better ones. The text is the corpus that our model was trained on, without
the documents held out; the minutes are those of our model on its clock. Training a tokenizer and encoding are free for
both. Then its GLUE tasks by run_glue.py: 3 epochs, batches of 32, 2e-5, 128 tokens.

The loss is measured as ours (model.heldout), on the same documents, in nats per byte of the original text. Both read
the text as our normalizer leaves it, which drops what is not ASCII: else the other model alone would pay for it. Its
documents begin with [CLS], as in its training, which is not scored. Its results are kept in the folder by settings and
seed; what is there is not repeated. Means are over seeds of pretraining and finetuning; give a pretrained artifact and a
report for each seed of ours.
"""

import argparse
import json
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import common
import numpy as np
import torch
import torch.nn.functional as F
from common import positive
from curves import cell, spread
from torch import Tensor, nn

from model import InputError, export, heldout, machine
from model.heldout import Heldout
from tasks.store import HELDOUT_TEXT, digest

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, Trainer

ENTRIES = 25_000  # of the course's tokenizer
SPECIALS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]  # in the course's order
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
MOST_STEPS = 1_000_000_000  # the clock ends training
INPUTS = {  # of a model; BERT tells the two texts of a pair apart
    "ModernBERT": ["input_ids", "attention_mask"],
    "BERT": ["input_ids", "token_type_ids", "attention_mask"],
}
GLUE = {"num_train_epochs": 3, "per_device_train_batch_size": 32, "learning_rate": 2e-5}
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}


def normalized(documents: Iterable[str], pretrained: Path) -> list[str]:
    """The documents as our model reads them."""
    from tasks.text.tokenizer import load_tokenizer

    normalizer = load_tokenizer(pretrained).normalizer
    return [normalizer.normalize_str(text) for text in documents]


def texts(corpus: Path, pretrained: Path) -> list[str]:
    """The corpus, without the documents that were held out from our model."""
    import pyarrow.parquet as pq

    held = set(pq.read_table(pretrained / HELDOUT_TEXT, columns=["text"])["text"].to_pylist())
    parts = sorted(corpus.glob("part-*.parquet"))
    if not parts:
        raise InputError(f"There are no part-*.parquet in {corpus}. Give the folder of a filtered corpus as --corpus.")
    documents = (text for part in parts for text in pq.read_table(part, columns=["text"])["text"].to_pylist())
    return normalized((text for text in documents if text not in held), pretrained)


def train_tokenizer(documents: list[str], length: int, inputs: list[str]) -> "PreTrainedTokenizerFast":
    """The WordPiece tokenizer of the course's chapter on building one."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=ENTRIES, special_tokens=SPECIALS, show_progress=False)
    made.train_from_iterator(documents, trainer)
    ends = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ends
    )
    made.decoder = decoders.WordPiece(prefix="##")
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, model_input_names=inputs, **names)


def blocks(documents: list[str], tokenizer: "PreTrainedTokenizerFast", length: int) -> "Dataset":
    """The dataset that run_mlm.py makes: documents with [CLS] and [SEP], joined, in blocks of `length` tokens."""
    from datasets import Dataset

    def encode(rows: dict) -> dict:
        return tokenizer(rows["text"], return_special_tokens_mask=True, verbose=False)

    def joined(rows: dict) -> dict:
        whole = {name: [token for row in column for token in row] for name, column in rows.items()}
        end = len(whole["input_ids"]) // length * length
        return {name: [column[at : at + length] for at in range(0, end, length)] for name, column in whole.items()}

    encoded = Dataset.from_dict({"text": documents}).map(encode, batched=True, remove_columns=["text"])
    return encoded.map(joined, batched=True)


@cache
def prepared(corpus: Path, pretrained: Path, kind: str) -> "tuple[PreTrainedTokenizerFast, Dataset]":
    """The tokenizer and the blocks, for all seeds."""
    documents, length = texts(corpus, pretrained), export.load(pretrained).length
    tokenizer = train_tokenizer(documents, length, INPUTS[kind])
    return tokenizer, blocks(documents, tokenizer, length)


def new_model(kind: str, pretrained: Path, tokenizer: "PreTrainedTokenizerFast") -> nn.Module:
    """ModernBERT or BERT of our model's sizes, else with its own settings."""
    import transformers

    ours = export.load(pretrained)
    a = ours.architecture
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": a.layers, "hidden_size": a.hidden}
    sizes |= {"num_attention_heads": a.heads, "max_position_embeddings": max(ours.length, 128)}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    wide = 3 * round(a.intermediate / 3)
    if kind == "ModernBERT":
        layout = {"intermediate_size": wide * 2 // 3, "bos_token_id": ids["cls_token_id"]}
        return transformers.ModernBertForMaskedLM(
            transformers.ModernBertConfig(**sizes, **layout, **ids, eos_token_id=ids["sep_token_id"])
        )
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, intermediate_size=wide, pad_token_id=ids["pad_token_id"])
    )


def trainer(model: nn.Module, data, collator, here: machine.Machine, out: Path, **settings: object) -> "Trainer":
    """The Trainer, silent. `optimizers`: instead of its own."""
    import transformers

    optimizers = settings.pop("optimizers", (None, None))
    precision = {"bf16": here.dtype is torch.bfloat16, "fp16": here.dtype is torch.float16}
    precision["use_cpu"] = here.device.type == "cpu"
    arguments = transformers.TrainingArguments(output_dir=str(out), **QUIET, **precision, **settings)
    made = transformers.Trainer(model, arguments, collator, data, optimizers=optimizers)
    made.remove_callback(transformers.PrinterCallback)
    return made


def pretrain(given: argparse.Namespace, here: machine.Machine, seed: int, home: Path) -> dict:
    """Train for the minutes; write model and tokenizer to `home`. Returns the loss and how far training came."""
    from transformers import DataCollatorForLanguageModeling, TrainerCallback, set_seed

    like = given.pretrained[0]
    tokenizer, data = prepared(given.corpus, like, given.model)
    collator, length = DataCollatorForLanguageModeling(tokenizer), tokenizer.model_max_length
    set_seed(seed)
    model = new_model(given.model, like, tokenizer)
    begin = None

    def spent() -> float:
        """The fraction of the minutes."""
        return 0.0 if begin is None else (time.perf_counter() - begin) / (60 * given.minutes)

    class Clock(TrainerCallback):
        """Ends training when the minutes are over."""

        def on_train_begin(self, *_: object, **__: object) -> None:
            nonlocal begin
            begin = time.perf_counter()

        def on_step_end(self, args, state, control, **_: object) -> None:
            control.should_training_stop |= spent() >= 1

    def rate(_: int) -> float:
        """A line to zero after the warm-up, over the minutes: nobody knows the number of steps beforehand."""
        warm = given.warm_up
        return min(1.0, spent() / warm) if spent() < warm else max(0.0, (1 - spent()) / (1 - warm))

    adamw = torch.optim.AdamW(model.to(here.device).parameters(), lr=given.rate, weight_decay=0.0, fused=True)
    settings = {"per_device_train_batch_size": given.batch, "seed": seed, "max_steps": MOST_STEPS}
    settings["remove_unused_columns"] = False  # special_tokens_mask would be one
    optimizers = (adamw, torch.optim.lr_scheduler.LambdaLR(adamw, rate))
    made = trainer(model, data, collator, here, home, optimizers=optimizers, **settings)
    made.add_callback(Clock)
    made.train()
    minutes, steps = spent() * given.minutes, made.state.global_step
    model.save_pretrained(home)
    tokenizer.save_pretrained(home)
    about = {"minutes": minutes, "steps": steps, "tokens": steps * given.batch * length}
    return about | loss(like, model, tokenizer, here, length)


class Predictor(nn.Module):
    """A model of transformers with the method by which the held-out loss is measured."""

    def __init__(self, model: nn.Module, pad: int) -> None:
        super().__init__()
        self.model, self.pad, self.is_bert = model, pad, hasattr(model, "cls")

    def losses(self, tokens_BS: Tensor, places_M: Tensor, labels_M: Tensor, padded: bool) -> Tensor:
        """The cross-entropy (M,), nats, at these places, which are numbered through the whole batch."""
        mask_BS = (tokens_BS != self.pad).long()
        hidden_MH = self.model.base_model(tokens_BS, mask_BS).last_hidden_state.flatten(0, 1)[places_M]
        # the head at these places only: for all tokens it takes most of the time
        scores_MV = self.model.cls(hidden_MH) if self.is_bert else self.model.decoder(self.model.head(hidden_MH))
        return F.cross_entropy(scores_MV.float(), labels_M, reduction="none")


class Begun(Heldout):
    """Documents that begin with [CLS], which is not scored."""

    def owners(self) -> np.ndarray:
        """As of any held-out text; -1 for [CLS] too."""
        owners = super().owners()
        begins = np.cumsum(self.documents[:, 0] + 1) - self.documents[:, 0] - 1
        owners.ravel()[begins] = -1
        return owners


def held_out(pretrained: Path, tokenizer: "PreTrainedTokenizerFast", length: int) -> Heldout:
    """The documents on which our model's loss was measured, in another tokenizer's tokens, each with [CLS] and [SEP]."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(pretrained / HELDOUT_TEXT, columns=["text", "measured"])
    documents = table.filter(pc.is_valid(table["measured"])).sort_by("measured")["text"].to_pylist()
    encoded = tokenizer(normalized(documents, pretrained), add_special_tokens=False, verbose=False)["input_ids"]
    ids = [[tokenizer.cls_token_id, *row] for row in encoded]
    sizes = [(len(row), len(text), len(text.encode())) for row, text in zip(ids, documents, strict=True)]
    stream = np.concatenate([np.array([*row, tokenizer.sep_token_id], dtype=np.uint16) for row in ids])
    padding = np.full(-len(stream) % length, tokenizer.pad_token_id, dtype=np.uint16)
    return Begun(np.concatenate([stream, padding]).reshape(-1, length), np.array(sizes, dtype=np.int64))


def loss(
    pretrained: Path, model: nn.Module, tokenizer: "PreTrainedTokenizerFast", here: machine.Machine, length: int
) -> dict:
    """The held-out loss in nats per byte, and its standard error."""
    held = held_out(pretrained, tokenizer, length)
    predictor = Predictor(model.to(here.device), tokenizer.pad_token_id)
    nats_D, _ = heldout.measure(predictor, held, tokenizer.mask_token_id, here)
    found = heldout.summary(held, nats_D)["nats_per_byte"]
    return {"nats_per_byte": found["value"], "standard_error": found["standard_error"]}


def finetune(given: argparse.Namespace, here: machine.Machine, task: str, seed: int, home: Path, scratch: Path) -> dict:
    """Finetune by run_glue.py's settings: the score on the validation data."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, set_seed

    from model.finetuning import predictions
    from tasks.glue import data as glue
    from tasks.glue import metrics
    from tasks.glue.tasks import TASKS as GLUE_TASKS

    set_seed(seed)
    about, tokenizer = GLUE_TASKS[task], AutoTokenizer.from_pretrained(home)
    model = AutoModelForSequenceClassification.from_pretrained(home, num_labels=about.classes)
    splits = {}
    for split in ("train", "validation"):
        table = glue.read(str(given.glue), task).tables[split]
        rows = dict(tokenizer(*(table[name].to_pylist() for name in about.columns), truncation=True, max_length=128))
        kind = np.float32 if about.classes == 1 else np.int64
        splits[split] = Dataset.from_dict(rows | {"labels": table["label"].to_numpy().astype(kind)})
    collator = DataCollatorWithPadding(tokenizer)
    made = trainer(model, splits["train"], collator, here, scratch, **GLUE, seed=seed)
    made.train()
    predicted = predictions(made.predict(splits["validation"]).predictions)
    labels = np.array(splits["validation"]["labels"])
    return {"score": metrics.score(about.metrics[0], labels, predicted)}


def kept(path: Path, make) -> dict:
    """What a file holds, or else what `make` returns, which is written to it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        common.write_whole(path, json.dumps(make(), indent=2) + "\n")
    return json.loads(path.read_text())


def about_of(pretrained: Path) -> dict:
    """What our pretrain stage says of its model. Raises InputError if the folder is none of its."""
    try:
        about = json.loads((pretrained / "stage.json").read_text())
        if about["stage"] != "pretrain":
            raise ValueError(f"its stage is {about['stage']}")
        return about
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{pretrained} is not what the pretrain stage writes ({error}). Give such a folder as --pretrained."
        ) from error


def scores_of(report: Path) -> tuple[str, dict[str, float]]:
    """The model of a report, and its scores by task. Raises InputError if the folder is no report."""
    try:
        about = json.loads((report / "report.json").read_text())
        usual = {"protocol": "cramming", "pretrained": True, "share": 1.0}
        return about["pretrained"], {
            row["task"]: row["score"] for row in about["scores"] if usual.items() <= row.items()
        }
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{report} is not what the report stage writes ({error}). Give such a folder as --report."
        ) from error


def check_seeds(folders: list[Path], models: list[dict]) -> None:
    """Raise InputError unless these are different seeds of one recipe, on the same text and for the same time."""
    first, *others = ({name: value for name, value in one["params"].items() if name != "seed"} for one in models)
    seeds = [one["params"]["seed"] for one in models]
    if any(other != first for other in others) or len(set(seeds)) < len(seeds):
        raise InputError(
            f"The models of --pretrained have seeds {', '.join(map(str, seeds))}. Expected different seeds, and the same "
            "parameters otherwise."
        )
    if len(found := {digest(folder / HELDOUT_TEXT) for folder in folders}) > 1:
        raise InputError(f"The models of --pretrained have {len(found)} different held-out texts. Train them on one.")
    seconds = [one["stats"]["seconds_on_the_clock"] for one in models]
    if max(seconds) > 1.05 * min(seconds):
        raise InputError(
            f"The models of --pretrained trained for {min(seconds):.0f} to {max(seconds):.0f} s. Give models that trained "
            "for the same time."
        )


def ours(pretrained: list[Path], reports: list[Path]) -> tuple[list[float], float, dict[str, list[float]]]:
    """The nats per byte of our models, the minutes of the first on its clock, and the scores of the reports by task."""
    models = [about_of(folder) for folder in pretrained]
    check_seeds(pretrained, models)
    names, scores = {f"pretrain/{one['key']}" for one in models}, {}
    for report in reports:
        model, of_model = scores_of(report)
        if model not in names:
            raise InputError(f"{report} is of {model}. Expected a report of one of {', '.join(sorted(names))}.")
        for task, score in of_model.items():
            scores.setdefault(task, []).append(score)
    stats = [one["stats"] for one in models]
    losses = [one["heldout"]["nats_per_byte"]["value"] for one in stats]
    return losses, stats[0]["seconds_on_the_clock"] / 60, scores


def key(given: argparse.Namespace, seed: int, here: machine.Machine) -> str:
    """Of the alternative's pretraining. Of our models it depends on their sizes, normalizer and held-out text."""
    import transformers

    read = [digest(given.pretrained[0] / name) for name in ("config.json", "tokenizer.json", HELDOUT_TEXT)]
    settings = [given.model, given.minutes, given.batch, given.rate, given.warm_up, str(given.corpus.resolve())]
    versions = [here.describe(), torch.__version__, transformers.__version__]
    return common.digest([settings, read, versions, seed])


def file_of(task: str, glue: Path) -> str:
    """The name of the file for a task's score, which tells its data."""
    from tasks.glue import data

    return f"{task}-{common.digest(data.identity(str(glue), task, False))}.json"


def share(text: str) -> float:
    """A fraction below 1."""
    if not 0 <= (value := float(text)) < 1:
        raise ValueError
    return value


def table(model: str, our_losses: list[float], our_scores: dict, losses: list[float], scores: dict) -> str:
    """Both side by side: means over seeds."""
    rows = [["", "cram", f"{model}, Trainer"], ["nats per byte", *(cell(spread(of), 4) for of in (our_losses, losses))]]
    for task, values in scores.items():
        own = cell(spread(our_scores[task]), 1) if task in our_scores else "–"
        rows.append([task, own, cell(spread(values), 1)])
    return common.aligned(rows)


def main() -> None:
    """Train what is not trained yet, and print the comparison."""
    parser = common.parser(
        __doc__,
        pretrained={
            "type": Path,
            "nargs": "+",
            "required": True,
            "help": "our pretrained artifacts, one for each seed",
        },
        corpus={"type": Path, "required": True, "help": "the filtered corpus that they were trained on"},
        minutes={"type": float, "help": "of training; default: what our model had on its clock"},
        model={"choices": ["ModernBERT", "BERT"], "default": "ModernBERT"},
        batch={"type": positive, "default": 8, "help": "sequences"},
        rate={"type": float, "default": 5e-5, "help": "the learning rate"},
        glue={"type": Path, "help": "a folder of GLUE; without it only the loss is compared"},
        tasks={"nargs": "+", "default": list(TASKS), "choices": TASKS},
        report={"type": Path, "nargs": "+", "default": [], "help": "our reports, for their scores"},
        seeds={"type": positive, "default": 3},
        folder={"type": Path, "required": True, "help": "for the results"},
    )
    parser.add_argument("--warm-up", type=share, default=0.0, help="the fraction of the steps in which the rate rises")
    given = parser.parse_args()
    if given.report and not given.glue:
        parser.error("--report without --glue: the alternative has no scores to compare with. Give --glue too.")
    with common.input_errors(parser):
        our_losses, minutes, our_scores = ours(given.pretrained, given.report)  # before hours of training
        given.minutes = given.minutes or minutes
        here = machine.detect()
        homes = [given.folder / key(given, seed, here) for seed in range(given.seeds)]
        losses, scores = [], {}
        for seed, home in enumerate(homes):
            found = kept(home / "pretraining.json", lambda seed=seed, home=home: pretrain(given, here, seed, home))
            losses.append(found["nats_per_byte"])
            for task in given.tasks if given.glue else []:
                work = (given, here, task, seed, home, home / "finetuning")
                made = kept(home / file_of(task, given.glue), lambda work=work: finetune(*work))
                scores.setdefault(task, []).append(made["score"])
    print(table(given.model, our_losses, our_scores, losses, scores))


if __name__ == "__main__":
    main()
