"""What reports say of training: the held-out loss, finetuning runs, software and machines."""

from tasks.reports.common import marked
from tasks.reports.markdown import Marked, code
from tasks.reports.scores import NAMES, is_partial_run, label


def nats(held: dict, unit: str) -> str:
    """The held-out loss per word, character or byte, with its standard error."""
    value, error = held[f"nats_per_{unit}"].values()
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def run_rows(manifests: dict[str, dict]) -> list[dict]:
    """A row for each finetuning run."""
    rows = []
    for name, manifest in manifests.items():
        stats, params = manifest["stats"], manifest["params"]
        scores = ", ".join(f"{of_split['metrics'][stats['metric']]:.1f}" for of_split in stats["validation"].values())
        rows.append({
            "artifact": Marked(f"[{name}](../../{name}/)"), "protocol": stats["protocol"],
            "task": NAMES.get(stats["task"], stats["task"]),
            "seed": stats["seed"], "score": marked(scores, is_partial_run(stats)),
            "start": label(stats["pretrained"], stats["share"]) + (" (MNLI)" if params["start"] == "mnli" else ""),
            "epoch": f"{stats['chosen_epoch']} of {params['epochs']}", "steps": stats["steps"],
            "examples/s": round(stats["examples_per_second"]), "seconds": stats["seconds_of_training"],
        })  # fmt: skip
    return rows


def environments(manifests: dict[str, dict]) -> list[dict]:
    """Software and machine of each of these stages, where they are known; a column for each stage."""
    columns = {}
    for name, manifest in manifests.items():
        if known := manifest.get("environment"):
            system, machine = known.get("machine", {}), manifest.get("stats", {}).get("machine", {})
            columns[name] = known["packages"] | {
                "Python": known["python"], "system": system.get("system"), "cores": system.get("cores"),
                "device": machine.get("device"), "precision": machine.get("dtype"),
                "commit of cram": code(known["commit"]),
            }  # fmt: skip
    packages = dict.fromkeys(p for m in manifests.values() for p in m.get("environment", {}).get("packages", ()))
    labels = ["Python", *packages, "system", "cores", "device", "precision", "commit of cram"]
    return [{"": row} | {name: column.get(row) for name, column in columns.items()} for row in labels if columns]
