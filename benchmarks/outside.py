"""What does a good loop around transformers' own model reach in the same time as cram's recipes?

    python benchmarks/outside.py --corpus artifacts/filter/latest --data artifacts/tokenize/latest --cpu-seconds 400 \\
        --folder outside
    python benchmarks/recipes.py --recipe pocket pocket-frontier … --cpu-seconds 400 --beside ModernBERT=outside

It is what a careful user would write without cram: ModernBERT of a recipe's sizes; a WordPiece tokenizer trained as
transformers' course does it; documents joined and cut into blocks without padding; masks by
DataCollatorForLanguageModeling; scores at masked tokens only (ModernBERT's sparse prediction); fused AdamW, clipping,
and a rate that rises and falls on a line to zero over the budget; bf16 where the machine has it; freed memory kept.
Batch, rate, warm-up, masks, betas and vocabulary are the best of a grid at 120 and 400 CPU seconds (docs/log/).

The text is a filtered corpus, without the documents that the tokenize stage of --data holds out; on these the loss is
measured as ours (model.heldout). Both read the text as our normalizer leaves it, so that the other model alone doesn't
pay for what ours deletes. Its documents begin with [CLS], as in its training, which is not scored. Training a tokenizer
and encoding are free for both. With --glue it is finetuned by run_glue.py's settings: 3 epochs, batches of 32, 2e-5.

Results are kept in the folder by settings and seed; what is there is not repeated.
"""

import argparse
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import transformers
from common import CpuClock, cell, positive, spread
from datasets import Dataset
from recipes import RESULT, measured
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from train import Case
from transformers import PreTrainedTokenizerFast

from model import heldout, machine
from model.clock import Clock
from model.errors import InputError
from model.finetuning import predictions
from model.heldout import Heldout
from model.pretraining import EVALUATIONS
from model.settings import Specials
from tasks.glue import data as glue
from tasks.glue import metrics, reading
from tasks.glue.own import by_name
from tasks.glue.table import TASKS as GLUE_TASKS
from tasks.store.artifacts import HELDOUT_TEXT
from tasks.text.holdout import measured_texts
from tasks.text.tokenizer import heldout_of, load_tokenizer

SPECIAL_TOKENS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]  # in the course's order
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
AT_ONCE = 4096  # documents encoded at once
ADAMW = {"betas": (0.9, 0.98), "weight_decay": 0.01}
CLIP = 1.0  # the largest norm of the gradients
GLUE = {"num_train_epochs": 3, "per_device_train_batch_size": 32, "learning_rate": 2e-5}
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
BUDGETS = ("cpu_seconds", "minutes", "tokens")
# what a result depends on, beside the text and the machine
SETTINGS = ("recipe", "length", "entries", "batch", "rate", "warm_up", "masks", "compile", *BUDGETS)


def texts(corpus: Path, data: Path) -> list[str]:
    """The corpus, without the documents that are held out from our models."""
    held = set(pq.read_table(data / HELDOUT_TEXT, columns=["text"])["text"].to_pylist())
    parts = sorted(corpus.glob("part-*.parquet"))
    if not parts:
        raise InputError(f"There are no part-*.parquet in {corpus}. Give the folder of a filtered corpus as --corpus.")
    documents = (text for part in parts for text in pq.read_table(part, columns=["text"])["text"].to_pylist())
    return [text for text in documents if text not in held]


