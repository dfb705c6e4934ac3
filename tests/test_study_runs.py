"""What a study consists of: its recipes, at which size and budget, and what is refused before anything runs."""

import functools
import importlib
import itertools
import json
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid

from flows.deltas import NAMED, heads
from flows.recipes import RECIPES, Recipe, recipe_of, resolve
from flows.studies import STUDIES, THE_RECIPE
from flows.study import CARDS, estimate, impossible, planned, recipe_operations, seconds_of
from flows.study_runs import Study, StudyRun, runs_of, scale_of, study_called
from model import InputError
from model.settings import Architecture, Training
from tasks.reports.law import FEWEST
from tasks.study import SIZES

HOME = Path(__file__).resolve().parents[1]


def runs(study: dict | str, recipe: str = "crammed-bert", scale: str = "", **given) -> list[StudyRun]:
    """The runs of a study, or of one with these runs."""
    given = {"override": {}, "seeds": 1, "until": "report"} | given
    return runs_of(called(study), recipe, scale=scale_of(scale, recipe), **given)[0]


def called(study: dict | str):
    from flows.study_runs import Study

    return study_called(study) if isinstance(study, str) else Study(runs=study)


def content(recipe: Recipe) -> dict:
    """All that a recipe says, but for its title."""
    return recipe.model_dump(exclude={"report"})


@functools.cache
def of_study(name: str, scale: str) -> list[StudyRun]:
    """The runs of a study that comes with cram."""
    return runs(name, scale=scale)


def refusal(study: dict | str, **given) -> str:
    """The sentence with which the runs of a study are refused."""
    with pytest.raises(InputError) as refused:
        runs(study, **given)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("scale", ["pocket", "day"])
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_recipes_that_all_differ_and_loses_no_run(name: str, scale: str):
    found = of_study(name, scale)
    every = [content(run.recipe) for run in found]
    assert all(one != other for one, other in itertools.combinations(every, 2))
    names = [name for run in found for name in (run.name, *run.also)]
    assert sorted(names) == sorted(STUDIES[name]["runs"])
    assert set(STUDIES[name].get("published", {})) <= set(names)
    assert len(found) >= (FEWEST if STUDIES[name].get("fit") else 2)
    assert found[0].changes == {}
    assert all(run.changes for run in found[1:])


@pytest.mark.parametrize("name", STUDIES)
def test_at_full_size_a_run_is_the_recipe_with_its_changes_and_nothing_else(name: str):
    for run in of_study(name, "day"):
        changes = STUDIES[name]["runs"][run.name]
        own = {stage: fields for stage, fields in changes.items() if stage != "recipe"}
        if "scale" not in changes:
            assert content(run.recipe) == content(resolve(changes.get("recipe", "crammed-bert"), own)), run.name
            assert run.recipe.report.title == run.name


def test_a_pocket_run_keeps_what_it_changes_of_muons_rates_batch_and_decay():
    usual = RECIPES["modern"].pretrain
    fields = ("learning_rate", "matrix_learning_rate", "weight_decay", "batch_size")
    doubled = {field: 2 * getattr(usual, field) for field in fields}
    base, run = (one.recipe.pretrain for one in runs({"own": {}, "doubled": {"pretrain": doubled}}, "modern"))
    assert [getattr(run, field) / getattr(base, field) for field in fields] == pytest.approx([2] * 4)


def test_what_a_run_of_modern_puts_back_is_compared_in_batches_of_one_size_at_pocket_size():
    assert len({run.recipe.pretrain.batch_size for run in of_study("modern", "pocket")}) == 1


def test_pocket_runs_of_the_recipes_are_the_pocket_recipes():
    for study in ("ablation", "baselines"):
        for run in of_study(study, "pocket"):
            changes = STUDIES[study]["runs"][run.name]
            [recipe] = [own for own, delta in NAMED.items() if changes in (delta, {"recipe": own})] or [None]
            if recipe:
                pocket = "pocket" if recipe == "crammed-bert" else f"pocket-{recipe}"
                assert content(run.recipe) == content(RECIPES[pocket])
    assert content(runs({"own": {}}, "modern")[0].recipe) == content(RECIPES["pocket-modern"])


