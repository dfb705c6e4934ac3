"""What does a good loop around transformers' own model reach in the same time as cram's recipes?

    python benchmarks/outside.py --corpus artifacts/filter/latest --data artifacts/tokenize/latest --cpu-seconds 400 \\
        --folder outside
    python benchmarks/recipes.py --recipe pocket pocket-frontier … --cpu-seconds 400 --beside ModernBERT=outside

It is what a careful user would write without cram: ModernBERT (or BERT) of a recipe's sizes; a WordPiece tokenizer
trained as transformers' course does it; documents joined and cut into blocks without padding; masks by
DataCollatorForLanguageModeling; scores at masked tokens only (ModernBERT's sparse prediction); fused AdamW, clipping,
and a rate that rises and falls on a line to zero over the budget; bf16 where the machine has it; freed memory kept.
The defaults of batch, rate, masks, betas and vocabulary are the best of a grid at 120 and 400 CPU seconds (LOG.md).

The text is a filtered corpus, without the documents that the tokenize stage of --data holds out; on these the loss is
measured as ours (model.heldout). Both read the text as our normalizer leaves it, so that the other model alone doesn't
pay for what ours deletes. Its documents begin with [CLS], as in its training, which is not scored. Training a tokenizer
and encoding are free for both. With --glue it is finetuned by run_glue.py's settings: 3 epochs, batches of 32, 2e-5.

Results are kept in the folder by settings and seed; what is there is not repeated.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import common
import numpy as np
import torch
import torch.nn.functional as F
from common import CpuClock, positive
from curves import cell, spread
from loops import Case
from recipes import RESULT
from torch import Tensor, nn

from model import InputError, heldout, machine
from model.clock import Clock
from model.heldout import Heldout
from model.pretraining import EVALUATIONS
from tasks.store import HELDOUT_TEXT, digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]  # in the course's order
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
AT_ONCE = 4096  # documents encoded at once
CLIP = 1.0  # the largest norm of the gradients
INPUTS = {  # of a model; BERT tells the two texts of a pair apart
    "ModernBERT": ["input_ids", "attention_mask"],
    "BERT": ["input_ids", "token_type_ids", "attention_mask"],
}
GLUE = {"num_train_epochs": 3, "per_device_train_batch_size": 32, "learning_rate": 2e-5}
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
# what a result depends on, beside the text and the machine
SETTINGS = ("model", "recipe", "length", "entries", "batch", "rate", "warm_up", "masks", "betas", "decay", "compile")


def texts(corpus: Path, data: Path) -> list[str]:
    """The corpus, without the documents that are held out from our models."""
    import pyarrow.parquet as pq

    held = set(pq.read_table(data / HELDOUT_TEXT, columns=["text"])["text"].to_pylist())
    parts = sorted(corpus.glob("part-*.parquet"))
    if not parts:
        raise InputError(f"There are no part-*.parquet in {corpus}. Give the folder of a filtered corpus as --corpus.")
    documents = (text for part in parts for text in pq.read_table(part, columns=["text"])["text"].to_pylist())
    return [text for text in documents if text not in held]


def train_tokenizer(documents: list[str], given: argparse.Namespace) -> "PreTrainedTokenizerFast":
    """The WordPiece tokenizer of the course's chapter on building one, after our normalizer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from tasks.text.tokenizer import load_tokenizer

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence(
        [load_tokenizer(given.data).normalizer, normalizers.BertNormalizer(lowercase=True)]
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=given.entries, special_tokens=SPECIALS, show_progress=False)
    made.train_from_iterator(documents, trainer)
    ends = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ends
    )
    made.decoder = decoders.WordPiece(prefix="##")
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}
    settings = {"model_max_length": given.length, "model_input_names": INPUTS[given.model]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **settings, **names)


