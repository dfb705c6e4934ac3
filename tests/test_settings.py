import random
import re

import pytest
from pydantic import ValidationError

from model.settings import READ_BY, Architecture, Finetuning, OptimizerName, ScheduleName, Training

OPTIMIZERS, SCHEDULES = OptimizerName.__args__, ScheduleName.__args__
CONDITIONAL = sorted(set().union(*READ_BY.values()))
OTHER = {  # than the default
    "beta1": 0.5,
    "beta2": 0.5,
    "adam_eps": 1e-8,
    "momentum": 0.5,
    "matrix_learning_rate": 0.5,
    "warmup": 0.25,
    "cooldown": 0.25,
    "power": 2.0,
    "decay_norms": True,
}


def refusal(settings: type, **given) -> str:
    """The one sentence with which these are refused, without pydantic's frame."""
    with pytest.raises(ValidationError) as caught:
        settings(**given)
    (problem,) = caught.value.errors()
    return problem["msg"].removeprefix("Value error, ")


@pytest.mark.parametrize("settings", [Architecture, Training, Finetuning])
def test_the_defaults_are_valid_and_described(settings):
    usual = settings()
    assert settings.model_validate(usual.model_dump()) == usual  # pydantic does not check defaults by itself
    assert settings.model_validate_json(usual.model_dump_json()) == usual
    for name, field in settings.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize("settings", [Architecture, Training, Finetuning])
