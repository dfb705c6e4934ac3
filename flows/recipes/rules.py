"""Rules that derive one recipe from another: rates and batch from the width and the tokens, and the pocket sizes.

Imports settings only, as deltas.py does.
"""

import math

from model.settings import Architecture, Training

LENGTH = 128  # tokens of a sequence
DAY = 1.1e10  # tokens of a day of an A6000 at half its peak
MINUTES = 2e7  # tokens of twenty minutes of two cores
POCKET_HEAD = 64  # values of an attention head, as in BERT
POCKET_SHARE = 128  # batch and text are divided by it
DOCUMENTS = 8_000_000  # of the paper's text, as tasks/download.py has it
LIMITS = ("documents", "megabytes")  # of a download, which fit its source; `words` is a rule for any text


def tuned(hidden: int, tokens: float, convolution: int) -> dict:
    """The batch, the rates and the decay of Muon for a model of this width and a run of that many tokens.

    AdamW's rate is higher for models with a `convolution` (tokens; 0: none).

    Constants are fits to runs of 2 x 128 to 4 x 256 with 1 to 6 million tokens (docs/findings.md). Rates fall with the
    root of the width, which keeps the size of Muon's updates in the spectral norm. The batch grows with the tokens by
    the exponent of Li et al. 2025 (arXiv 2503.04715). Muon's matrices forget their start as often in a long run as in a
    short one: decay times rate, summed over the steps, is 2 at a constant rate.
    """
    narrower = math.sqrt(256 / hidden)
    batch = 2 ** round(math.log2(0.75 * tokens**0.571 / LENGTH))
    steps = tokens / (batch * LENGTH)
    rate = 3.6e-3 * narrower
    adamw = 0.01 if convolution else 0.004
    return {
        "batch_size": batch,
        "batch_ramp": 0,
        "matrix_learning_rate": two_digits(rate),
        "learning_rate": two_digits(adamw * narrower),
        "weight_decay": two_digits(min(1.0, 2 / (rate * steps))),
    }


def two_digits(value: float) -> float:
    """A value rounded to two significant digits."""
    return float(f"{value:.2g}")


def nearest(value: float, unit: int) -> int:
    """The multiple of `unit` that is nearest to a value, at least one unit."""
    return unit * max(1, round(value / unit))


def heads(architecture: Architecture, hidden: int) -> int:
    """The number of heads at another width. Heads keep their width if it divides `hidden`; else their number scales."""
    width = architecture.hidden // architecture.heads
    if hidden % width == 0:
        return hidden // width
    fitting = (count for count in range(1, hidden + 1) if hidden % count == 0 and hidden // count % 2 == 0)
    return min(fitting, key=lambda count: abs(count - architecture.heads * hidden / architecture.hidden))


def reads_files(download: dict) -> bool:
    """Whether these changes to download select the user's own files, and nothing else."""
    source = download.get("source")
    return source == "files" or (isinstance(source, dict) and set(source) == {"files"})


def less_text(download: dict) -> dict:
    """The download of a pocket recipe: a 128th from the hub, but everything from text on this machine."""
    if reads_files(download) or download.get("source") == "python-docs":
        return download
    less = dict(download)
    documents = download.get("documents", DOCUMENTS)
    if documents:
        less["documents"] = max(1, round(documents / POCKET_SHARE))
    megabytes = download.get("megabytes", 0)
    if megabytes:
        less["megabytes"] = megabytes / POCKET_SHARE
    words = download.get("words", 0)
    if words:
        less["words"] = max(1, round(words / POCKET_SHARE))
    return less


def in_minutes(training: Training, hidden: int, narrow: int) -> dict:
    """Scale batch, rates and decay from a day at the width `hidden` to twenty minutes at the width `narrow`.

    The batch shrinks to a 128th (at least 16 sequences) and the rate grows by four; for Muon, all follow `tuned`.
    """
    if training.optimizer != "muon":
        batch = max(16, training.batch_size // POCKET_SHARE)
        return {"batch_size": batch, "learning_rate": 4 * training.learning_rate}
    day = tuned(hidden, DAY, 0)
    minutes = tuned(narrow, MINUTES, 0)

    def scaled(name: str) -> float:
        return getattr(training, name) * minutes[name] / day[name]

    return {
        "matrix_learning_rate": two_digits(scaled("matrix_learning_rate")),
        "learning_rate": two_digits(scaled("learning_rate")),
        "weight_decay": min(1.0, two_digits(scaled("weight_decay"))),
        "batch_size": max(16, round(scaled("batch_size"))),
    }


def resized(shape: Architecture, layers: float, hidden: int, fewest: int = 1) -> dict:
    """The sizes of an architecture at another width, with `layers` times the blocks (at least `fewest`).

    Embeddings and feed-forward layers keep their relative width, the latter in multiples of 6, which all activations
    accept.
    """
    sizes = {
        "layers": max(fewest, round(layers * shape.layers)),
        "hidden": hidden,
        "heads": heads(shape, hidden),
        "intermediate": nearest(hidden * shape.intermediate / shape.hidden, 6),
    }
    if shape.embedding:
        sizes["embedding"] = nearest(hidden * shape.embedding / shape.hidden, 2)
    if shape.different_layers:
        sizes["different_layers"] = max(1, round(layers * shape.different_layers))
    return sizes


def pocket(delta: dict) -> dict:
    """The delta of the same recipe for two CPU cores and twenty minutes.

    A quarter of the blocks, but at least two, and a third of the width, in heads of 64, or wider if the recipe's are
    (`resized`). A 128th of the text, unless it is the user's own. Batch and rates for the short run (`in_minutes`).
    Sequences in random order: such a run is far shorter than an epoch and would only see the junk at the head of the
    sort. One seed in finetuning, at 2e-4, since with the rules' 4e-5 so small a model hardly leaves the majority class.
    """
    pretrain = delta.get("pretrain", {})
    shape = pretrain.get("architecture", {})
    architecture = Architecture(**shape)
    training = Training(**{name: value for name, value in pretrain.items() if name in Training.model_fields})
    hidden = nearest(architecture.hidden / 3, POCKET_HEAD)
    smaller = {"architecture": shape | resized(architecture, 1 / 4, hidden, fewest=2)}
    shorter = {"budget": 1 / 3, "budget_unit": "hours"} | in_minutes(training, architecture.hidden, hidden)
    tokenize = delta.get("tokenize", {})
    most = min(250_000, tokenize.get("max_sequences", 250_000))
    return delta | {
        "download": less_text(delta.get("download", {})),
        "tokenize": tokenize | {"heldout_fraction": 0.005, "max_sequences": most, "sort": "random"},
        "pretrain": pretrain | smaller | shorter,
        "finetune": delta.get("finetune", {}) | {"seeds": 1, "learning_rate": 2e-4},
    }
