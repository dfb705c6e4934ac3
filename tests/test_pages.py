"""What the page of a Prefect run shows of artifacts."""

import json
from pathlib import Path

import prefect.artifacts
import pytest
from markdown_it import MarkdownIt

from flows import pages
from tasks.store import Artifact

SCORES = {"task": "RTE", "protocol": "cramming", "pretrained": True, "share": 1.0, "metric": "accuracy", "score": 54.43,
          "majority": 52.7076, "seeds": 5, "partial data": False}  # fmt: skip


def test_tables_are_text_with_separated_thousands_and_few_columns():
    row = {"source": "all", "documents": 8_000_000, "kept": None, "longer than 1 MB": 0, "kept, % of documents": 91.1}
    shown = {"source": "all", "documents": "8,000,000", "kept": "–", "kept, % of documents": "91.1"}
    assert pages.table("filter-table", [row]) == [shown]
    assert pages.table("other-table", [{"a": 1234, "b": False}]) == [{"a": "1,234", "b": "no"}]
    usual = {"task": "RTE", "metric": "accuracy", "score": "54.4", "majority": "52.7", "seeds": "5"}
    assert pages.table("scores", [SCORES]) == [usual]
    both = pages.table("scores", [SCORES, SCORES | {"pretrained": False}])
    assert [row["pretrained"] for row in both] == ["yes", "no"]


@pytest.mark.parametrize(
    "text", ["![x](http://a.org/a.png)", "<img src=http://a.org/a.png>", "[x](javascript:alert(1))"]
)
def test_a_cell_with_text_from_data_is_neither_a_picture_nor_a_link_nor_html(text: str):
    [row] = pages.table("filter-table", [{"source": text, "documents": 1}])
    [block] = MarkdownIt("commonmark").parseInline(row["source"])
    assert {part.type for part in block.children} <= {"text", "text_special"}
    assert "".join(part.content for part in block.children) == text
    for usual in ("Pile-CC", "Books & Papers", "C#", "snake_case", "≤ 1 %"):
        assert pages.table("filter-table", [{"source": usual}]) == [{"source": usual}]


def test_the_head_of_a_model_card_is_not_shown(tmp_path: Path):
    (tmp_path / "README.md").write_text('---\ntags: ["cram"]\nmask_token: "[MASK]"\n---\n\n# Encoder\n\n---\n\nText\n')
    assert pages.markdown(tmp_path / "README.md") == "# Encoder\n\n---\n\nText\n"
    (tmp_path / "report.md").write_text("# Report\n\n---\n")
    assert pages.markdown(tmp_path / "report.md") == "# Report\n\n---\n"


def test_every_table_picture_and_text_says_what_it_shows_and_where_it_comes_from(store: Path, monkeypatch):
    shown = {}

    def create(data: object, key: str, description: str) -> None:
        shown[key] = description

    for kind in ("table", "image", "markdown"):
        monkeypatch.setattr(prefect.artifacts, f"create_{kind}_artifact", create)
    for stage in {key.split("-")[0] for key in pages.DESCRIPTIONS if key != "scores"}:
        folder = store / stage / "0123"
        folder.mkdir(parents=True)
        rows = [SCORES] if stage == "report" else [{"a": 1}]
        for name in ("histogram.png", "loss.png", "README.md", f"{stage}.md"):
            (folder / name).write_text("")
        (folder / "stage.json").write_text(json.dumps({"files": [], "stats": {"table": rows}}))
        for _, call in pages.parts(Artifact(stage=stage, key="0123")):
            call()
    assert set(pages.DESCRIPTIONS) <= set(shown)
    for key, description in shown.items():
        assert description.startswith(pages.DESCRIPTIONS.get(key, ""))
        assert description.endswith("/0123")