def test_a_run_may_be_another_recipe_whatever_the_others_are_made_of():
    found = runs("baselines", "modern", "day")
    assert found[0].also == ("modern",)
    by_name = {run.name: content(run.recipe) for run in found}
    assert by_name["frontier"] == content(RECIPES["frontier"])
    assert by_name["BERT"] == content(RECIPES["bert-base"])
    study = {"own": {}, "wider": {"recipe": "modern", "scale": {"hidden": 2}, "pretrain": {"clip": 1.0}}}
    wider = runs(study, override={"pretrain": {"mask_fraction": 0.4}})[1].recipe.pretrain
    assert (wider.architecture.hidden, wider.clip, wider.mask_fraction, wider.optimizer) == (512, 1.0, 0.3, "muon")
    for bad in ("frontir", "pocket-modern", 3, None, []):
        words = refusal({"own": {}, "other": {"recipe": bad}})
        assert "'other'" in words
        assert repr(bad) in words
    about, possible = planned("baselines", "demo", {}, 1, "", "pretrain")
    assert [run.name for run in possible] == ["as the recipe"]
    assert all("demo" in member.problem for member in about.members)


def test_no_option_of_architecture_and_training_is_idle():
    """Each is set by a recipe or by a run of a study."""
    every = [run.recipe for name in STUDIES for run in of_study(name, "day")] + [*RECIPES.values()]
    for settings, chosen in (
        (Architecture, [recipe.pretrain.architecture for recipe in every]),
        (Training, [recipe.pretrain for recipe in every]),
    ):
        for name, field in settings.model_fields.items():
            found, kind = {getattr(one, name) for one in chosen}, field.annotation
            if get_origin(kind) is Literal and name not in ("budget_unit", "nonfinite"):
                assert found == set(get_args(kind)), name
            elif kind is bool or type(None) in get_args(kind):
                assert len(found) > 1, name
    shapes, trained = [recipe.pretrain.architecture for recipe in every], [recipe.pretrain for recipe in every]
    assert {one.ffn_every for one in shapes} > {1}
    assert {one.funnel for one in shapes} > {0}
    assert {one.masked_share for one in trained} > {0.8}
    assert {one.dropout for one in trained} > {0.0}


@pytest.mark.parametrize(
    ("text", "recipe", "expected", "words"),
    [
        ("", "crammed-bert", ("pocket", 1, None, ""), "pocket"),
        ("pocket", "modern", ("pocket", 1, None, ""), "pocket"),
        (" day ", "crammed-bert", ("day", 1, None, ""), "day"),
        ("pocket 3e6 tokens", "crammed-bert", ("pocket", 1, 3e6, "tokens"), "pocket, 3,000,000 tokens"),
        ("1e15 flops", "crammed-bert", ("pocket", 1, 1e15, "flops"), "pocket, 1e+15 flops"),
        ("day 0.5 hours", "izsak", ("day", 1, 0.5, "hours"), "day, 30 minutes"),
        ("", "demo", ("", 1, None, ""), ""),
        ("2000 tokens", "demo", ("", 1, 2000, "tokens"), "2,000 tokens"),
    ],
)
def test_a_scale_names_a_size_and_a_budget(text: str, recipe: str, expected: tuple, words: str):
    found = scale_of(text, recipe)
    assert (tuple(found), str(found)) == (expected, words)
    [run] = runs({"one": {}}, recipe, text)
    size, _, amount, unit = expected
    whole = RECIPES[recipe if size != "pocket" else "pocket" if recipe == "crammed-bert" else f"pocket-{recipe}"]
    assert run.recipe.pretrain.architecture == whole.pretrain.architecture
    budget = (amount, unit) if amount else (whole.pretrain.budget, whole.pretrain.budget_unit)
    assert (run.recipe.pretrain.budget, run.recipe.pretrain.budget_unit) == budget


