"""What the runs of a study change: in words, and field by field."""

import json
from typing import TYPE_CHECKING, Any

from model.wording import budget, counted
from tasks.reports.markdown import code

if TYPE_CHECKING:
    import pandas as pd

MOST_FIELDS = 4  # that the words about a run name


def words_table(about: dict[str, Any], rows: "pd.DataFrame") -> list[dict]:
    """What each run is, in words."""
    units = set(rows["budget_unit"].dropna()) if "budget_unit" in rows else set()
    usual = units.pop() if len(units) == 1 else ""
    table = []
    for n, one in enumerate({one["run"]: one for one in about["members"]}.values()):
        words = one["words"] or changes_in_words(one["changes"], one["usual"], usual)
        if not words:
            words = "Unchanged" if n else f"The recipe {about['recipe']}"
        table.append({"run": one["run"], "what it is": words})
    return table


def changes_in_words(changes: dict[str, Any], usual: dict[str, Any], budget_unit: str) -> str:
    """The first changed fields of a run, each with the value of the first run. `budget_unit`: if all runs have one."""
    parts = []
    for name, value in list(changes.items())[:MOST_FIELDS]:
        values = [value, usual[name]] if name in usual else [value]
        if name == "pretrain.budget" and budget_unit:
            shown = [budget(each, budget_unit) for each in values]
        else:
            shown = [in_words(each) for each in values]
        field = name.rpartition(".")[2].replace("_", " ")
        parts.append(f"{field} {' instead of '.join(shown)}")
    more = len(changes) - len(parts)
    if more:
        parts.append(f"and {counted(more, 'other field')} (under Settings)")
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def in_words(value: Any) -> str:
    """The value of a field as a sentence has it."""
    if value is None or value in ("", []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return " and ".join(map(in_words, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def settings_table(members: list[dict]) -> list[dict]:
    """The changed fields of each run, with the values of the first run."""
    rows = []
    for run, one in {one["run"]: one for one in members}.items():
        for name, value in one["changes"].items():
            row: dict[str, object] = {"run": run, "field": code(name), "value": code(json.dumps(value))}
            row["first run"] = code(json.dumps(one["usual"][name])) if name in one["usual"] else None
            rows.append(row)
    return rows
