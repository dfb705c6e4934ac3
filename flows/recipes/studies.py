"""Studies: named lists of runs. Each run is a set of changes to a recipe, at the size of the paper.

A run's changes have the form of a recipe's (deltas.py). Under `scale`, they may also give multiples of the size
and the budget that a run would have otherwise: {"scale": {"layers": 0.5, "hidden": 2, "budget": 0.25}}. Under `recipe`,
they may name another recipe that they start from.
The first run of a study is the one that the others are compared with.
"""

from flows.recipes.deltas import DETECTION, NAMED, POCKETS, WIKIPEDIA_AND_BOOKS
from flows.recipes.rules import DAY, tuned
from model.settings import Architecture, Finetuning, Training

THE_RECIPE = "as the recipe"
BASE: dict[str, dict] = {THE_RECIPE: {}}
SECTION = "arXiv 2212.14034, section"


def architecture(**fields: object) -> dict:
    """The changes of a run that differs in its architecture."""
    return {"pretrain": {"architecture": fields}}


def training(**fields: object) -> dict:
    """The changes of a run that differs in its training."""
    return {"pretrain": fields}


def times(**multiples: float) -> dict:
    """The changes of a run with another size or budget."""
    return {"scale": multiples}


# Not in the recipes: text, training and architecture of BERT together
ALL_REVERTED = WIKIPEDIA_AND_BOOKS | NAMED["architecture-and-training-reverted"]
# Parts of crammed-bert, whose settings are the defaults. AdamW's rate and its batch belong together.
NORMS = Architecture().model_dump(include={"norm_bias", "norm_eps", "first_norm"})
ADAMW = Training().model_dump(
    include={"optimizer", "learning_rate", "weight_decay", "beta2", "adam_eps", "batch_size", "batch_ramp"}
)

# `adapt`: the recipe with its own vocabulary and training, in place of the public model's
FRONTIER = POCKETS["pocket-frontier"]
FROM_SCRATCH: dict[str, dict] = {
    "vocabulary": FRONTIER["vocabulary"],
    "pretrain": {name: value for name, value in FRONTIER["pretrain"].items() if not name.startswith("budget")}
    | {"start": ""},
    "finetune": FRONTIER["finetune"] | Finetuning().model_dump(include={"epochs", "batch_size"}) | {"seeds": 3},
}

