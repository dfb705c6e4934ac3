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


REFUSED = [  # axes, the first words of the sentence, and changes that make them fit
    ({"hidden": 100, "heads": 12}, "hidden 100 ", {"hidden": 108}),
    ({"heads": 13}, "hidden 768 ", {"heads": 16}),
    ({"intermediate": 2048}, "intermediate 2048 ", {"activation": "gelu"}),
    ({"norm": "rmsnorm"}, "norm 'rmsnorm' ", {"norm_bias": False}),
    ({"norm_order": "post", "first_norm": False}, "first_norm false ", {"norm_order": "pre"}),
    ({"hidden": 99, "heads": 3}, "the embedding's width 99 ", {"positions": "learned"}),
    ({"hidden": 99, "heads": 3, "positions": "sinusoidal"}, "the embedding's width 99 ", {"embedding": 34}),
    ({"embedding": 33}, "the embedding's width 33 ", {"positions": "rotary"}),
    ({"hidden": 36, "heads": 12, "positions": "rotary"}, "heads are 3 wide", {"heads": 9}),
    ({"embedding": 768}, "embedding 768 ", {"embedding": 1024}),
    ({"different_layers": 3}, "different_layers 3 ", {"different_layers": 4}),
    ({"different_layers": 32}, "different_layers 32 ", {"layers": 64}),
    ({"different_layers": 16}, "different_layers 16 ", {"layers": 32}),
    ({"ffn_every": 17}, "ffn_every 17 ", {"ffn_every": 16}),
    ({"different_layers": 1, "ffn_every": 2}, "ffn_every 2 ", {"different_layers": 2}),
    ({"funnel": 8}, "funnel 8 ", {"layers": 17}),
    ({"layers": 2, "funnel": 1}, "funnel 1 ", {"layers": 3}),
]


@pytest.mark.parametrize(("given", "words", "fitting"), REFUSED)
def test_axes_that_do_not_fit_each_other_are_refused_with_what_to_do(given, words, fitting):
    sentence = refusal(Architecture, **given)
    assert sentence.startswith(words)
    assert re.search(r"; (set|make|leave|lower) ", sentence)
    Architecture(**given | fitting)


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
        for part in (f"{name} is {OTHER[name]},", repr(optimizer), repr(schedule), f"at {usual}"):
            assert part in sentence
        assert getattr(Training(**chosen | {name: usual}), name) == usual  # to say what holds anyway is no mistake


@pytest.mark.parametrize("schedule", ["trapezoid", "inverse-sqrt"])
def test_warmup_and_cooldown_are_the_whole_budget_at_most(schedule):
    assert refusal(Training, schedule=schedule, warmup=0.6, cooldown=0.5).startswith("warmup 0.6 and cooldown 0.5 ")
    assert refusal(Training, schedule=schedule, warmup=0.51).startswith("warmup 0.51 ")  # with the default cooldown
    for hundredths in range(1, 100):
        Training(schedule=schedule, warmup=hundredths / 100, cooldown=(100 - hundredths) / 100)


@pytest.mark.parametrize(("schedule", "read"), [("cosine", "warmup"), ("linear", "warmup"), ("ramp", "cooldown")])
def test_the_default_of_one_of_them_that_is_not_read_leaves_the_other_the_whole_budget(schedule, read):
    assert len(READ_BY[schedule] & {"warmup", "cooldown"}) == 1
    Training(schedule=schedule, **{read: 0.99})


@pytest.mark.parametrize(
    ("given", "field", "valid"),
    [
        ({"mask_fraction": 0.3, "last_mask_fraction": 0.3}, "last_mask_fraction", {"last_mask_fraction": 0.15}),
        ({"last_mask_fraction": 0.25}, "last_mask_fraction", {"last_mask_fraction": 0.15}),
        ({"decay_norms": True, "weight_decay": 0}, "decay_norms", {"weight_decay": 0.1}),
        ({"schedule": "inverse-sqrt"}, "warmup", {"warmup": 1e-6}),
    ],
)
def test_a_setting_without_effect_is_refused_by_its_name(given, field, valid):
    assert field in refusal(Training, **given)
    Training(**given | valid)
