import math

import pytest
from pydantic import BaseModel, ValidationError

from model.settings import READ_BY, Architecture, Finetuning, OptimizerName, ScheduleName, Training

OPTIMIZERS = OptimizerName.__args__
SCHEDULES = ScheduleName.__args__
OTHER = {  # values of what only some of them read, none of them the default
    "beta2": 0.5,
    "adam_eps": 1e-8,
    "matrix_learning_rate": 0.5,
    "warmup": 0.25,
    "cooldown": 0.25,
    "power": 2.0,
    "decay_norms": True,
}
WRONG = {  # settings, value, and the fields that do not take it
    (Architecture, 0): "layers hidden heads intermediate norm_eps embedding different_layers ffn_every",
    (Architecture, -1): "funnel convolution",
    (Architecture, "sandwich"): "activation norm norm_order positions and_a_field_that_there_is_not",
    (Architecture, math.nan): "norm_eps",
    (Training, 0): "batch_size learning_rate adam_eps clip cooldown mask_fraction last_mask_fraction",
    (Training, 1): "warmup beta2 floor dropout mask_fraction last_mask_fraction",
    (Training, 1.1): "batch_ramp weight_decay cooldown masked_share",
    (Training, -0.1): "budget warmup batch_ramp weight_decay floor masked_share detection",
    (Training, "never"): "optimizer schedule budget_unit and_a_field_that_there_is_not",
    (Training, math.inf): "budget clip",
    (Finetuning, 0): "epochs batch_size learning_rate",
    (Finetuning, 1): "warmup dropout",
    (Finetuning, 1.1): "weight_decay",
    (Finetuning, 7): "max_tokens",
    (Finetuning, 21): "epochs",
    (Finetuning, "never"): "schedule head choose batches and_a_field_that_there_is_not",
    (Finetuning, math.nan): "learning_rate",
}


@pytest.mark.parametrize(("settings", "value"), WRONG)
def test_a_value_out_of_its_range_is_refused_by_the_name_of_its_field(settings: type[BaseModel], value):
    for name in WRONG[settings, value].split():
        with pytest.raises(ValidationError) as caught:
            settings(**{name: value})
        assert [problem["loc"] for problem in caught.value.errors()] == [(name,)]


def refusal(settings: type[BaseModel], **given) -> str:
    """The one sentence with which these are refused."""
    with pytest.raises(ValidationError) as caught:
        settings(**given)
    (problem,) = caught.value.errors()
    return problem["msg"]


REFUSED = [  # settings, a field that the sentence names, and changes that make them fit
    ({"hidden": 100, "heads": 12}, "hidden", {"hidden": 108}),
    ({"intermediate": 2048}, "intermediate", {"activation": "gelu"}),
    ({"norm": "rmsnorm"}, "norm", {"norm_bias": False}),
    ({"norm_order": "post", "first_norm": False}, "first_norm", {"norm_order": "pre"}),
    ({"hidden": 99, "heads": 3}, "embedding", {"positions": "learned"}),
    ({"embedding": 33}, "embedding", {"positions": "rotary"}),
    ({"hidden": 36, "heads": 12, "positions": "rotary"}, "heads", {"heads": 9}),
    ({"embedding": 768}, "embedding", {"embedding": 1024}),
    ({"different_layers": 3}, "different_layers", {"different_layers": 4}),
    ({"different_layers": 32}, "different_layers", {"layers": 64}),
    ({"ffn_every": 17}, "ffn_every", {"ffn_every": 16}),
    ({"convolution": 2}, "convolution", {"convolution": 3}),
    ({"different_layers": 1, "ffn_every": 2}, "ffn_every", {"different_layers": 2}),
    ({"funnel": 8}, "funnel", {"layers": 17}),
    ({"layers": 2, "funnel": 1}, "funnel", {"layers": 3}),
    ({"mask_fraction": 0.3, "last_mask_fraction": 0.3}, "last_mask_fraction", {"last_mask_fraction": 0.15}),
    ({"decay_norms": True, "weight_decay": 0}, "decay_norms", {"weight_decay": 0.1}),
    ({"schedule": "inverse-sqrt"}, "schedule", {"warmup": 1e-6}),
    ({"schedule": "trapezoid", "warmup": 0.6, "cooldown": 0.5}, "warmup", {"cooldown": 0.4}),
    ({"schedule": "inverse-sqrt", "warmup": 0.51}, "warmup", {"cooldown": 0.4}),
]


@pytest.mark.parametrize(("given", "field", "fitting"), REFUSED)
def test_settings_that_do_not_fit_each_other_are_refused_by_name(given: dict, field: str, fitting: dict):
    settings = Training if given.keys() <= Training.model_fields.keys() else Architecture
    assert field in refusal(settings, **given)
    settings(**given | fitting)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_not_read_is_refused_and_what_is_read_taken(optimizer: str, schedule: str):
    chosen = {"optimizer": optimizer, "schedule": schedule} | ({"warmup": 0.1} if schedule == "inverse-sqrt" else {})
    for name, readers in READ_BY.items():
        if readers & {optimizer, schedule}:
            Training(**chosen | {name: OTHER[name]})
        else:
            assert f"{name} is" in refusal(Training, **chosen | {name: OTHER[name]})
            Training(**chosen | {name: Training.model_fields[name].default})  # to say what holds anyway is no mistake


def test_warmup_and_cooldown_may_be_the_whole_budget_and_the_default_of_one_that_is_not_read_leaves_it_to_the_other():
    for hundredths in range(1, 100):
        Training(schedule="trapezoid", warmup=hundredths / 100, cooldown=(100 - hundredths) / 100)
    for schedule, read in (("cosine", "warmup"), ("linear", "warmup"), ("ramp", "cooldown")):
        Training(schedule=schedule, **{read: 0.99})


@pytest.mark.parametrize(
    ("given", "budget", "unit"),
    [
        ({"budget": "3 minutes"}, 0.05, "hours"),
        ({"budget": "3e6 tokens"}, 3e6, "tokens"),
        ({"budget": "3e6 tokens", "budget_unit": "tokens"}, 3e6, "tokens"),
        ({"budget": "3e6", "budget_unit": "tokens"}, 3e6, "tokens"),
        ({"budget": "0.5 epochs"}, 0.5, "epochs"),
        ({"budget": "2"}, 2, "hours"),
    ],
)
def test_a_budget_may_be_in_words_with_its_unit(given: dict, budget: float, unit: str):
    assert Training(**given) == Training(budget=budget, budget_unit=unit)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"budget": "3 minutes", "budget_unit": "tokens"}, ["'3 minutes'", "tokens"]),
        ({"budget": 0.05, "budget_unit": "tokens"}, ["0.05 tokens", "budget_unit"]),
        ({"budget": "1e-3 flops"}, ["0.001 flops"]),
        ({"budget": "3 parsecs"}, ["'3 parsecs'", "20 minutes"]),
    ],
)
def test_a_budget_that_contradicts_its_unit_or_has_none_is_refused(given: dict, words: list[str]):
    said = refusal(Training, **given)
    assert [word for word in words if word not in said] == []