@pytest.mark.parametrize(
    "text",
    [
        "week", "pocket day", "3e6", "tokens", "3e6 steps", "0 tokens", "-1 hours", "nan hours", "inf flops",
        "many tokens", "pocket 3e6 tokens 2 hours", "pocket x", "pocket x 0", "pocket x half", "x 0.5",
        "pocket x 0,5", "0,5 hours", "1,00 tokens",
        "day x 0.5 hours",
    ],
)  # fmt: skip
def test_a_scale_that_is_none_is_refused_with_what_it_may_be(text: str):
    with pytest.raises(InputError) as refused:
        scale_of(text, "crammed-bert")
    for word in (repr(text), "pocket", "day", "tokens"):
        assert word in str(refused.value)


@pytest.mark.parametrize("number", ["1e308", "65", "1e-9"])
def test_a_multiple_beyond_the_limits_is_refused_with_them(number: str):
    with pytest.raises(InputError, match=rf"x {number}'.*1/64 and 64"):
        scale_of(f"pocket x {number}", "crammed-bert")


def test_a_multiple_that_changes_nothing_is_refused_and_one_that_leaves_no_run_possible_is_named():
    with pytest.raises(InputError, match=r"1\.1 changes nothing"):
        planned("masking", None, {}, 1, "pocket x 1.1", "pretrain")
    with pytest.raises(InputError, match=r"scale pocket x 60: .*layers"):
        planned("masking", None, {}, 1, "pocket x 60", "pretrain")


@pytest.mark.parametrize("kind", ["embedding", "different_layers"])
def test_runs_of_a_law_differ_in_size_only_whatever_the_base_is(kind: str):
    override = {"pretrain": {"architecture": {kind: 2}}}
    about, found = planned("shapes", None, override, 1, "", "pretrain")
    assert about.fit
    assert len(found) >= 12
    assert {name for run in found for name in run.changes} <= SIZES


@pytest.mark.parametrize(
    "text", ["pocket x 0.5", "pocket x0.5", "pocket x 0.5 3,000,000 tokens", "pocket x 0.5, 3e6 tokens"]
)
def test_a_multiple_of_a_size_scales_every_run_and_leaves_out_those_that_get_too_small(text: str):
    studied = {"own": {}, "wide": {"scale": {"hidden": 2}}, "4 heads": {"pretrain": {"architecture": {"heads": 4}}}}
    studied |= {"small words": {"pretrain": {"architecture": {"embedding": 192}}}}
    studied |= {"deep": {"pretrain": {"architecture": {"layers": 32}}}}
    studied |= {"half": {"pretrain": {"architecture": {"different_layers": 8}}}}
    words = "pocket x 0.5, 3,000,000 tokens" if "tokens" in text else "pocket x 0.5"
    assert str(scale_of(text, "crammed-bert")) == words
    of = {run.name: run.recipe.pretrain.architecture for run in runs(studied, scale=text)}
    assert (of["own"].layers, of["own"].hidden, of["own"].heads, of["own"].intermediate) == (2, 128, 2, 384)
    assert (of["wide"].layers, of["wide"].hidden, of["wide"].heads) == (2, 256, 4)
    assert (of["4 heads"].hidden, of["4 heads"].heads) == (128, 1)
    assert (of["small words"].hidden, of["small words"].embedding) == (128, 32)
    assert (of["deep"].layers, of["half"].different_layers) == (4, 1)
    about, found = planned("architectures", None, {}, 1, text, "pretrain")
    assert {member.run: "layers" in member.problem for member in about.members} == {
        "funnel": True,
        "feed-forward in every 4th block": True,
    }
    assert {run.recipe.pretrain.architecture.hidden for run in found} == {128}
    with pytest.raises(InputError, match="'demo'"):
        scale_of(text, "demo")