def train_tokenizer(documents: list[str], given: argparse.Namespace) -> PreTrainedTokenizerFast:
    """The WordPiece tokenizer of the course's chapter on building one, after our normalizer."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence(
        [load_tokenizer(given.data).normalizer, normalizers.BertNormalizer(lowercase=True)]
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=given.entries, special_tokens=SPECIAL_TOKENS, show_progress=False)
    made.train_from_iterator(documents, trainer)
    ends = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ends
    )
    made.decoder = decoders.WordPiece(prefix="##")
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL_TOKENS}
    settings = {"model_max_length": given.length, "model_input_names": ["input_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **settings, **names)


def blocks(documents: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> np.ndarray:
    """(n, length) uint16: documents with [CLS] and [SEP], joined and cut, as run_mlm.py does."""
    fast = tokenizer.backend_tokenizer
    streams = []
    fast.encode_special_tokens = True  # a literal [MASK] is text
    for first in range(0, len(documents), AT_ONCE):
        encoded = fast.encode_batch_fast(documents[first : first + AT_ONCE])
        streams += [np.array(one.ids, dtype=np.uint16) for one in encoded]
    stream = np.concatenate(streams)
    return stream[: len(stream) // length * length].reshape(-1, length)


def prepared(given: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, np.ndarray]:
    """The tokenizer and the blocks, made once for all settings with the same vocabulary."""
    home = given.folder / f"text-{common.digest([given.entries, given.length, *text_of(given)])}"
    if not (home / "blocks.npy").exists():
        documents = texts(given.corpus, given.data)
        tokenizer = train_tokenizer(documents, given)
        tokenizer.save_pretrained(home)
        np.save(home / "half.npy", blocks(documents, tokenizer, given.length))
        (home / "half.npy").rename(home / "blocks.npy")
    return PreTrainedTokenizerFast.from_pretrained(home), np.load(home / "blocks.npy", mmap_mode="r")


def new_model(given: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    """ModernBERT of the recipe's sizes, else with its own settings."""
    a, _ = common.settings(given.recipe, {})
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": a.layers, "hidden_size": a.hidden}
    sizes |= {"num_attention_heads": a.heads, "max_position_embeddings": max(given.length, 128)}
    sizes |= {"intermediate_size": 2 * round(a.intermediate / 3)}
    names = {"pad": "pad", "cls": "cls", "bos": "cls", "sep": "sep", "eos": "sep"}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{token}_token_id") for name, token in names.items()}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes, **ids, sparse_prediction=True))