def blocks(documents: list[str], tokenizer: "PreTrainedTokenizerFast", length: int) -> np.ndarray:
    """(n, length) uint16: documents with [CLS] and [SEP], joined and cut, as run_mlm.py does."""
    fast, streams = tokenizer.backend_tokenizer, []
    fast.encode_special_tokens = True  # a literal [MASK] is text
    for first in range(0, len(documents), AT_ONCE):
        encoded = fast.encode_batch_fast(documents[first : first + AT_ONCE])
        streams += [np.array(one.ids, dtype=np.uint16) for one in encoded]
    stream = np.concatenate(streams)
    return stream[: len(stream) // length * length].reshape(-1, length)


def prepared(given: argparse.Namespace) -> "tuple[PreTrainedTokenizerFast, np.ndarray]":
    """The tokenizer and the blocks, made once for all settings with the same vocabulary."""
    from transformers import PreTrainedTokenizerFast

    about = [given.model, given.entries, given.length, *text_of(given)]
    home = given.folder / f"text-{common.digest(about)}"
    if not (home / "blocks.npy").exists():
        documents = texts(given.corpus, given.data)
        tokenizer = train_tokenizer(documents, given)
        tokenizer.save_pretrained(home)
        np.save(home / "half.npy", blocks(documents, tokenizer, given.length))
        (home / "half.npy").rename(home / "blocks.npy")
    return PreTrainedTokenizerFast.from_pretrained(home), np.load(home / "blocks.npy", mmap_mode="r")


def new_model(given: argparse.Namespace, tokenizer: "PreTrainedTokenizerFast") -> nn.Module:
    """ModernBERT or BERT of the recipe's sizes, else with its own settings."""
    import transformers

    a, _ = common.settings(given.recipe, {})
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": a.layers, "hidden_size": a.hidden}
    sizes |= {"num_attention_heads": a.heads, "max_position_embeddings": max(given.length, 128)}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    wide = 3 * round(a.intermediate / 3)
    if given.model == "ModernBERT":
        layout = {"intermediate_size": wide * 2 // 3, "bos_token_id": ids["cls_token_id"], "sparse_prediction": True}
        return transformers.ModernBertForMaskedLM(
            transformers.ModernBertConfig(**sizes, **layout, **ids, eos_token_id=ids["sep_token_id"])
        )
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, intermediate_size=wide, pad_token_id=ids["pad_token_id"])
    )


