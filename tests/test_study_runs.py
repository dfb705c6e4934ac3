"""What a study consists of: its recipes, at which size and budget, and what is refused before anything runs."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid

from flows.recipes.deltas import NAMED
from flows.recipes.recipe import RECIPES, Recipe, recipe_of, resolve
from flows.recipes.rules import heads
from flows.recipes.studies import STUDIES, THE_RECIPE
from flows.recipes.study_runs import (
    Study,
    StudyRun,
    find_study,
    operations_per_token,
    parse_scale,
    resolve_study,
    runs_of,
)
from flows.study import estimate, pretraining_seconds, study
from model.errors import InputError
from model.settings import Architecture, Training
from tasks.compare import SIZE_FIELDS
from tasks.reports.law import FEWEST

OWN_TEXT = {"source": "files", "files": ["own.jsonl"]}


def runs(study: dict | str, recipe: str = "crammed-bert", scale: str = "", **given) -> list[StudyRun]:
    """All runs of a study, or of one with these runs."""
    given = {"override": {}, "seeds": 1, "until": "report"} | given
    asked = find_study(study) if isinstance(study, str) else Study(recipe=recipe, runs=study)
    return runs_of(asked, recipe, scale=parse_scale(scale, recipe), **given)


def recipes(*args, **given) -> dict[str, Recipe]:
    """The recipes of the possible runs, by name."""
    return {run.member.run: run.recipe for run in runs(*args, **given) if run.recipe}


def content(recipe: Recipe) -> dict:
    """All that a recipe says, but for its title."""
    return recipe.model_dump(exclude={"report"})


@functools.cache
def of_study(name: str, scale: str) -> list[StudyRun]:
    """The runs of a study that comes with cram."""
    return runs(name, scale=scale)


def asked(study: str, recipe: str | None = None, override: dict | None = None, seeds: int = 1, scale: str = ""):
    """What `cram study` plans until pretraining."""
    return resolve_study(study, recipe, override or {}, seeds, scale, "pretrain")


def refusal(call, *args, **given) -> str:
    """The sentence with which a call is refused."""
    with pytest.raises(InputError) as refused:
        call(*args, **given)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("scale", ["pocket", "day"])
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_recipes_that_all_differ_and_loses_no_run(name: str, scale: str):
    found = of_study(name, scale)
    every = [content(run.recipe) for run in found]
    assert all(one != other for one, other in itertools.combinations(every, 2))
    names = [name for run in found for name in (run.member.run, *run.member.also)]
    assert sorted(names) == sorted(STUDIES[name]["runs"])
    assert len(found) >= (FEWEST if STUDIES[name].get("fit") else 2)
    assert STUDIES[name].get("published", {}).keys() <= STUDIES[name]["runs"].keys()
    assert [bool(run.member.changes) for run in found] == [False] + [True] * (len(found) - 1)


@pytest.mark.parametrize("name", STUDIES)
def test_at_full_size_a_run_is_the_recipe_with_its_changes_and_nothing_else(name: str):
    for run in of_study(name, "day"):
        changes = STUDIES[name]["runs"][run.member.run]
        own = {stage: fields for stage, fields in changes.items() if stage != "recipe"}
        if "scale" not in changes:
            assert content(run.recipe) == content(resolve(changes.get("recipe", "crammed-bert"), own)), run.member.run
            assert run.recipe.report.title == run.member.run


def test_a_pocket_run_keeps_what_it_changes_of_muons_rates_batch_and_decay():
    usual = RECIPES["modern"].pretrain
    fields = ("learning_rate", "matrix_learning_rate", "weight_decay", "batch_size")
    doubled = {field: 2 * getattr(usual, field) for field in fields}
    found = recipes({"own": {}, "doubled": {"pretrain": doubled}}, "modern")
    ratios = [getattr(found["doubled"].pretrain, field) / getattr(found["own"].pretrain, field) for field in fields]
    assert ratios == pytest.approx([2] * 4)
    batches = {run.recipe.pretrain.batch_size for run in of_study("modern", "pocket")}
    assert len(batches) == 1, "what a run puts back is compared in batches of one size"


def test_pocket_runs_of_the_recipes_are_the_pocket_recipes():
    for name in ("ablation", "baselines"):
        for run in of_study(name, "pocket"):
            changes = STUDIES[name]["runs"][run.member.run]
            for recipe in (own for own, delta in NAMED.items() if changes in (delta, {"recipe": own})):
                pocket = "pocket" if recipe == "crammed-bert" else f"pocket-{recipe}"
                assert content(run.recipe) == content(RECIPES[pocket])
    assert content(recipes({"own": {}}, "modern")["own"]) == content(RECIPES["pocket-modern"])


def test_a_run_may_be_another_recipe_whatever_the_others_are_made_of():
    found = runs("baselines", "modern", "day")
    assert found[0].member.also == ["modern"]
    by_name = {run.member.run: content(run.recipe) for run in found}
    assert by_name["frontier"] == content(RECIPES["frontier"])
    assert by_name["BERT"] == content(RECIPES["bert-base"])
    study = {"own": {}, "wider": {"recipe": "modern", "scale": {"hidden": 2}, "pretrain": {"clip": 1.0}}}
    wider = recipes(study, override={"pretrain": {"mask_fraction": 0.4}})["wider"].pretrain
    assert (wider.architecture.hidden, wider.clip, wider.mask_fraction, wider.optimizer) == (512, 1.0, 0.3, "muon")
    first, *others = asked("baselines", "demo")[1]
    assert first.recipe
    assert all(run.recipe is None and "demo" in run.member.problem for run in others)


def test_no_option_of_architecture_and_training_is_idle():
    """Each is set by a recipe or by a run of a study."""
    every = [run.recipe for name in STUDIES for run in of_study(name, "day")] + [*RECIPES.values()]
    trained = [recipe.pretrain for recipe in every]
    for settings, chosen in ((Architecture, [one.architecture for one in trained]), (Training, trained)):
        for name, field in settings.model_fields.items():
            found = {getattr(one, name) for one in chosen}
            kind = field.annotation
            if get_origin(kind) is Literal and name != "budget_unit":
                assert found == set(get_args(kind)), name
            elif kind is bool or type(None) in get_args(kind) or name in ("ffn_every", "funnel", "masked_share"):
                assert len(found) > 1, name


@pytest.mark.parametrize(
    ("text", "recipe", "expected", "words"),
    [
        ("", "crammed-bert", ("pocket", 1, None, ""), "pocket"),
        (" day ", "crammed-bert", ("day", 1, None, ""), "day"),
        ("pocket 3,000,000 tokens", "crammed-bert", ("pocket", 1, 3e6, "tokens"), "pocket, 3,000,000 tokens"),
        ("1e15 flops", "modern", ("pocket", 1, 1e15, "flops"), "pocket, 1e+15 flops"),
        ("day 0.5 hours", "izsak", ("day", 1, 0.5, "hours"), "day, 30 minutes"),
        ("pocket 3 minutes", "crammed-bert", ("pocket", 1, 0.05, "hours"), "pocket, 3 minutes"),
        ("day, 10 million tokens", "izsak", ("day", 1, 1e7, "tokens"), "day, 10,000,000 tokens"),
        ("pocket x0.5", "crammed-bert", ("pocket", 0.5, None, ""), "pocket x 0.5"),
        ("pocket x 0.5, 3e6 tokens", "modern", ("pocket", 0.5, 3e6, "tokens"), "pocket x 0.5, 3,000,000 tokens"),
        ("", "demo", ("", 1, None, ""), ""),
        ("2000 tokens", "demo", ("", 1, 2000, "tokens"), "2,000 tokens"),
        ("pocket 0.5 epochs", "izsak", ("pocket", 1, 0.5, "epochs"), "pocket, 0.5 epochs"),
    ],
)
def test_a_scale_names_a_size_and_a_budget(text: str, recipe: str, expected: tuple, words: str):
    found = parse_scale(text, recipe)
    assert (tuple(found), str(found)) == (expected, words)
    run = recipes({"one": {}}, recipe, text)["one"].pretrain
    size, multiple, amount, unit = expected
    whole = RECIPES[recipe if size != "pocket" else "pocket" if recipe == "crammed-bert" else f"pocket-{recipe}"]
    assert (run.architecture == whole.pretrain.architecture) == (multiple == 1)
    usual = (whole.pretrain.budget, whole.pretrain.budget_unit)
    assert (run.budget, run.budget_unit) == ((amount, unit) if amount else usual)


@pytest.mark.parametrize(
    "text",
    [
        "week", "pocket day", "3e6", "tokens", "3e6 steps", "0 tokens", "0.4 tokens", "-1 hours", "nan hours",
        "1e999 flops", "many tokens", "pocket 3e6 tokens 2 hours", "pocket x", "pocket x 0", "pocket x half", "x 0.5",
        "pocket x 0,5", "0,5 hours", "1,00 tokens", "day x 0.5 hours", "pocket x 1e308", "pocket x 65", "day x 1e-9",
    ],
)  # fmt: skip
def test_a_scale_that_is_none_is_refused_with_what_it_may_be(text: str):
    refused = refusal(parse_scale, text, "crammed-bert")
    for word in (repr(text), "pocket", "day", "tokens", "1/64 to 64"):
        assert word in refused


@pytest.mark.parametrize("kind", ["embedding", "different_layers"])
def test_runs_of_a_law_differ_in_size_only_whatever_the_base_is(kind: str):
    about, found = asked("shapes", override={"pretrain": {"architecture": {kind: 2}}})
    assert about.fit
    assert len(found) >= 12
    assert {name for run in found for name in run.member.changes} <= SIZE_FIELDS


def test_a_multiple_of_a_size_scales_every_run_and_leaves_out_those_that_get_too_small():
    text = "pocket x0.5"
    studied = {"own": {}, "wide": {"scale": {"hidden": 2}}}
    for field, value in (("heads", 4), ("embedding", 192), ("layers", 32), ("different_layers", 8)):
        studied[field] = {"pretrain": {"architecture": {field: value}}}
    of = {name: recipe.pretrain.architecture for name, recipe in recipes(studied, scale=text).items()}
    assert (of["own"].layers, of["own"].hidden, of["own"].heads, of["own"].intermediate) == (2, 128, 2, 384)
    assert (of["wide"].layers, of["wide"].hidden, of["wide"].heads) == (2, 256, 4)
    assert (of["heads"].hidden, of["heads"].heads) == (128, 1)
    assert (of["embedding"].hidden, of["embedding"].embedding) == (128, 32)
    assert (of["layers"].layers, of["different_layers"].different_layers) == (4, 1)
    _, found = asked("architectures", scale=text)
    assert {run.member.run: "layers" in run.member.problem for run in found if not run.recipe} == {
        "funnel": True,
        "feed-forward in every 4th block": True,
    }
    assert {run.recipe.pretrain.architecture.hidden for run in found if run.recipe} == {128}


def test_an_override_holds_for_all_runs_but_for_what_a_run_sets_itself():
    override = {"pretrain": {"mask_fraction": 0.5, "clip": 2.0, "architecture": {"layers": 3}}}
    study = {"own": {}, "15 %": {"pretrain": {"mask_fraction": 0.15}}, "usual": {"pretrain": {"mask_fraction": 0.25}}}
    for scale in ("pocket", "day"):
        found = runs(study, scale=scale, override=override)
        trained = [run.recipe.pretrain for run in found]
        assert [one.mask_fraction for one in trained] == [0.5, 0.15, 0.25]
        assert {(one.clip, one.architecture.layers) for one in trained} == {(2.0, 3)}
        masks = [{"pretrain.mask_fraction": each} for each in (0.15, 0.25)]
        assert [run.member.changes for run in found] == [{}, *masks]


def test_a_budget_in_words_of_a_run_or_an_override_is_that_number_in_its_unit():
    study = {"own": {}, "short": {"pretrain": {"budget": "20 minutes"}}, "long": {"scale": {"budget": 2}}}
    found = recipes(study, override={"pretrain": {"budget": "3e6 tokens"}})
    budgets = {name: (one.pretrain.budget, one.pretrain.budget_unit) for name, one in found.items()}
    assert budgets == {"own": (3e6, "tokens"), "short": (1 / 3, "hours"), "long": (6e6, "tokens")}


def test_multiples_are_of_the_size_and_budget_that_a_run_has_otherwise():
    layout = {"layers": 6, "hidden": 96, "heads": 3, "intermediate": 288}
    override = {"pretrain": {"architecture": layout, "budget": 1000, "budget_unit": "tokens"}}
    study = {
        "own": {},
        "large": {"scale": {"layers": 0.5, "hidden": 2, "budget": 3}},
        "its own": {"pretrain": {"budget": 50}, "scale": {"budget": 2, "hidden": 0.01, "layers": 0.01}},
    }
    for scale in ("pocket", "day"):
        of = {name: recipe.pretrain for name, recipe in recipes(study, scale=scale, override=override).items()}
        sizes = {n: (a.layers, a.hidden, a.heads, a.intermediate) for n, t in of.items() for a in [t.architecture]}
        assert sizes == {"own": (6, 96, 3, 288), "large": (3, 192, 6, 576), "its own": (1, 32, 1, 96)}
        assert {name: one.budget for name, one in of.items()} == {"own": 1000, "large": 3000, "its own": 100}
        assert {one.budget_unit for one in of.values()} == {"tokens"}


@pytest.mark.parametrize("scale", ["pocket", "day"])
def test_the_shapes_have_about_equal_parameters_in_their_blocks(scale: str):
    found = {run.member.run: run.recipe.pretrain.architecture for run in of_study("shapes", scale)}
    weights = {name: one.layers * one.hidden * (4 * one.hidden + 2 * one.intermediate) for name, one in found.items()}
    for name in found:
        if "width" in name:
            assert weights[name] == pytest.approx(weights[THE_RECIPE], rel=0.2), name
            assert found[name].hidden % 64 == 0


def test_at_another_width_heads_stay_as_wide_or_are_as_many_times_fewer():
    for hidden, width, count in itertools.product((64, 128, 192, 256, 768, 1024), (32, 64, 128), (1, 2, 4, 6, 12)):
        before = Architecture(hidden=count * width, heads=count, intermediate=3 * count * width)
        found = heads(before, hidden)
        assert hidden % found == 0
        if hidden % width == 0:
            assert hidden == found * width
        else:
            wanted = count * hidden / before.hidden
            fitting = [n for n in range(1, hidden + 1) if hidden % n == 0 and (hidden // n) % 2 == 0]
            assert abs(found - wanted) == min(abs(n - wanted) for n in fitting)


@pytest.mark.parametrize("scale", ["pocket", "day", "pocket 500 tokens"])
def test_what_a_run_sets_itself_stays_at_every_scale(scale: str):
    own = {
        "tokenize": {"sort": "unigram", "heldout_fraction": 0.1, "max_sequences": 700},
        "pretrain": {"budget": 40.0, "budget_unit": "tokens", "mask_fraction": 0.3},
        "finetune": {"seeds": 4, "learning_rate": 1e-3},
    }
    run = recipes({"own": own}, scale=scale)["own"].model_dump()
    assert {stage: {name: run[stage][name] for name in fields} for stage, fields in own.items()} == own


def test_runs_that_are_the_same_are_one_under_both_names():
    study = {"own": {}, "25 %": {"pretrain": {"mask_fraction": 0.25}}, "15 %": {"pretrain": {"mask_fraction": 0.15}}}
    found = [run.member for run in runs(study | {"also 15 %": study["15 %"]}, seeds=2)]
    assert [(one.run, one.also, one.seed) for one in found] == [
        (*names, seed) for names in (("own", ["25 %"]), ("15 %", ["also 15 %"])) for seed in (0, 1)
    ]
    finetuned = {"base": {}, "slower": {"finetune": {"learning_rate": 1e-5}}}
    for until, count in (("pretrain", 1), ("report", 2)):
        assert len(runs(finetuned, "demo", until=until)) == count


def test_every_seed_is_another_one_from_that_of_the_recipe_on():
    moved = runs({"own": {}}, seeds=2, override={"pretrain": {"seed": 7}})
    assert [(run.member.seed, run.recipe.pretrain.seed) for run in moved] == [(0, 7), (1, 8)]


def test_fields_that_only_the_recipes_optimizer_and_schedule_read_do_not_hinder_a_run_with_others():
    study = {"own": {}, "adafactor": {"pretrain": {"optimizer": "adafactor", "schedule": "linear"}}}
    found = recipes(study, "modern", "day")
    assert found["own"] == recipe_of(NAMED["modern"] | {"report": {"title": "own"}}, {})
    other = found["adafactor"].pretrain
    assert (other.beta2, other.warmup) == (Training().beta2, 0.02)
    post = {"post": {"pretrain": {"architecture": {"norm_order": "post", "final_norm": False}}}}
    assert recipes(post, "modern", "day")["post"].pretrain.architecture.first_norm
    assert "beta2" in refusal(runs, {"bad": {"pretrain": {"optimizer": "adafactor", "beta2": 0.9}}}, "modern")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrian": {"clip": 1}}, "pretrian pretrain"),
        ({"pretrain": {"clipp": 1}}, "pretrain.clipp clip"),
        ({"pretrain": {"architecture": {"headz": 1}}}, "pretrain.architecture.headz heads"),
        ({"pretrain": {"clip": -1}}, "pretrain.clip -1"),
        ({"pretrain": 3}, "pretrain 3"),
        ({"pretrain": {"architecture": {"heads": 5}}}, "pretrain.architecture heads 5"),
        ({"scale": {"width": 2}}, "scale.width"),
        ({"scale": {"budget": 0}}, "scale.budget"),
        ({"scale": 2}, "scale"),
        ({"tokenize": {"length": 64}}, "tokenize.length finetune.max_tokens"),
        ({"recipe": "frontir"}, "'frontir'"),
        ({"recipe": "pocket-modern"}, "'pocket-modern'"),
        ({"recipe": []}, "[]"),
    ],
)
def test_changes_that_no_recipe_takes_are_refused_with_the_run_and_the_field(changes: dict, words: str):
    refused = refusal(runs, {"own": {}, "the odd one": changes}, seeds=2)
    for word in ("'the odd one'", *words.split()):
        assert word in refused


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: find_study("maskin"), ["masking?"]),
        (lambda: asked("masking", "crammed-bret"), ["crammed-bert?"]),
        (lambda: parse_scale("pocket", "demo"), ["'demo'"]),
        (lambda: parse_scale("pocket 3e6 tokens", "demo"), ["'demo'"]),
        (lambda: asked("masking", scale="pocket x 1.1"), ["1.1"]),
        (lambda: asked("masking", scale="pocket x 60"), ["pocket x 60", "layers"]),
    ],
    ids=["no study", "no recipe", "a second size", "a second size with a budget", "changes nothing", "no run possible"],
)
def test_a_study_that_cannot_run_is_refused_by_name(call: Callable, words: list[str]):
    refused = refusal(call)
    for word in words:
        assert word in refused


@pytest.mark.parametrize("bad", [{"pretrain": {"clipp": 1}}, {"pretrain": 3}, {"report": {"title": "x"}}])
def test_a_bad_override_is_refused_with_its_field_and_blamed_on_no_run(bad: dict):
    refused = refusal(runs, "masking", override=bad)
    assert all(stage in refused for stage in bad)
    assert "Run " not in refused


def test_runs_that_an_override_makes_impossible_are_left_out_with_the_reason():
    _, found = asked("ablation", override={"download": OWN_TEXT}, seeds=2)
    left_out = [run.member for run in found if not run.recipe]
    names = ("text reverted", "all reverted")
    assert [(member.run, member.seed) for member in left_out] == [(name, n) for name in names for n in (0, 1)]
    assert all("own.jsonl" in member.problem for member in left_out)
    assert [*dict.fromkeys(run.member.run for run in found)] == [*STUDIES["ablation"]["runs"]]
    assert all(run.recipe.download.files == ["own.jsonl"] for run in found if run.recipe)
    wrong = {"own": {}, "the odd one": {"download": {"source": "files"}}}
    assert "'the odd one'" in refusal(runs, wrong, override={"download": OWN_TEXT})


def test_runs_that_another_recipe_makes_impossible_are_left_out_with_the_reason():
    about, found = asked("architectures", "demo")
    problems = {run.member.run: run.member.problem for run in found if not run.recipe}
    assert "embedding" in problems["embedding of 128"]
    assert len(found) - len(problems) > 10
    assert about.published == {}, "those are of the study's own recipe"


@pytest.mark.parametrize("scale", ["pocket", "day"])
def test_files_of_a_run_or_an_override_are_read_as_far_as_these_say(scale: str):
    def limits(study: dict, **override: object) -> list[tuple]:
        found = recipes(study, scale=scale, override={"download": override} if override else {}).values()
        return [(recipe.download.documents, recipe.download.megabytes) for recipe in found]

    own = {"whole": {"download": OWN_TEXT}, "some": {"download": OWN_TEXT | {"documents": 900}}, "the pile": {}}
    assert limits(own) == [(0, 0), (900, 0), (62_500 if scale == "pocket" else 8_000_000, 0)]
    assert limits(own, documents=50) == [(50, 0), (900, 0), (50, 0)]
    sizes = {"all": {}, "less": {"download": {"documents": 100_000}}, "least": {"download": {"megabytes": 2.5}}}
    assert limits(sizes, source={"files": 1}, files=["own.jsonl"]) == [(0, 0), (100_000, 0), (0, 2.5)]
    masks = {"usual": {}, "fewer masks": {"pretrain": {"mask_fraction": 0.1}}}
    assert limits(masks, **OWN_TEXT, megabytes=12) == [(0, 12)] * 2


def test_a_study_needs_a_seed_or_more_and_sets_it_in_one_place(tmp_path: Path):
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"runs": {"own": {"pretrain": {"seed": 4}}}}))
    assert asked(str(own))[1][0].recipe.pretrain.seed == 4
    assert "pretrain.seed" in refusal(asked, str(own), seeds=2)


def test_a_users_study_is_read_from_a_json_file(tmp_path: Path):
    own = {"about": "A question.", "recipe": "modern", "runs": {"own": {}, "no clip": {"pretrain": {"clip": 1.0}}}}
    (tmp_path / "own.JSON").write_text("\ufeff" + json.dumps(own), encoding="utf-8")
    about, found = asked(str(tmp_path / "own.JSON"), seeds=2)
    assert (about.about, about.recipe, about.title) == ("A question.", "modern", "Study: own")
    assert [(run.member.run, run.member.seed) for run in found] == [(name, n) for name in own["runs"] for n in (0, 1)]
    assert asked(f"{tmp_path}/own.JSON", "crammed-bert")[0].recipe == "crammed-bert"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.json", None, "gone.json"),
        ("gone.py", None, "gone.py masking .json"),
        ("a.json", '{"runs": ', "a.json JSONDecodeError"),
        ("a.json", "\xff\xfe", "a.json"),
        ("a.json", "[]", "a.json the study"),
        ("a.json", '{"runs": {}}', "a.json runs"),
        ("a.json", '{"runs": {"own": 3}}', "a.json runs.own"),
        ("a.json", '{"about": "x"}', "a.json runs"),
        ("a.json", '{"runs": {"own": {}}, "titel": "x"}', "a.json titel"),
        ("a.json", '{"runs": {"own": {}}, "fit": "perhaps"}', "a.json fit"),
        ("a.json", '{"runs": {"own": {}, "own": {"pretrain": {"clip": 1.0}}}}', "a.json 'own' twice"),
        ("a.json", '{"runs": {"own ": {}}}', "a.json runs.own"),
        ("a.json", r'{"runs": {"a\nb": {}}}', "a.json runs.a"),
    ],
)
def test_a_file_that_holds_no_study_is_refused_with_its_name_and_what_is_wrong(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(InputError) as refused:
        find_study(str(tmp_path / name))
    for word in words.split():
        assert word in str(refused.value)


def test_the_time_of_a_study_follows_from_budgets_operations_and_the_rate_of_the_machine():
    def seconds(unit: str, amount: float) -> float:
        return pretraining_seconds(resolve("pocket", {"pretrain": {"budget": amount, "budget_unit": unit}}), 1e10)

    assert seconds("hours", 0.5) == 1800
    assert seconds("flops", 3e12) == 300
    assert seconds("tokens", 1000) == pytest.approx(1000 * operations_per_token(RECIPES["pocket"]) / 1e10)
    epoch = 250_000 * 128  # its most sequences
    assert seconds("epochs", 2) == pytest.approx(seconds("tokens", 2 * epoch))
    found = runs({"own": {}, "twice": {"scale": {"budget": 2}}}, scale="1 hours")
    assert estimate(found, 1.0) == "2 runs, about 3 hours"


def test_prefect_refuses_bad_parameters_of_a_study_at_submission():
    schema = parameter_schema(study).model_dump_for_openapi()
    assert is_valid({"study": "masking", "recipe": "modern", "scale": "day", "seeds": 3, "until": "report"}, schema)
    for bad in ({"recipe": "modrn"}, {"until": "filter"}, {"seeds": "x"}, {"override": {"pretrain": {"clipp": 1}}}):
        assert not is_valid(bad, schema), bad