def pretrain(given: argparse.Namespace, here: machine.Machine, seed: int, home: Path) -> dict:
    """Train for the budget; write model and tokenizer to `home`. Returns the losses and how far training came."""
    tokenizer, rows = prepared(given)
    torch.manual_seed(seed)
    if here.device.type == "cpu":
        machine.keep_heap()
    model = new_model(given, tokenizer).to(here.device).train()
    forward = torch.compile(model) if given.compile else model
    masked = masking(tokenizer, given.masks)
    adamw = torch.optim.AdamW(model.parameters(), lr=given.rate, fused=True, **ADAMW)
    held = held_out(given.data, tokenizer, given.length)
    predictor = Predictor(model, tokenizer.pad_token_id)
    operations = operations_per_token(given)
    counts_cpu_time = not given.minutes and here.device.type == "cpu"
    clock = CpuClock() if counts_cpu_time else Clock()
    batches = shuffled(len(rows), given.batch, seed)
    step = 0
    evaluations = []
    with clock:
        while True:
            read = step * given.batch * given.length
            fraction = spent_fraction(given, clock.seconds(), read)
            if EVALUATIONS * fraction >= len(evaluations):
                with clock.paused():
                    losses = heldout.curve_losses(predictor, held, tokenizer.mask_token_id, here)
                    spent = {"step": step, "tokens": read, "operations": read * operations, "seconds": clock.seconds()}
                    evaluations.append({"fraction": fraction} | spent | losses)
            if fraction == 1:
                break
            for group in adamw.param_groups:
                group["lr"] = given.rate * rate(fraction, given.warm_up)
            for some in np.split(next(batches), range(here.micro_batch, given.batch, here.micro_batch)):
                inputs, labels = masked(torch.from_numpy(rows[np.sort(some)].astype(np.int64)))
                with here.autocast():
                    found = forward(input_ids=inputs.to(here.device), labels=labels.to(here.device)).loss
                (found * (len(some) / given.batch)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            adamw.step()
            adamw.zero_grad()
            step += 1
    model.save_pretrained(home)
    tokenizer.save_pretrained(home)
    losses = measured(predictor, held, tokenizer.mask_token_id, here)
    return {"tokens": read, "seconds": clock.seconds(), "evaluations": evaluations, "heldout": losses}


def shuffled(count: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """The rows of batches, epoch after epoch, each in another order."""
    order = np.random.default_rng(seed)
    waiting = np.zeros(0, int)
    while True:
        while len(waiting) < size:
            waiting = np.append(waiting, order.permutation(count))
        yield waiting[:size]
        waiting = waiting[size:]


def masking(tokenizer: PreTrainedTokenizerFast, share: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The function that masks tokens (B, S): what the model reads, and the labels."""
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)
    special_V = torch.zeros(len(tokenizer), dtype=torch.bool)
    special_V[tokenizer.all_special_ids] = True
    return lambda tokens_BS: collator.torch_mask_tokens(tokens_BS, special_tokens_mask=special_V[tokens_BS])


def operations_per_token(given: argparse.Namespace) -> float:
    """Floating-point operations per token, forward and backward."""
    architecture, training = common.settings(given.recipe, {"mask_fraction": given.masks})
    ours = Case(given.recipe, None, given.compile, architecture, training, given.entries, given.length)
    return ours.of_peer("ModernBERT").operations()


def spent_fraction(given: argparse.Namespace, seconds: float, tokens: int) -> float:
    """The fraction of the budget that so many seconds or tokens are, at most 1."""
    if given.tokens:
        return min(1.0, tokens / given.tokens)
    return min(1.0, seconds / (given.cpu_seconds or 60 * given.minutes))


def rate(fraction: float, warm_up: float) -> float:
    """The multiplier of the learning rate: a line up to the end of the warm-up, then a line to zero."""
    return fraction / warm_up if fraction < warm_up else (1 - fraction) / (1 - warm_up)


class Predictor(nn.Module):
    """A ModernBERT of transformers with the method by which the held-out loss is measured."""

    def __init__(self, model: nn.Module, pad: int) -> None:
        super().__init__()
        self.model = model
        self.pad = pad

    def losses(self, tokens_BS: Tensor, places_M: Tensor, labels_M: Tensor, padded: bool) -> Tensor:
        """The cross-entropy (M,), nats, at these places, which are numbered through the whole batch."""
        mask_BS = (tokens_BS != self.pad).long()
        hidden_MH = self.model.model(tokens_BS, mask_BS).last_hidden_state.flatten(0, 1)[places_M]
        # the head at these places only: for all tokens it takes most of the time
        return F.cross_entropy(self.model.decoder(self.model.head(hidden_MH)).float(), labels_M, reduction="none")


def held_out(data: Path, tokenizer: PreTrainedTokenizerFast, length: int) -> Heldout:
    """The documents on which our models' loss is measured, in another tokenizer's tokens, each with [CLS] and [SEP]."""
    specials = Specials(**{name: getattr(tokenizer, f"{name}_token_id") for name in Specials._fields})
    fast = tokenizer.backend_tokenizer
    fast.encode_special_tokens = True
    return heldout_of(measured_texts(data), fast, length, specials, begin=specials.cls).without(specials.unk)


def finetune(given: argparse.Namespace, here: machine.Machine, task: str, seed: int, home: Path) -> dict:
    """Finetune by run_glue.py's settings: the score on the validation data."""
    transformers.set_seed(seed)
    about = GLUE_TASKS[task]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(home, num_labels=about.classes)
    splits: dict[str, Dataset] = {}
    for split in ("train", "validation"):
        table = reading.read(by_name(task, str(given.glue))).tables[split]
        rows = dict(tokenizer(*(table[name].tolist() for name in about.columns), truncation=True, max_length=128))
        kind = np.float32 if about.classes == 1 else np.int64
        splits[split] = Dataset.from_dict(rows | {"labels": table["label"].to_numpy().astype(kind)})
    precision = {"bf16": here.dtype is torch.bfloat16, "fp16": here.dtype is torch.float16}
    precision["use_cpu"] = here.device.type == "cpu"
    arguments = transformers.TrainingArguments(
        output_dir=str(home / "finetuning"), **QUIET, **precision, **GLUE, seed=seed
    )
    made = transformers.Trainer(model, arguments, transformers.DataCollatorWithPadding(tokenizer), splits["train"])
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    answers = made.predict(splits["validation"]).predictions
    predicted = predictions(answers, "regression" if about.classes == 1 else "classes")
    return {"score": metrics.score(about.metrics[0], np.array(splits["validation"]["labels"]), predicted)}


def kept(path: Path, make: Callable[[], dict]) -> dict:
    """What a file holds, or else what `make` returns, which is written to it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        common.write_json(path, make())
    return json.loads(path.read_text(encoding="utf-8"))


def text_of(given: argparse.Namespace) -> list[str]:
    """What identifies the text: the corpus, our normalizer and the documents held out."""
    try:
        files = [(given.data / name).read_bytes() for name in ("tokenizer.json", HELDOUT_TEXT)]
    except OSError as error:
        raise InputError(f"{given.data} is not what the tokenize stage writes ({error}). Give its folder.") from error
    return [str(given.corpus.resolve()), *(hashlib.sha256(content).hexdigest() for content in files)]


def about_of(given: argparse.Namespace, here: machine.Machine) -> dict:
    """What identifies a run, without its seed."""
    about = {name: getattr(given, name) for name in SETTINGS} | {"text": text_of(given), "machine": here.describe()}
    return about | {"torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    """Train what is not trained yet, and print the losses and scores: means over seeds."""
    parser = common.parser(
        __doc__,
        corpus={"type": Path, "required": True, "help": "a filtered corpus"},
        data={"type": Path, "required": True, "help": "the folder of a tokenize stage, for its held-out documents"},
        recipe={"default": "pocket", "help": "whose sizes the model has"},
        length={"type": positive, "default": common.LENGTH, "help": "tokens of a sequence"},
        entries={"type": positive, "default": 16_384, "help": "of the vocabulary"},
        batch={"type": positive, "default": 16, "help": "sequences"},
        rate={"type": float, "default": 1.5e-3, "help": "the learning rate"},
        warm_up={"type": float, "default": 0.05, "help": "the fraction of the budget in which the rate rises"},
        masks={"type": float, "default": 0.3, "help": "the fraction of tokens to predict"},
        compile={"action": "store_true", "help": "by torch.compile; that takes time of the budget"},
        glue={"type": Path, "help": "a folder of GLUE, for scores"},
        tasks={"nargs": "+", "default": list(TASKS), "choices": TASKS},
        seeds={"type": positive, "default": 3},
        folder={"type": Path, "required": True, "help": "for the results"},
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="of training")
    budget.add_argument("--cpu-seconds", type=float, help="of training")
    budget.add_argument("--tokens", type=float, help="to train on; seconds are then the process's CPU seconds")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with common.input_errors(parser):
        here = machine.detect()
        losses = []
        scores = {}
        if given.cpu_seconds:
            common.check_cpu(here)
        about = about_of(given, here)
        for seed in range(given.seeds):
            home = given.folder / f"ModernBERT-{common.digest(about | {'seed': seed})}"
            made = kept(home / RESULT, lambda s=seed, h=home: about | {"seed": s} | pretrain(given, here, s, h))
            losses.append(made["heldout"])
            print(f"seed {seed}: {made['tokens']:,} tokens, {losses[-1]['nats_per_byte']['value']:.4f} nats per byte")
            for task in given.tasks if given.glue else []:
                work = (given, here, task, seed, home)
                data = common.digest(glue.identity(by_name(task, str(given.glue))))
                score = kept(home / f"{task}-{data}.json", lambda work=work: finetune(*work))["score"]
                scores.setdefault(task, []).append(score)
    rows = [["", f"ModernBERT, {given.entries:,} entries"]]
    for unit in heldout.UNITS:
        rows.append([f"nats per {unit}", cell(spread([each[f"nats_per_{unit}"]["value"] for each in losses]), 4)])
    print(common.aligned([*rows, *([task, cell(spread(values), 1)] for task, values in scores.items())]))


if __name__ == "__main__":
    main()