def pretrain(given: argparse.Namespace, here: machine.Machine, seed: int, home: Path) -> dict:
    """Train for the budget; write model and tokenizer to `home`. Returns the losses and how far training came."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer, rows = prepared(given)
    torch.manual_seed(seed)
    if here.device.type == "cpu":
        machine.keep_heap()
    model = new_model(given, tokenizer).to(here.device).train()
    forward = torch.compile(model) if given.compile else model
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=given.masks)
    special_V = torch.zeros(len(tokenizer), dtype=torch.bool)
    special_V[tokenizer.all_special_ids] = True
    adamw = torch.optim.AdamW(
        model.parameters(), lr=given.rate, betas=tuple(given.betas), weight_decay=given.decay, fused=True
    )
    held, predictor = held_out(given.data, tokenizer, given.length), Predictor(model, tokenizer.pad_token_id)
    operations = operations_per_token(given)
    order, limit = np.random.default_rng(seed), given.cpu_seconds or 60 * given.minutes
    clock = CpuClock(0.0) if given.cpu_seconds else Clock(0.0)
    step, read, evaluations, waiting = 0, 0, [], np.zeros(0, int)

    def evaluate(fraction: float) -> None:
        with clock.paused():
            losses = heldout.curve_losses(predictor, held, tokenizer.mask_token_id, here)
            spent = {"step": step, "tokens": read, "operations": read * operations, "seconds": clock.seconds()}
            evaluations.append({"fraction": min(1.0, fraction)} | spent | losses)

    while (fraction := clock.seconds() / limit) < 1:
        if EVALUATIONS * fraction >= len(evaluations):
            evaluate(fraction)
        for group in adamw.param_groups:
            group["lr"] = given.rate * rate(fraction, given.warm_up)
        while len(waiting) < given.batch:
            waiting = np.append(waiting, order.permutation(len(rows)))
        batch, waiting = waiting[: given.batch], waiting[given.batch :]
        for some in np.split(batch, range(here.micro_batch, given.batch, here.micro_batch)):
            tokens = torch.from_numpy(rows[np.sort(some)].astype(np.int64))
            inputs, labels = collator.torch_mask_tokens(tokens, special_tokens_mask=special_V[tokens])
            with here.autocast():
                found = forward(input_ids=inputs.to(here.device), labels=labels.to(here.device)).loss
            (found * (len(some) / given.batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        step, read = step + 1, read + batch.size * given.length
    evaluate(1.0)
    model.save_pretrained(home)
    tokenizer.save_pretrained(home)
    nats_D, _ = heldout.measure(predictor, held, tokenizer.mask_token_id, here)
    measured = heldout.summary(held, nats_D) | {"nats_of_documents": nats_D.tolist()}
    return {"tokens": read, "seconds": clock.seconds(), "evaluations": evaluations, "heldout": measured}


def operations_per_token(given: argparse.Namespace) -> float:
    """Floating-point operations per token, forward and backward."""
    architecture, training = common.settings(given.recipe, {"mask_fraction": given.masks})
    ours = Case(given.recipe, None, given.compile, architecture, training, given.entries, given.length, steps=1)
    return ours.of_peer(given.model).operations()


def rate(fraction: float, warm_up: float) -> float:
    """The multiplier of the learning rate: a line up to the end of the warm-up, then a line to zero."""
    return fraction / warm_up if fraction < warm_up else (1 - fraction) / (1 - warm_up)


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


def held_out(data: Path, tokenizer: "PreTrainedTokenizerFast", length: int) -> Heldout:
    """The documents on which our models' loss is measured, in another tokenizer's tokens, each with [CLS] and [SEP]."""
    from tasks.text.original_words import heldout_of
    from tasks.tokenize import measured_texts

    names = {"unknown": "unk", "separator": "sep", "pad": "pad", "begin": "cls"}
    ids = {name: getattr(tokenizer, f"{token}_token_id") for name, token in names.items()}
    fast = tokenizer.backend_tokenizer
    fast.encode_special_tokens = True
    return heldout_of(measured_texts(data), fast, length, **ids)


def finetune(given: argparse.Namespace, here: machine.Machine, task: str, seed: int, home: Path) -> dict:
    """Finetune by run_glue.py's settings: the score on the validation data."""
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, set_seed

    from model.finetuning import predictions
    from tasks.glue import data as glue
    from tasks.glue import metrics
    from tasks.glue.tasks import TASKS as GLUE_TASKS

    set_seed(seed)
    about, tokenizer = GLUE_TASKS[task], AutoTokenizer.from_pretrained(home)
    model = AutoModelForSequenceClassification.from_pretrained(home, num_labels=about.classes)
    splits: dict[str, Dataset] = {}
    for split in ("train", "validation"):
        table = glue.read(str(given.glue), task).tables[split]
        rows = dict(tokenizer(*(table[name].to_pylist() for name in about.columns), truncation=True, max_length=128))
        kind = np.float32 if about.classes == 1 else np.int64
        splits[split] = Dataset.from_dict(rows | {"labels": table["label"].to_numpy().astype(kind)})
    precision = {"bf16": here.dtype is torch.bfloat16, "fp16": here.dtype is torch.float16}
    precision["use_cpu"] = here.device.type == "cpu"
    arguments = transformers.TrainingArguments(
        output_dir=str(home / "finetuning"), **QUIET, **precision, **GLUE, seed=seed
    )
    made = transformers.Trainer(model, arguments, DataCollatorWithPadding(tokenizer), splits["train"])
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    predicted = predictions(made.predict(splits["validation"]).predictions)
    return {"score": metrics.score(about.metrics[0], np.array(splits["validation"]["labels"]), predicted)}


