"""Sections on pretraining: budget, machine, loss curves, held-out loss; and how all was made."""

from collections.abc import Iterable

from model.quantities import counted, duration
from tasks.reports.common import budget_of, marked, picture
from tasks.reports.markdown import Marked, code, table
from tasks.reports.scores import (
    NAMES,
    is_partial,
    label,
    present,
)

LAST_STEP = 1.001  # a budget ends with the step in which it is spent


def gpus(machine: dict) -> str:
    """How many GPUs, or processes, in words."""
    return "one" if machine["gpus"] == 1 else f"{machine['gpus']}, though the rule of the game is one"


def budget_section(about: dict) -> list[str]:
    """What was spent, and how fast."""
    stats, params = about["stats"], about["params"]
    machine, held = stats["machine"], stats["heldout"]
    rows = [
        ["budget", budget_of(params)],
        ["spent", f"{duration(stats['seconds_on_the_clock'])}, {counted(stats['tokens'], 'token')}, "
                  f"{counted(stats['steps'], 'step')}"],
        ["speed", f"{stats['tokens_per_second']:,.0f} tokens a second, MFU {100 * stats['mfu']:.0f} %"],
        ["machine", f"{machine['device']}, {machine['dtype']}, {'compiled' if machine['compiled'] else 'eager'}, "
                    f"{counted(machine['micro_batch'], 'sequence')} at once"],
        ["GPUs, or processes", gpus(machine)],
        ["parameters", f"{stats['parameters']:,}"],
        *([f"held-out loss, nats per {unit}", nats(held, unit)] for unit in ("token", "character", "byte")),
    ]  # fmt: skip
    rows += [
        ["skipped", f"{what['problem']}: went on behind sequences {what['sequences'][0]:,} to {what['sequences'][1]:,}"]
        for what in stats["skipped"]
    ]
    return ["## Budget", table(["", ""], rows), heldout_note(held)]


def nats(held: dict, unit: str) -> str:
    """The held-out loss per token, character or byte, with its standard error."""
    value, error = held[f"nats_per_{unit}"].values()
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def heldout_note(held: dict) -> str:
    """What the held-out loss was measured on."""
    one = held["documents"] == 1
    error = (
        "; there is no standard error, which would be over documents"
        if one
        else "; ± is the standard error over documents"
    )
    return (
        f"The held-out loss covers all {held['tokens']:,} tokens of {held['documents']:,} document{'' if one else 's'} "
        f"({held['characters']:,} characters, {held['bytes']:,} bytes) that the model was never trained on, each predicted once "
        f"with a seventh of the tokens masked{error}. Models with different vocabularies compare per character or byte, on the "
        "same documents."
    )


def curves_section(about: dict, at_hand: bool, pictures: Iterable[str] = ()) -> list[str]:
    """Loss and speed over the run, and the held-out loss in numbers."""
    evaluations = about["stats"]["evaluations"]
    lines = [
        [f"{e['fraction']:.0%}", e["step"], e["tokens"], f"{e['seconds'] / 3600:.3f}", f"{e['heldout_loss']:.4f}",
         f"{e['heldout_nats_per_byte']:.4f}"]
        for e in evaluations
    ]  # fmt: skip
    missing = "The model's own folder was not at hand here, so this is the held-out loss alone, without training loss and speed over the run."
    note = "Held-out losses over the run are measured on a part of the held-out tokens, the same ones each time."
    header = ["of the budget", "step", "tokens", "hours", "held-out nats per token", "per byte"]
    sections = ["## Loss"]
    sections += [picture("loss.svg", "Training and held-out loss over tokens")] if "loss.svg" in pictures else []
    sections += [table(header, lines), note, *([] if at_hand else [missing])]
    if "speed.svg" in pictures:
        sections += [
            "## Throughput",
            picture("speed.svg", "Tokens a second, and MFU"),
        ]
        sections += [f"Over all of the run: {about['stats']['tokens_per_second']:,.0f} tokens a second; median step: "
                     f"MFU {100 * about['stats']['mfu']:.0f} %, the share of the rate that matrix products reach "
                     "there."]  # fmt: skip
    return sections


def lineage_section(lineage: dict[str, dict]) -> list[str]:
    """Every artifact that led to the model, with its key."""
    lines = [
        [Marked(f"[{name}](../../{name}/)"), about.get("version"), f"{about['seconds']:,.1f}" if "seconds" in about else None,
         about.get("finished", "")[:19].replace("T", " ") or None]
        for name, about in lineage.items()
    ]  # fmt: skip
    return ["## Lineage", table(["artifact", "version", "seconds", "finished (UTC)"], lines)]


def runs_section(runs: list[dict]) -> list[str]:
    """Every finetuning run: `name`, `stats`, `params` and `seconds` of each."""
    lines = []
    for run in runs:
        stats = run["stats"]
        scores = ", ".join(f"{one['metrics'][stats['metric']]:.1f}" for one in stats["validation"].values())
        sizes = [(present(stats), stats["official_train_examples"])]
        sizes += [(about["examples"], about["official_examples"]) for about in stats["validation"].values()]
        what = label(stats["pretrained"], stats["share"]) + (" (MNLI)" if run["params"]["start"] == "mnli" else "")
        lines.append([
            Marked(f"[{run['name']}](../../{run['name']}/)"), stats["protocol"], NAMES.get(stats["task"], stats["task"]),
            stats["seed"], marked(scores, is_partial(stats["task"], sizes)), what, f"{stats['chosen_epoch']} of {run['params']['epochs']}", stats["steps"],
            round(stats["examples_per_second"]), f"{stats['seconds_of_training']:,.1f}",
        ])  # fmt: skip
    header = ["artifact", "protocol", "task", "seed", "score", "start", "epoch", "steps", "examples/s", "seconds"]
    return ["## Every run", table(header, lines)]


def environment_section(manifests: dict[str, dict]) -> list[str]:
    """Software and machine of each of these stages, where they are known."""
    known = {name: about["environment"] for name, about in manifests.items() if about and "environment" in about}
    packages = list(dict.fromkeys(package for one in known.values() for package in one["packages"]))
    machines = [manifests[name].get("stats", {}).get("machine", {}) for name in known]
    lines = [
        ["Python", *(one["python"] for one in known.values())],
        *([package, *(one["packages"].get(package) for one in known.values())] for package in packages),
        ["system", *(one.get("machine", {}).get("system") for one in known.values())],
        ["cores", *(one.get("machine", {}).get("cores") for one in known.values())],
        ["device", *(one.get("device") for one in machines)],
        ["precision", *(one.get("dtype") for one in machines)],
        ["commit of cram", *(code(one["commit"]) for one in known.values())],
    ]
    return ["## Environment", table(["", *known], lines)] if known else []