@pytest.mark.parametrize("size", ["pocket", "day", "pocket 3e6 tokens"])
def test_a_size_is_refused_for_a_recipe_that_has_one_of_its_own(size: str):
    with pytest.raises(InputError, match="'demo'"):
        scale_of(size, "demo")
    with pytest.raises(InputError, match=r"'cramed-bert'.*Did you mean crammed-bert"):
        scale_of(size, "cramed-bert")


def test_an_override_holds_for_all_runs_but_for_what_a_run_sets_itself():
    override = {"pretrain": {"mask_fraction": 0.5, "clip": 2.0, "architecture": {"layers": 3}}}
    study = {"own": {}, "15 %": {"pretrain": {"mask_fraction": 0.15}}, "usual": {"pretrain": {"mask_fraction": 0.25}}}
    for scale in ("pocket", "day"):
        found = runs(study, scale=scale, override=override)
        assert [run.recipe.pretrain.mask_fraction for run in found] == [0.5, 0.15, 0.25]
        assert {(run.recipe.pretrain.clip, run.recipe.pretrain.architecture.layers) for run in found} == {(2.0, 3)}
        assert [run.changes for run in found] == [{}, *({"pretrain.mask_fraction": each} for each in (0.15, 0.25))]


def test_multiples_are_of_the_size_and_budget_that_a_run_has_otherwise():
    override = {
        "pretrain": {
            "architecture": {"layers": 6, "hidden": 96, "heads": 3, "intermediate": 288},
            "budget": 1000,
            "budget_unit": "tokens",
        }
    }
    study = {
        "own": {},
        "large": {"scale": {"layers": 0.5, "hidden": 2, "budget": 3}},
        "its own": {"pretrain": {"budget": 50}, "scale": {"budget": 2, "hidden": 0.01, "layers": 0.01}},
    }
    for scale in ("pocket", "day"):
        of = {run.name: run.recipe.pretrain for run in runs(study, scale=scale, override=override)}
        sizes = {n: (a.layers, a.hidden, a.heads, a.intermediate) for n, t in of.items() for a in [t.architecture]}
        assert sizes == {"own": (6, 96, 3, 288), "large": (3, 192, 6, 576), "its own": (1, 32, 1, 96)}
        assert {name: one.budget for name, one in of.items()} == {"own": 1000, "large": 3000, "its own": 100}
        assert {one.budget_unit for one in of.values()} == {"tokens"}


@pytest.mark.parametrize("scale", ["pocket", "day"])
def test_the_shapes_have_about_equal_parameters_in_their_blocks(scale: str):
    found = {run.name: run.recipe.pretrain.architecture for run in of_study("shapes", scale)}
    weights = {name: one.layers * one.hidden * (4 * one.hidden + 2 * one.intermediate) for name, one in found.items()}
    for name in found:
        if "width" in name:
            assert weights[name] == pytest.approx(weights[THE_RECIPE], rel=0.2), name
            assert found[name].hidden % 64 == 0


