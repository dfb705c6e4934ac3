"""Every recipe, as its changes to the paper's final recipe, `crammed-bert`, whose params are the stages' defaults.

Imports settings only, so that a machine that has only torch can train by a recipe too.
"""

from typing import Any, TypeAlias

from flows.recipes.rules import DAY, pocket, tuned
from model.settings import Architecture

Delta: TypeAlias = dict[str, Any]  # changes to a recipe, or to a stage of it

# Parts of several recipes. "The reference" is the implementation that was published with the paper.
# BookCorpus is no longer available, hence PG-19. BERT had 2.5 billion words of Wikipedia and 0.8 of books. The
# reference kept 35 million sequences (bookcorpus-wikipedia), about as many as 20 GB give.
WIKIPEDIA_AND_BOOKS: Delta = {
    "download": {"source": {"wikipedia": 3, "books": 1}, "documents": 0, "megabytes": 20_000},
    "filter": {"max_tokens_per_char": None},
    "tokenize": {"sort": "random", "max_sequences": 35_000_000},
}
BERT_LAYER: Delta = {  # with BERT's head
    "activation": "gelu",
    "intermediate": 3072,
    "final_norm": False,
    "bias": True,
    "qkv_bias": True,
    "positions": "learned",
    "head_transform": True,
    "decoder_bias": True,
}
# hf-bert-base: transformers' BertForMaskedLM, without token types
BERT: Delta = {"architecture": BERT_LAYER | {"layers": 12, "norm_order": "post"}}
ORIGINAL_TRAINING: Delta = {  # bert-original, but for its schedule
    "optimizer": "adam",
    "learning_rate": 1e-4,
    "beta2": 0.999,
    "adam_eps": 1e-8,
    "batch_size": 512,
    "batch_ramp": 0,
    "clip": None,
    "dropout": 0.1,
    "mask_fraction": 0.15,
}
MINIMAL_TRAINING: Delta = {  # bert-base of the reference, with the schedule of its ablation
    "learning_rate": 5e-4,
    "schedule": "cosine",
    "warmup": 0.06,
    "batch_ramp": 0,
    "clip": None,
    "mask_fraction": 0.15,
}
POLYNOMIAL: Delta = {
    "schedule": "polynomial",
    "warmup": 0.01,
}  # BERT's line to zero: it rises for 10,000 of a million steps
# The part of that line that the reference's bert-original reaches in a day of the paper's A6000. Its rate goes by
# micro-batches: it rises for 80,000 of them and falls until the 8 millionth. With 256 sequences each and 42 % of the
# card's peak, a day has about 253,000, so the rate rises for 31 % of the day and ends at 98 % of its peak. (On its
# smaller cards, with micro-batches of 32 and 64, it rises for 10 to 14 %.) The cooldown is only a few steps.
UNFINISHED: Delta = {"schedule": "trapezoid", "warmup": 0.31, "cooldown": 1e-4}
COSINE: Delta = {"schedule": "cosine", "warmup": 0.06}

# Beyond the paper: Muon, more masks, and a rate that falls over the second half
BEYOND: Delta = {
    "optimizer": "muon",
    "beta2": 0.95,
    "adam_eps": 1e-8,
    "schedule": "trapezoid",
    "warmup": 0.02,
    "clip": None,
    "mask_fraction": 0.3,
}
# As deep and wide as crammed-bert, with rotary positions as ModernBERT
ROTARY: Delta = {"norm_bias": False, "norm_eps": 1e-5, "first_norm": False, "positions": "rotary", "zero_outputs": True}
# With a dense layer before the vocabulary it is transformers' ModernBERT with global attention only.
MODERN: Delta = BEYOND | {"architecture": ROTARY | {"head_transform": True}}
DETECTION: Delta = {"detection": 5.0}  # at pocket size a weight of 1 gained hardly anything on CoLA (docs/findings.md)
# Without ModernBERT's dense layer and with convolutions, short runs reach a lower loss (docs/findings.md).
FRONTIER: Delta = BEYOND | DETECTION | {"architecture": ROTARY | {"convolution": 5}}