def kept(path: Path, make) -> dict:
    """What a file holds, or else what `make` returns, which is written to it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        common.write_whole(path, json.dumps(make(), indent=2) + "\n")
    return json.loads(path.read_text())


def text_of(given: argparse.Namespace) -> list[str]:
    """What tells the text: the corpus, our normalizer and the documents held out."""
    try:
        return [str(given.corpus.resolve()), *(digest(given.data / name) for name in ("tokenizer.json", HELDOUT_TEXT))]
    except OSError as error:
        raise InputError(f"{given.data} is not what the tokenize stage writes ({error}). Give its folder.") from error


def about_of(given: argparse.Namespace, here: machine.Machine) -> dict:
    """What identifies a run, without its seed."""
    import transformers

    about = {name: getattr(given, name) for name in SETTINGS} | {"clip": CLIP, "text": text_of(given)}
    about |= {"cpu_seconds": given.cpu_seconds, "minutes": given.minutes, "machine": here.describe()}
    return about | {"torch": torch.__version__, "transformers": transformers.__version__}


def file_of(task: str, glue: Path) -> str:
    """The name of the file for a task's score, which tells its data."""
    from tasks.glue import data

    return f"{task}-{common.digest(data.identity(str(glue), task, False))}.json"


def share(text: str) -> float:
    """A fraction below 1."""
    if not 0 <= (value := float(text)) < 1:
        raise ValueError
    return value


def main() -> None:
    """Train what is not trained yet, and print the losses and scores: means over seeds."""
    parser = common.parser(
        __doc__,
        corpus={"type": Path, "required": True, "help": "a filtered corpus"},
        data={"type": Path, "required": True, "help": "the folder of a tokenize stage, for its held-out documents"},
        model={"choices": ["ModernBERT", "BERT"], "default": "ModernBERT"},
        recipe={"default": "pocket", "help": "whose sizes the model has"},
        length={"type": positive, "default": common.LENGTH, "help": "tokens of a sequence"},
        entries={"type": positive, "default": 16_384, "help": "of the vocabulary"},
        batch={"type": positive, "default": 16, "help": "sequences"},
        rate={"type": float, "default": 1.5e-3, "help": "the learning rate"},
        masks={"type": share, "default": 0.3, "help": "the fraction of tokens to predict"},
        betas={"type": float, "nargs": 2, "default": [0.9, 0.98], "help": "of AdamW"},
        decay={"type": float, "default": 0.01, "help": "AdamW's weight decay"},
        compile={"action": "store_true", "help": "by torch.compile; that takes time of the budget"},
        glue={"type": Path, "help": "a folder of GLUE, for scores"},
        tasks={"nargs": "+", "default": list(TASKS), "choices": TASKS},
        seeds={"type": positive, "default": 3},
        folder={"type": Path, "required": True, "help": "for the results"},
    )
    parser.add_argument("--warm-up", type=share, default=0.05, help="the fraction in which the rate rises")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="of training")
    budget.add_argument("--cpu-seconds", type=float, help="of training")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with common.input_errors(parser):
        here, losses, scores = machine.detect(), [], {}
        if given.cpu_seconds:
            common.check_cpu(here)
        about = about_of(given, here)
        for seed in range(given.seeds):
            home = given.folder / f"{given.model}-{common.digest(about | {'seed': seed})}"
            made = kept(home / RESULT, lambda s=seed, h=home: about | {"seed": s} | pretrain(given, here, s, h))
            losses.append(made["heldout"])
            print(f"seed {seed}: {made['tokens']:,} tokens, {losses[-1]['nats_per_byte']['value']:.4f} nats per byte")
            for task in given.tasks if given.glue else []:
                work = (given, here, task, seed, home)
                score = kept(home / file_of(task, given.glue), lambda work=work: finetune(*work))["score"]
                scores.setdefault(task, []).append(score)
    rows = [["", f"{given.model}, {given.entries:,} entries"]]
    rows += [[unit, cell(spread([each[f"nats_per_{unit}"]["value"] for each in losses]), 4)] for unit in heldout.UNITS]
    rows[1:] = [[f"nats per {name}", *values] for name, *values in rows[1:]]
    print(common.aligned([*rows, *([task, cell(spread(values), 1)] for task, values in scores.items())]))


if __name__ == "__main__":
    main()