def test_at_another_width_heads_stay_as_wide_or_are_as_many_times_fewer():
    for hidden, width in itertools.product((64, 128, 192, 256, 768, 1024), (32, 64, 128)):
        for count in (1, 2, 4, 6, 12):
            before = Architecture(hidden=count * width, heads=count, intermediate=3 * count * width)
            found = heads(before, hidden)
            assert hidden % found == 0
            if hidden % width == 0:
                assert hidden == found * width
            else:
                wanted = count * hidden / before.hidden
                fitting = [n for n in range(1, hidden + 1) if hidden % n == 0 and (hidden // n) % 2 == 0]
                assert abs(found - wanted) == min(abs(n - wanted) for n in fitting)
    of = {run.name: run.recipe.pretrain.architecture.heads for run in of_study("architectures", "pocket")}
    assert (of[THE_RECIPE], of["8 heads"], of["4 heads"]) == (4, 2, 1), "a third of the width"


@pytest.mark.parametrize("scale", ["pocket", "day", "pocket 500 tokens"])
def test_what_a_run_sets_itself_stays_at_every_scale(scale: str):
    own = {
        "tokenize": {"sort": "unigram", "heldout_fraction": 0.1, "max_sequences": 700},
        "pretrain": {"budget": 40.0, "budget_unit": "tokens", "mask_fraction": 0.3},
        "finetune": {"seeds": 4, "learning_rate": 1e-3},
    }
    [run] = runs({"own": own}, scale=scale)
    for stage, fields in own.items():
        found = getattr(run.recipe, stage)
        assert {name: getattr(found, name) for name in fields} == fields


def test_runs_that_are_the_same_are_one_under_both_names():
    study = {"own": {}, "25 %": {"pretrain": {"mask_fraction": 0.25}}, "15 %": {"pretrain": {"mask_fraction": 0.15}}}
    found = runs(study | {"also 15 %": study["15 %"]}, seeds=2)
    assert [(run.name, run.also, run.seed) for run in found] == [
        ("own", ("25 %",), 0), ("own", ("25 %",), 1), ("15 %", ("also 15 %",), 0), ("15 %", ("also 15 %",), 1),
    ]  # fmt: skip


def test_every_seed_is_another_one_from_that_of_the_recipe_on():
    assert [run.recipe.pretrain.seed for run in runs({"own": {}}, seeds=3)] == [0, 1, 2]
    moved = runs({"own": {}}, seeds=2, override={"pretrain": {"seed": 7}})
    assert [(run.seed, run.recipe.pretrain.seed) for run in moved] == [(0, 7), (1, 8)]


def test_fields_that_only_the_recipes_optimizer_and_schedule_read_do_not_hinder_a_run_with_others():
    study = {"own": {}, "adafactor": {"pretrain": {"optimizer": "adafactor", "schedule": "linear"}}}
    [own, other] = runs(study, "modern", "day")
    assert own.recipe == recipe_of(NAMED["modern"] | {"report": {"title": "own"}}, {})
    assert (other.recipe.pretrain.beta2, other.recipe.pretrain.warmup) == (Training().beta2, 0.02)
    post = {"post": {"pretrain": {"architecture": {"norm_order": "post", "final_norm": False}}}}
    assert runs(post, "modern", "day")[0].recipe.pretrain.architecture.first_norm
    words = refusal({"bad": {"pretrain": {"optimizer": "adafactor", "beta2": 0.9}}}, recipe="modern")
    assert "beta2" in words


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
        ({"finetune": {"modern": {"warmup": 0.2}}}, "finetune.modern"),
    ],
)
@pytest.mark.parametrize("scale", ["pocket", "day"])
def test_changes_that_no_recipe_takes_are_refused_with_the_run_and_the_field(changes: dict, words: str, scale: str):
    refused = refusal({"own": {}, "the odd one": changes}, scale=scale, seeds=2)
    for word in ("'the odd one'", *words.split()):
        assert word in refused


@pytest.mark.parametrize("bad", [{"pretrain": {"clipp": 1}}, {"pretrain": 3}, {"filter": {"max_tokens_per_char": -1}}])
def test_a_bad_override_is_refused_with_its_field_and_blamed_on_no_run(bad: dict):
    refused = refusal("masking", override=bad)
    [stage] = bad
    assert stage in refused
    assert "Run " not in refused