# `paper`: what is reproduced, or that nothing is; `published`: by run, figures or findings of the paper
STUDIES: dict[str, dict] = {
    "ablation": {
        "about": "What text, training and architecture contribute: each put back to BERT's, alone and together.",
        "paper": f"{SECTION} 5.1 and its ablation table; no copy of the table's numbers was at hand",
        "published": {
            "text reverted": "the text contributes about one point of GLUE",
            "minimal training": "training contributes about half a point of GLUE",
            "minimal architecture": "the architecture contributes about two points of GLUE; without minimal changes, "
            "such as pre-norm, reverted models don't train",
        },
        "runs": BASE
        | {
            "text reverted": NAMED["data-reverted"],
            "training reverted": NAMED["training-reverted"],
            "minimal training": NAMED["minimal-training"],
            "minimal training, large batch": NAMED["minimal-training-large-batch"],
            "architecture reverted": NAMED["architecture-reverted"],
            "minimal architecture": NAMED["minimal-architecture"],
            "architecture and training reverted": NAMED["architecture-and-training-reverted"],
            "all reverted": ALL_REVERTED,
        },
    },
    "architectures": {
        "about": "One part of the architecture changed at a time.",
        "paper": f"{SECTION} 4.2 and its figure of losses over architectures; directions only, no numbers at hand",
        "published": {
            "gelu": "slightly worse",
            "4 heads": "faster, lower loss, but worse after finetuning",
            "rotary positions": "a small gain, lost to the lower speed (the released rotary code turns nothing)",
            "untied head": "no gain",
            "rmsnorm": "no gain",
            "embedding of 128": "no gain",
            "funnel": "no gain",
            "feed-forward in every 2nd block": "no gain",
            "one block repeated": "no gain",
        },
        "runs": BASE
        | {
            "post-norm": architecture(norm_order="post", final_norm=False),
            "gelu": architecture(activation="gelu"),
            "squared relu": architecture(activation="relu2"),
            "biases": architecture(bias=True, decoder_bias=True),
            "qkv biases": architecture(qkv_bias=True),
            "rmsnorm": architecture(norm="rmsnorm", norm_bias=False),
            "norms without bias": architecture(norm_bias=False),
            "norm epsilon 1e-6": architecture(norm_eps=1e-6),
            "no embedding norm": architecture(embedding_norm=False),
            "no first norm": architecture(first_norm=False),
            "no final norm": architecture(final_norm=False),
            **{f"{count} heads": architecture(heads=count) for count in (4, 8)},
            **{f"{kind} positions": architecture(positions=kind) for kind in ("learned", "sinusoidal", "rotary")},
            "dense head": architecture(head_transform=True),
            "untied head": architecture(tied=False),
            "outputs start at zero": architecture(zero_outputs=True),
            "convolutions over 5 tokens": architecture(convolution=5),
            "embedding of 128": architecture(embedding=128),
            "funnel": architecture(funnel=1),
            "one block repeated": architecture(different_layers=1),
            "half of the blocks, each twice": architecture(different_layers=8),
            "feed-forward in every 2nd block": architecture(ffn_every=2),
            "feed-forward in every 4th block": architecture(ffn_every=4),
        },
    },
    "shapes": {
        "about": "Depth against width at about equal parameters of the blocks (whole heads make them up to 12 % more "
        "or fewer), and a scaling law over sizes and budgets. A scale in flops gives the shapes equal operations.",
        "paper": f"{SECTION} 4.2: all sizes reach about the same loss in a day; the law itself is not in the paper",
        "published": {
            THE_RECIPE: "all sizes reach about 1.9 nats per token in a day (15 % masks, books and Wikipedia)",
            "4 x depth, 1/2 width": "deep and narrow: no gain",
        },
        "fit": True,
        "runs": BASE
        | {
            "1/4 depth, 2 x width": times(layers=1 / 4, hidden=2),
            "1/2 depth, 1.4 x width": times(layers=1 / 2, hidden=2**0.5),
            "2 x depth, 0.7 x width": times(layers=2, hidden=2**-0.5),
            "4 x depth, 1/2 width": times(layers=4, hidden=1 / 2),
            **{f"{depth:g} x depth": times(layers=depth) for depth in (0.5, 1.5)},
            **{
                f"{size:g} x size, {budget:g} x budget": times(layers=size, hidden=size, budget=budget)
                for size in (0.5, 0.75, 1.0)
                for budget in (0.125, 0.25, 0.5)
            },
            "1.5 x size, 1.5 x budget": times(layers=1.5, hidden=1.5, budget=1.5),
        },
    },
    "schedules": {
        "about": "Every schedule of the learning rate, and sizes and ramps of the batch.",
        "paper": f"{SECTION} 4.3; directions only, no numbers at hand",
        "published": {
            "one-cycle": "best with a peak of 1e-3 (first version of the paper)",
            "batch 1,536": "lowest loss",
            "batch 4,096": "best after finetuning (first version of the paper)",
        },
        "runs": BASE
        | {
            "triangle": training(schedule="triangle"),
            "one-cycle": training(schedule="one-cycle"),
            "cosine": training(schedule="cosine", warmup=0.06),
            "linear": training(schedule="linear", warmup=0.06),
            "trapezoid": training(schedule="trapezoid", warmup=0.02),
            "inverse square root": training(schedule="inverse-sqrt", warmup=0.06, cooldown=0.25),
            "ramp": training(schedule="ramp", cooldown=0.25),
            "dive": training(schedule="dive", cooldown=0.5),
            "slow dive": training(schedule="dive", cooldown=0.75),
            "fast dive": training(schedule="dive", cooldown=0.25),
            "constant": training(schedule="trapezoid", warmup=0.02, cooldown=1e-4),
            "annealing": training(schedule="annealing", warmup=0.06),
            "square": training(schedule="polynomial", warmup=0.06, power=2.0),
            "never below a tenth": training(floor=0.1),
            "no batch ramp": training(batch_ramp=0),
            "batch ramp to the end": training(batch_ramp=1),
            **{f"batch {size:,}": training(batch_size=size) for size in (1536, 2048, 4096, 16_384, 32_768)},
            **{
                f"batch {size:,}, no ramp": training(batch_size=size, batch_ramp=0)
                for size in (512, 1024, 1536, 2048, 4096, 16_384)
            },
        },
    },
    "optimizers": {
        "about": "Every optimizer, and settings of AdamW.",
        "paper": f"{SECTION} 4.3: no gain from other optimizers; no numbers at hand",
        "published": {"adafactor": "no gain", "radam": "no gain", "no clipping": "less stable"},
        "runs": BASE
        | {
            **{name: training(optimizer=name) for name in ("adamw", "adam", "radam", "adafactor")},
            "sgd": training(optimizer="sgd", learning_rate=0.025),
            "muon, batch, rates and decay as in modern": training(
                optimizer="muon", **tuned(Architecture().hidden, DAY, 0)
            ),
            "half the rate": training(learning_rate=5e-4),
            "twice the rate": training(learning_rate=2e-3),
            "beta2 0.95": training(beta2=0.95),
            "beta2 0.999": training(beta2=0.999),
            "epsilon 1e-8": training(adam_eps=1e-8),
            "no weight decay": training(weight_decay=0),
            "weight decay 0.1": training(weight_decay=0.1),
            "norms decay": training(optimizer="adamw", decay_norms=True),
            "no clipping": training(clip=None),
            "clip 1": training(clip=1.0),
        },
    },
    "masking": {
        "about": "How many tokens are predicted, what replaces them, whether others are corrupted, and dropout.",
        "paper": f"{SECTION} 4.3; directions only, no numbers at hand",
        "published": {"40 %": "no gain (with dropout)", "[MASK] only": "no effect", "dropout 0.1": "worse"},
        "runs": BASE
        | {
            **{f"{share} %": training(mask_fraction=share / 100) for share in (15, 20, 25, 30, 40, 60)},
            "40 falling to 15 %": training(mask_fraction=0.4, last_mask_fraction=0.15),
            "30 falling to 15 %": training(mask_fraction=0.3, last_mask_fraction=0.15),
            "[MASK] only": training(masked_share=1.0),
            "dropout 0.1": training(dropout=0.1),
            "corrupted tokens detected": training(**DETECTION),
            "no detection": training(detection=0),
        },
    },
    "data": {
        "about": "Sources of text, deduplication, filter and order. Losses are per byte of text that no model was "
        "trained on.",
        "paper": f"{SECTION} 4.4 and its table of data sets; directions only, no numbers at hand",
        "published": {
            THE_RECIPE: "the Pile has the best MNLI score of four sources",
            "C4": "gains measurably by the filter",
            "C4, not filtered": "worse than filtered",
            "repeated passages cut": "no gain",
            "likely words first": "helps slightly",
        },
        "runs": BASE
        | {
            "the Pile's natural part": {"download": {"sets": ["Books3", "Gutenberg (PG-19)", "Wikipedia (en)"]}},
            "C4": {"download": {"source": "c4"}},
            "C4, not filtered": {"download": {"source": "c4"}, "filter": {"max_tokens_per_char": None}},
            "OSCAR": {"download": {"source": "oscar"}},
            "Wikipedia and books": {"download": WIKIPEDIA_AND_BOOKS["download"]},
            "FineWeb-Edu": {"download": {"source": "fineweb-edu"}},
            "not deduplicated": {"deduplicate": {"methods": []}},
            "near-duplicates dropped": {"deduplicate": {"methods": ["exact", "minhash"]}},
            "repeated passages cut": {"deduplicate": {"methods": ["exact", "substring"]}},
            "not filtered": {"filter": {"max_tokens_per_char": None}},
            "filter at 0.25": {"filter": {"max_tokens_per_char": 0.25}},
            "filter at 0.35": {"filter": {"max_tokens_per_char": 0.35}},
            "short sentences first": {"tokenize": {"sort": "sentence-length"}},
            "likely words first": {"tokenize": {"sort": "unigram"}},
            "random order": {"tokenize": {"sort": "random"}},
        },
    },
    "vocabulary": {
        "about": "Size of the vocabulary, by loss per byte.",
        "paper": f"{SECTION} 4.4; directions only, no numbers at hand",
        "published": {
            "4,096 entries": "worse",
            "8,192 entries": "worse",
            "16,384 entries": "worse",
            "32,768 entries": "MNLI does not rise beyond it",
            "65,536 entries": "not reliably better",
        },
        "runs": BASE | {f"{2**power:,} entries": {"vocabulary": {"entries": 2**power}} for power in range(11, 18)},
    },
    "budgets": {
        "about": "The same recipe with more and with less time. At scale day: an hour, six hours, a day, two days.",
        "paper": "the day of its title, and two days of eight A6000 (208 exaFLOP) in its appendix; no numbers at hand",
        "published": {
            "twice the budget": "two days of eight cards: clearly better than BERT on MNLI and SST-2, CoLA hardly"
        },
        "runs": {
            "the budget": {},
            "1/24 of the budget": times(budget=1 / 24),
            "1/4 of the budget": times(budget=1 / 4),
            "twice the budget": times(budget=2),
        },
    },
    "modern": {
        "about": "What the choices of the recipe modern contribute: each put back to the paper's, alone and together; "
        "and what convolutions would.",
        "recipe": "modern",
        "runs": BASE
        | {
            "scaled sinusoidal positions": architecture(positions="scaled-sinusoidal"),
            "learned positions": architecture(positions="learned"),
            "outputs do not start at zero": architecture(zero_outputs=False),
            "no dense head": architecture(head_transform=False),
            "convolutions over 5 tokens": architecture(convolution=5),
            "norms as the paper's": architecture(**NORMS),
            "architecture of the paper": architecture(
                positions="scaled-sinusoidal", zero_outputs=False, head_transform=False, **NORMS
            ),
            "adamw, its rate and batch": training(**ADAMW),
            "triangle": training(schedule="triangle"),
            "25 % masks": training(mask_fraction=0.25),
            "weight decay 0.01": training(weight_decay=0.01),
            "training of the paper": training(schedule="triangle", clip=0.5, mask_fraction=0.25, **ADAMW),
        },
    },
    "frontier": {
        "about": "What the choices of the recipe frontier contribute beyond those of modern: each left out or changed.",
        "recipe": "frontier",
        "runs": BASE
        | {
            "no convolutions": architecture(convolution=0),
            "no detection": training(detection=0),
            "squared relu": architecture(activation="relu2"),
            "dense head": architecture(head_transform=True),
            "30 falling to 15 %": training(last_mask_fraction=0.15),
        },
    },
    "baselines": {
        "about": "The recipes that the paper compares itself with, and ours.",
        "paper": f"{SECTION} 5 and its table of GLUE scores",
        "published": {
            THE_RECIPE: "GLUE 80.4 (A6000, median), 79.2 (A4000)",
            "first version of the paper": "GLUE 78.6 (A6000)",
            "BERT": "clearly worse; no numbers at hand",
            "BERT-large of Izsak et al.": "clearly worse; no numbers at hand",
        },
        "runs": BASE
        | {
            "first version of the paper": {"recipe": "crammed-bert-v1"},
            "BERT": {"recipe": "bert-base"},
            "BERT, rate falling to zero": {"recipe": "bert-base-annealed"},
            "BERT-large of Izsak et al.": {"recipe": "izsak"},
            "modern": {"recipe": "modern"},
            "frontier": {"recipe": "frontier"},
        },
    },
    "adapt": {
        "about": "Should I pretrain at all? A public encoder as it is, the same adapted to your text, and a model from "
        "scratch in the same time, on your own labels.",
        "recipe": "pocket-adapt",
        "words": {
            "as it is": "The public encoder, not trained any further",
            "adapted": "The same encoder, trained further on your text for the budget",
            "from scratch": "The recipe pocket-frontier: its own vocabulary, and a new model that is trained on your "
            "text alone, for the same budget",
        },
        "runs": {"as it is": training(budget=0), "adapted": {}, "from scratch": FROM_SCRATCH},
    },
}