# How each recipe differs from the paper's final one. The title, which is the recipe's name, comes below.
NAMED: dict[str, Delta] = {
    "crammed-bert": {},
    # The paper's first version (December 2022: c5, o3, C4) has the same layout. Its release read 25 million documents
    # and dropped those with 0.25 tokens per character, as here; its text says 20 million and 0.3. It filtered first, by
    # ALBERT's vocabulary, and then cut all copies of repeated passages; here the first copy stays. Its batch grew for
    # 300,000 micro-batches, whatever their time: about a 2080 Ti's day, in micro-batches of 96. Its masks: 20 of 128.
    "crammed-bert-v1": {
        "download": {"source": "c4", "documents": 25_000_000},
        "deduplicate": {"methods": ["substring"]},
        "filter": {"max_tokens_per_char": 0.25},
        "pretrain": {"batch_size": 4096, "batch_ramp": 1, "mask_fraction": 0.15625},
    },
    # BERT within the budget, as the paper ran it. Here, as in all recipes, the last block and the vocabulary head are
    # computed at masked positions only: the same loss with 24 % fewer operations.
    "bert-base": WIKIPEDIA_AND_BOOKS | {"pretrain": BERT | ORIGINAL_TRAINING | UNFINISHED},
    # The same with BERT's schedule scaled to the budget: a fairer and much stronger baseline
    "bert-base-annealed": WIKIPEDIA_AND_BOOKS | {"pretrain": BERT | ORIGINAL_TRAINING | POLYNOMIAL},
    # BERT itself, without next-sentence prediction: a million steps of 256 sequences of 512 tokens, which take days.
    # BERT had 128 tokens per sequence in the first nine tenths of the steps.
    "bert-original": WIKIPEDIA_AND_BOOKS
    | {
        "vocabulary": {"entries": 30_522},
        "tokenize": WIKIPEDIA_AND_BOOKS["tokenize"] | {"length": 512},
        "pretrain": BERT
        | ORIGINAL_TRAINING
        | POLYNOMIAL
        | {"budget": 1e6 * 256 * 512, "budget_unit": "tokens", "batch_size": 256},
    },
    # BERT-large "with an academic budget" (Izsak et al. 2021), as the paper ran it: crammed-large-izsak, bert-izsak
    "izsak": WIKIPEDIA_AND_BOOKS
    | {
        "pretrain": {
            "architecture": BERT_LAYER
            | {"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096, "norm_eps": 1e-6},
            "learning_rate": 2e-3,
            "adam_eps": 1e-6,
            "schedule": "linear",
            "warmup": 0.06,
            "batch_size": 4096,
            "batch_ramp": 0,
            "clip": None,
            "dropout": 0.1,
            "mask_fraction": 0.15,
        }
    },
    # The rows of the paper's ablation: one part reverted to BERT's, or to the smallest change from BERT's that trains
    "data-reverted": WIKIPEDIA_AND_BOOKS,
    # The reference's bert-original exempts parameters named LayerNorm from weight decay. These are the norms of
    # transformers' BERT; those of crammed-bert are named norm1, norm2 … and decay. Adam adds decay to gradients.
    # On a gain of 1 it is 0.01, and the gradient is about 0.001, so gains fall by nearly the full rate at every step:
    # from 1 to a tenth in about 13,000 of the 140,000 steps of an A6000's day. Probably the paper's row fails for that.
    "training-reverted": {"pretrain": ORIGINAL_TRAINING | COSINE | {"decay_norms": True}},
    "minimal-training": {"pretrain": MINIMAL_TRAINING | {"batch_size": 1536}},
    "minimal-training-large-batch": {"pretrain": MINIMAL_TRAINING},
    "architecture-reverted": {"pretrain": BERT},
    "minimal-architecture": {"pretrain": {"architecture": BERT_LAYER | {"layers": 12}}},  # crammed-bert-simple
    "architecture-and-training-reverted": {"pretrain": BERT | ORIGINAL_TRAINING | COSINE},
    "modern": {"pretrain": MODERN | tuned(Architecture().hidden, DAY, 0)},
    # At pocket size, STS-B needs a head that compares the texts of a pair, with or without pretraining, and CoLA needs
    # detection: without it, a lower loss brings no higher score (docs/findings.md).
    "frontier": {"pretrain": FRONTIER | tuned(Architecture().hidden, DAY, 5), "finetune": {"pooling": "compare"}},
}
# What a pocket recipe changes beyond its rule. In so small a model, 32,768 entries take nearly half of the
# operations; with 8,192 a step takes 0.63 of the time. After the same time the loss of whole words doesn't show which
# is better, and CoLA and STS-B are no worse in any of two seeds (docs/findings.md).
POCKET_EXTRA: dict[str, Delta] = {name: {"vocabulary": {"entries": 8192}} for name in ("modern", "frontier")}

# Offline and in a few minutes: the documentation of installed packages, and probes in place of GLUE. The layout is that
# of `frontier`, whose convolutions learn in a minute what the probes ask. Sizes, batch, Muon's rate and masks were the
# best of twelve trials of two minutes' CPU time without convolutions; AdamW's rate was tried once with them
# (docs/log/2026-11-a.md, docs/log/2026-11-b.md).
DEMO: Delta = {
    "download": {"source": "python-docs", "documents": 0, "megabytes": 12, "part_megabytes": 4},
    "measure": {"vocabulary_entries": 4096, "sample_megabytes": 5},
    "vocabulary": {"entries": 4096},
    "tokenize": {"heldout_fraction": 0.15, "sort": "random"},
    "pretrain": BEYOND
    | {
        "architecture": FRONTIER["architecture"] | {"layers": 2, "hidden": 128, "heads": 2, "intermediate": 384},
        "budget": 1 / 60,
        "batch_size": 16,
        "learning_rate": 0.01,
        "weight_decay": 0.05,
        "mask_fraction": 0.2,
    },
    "finetune": {
        "data": "probes",
        "tasks": ["word-order", "odd-word", "neighbours"],
        "seeds": 1,
        "epochs": 4,
        "batch_size": 32,
        "learning_rate": 6e-4,
        "baseline": True,
    },
}

POCKETS: dict[str, Delta] = {
    "pocket" if name == "crammed-bert" else f"pocket-{name}": pocket(delta) | POCKET_EXTRA.get(name, {})
    for name, delta in NAMED.items()
}
# For three minutes of two slow cores on the user's own text: model and training of the demo. Where `pocket-frontier`
# takes 21 steps in that time and knows no more than frequencies, this takes 800 and is far below them; with detection
# it takes a quarter fewer and ends higher (docs/your-text.md has the numbers, and scores that it doesn't raise yet).
POCKETS["pocket-mini"] = POCKETS["pocket-frontier"] | {
    "vocabulary": DEMO["vocabulary"],
    "tokenize": POCKETS["pocket-frontier"]["tokenize"] | {"heldout_fraction": 0.02},  # of little text
    "pretrain": DEMO["pretrain"] | {"budget": 1 / 20},
    "finetune": POCKETS["pocket-frontier"]["finetune"] | {"batch_size": 32, "learning_rate": 6e-4},
}
POCKETS["pocket-unicode"] = POCKETS["pocket"] | {"vocabulary": {"characters": "unicode"}}  # text of any script
# Continued pretraining of a public encoder, `pretrain.start`, on the user's text, in two hours of a GPU: as for a
# task in "Don't Stop Pretraining" (Gururangan et al. 2020, arXiv 2004.10964, appendix B), but in random order, as the
# model has no use for easy sequences first. Finetuning is BERT's (Devlin et al. 2019, appendix A.3).
ADAPT: Delta = {
    "tokenize": {"heldout_fraction": 0.02, "sort": "random"},
    "pretrain": {
        "budget": 2,
        "learning_rate": 1e-4,
        "adam_eps": 1e-6,
        "schedule": "linear",
        "warmup": 0.06,
        "batch_size": 256,
        "batch_ramp": 0,
        "clip": 1.0,
        "dropout": 0.1,
        "mask_fraction": 0.15,
    },
    "finetune": {"learning_rate": 5e-5, "epochs": 3, "batch_size": 32, "seeds": 3},
}
# The same for two CPU cores: in twenty minutes the smaller batch takes some hundred steps.
POCKET_ADAPT: Delta = ADAPT | {"pretrain": ADAPT["pretrain"] | {"budget": 1 / 3, "batch_size": 32}}
ADAPTS = {"adapt": ADAPT, "pocket-adapt": POCKET_ADAPT}  # recipes that begin from a model

# BabyLM
EPOCHS = 10
TOKENS_A_WORD = 1.6  # with the entries below 1.4 to 1.7, for English
STRICT_SMALL = 10_000_000  # words of this track
STRICT = 100_000_000  # of this one
SMALL_SIZE: Delta = {"layers": 12, "hidden": 384, "heads": 6, "intermediate": 1152}  # as entries of the track have
POCKET_SIZE: Delta = {"layers": 4, "hidden": 256, "heads": 4, "intermediate": 768}  # as pocket-frontier


def babylm(words: int, size: Delta, entries: int) -> Delta:
    """A recipe by the rules of a track of BabyLM: at most so many words of any text, and ten epochs over them.

    The layout is that of `frontier`, at this size. Batch, rates and decay follow from the tokens that are read. Masks
    fall from 30 to 15 %, as in GPT-BERT (Charpentier and Samuel 2024, arXiv 2410.24159). All epochs have the same
    order, so it is random. The share of the documents that is held out is that of the pocket recipes.
    """
    architecture = FRONTIER["architecture"] | size
    rates = tuned(Architecture(**architecture).hidden, EPOCHS * TOKENS_A_WORD * words, architecture["convolution"])
    masks = {"last_mask_fraction": 0.15}
    budget = {"budget": EPOCHS, "budget_unit": "epochs"}
    return {
        "download": {"documents": 0, "words": words},
        "vocabulary": {"entries": entries},
        "tokenize": {"heldout_fraction": 0.005, "sort": "random"},
        "pretrain": FRONTIER | {"architecture": architecture} | rates | masks | budget,
    }


COMPARE: Delta = NAMED["frontier"]["finetune"]
POCKET_COMPARE: Delta = POCKETS["pocket-frontier"]["finetune"]
# The pocket recipes keep words and epochs, which are the rules, and take hours. A rate of 1e-4 in finetuning lies
# between those of pocket and full size; it was not compared with others.
BABYLMS: dict[str, Delta] = {
    "babylm-small": babylm(STRICT_SMALL, SMALL_SIZE, 16_384) | {"finetune": COMPARE | {"learning_rate": 1e-4}},
    "babylm": babylm(STRICT, {}, 32_768) | {"finetune": COMPARE},
    "pocket-babylm-small": babylm(STRICT_SMALL, POCKET_SIZE, 8192) | {"finetune": POCKET_COMPARE},
    "pocket-babylm": babylm(STRICT, POCKET_SIZE, 8192) | {"finetune": POCKET_COMPARE},
}
# The changes of every recipe, with its title: those above, a pocket recipe for each, and the demo
WITHOUT_TITLE: dict[str, Delta] = NAMED | POCKETS | ADAPTS | BABYLMS | {"demo": DEMO}
DELTAS: dict[str, Delta] = {name: delta | {"report": {"title": name}} for name, delta in WITHOUT_TITLE.items()}