def test_runs_that_an_override_makes_impossible_are_left_out_with_the_reason():
    own_text = {"download": {"source": "files", "files": ["own.jsonl"]}}
    about, found = planned("ablation", None, own_text, 2, "", "pretrain")
    left_out = {"text reverted", "all reverted"}
    assert {(member.run, member.seed) for member in about.members} == {(name, n) for name in left_out for n in (0, 1)}
    for member in about.members:
        assert "download" in member.problem
        assert "own.jsonl" in member.problem
    possible = [name for name in STUDIES["ablation"]["runs"] if name not in left_out]
    assert [*dict.fromkeys(run.name for run in found)] == possible
    assert all(run.recipe.download.files == ["own.jsonl"] for run in found)
    wrong = {"own": {}, "the odd one": {"download": {"source": "files"}}}
    assert "'the odd one'" in refusal(wrong, override=own_text)


@pytest.mark.parametrize("scale", ["pocket", "day"])
def test_files_of_a_run_or_an_override_are_read_as_far_as_these_say(scale: str):
    own_text = {"source": "files", "files": ["own.jsonl"]}
    own = {"whole": {"download": own_text}, "some": {"download": own_text | {"documents": 900}}, "the pile": {}}
    found = {run.name: run.recipe.download for run in runs(own, scale=scale)}
    assert {name: (download.documents, download.megabytes) for name, download in found.items()} == {
        "whole": (0, 0),
        "some": (900, 0),
        "the pile": (62_500 if scale == "pocket" else 8_000_000, 0),
    }
    fewer = {run.name: run.recipe.download.documents for run in runs(own, override={"download": {"documents": 50}})}
    assert fewer == {"whole": 50, "some": 900, "the pile": 50}
    sizes = {"all": {}, "less": {"download": {"documents": 100_000}}, "least": {"download": {"megabytes": 2.5}}}
    found = runs(sizes, override={"download": {"source": {"files": 1}, "files": ["own.jsonl"]}}, scale=scale)
    assert [(run.recipe.download.documents, run.recipe.download.megabytes) for run in found] == [
        (0, 0),
        (100_000, 0),
        (0, 2.5),
    ]
    override = {"download": own_text | {"megabytes": 12}}
    found = runs({"usual": {}, "fewer masks": {"pretrain": {"mask_fraction": 0.1}}}, override=override, scale=scale)
    assert [(run.recipe.download.documents, run.recipe.download.megabytes) for run in found] == [(0, 12)] * 2


def test_an_override_that_nothing_reads_is_refused():
    assert "finetune.modern" in refusal("masking", override={"finetune": {"modern": {"warmup": 0.1}}})


def test_an_unknown_study_or_recipe_is_refused_with_a_suggestion():
    with pytest.raises(InputError, match=r"'maskin'.*Did you mean masking\?.*ablation"):
        study_called("maskin")
    with pytest.raises(InputError, match=r"'crammed-bret'.*Did you mean crammed-bert\?"):
        planned("masking", "crammed-bret", {}, 1, "", "pretrain")


def test_a_study_needs_a_seed_or_more_and_sets_it_in_one_place(tmp_path: Path):
    with pytest.raises(InputError, match="seeds is 0"):
        planned("masking", None, {}, 0, "", "pretrain")
    (tmp_path / "own.json").write_text(json.dumps({"runs": {"own": {"pretrain": {"seed": 4}}}}))
    assert planned(f"{tmp_path}/own.json", None, {}, 1, "", "pretrain")[1][0].recipe.pretrain.seed == 4
    with pytest.raises(InputError, match=r"pretrain\.seed.*seeds"):
        planned(f"{tmp_path}/own.json", None, {}, 2, "", "pretrain")


OWN = {"about": "A question.", "recipe": "modern", "runs": {"own": {}, "no clip": {"pretrain": {"clip": 1.0}}}}