def test_settings_cannot_be_changed_misspelt_or_infinite(settings):
    usual = settings()
    name = next(iter(settings.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(usual, name, getattr(usual, name))
    with pytest.raises(ValidationError, match=rf"{name}_\n.*not permitted"):
        settings(**{f"{name}_": 1})
    for name, field in settings.model_fields.items():
        if field.annotation in (float, float | None):
            for wrong in (float("nan"), float("inf"), float("-inf")):
                with pytest.raises(ValidationError, match=rf"(?s)^1 validation error.*\n{name}\n"):
                    settings(**{name: wrong})


@pytest.mark.parametrize(
    ("settings", "name", "wrong"),
    [
        *((Architecture, name, 0) for name in ("layers", "hidden", "heads", "intermediate", "norm_eps", "embedding")),
        (Architecture, "different_layers", 0),
        (Architecture, "ffn_every", 0),
        (Architecture, "funnel", -1),
        (Architecture, "activation", "swish"),
        (Architecture, "norm", "batchnorm"),
        (Architecture, "norm_order", "sandwich"),
        (Architecture, "positions", "none"),
        *((Training, name, 0) for name in ("budget", "batch_size", "learning_rate", "adam_eps", "clip", "cooldown")),
        *((Training, name, 1) for name in ("warmup", "beta1", "beta2", "momentum", "floor", "dropout")),
        *((Training, name, -0.1) for name in ("warmup", "batch_ramp", "weight_decay", "momentum", "floor")),
        *((Training, name, wrong) for name in ("mask_fraction", "last_mask_fraction") for wrong in (0, 1)),
        *((Training, name, "never") for name in ("optimizer", "schedule", "nonfinite", "budget_unit")),
        *((Training, name, 1.1) for name in ("batch_ramp", "weight_decay", "cooldown")),
        (Finetuning, "epochs", 21),
        (Finetuning, "epochs", 0),
        (Finetuning, "batch_size", 0),
        (Finetuning, "learning_rate", 0),
        (Finetuning, "warmup", 1),
        (Finetuning, "dropout", 1),
        (Finetuning, "max_tokens", 7),
        (Finetuning, "weight_decay", 1.1),
        *((Finetuning, name, "never") for name in ("schedule", "head", "choose", "batches")),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_the_name_of_its_field(settings, name, wrong):
    with pytest.raises(ValidationError) as caught:
        settings(**{name: wrong})
    assert [problem["loc"] for problem in caught.value.errors()] == [(name,)]


REFUSED = [
    ({"hidden": 100, "heads": 12}, "hidden 100 is not a multiple of heads 12; make it one"),
    ({"heads": 13}, "hidden 768 is not a multiple of heads 13"),
    ({"intermediate": 2048}, "intermediate 2048 is not a multiple of 3, which geglu needs"),
    ({"norm": "rmsnorm"}, "norm 'rmsnorm' has no bias; set norm_bias to false"),
    ({"norm_order": "post", "first_norm": False}, "first_norm false is for norm_order 'pre', since"),
    ({"hidden": 99, "heads": 3}, "width 99 is odd, but sinusoidal positions are pairs"),
    ({"hidden": 99, "heads": 3, "positions": "sinusoidal"}, "width 99 is odd, but sinusoidal positions are pairs"),
    ({"embedding": 33}, "width 33 is odd, but sinusoidal positions are pairs"),
    ({"hidden": 36, "heads": 12, "positions": "rotary"}, "heads are 3 wide, but rotary positions turn pairs"),
    ({"embedding": 768}, "embedding 768 is hidden itself; leave it null"),
    ({"different_layers": 3}, "different_layers 3 does not divide layers 16"),
    ({"different_layers": 32}, "different_layers 32 does not divide layers 16"),
    ({"different_layers": 16}, "different_layers 16 is layers itself; leave it null"),
    ({"ffn_every": 17}, "ffn_every 17 is more than different_layers or layers 16"),
    ({"different_layers": 1, "ffn_every": 2}, "ffn_every 2 is more than different_layers or layers 1,"),
    ({"funnel": 8}, "funnel 8 needs 17 layers or more to halve and restore, not 16; lower it"),
    ({"layers": 2, "funnel": 1}, "funnel 1 needs 3 layers or more to halve and restore, not 2; lower it"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_axes_that_do_not_fit_each_other_are_refused_in_a_sentence(given, sentence):
    assert sentence in refusal(Architecture, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"hidden": 108, "heads": 12},
        {"intermediate": 2304},
        {"intermediate": 2048, "activation": "gelu"},
        {"intermediate": 2048, "activation": "relu2"},
        {"norm": "rmsnorm", "norm_bias": False},
        {"norm_order": "post"},
        {"first_norm": False},
        {"hidden": 99, "heads": 3, "positions": "learned"},
        {"hidden": 99, "heads": 3, "embedding": 34},
        {"embedding": 33, "positions": "rotary"},
        {"hidden": 36, "heads": 12, "positions": "learned"},
        {"embedding": 128},
        {"embedding": 1024},
        {"different_layers": 4},
        {"ffn_every": 16},
        {"different_layers": 2, "ffn_every": 2},
        {"funnel": 8, "layers": 17},
        {"layers": 3, "funnel": 1},
        {"layers": 1},
    ],
)
def test_what_is_nearly_refused_is_not(given):
    assert Architecture(**given).model_dump(include=set(given)) == given


def test_the_feed_forward_layer_has_a_gate_of_the_same_parameters():
    assert Architecture().inner == 1536  # the paper's
    assert Architecture(activation="gelu").inner == 2304


def test_each_optimizer_and_schedule_says_what_it_reads():
    assert set(READ_BY) == {*OPTIMIZERS, *SCHEDULES}
    assert set(OTHER) == set(CONDITIONAL) < set(Training.model_fields)
    for name, other in OTHER.items():
        assert other != Training.model_fields[name].default


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_not_read_is_refused_and_what_is_read_taken(optimizer, schedule):
    chosen = {"optimizer": optimizer, "schedule": schedule}
    if schedule == "inverse-sqrt":
        chosen["warmup"] = 0.1
    for name in CONDITIONAL:
        if name in READ_BY[optimizer] | READ_BY[schedule]:
            assert getattr(Training(**chosen | {name: OTHER[name]}), name) == OTHER[name]
            continue
        sentence = refusal(Training, **chosen | {name: OTHER[name]})
        usual = Training.model_fields[name].default
        assert sentence == (
            f"{name} is {OTHER[name]}, but neither optimizer {optimizer!r} nor schedule {schedule!r} reads it; "
            f"leave it at {usual}"
        )
        assert getattr(Training(**chosen | {name: usual}), name) == usual  # to say what holds anyway is no mistake


def test_the_inverse_root_needs_a_warmup():
    assert "set warmup above 0" in refusal(Training, schedule="inverse-sqrt")
    Training(schedule="inverse-sqrt", warmup=1e-6)


@pytest.mark.parametrize("schedule", ["trapezoid", "inverse-sqrt"])
def test_warmup_and_cooldown_are_the_whole_budget_at_most(schedule):
    sentence = refusal(Training, schedule=schedule, warmup=0.6, cooldown=0.5)
    assert re.match(r"warmup 0\.6 and cooldown 0\.5 are more than the whole budget; lower one", sentence)
    assert "more than the whole" in refusal(Training, schedule=schedule, warmup=0.51)  # the default's cooldown
    for hundredths in range(1, 100):
        Training(schedule=schedule, warmup=hundredths / 100, cooldown=(100 - hundredths) / 100)


@pytest.mark.parametrize(("schedule", "read"), [("cosine", "warmup"), ("linear", "warmup"), ("ramp", "cooldown")])
def test_the_default_of_one_of_them_that_is_not_read_leaves_the_other_the_whole_budget(schedule, read):
    assert len(READ_BY[schedule] & {"warmup", "cooldown"}) == 1
    Training(schedule=schedule, **{read: 0.99})


def test_a_last_mask_fraction_that_changes_nothing_is_refused():
    assert "leave it null" in refusal(Training, mask_fraction=0.3, last_mask_fraction=0.3)
    assert "leave it null" in refusal(Training, last_mask_fraction=0.25)
    Training(last_mask_fraction=0.15)


def test_a_decay_of_norms_is_refused_where_nothing_decays():
    assert "weight_decay is 0" in refusal(Training, decay_norms=True, weight_decay=0)
    Training(decay_norms=True)


def test_every_refusal_of_axes_says_what_was_found_and_what_to_do():
    """Of axes drawn at random: one sentence, without pydantic's, with the name of a field that was drawn."""
    rng, sentences = random.Random(0), set()
    for _ in range(3000):
        drawn = {
            "layers": rng.choice((1, 2, 3, 4, 6, 16)),
            "hidden": rng.choice((12, 15, 24, 32)),
            "heads": rng.choice((1, 3, 4)),
            "intermediate": rng.choice((24, 32)),
            "activation": rng.choice(("geglu", "gelu")),
            "norm": rng.choice(("layernorm", "rmsnorm")),
            "norm_order": rng.choice(("pre", "post")),
            "norm_bias": rng.choice((True, False)),
            "first_norm": rng.choice((True, False)),
            "positions": rng.choice(("learned", "sinusoidal", "rotary")),
            "embedding": rng.choice((None, 12, 9)),
            "different_layers": rng.choice((None, 1, 2)),
            "ffn_every": rng.choice((1, 2, 4)),
            "funnel": rng.choice((0, 0, 0, 1, 2)),
        }
        try:
            Architecture(**drawn)
        except ValidationError as error:
            (problem,) = error.errors()
            sentences.add(re.sub(r"\d+", "#", problem["msg"]))
            assert any(name in problem["msg"] for name in drawn), problem["msg"]
            assert re.search(r"; (set|make|leave|lower) ", problem["msg"]), problem["msg"]
    assert len(sentences) == 11  # each of them
