"""The folder of a model for others: weights, config, tokenizer and card, without what its artifact has of the text.

It also has the code of the model's classes if transformers lacks them, and on request what opens it in
sentence-transformers, and the model in ONNX.
"""

import json
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from model import files
from model.errors import InputError
from model.files import KEPT, TOKENS
from tasks.reports.model_card import Kept, Published
from tasks.text.tokenizer import FILES

MODEL_CODE = Path(__file__).parents[2] / "model"
CODE = ("hf.py", "layers.py")  # these import nothing else of cram
WEIGHTS = "model*.safetensors*"  # one file, or several and their index
MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
ONNX = "onnx/model.onnx"
# the files that one version of a model may have and the next may lack
OPTIONAL = [
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    *CODE,
    MODULES,
    POOLING,
    ONNX,
]


class Source(NamedTuple):
    """A model in the store."""

    name: str
    folder: Path
    about: dict  # its manifest
    lineage: dict  # the manifests of those that led to it
    config: dict  # its config.json

    def files(self) -> list[str]:
        """The files in its manifest."""
        return [file["path"] for file in self.about["files"]]

    def kept(self) -> list[Kept]:
        """The models that its training kept on its way: at tenths of the budget, then by tokens."""
        found = []
        for kind in KEPT:
            numbers = {int(Path(name).parent.name) for name in self.files() if name.startswith(f"{kind}/")}
            found += [Kept(kind, number) for number in sorted(numbers)]
        if not any(kept.kind == TOKENS for kept in found):
            return found
        steps = pq.read_table(self.folder / "metrics.parquet", columns=["step", "tokens"]).to_pylist()
        return [with_steps(kept, steps) for kept in found]


def with_steps(kept: Kept, steps: list[dict]) -> Kept:
    """The same with its tokens and steps, if it was kept by tokens: at the first step that reached them."""
    if kept.kind != TOKENS or not kept.number:
        return kept
    step = next(row for row in steps if row["tokens"] >= kept.number * files.MILLION)
    return kept._replace(tokens=step["tokens"], steps=step["step"])


def write_folder(
    folder: Path, source: Source, card: str, how: Published, place: Callable[[Path, Path], object]
) -> None:
    """Write the folder, which must not exist. `place` copies or links a file. Raises InputError if one is missing."""
    files = files_to_place(source, how)
    config = source.config | (auto_map() if how.with_code else {})
    config.pop("_name_or_path", None)  # older versions of transformers wrote it, and a model may be adopted
    folder.mkdir()
    for path in files:
        place(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
    if how.embeds:
        write_modules(folder, config.get("hidden_size") or config["hidden"])
    if how.onnx:
        write_onnx(folder, auto_class(config))


def files_to_place(source: Source, how: Published) -> list[Path]:
    """The files of the model, and of its code if that is published, which are copied unchanged."""
    weights = f"{how.kept.kind}/{how.kept.number}/{WEIGHTS}" if how.kept else WEIGHTS
    files = []
    for name in source.files():
        if name in FILES or fnmatch(name, weights):
            path = source.folder / name
            if not path.is_file():
                raise InputError(
                    f"{source.folder} has no {name}, which its manifest lists. Copy it there, or run its stage again."
                )
            files.append(path)
    if how.with_code:
        files += [MODEL_CODE / name for name in CODE]
    return files


def auto_map() -> dict[str, dict]:
    """The field of config.json that names the classes in CODE for transformers' Auto classes."""
    source = (MODEL_CODE / CODE[0]).read_text(encoding="utf-8")
    heads = re.findall(r"^class Cram(For\w+|Model)\(", source, re.MULTILINE)
    classes = {f"AutoModel{head.removeprefix('Model')}": f"hf.Cram{head}" for head in heads}
    return {"auto_map": {"AutoConfig": "hf.CramConfig"} | classes}


def auto_class(config: dict) -> str:
    """The Auto class of transformers that opens a model with this config.json, with its head."""
    _, head, task = config["architectures"][0].partition("For")
    return f"AutoModel{head}{task}"


def write_modules(folder: Path, width: int) -> None:
    """Write what opens a model in sentence-transformers: its encoder, then the mean of the states of this width."""
    pooling_folder = Path(POOLING).parent.name
    kinds = {"Transformer": "", "Pooling": pooling_folder}  # with their folders
    modules = []
    for number, (kind, path) in enumerate(kinds.items()):
        type_ = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": type_})
    pooling = {"word_embedding_dimension": width, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / MODULES).write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    (folder / pooling_folder).mkdir()
    (folder / POOLING).write_text(json.dumps(pooling, indent=2) + "\n", encoding="utf-8")


def write_onnx(folder: Path, class_name: str) -> None:
    """Write the model for onnxruntime, for texts of any number and length. `class_name`: its Auto class."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed, which --onnx needs: pip install 'cram[onnx]'.") from error
    import torch
    import transformers

    import model.hf  # noqa: F401

    model_class = getattr(transformers, class_name)
    ids = torch.tensor([[2, 5, 3, 6, 3], [2, 5, 3, 3, 0]])  # two texts each, which some heads compare
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    sizes = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in inputs}
    (folder / ONNX).parent.mkdir()
    torch.onnx.export(
        model_class.from_pretrained(folder).eval(),
        (),
        folder / ONNX,
        kwargs=inputs,
        input_names=list(inputs),
        output_names=["logits"],
        dynamic_shapes=sizes,
        external_data=False,
        dynamo=True,
        verbose=False,
    )