def test_a_users_study_is_read_from_a_json_or_python_file(tmp_path: Path):
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    (tmp_path / "own.py").write_text(f"STUDY = {OWN}\nSTUDY['runs'] |= {{}}\n")
    (about, found), (of_python, same) = (
        planned(f"{tmp_path}/own.{kind}", None, {}, 2, "", "pretrain") for kind in ("json", "py")
    )
    assert (about, found) == (of_python, same)
    assert (about.about, about.recipe, about.title) == ("A question.", "modern", "Study: own")
    assert [run.title for run in found] == [(name, f"seed {n}") for name in OWN["runs"] for n in (0, 1)]
    assert planned(f"{tmp_path}/own.py", "crammed-bert", {}, 1, "", "pretrain")[0].recipe == "crammed-bert"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.json", None, "gone.json"),
        ("gone.py", None, "gone.py"),
        ("a.json", '{"runs": ', "a.json JSONDecodeError"),
        ("a.json", "\xff\xfe", "a.json"),
        ("a.py", "runs = {}", "a.py STUDY"),
        ("a.py", "STUDY = {}['clip']", "a.py KeyError clip"),
        ("a.py", "STUDY = (", "a.py SyntaxError"),
        ("a.json", "[]", "a.json the study"),
        ("a.json", '{"runs": {}}', "a.json runs"),
        ("a.json", '{"runs": []}', "a.json runs"),
        ("a.json", '{"runs": {"own": 3}}', "a.json runs.own"),
        ("a.json", '{"about": "x"}', "a.json runs"),
        ("a.json", '{"runs": {"own": {}}, "titel": "x"}', "a.json titel"),
        ("a.json", '{"runs": {"own": {}}, "fit": "perhaps"}', "a.json fit"),
        ("a.json", '{"runs": {"own": {}, "own": {"pretrain": {"clip": 1.0}}}}', "a.json 'own' twice"),
        ("a.json", '{"runs": {"own ": {}}}', "a.json 'own '"),
        ("a.json", r'{"runs": {"a\nb": {}}}', r"a.json 'a\nb'"),
        ("a.json", r'{"runs": {"\ud800": {}}}', r"a.json '\ud800'"),
        ("a.py", "import sys; sys.exit(0)", "a.py SystemExit"),
    ],
)
def test_a_file_that_holds_no_study_is_refused_with_its_name_and_what_is_wrong(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(InputError) as refused:
        study_called(str(tmp_path / name))
    for word in words.split():
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "own",
    [
        {str(n): {"scale": {"budget": n}} for n in range(1, FEWEST)},
        {"0": {}} | {str(n): {"pretrain": {"mask_fraction": n / 10}} for n in range(1, 9)},
    ],
    ids=["too few", "of other differences"],
)
def test_a_fit_with_too_few_runs_of_different_sizes_is_refused_with_the_number_needed(tmp_path: Path, own: dict):
    (tmp_path / "own.json").write_text(json.dumps({"fit": True, "runs": own}))
    for seeds in (1, 3):  # seeds are no sizes
        with pytest.raises(InputError, match=rf"at least {FEWEST} runs.* {1 if '8' in own else FEWEST - 1}\."):
            planned(f"{tmp_path}/own.json", None, {}, seeds, "", "pretrain")
    of_one_size = {f"{n}": {"scale": {"budget": n}} for n in range(1, FEWEST + 1)}
    (tmp_path / "own.json").write_text(json.dumps({"fit": True, "runs": of_one_size}))
    with pytest.raises(InputError, match="same size"):
        planned(f"{tmp_path}/own.json", None, {}, 1, "", "pretrain")
    of_one_budget = {f"{n}": {"scale": {"layers": n}} for n in range(1, FEWEST + 1)}
    (tmp_path / "own.json").write_text(json.dumps({"fit": True, "runs": of_one_budget}))
    with pytest.raises(InputError, match="same number of tokens"):
        planned(f"{tmp_path}/own.json", None, {}, 1, "1e6 tokens", "pretrain")
    assert planned(f"{tmp_path}/own.json", None, {}, 1, "1e15 flops", "pretrain")[0].fit, "these read fewer tokens"
    own |= {f"{n} more": {"scale": {"budget": 10 + n, "layers": n}} for n in range(1, FEWEST)}
    (tmp_path / "own.json").write_text(json.dumps({"fit": True, "runs": own}))
    assert planned(f"{tmp_path}/own.json", None, {}, 1, "", "pretrain")[0].fit


def test_the_cards_that_the_law_predicts_for_have_a_day_at_full_size():
    about, _ = planned("shapes", "modern", {}, 1, "pocket 1e6 tokens", "pretrain")
    assert [card.name for card in about.cards] == list(CARDS)
    of = {card.name: card for card in about.cards}
    assert of["RTX A6000"].operations == pytest.approx(0.42 * 154.8e12 * 24 * 3600)
    assert {card.size for card in about.cards} == {recipe_operations(RECIPES["modern"]) / 6}
    assert planned("masking", None, {}, 1, "", "pretrain")[0].cards == []
    assert planned("shapes", "demo", {}, 1, "", "pretrain")[0].cards == [], "the demo has no full size"


def test_the_time_of_a_study_follows_from_budgets_operations_and_the_rate_of_the_machine():
    def seconds(unit: str, amount: float) -> float:
        return seconds_of(resolve("pocket", {"pretrain": {"budget": amount, "budget_unit": unit}}), 1e10)

    assert seconds("hours", 0.5) == 1800
    assert seconds("flops", 3e12) == 300
    assert seconds("tokens", 1000) == pytest.approx(1000 * recipe_operations(RECIPES["pocket"]) / 1e10)
    assert estimate(runs({"own": {}, "twice": {"scale": {"budget": 2}}}, scale="1 hours"), 1.0) == (
        "2 runs, about 3 hours"
    )


def test_both_flows_are_deployed_and_prefect_refuses_an_unknown_recipe_of_a_study():
    deployments = {one["name"]: one for one in yaml.safe_load((HOME / "prefect.yaml").read_text())["deployments"]}
    assert set(deployments) == {"full", "study"}
    found = {}
    for name, one in deployments.items():
        module, _, attribute = one["entrypoint"].rpartition(".")
        found[name] = getattr(importlib.import_module(module), attribute)
        assert isinstance(found[name], Flow)
        assert found[name].name == "cram"
    schema = parameter_schema(found["study"]).model_dump_for_openapi()
    assert is_valid({"study": "masking", "recipe": "modern", "scale": "day", "seeds": 3, "until": "report"}, schema)
    for bad in ({"recipe": "modrn"}, {"until": "filter"}, {"seeds": "x"}, {"override": {"pretrain": {"clipp": 1}}}):
        assert not is_valid(bad, schema), bad


def test_a_run_that_another_recipe_cannot_take_is_told_and_the_others_go_on():
    about, possible = planned("architectures", "demo", {}, 1, "", "pretrain")
    left_out = impossible(about)
    assert "embedding" in left_out["embedding of 128"]
    assert {run.name for run in possible}.isdisjoint(left_out)
    assert len(possible) > 10
    assert about.published == {}, "those are of the study's own recipe"
    with pytest.raises(InputError, match="'wide'"):
        planned_of({"base": {}, "wide": {"pretrain": {"architecture": {"hidden": 1}}}})


def planned_of(own: dict):
    """The runs of a study of the demo."""
    return runs_of(Study(recipe="demo", runs=own), "demo", {}, 1, scale_of("", "demo"), "pretrain")


def test_runs_that_differ_after_the_last_stage_only_are_one():
    own = {"base": {}, "slower": {"finetune": {"learning_rate": 1e-5}}}
    assert [run.also for run in planned_of(own)[0]] == [("slower",)]
    scored = runs_of(Study(recipe="demo", runs=own), "demo", {}, 1, scale_of("", "demo"), "report")[0]
    assert [run.name for run in scored] == ["base", "slower"]


def test_a_study_with_an_empty_name_or_findings_of_no_run_is_refused():
    for wrong in ({"runs": {" ": {}}}, {"runs": {"a": {}}, "published": {"b": "found"}}):
        with pytest.raises(ValueError, match=r"name|'b'"):
            Study(**wrong)
