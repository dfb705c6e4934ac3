import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors import safe_open

from model import InputError, bert, training
from model.machine import Machine
from model.settings import Architecture, Finetuning

SMALL = Architecture(layers=2, hidden=32, heads=4, intermediate=48)
VOCABULARY, LENGTH = 60, 24
torch.set_num_threads(1)  # for so small a model; several that wait for a busy core take a hundred times as long


@pytest.fixture
def small() -> bert.Bert:
    """A small encoder in which no parameter has a value of its own, like 0 or 1, that could hide a mistake."""
    model = bert.Bert(SMALL, VOCABULARY, LENGTH, seed=3).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def some_tokens(sequences: int, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sequences + length)
    return torch.randint(5, VOCABULARY, (sequences, length), generator=generator)


def norm(x: np.ndarray, weights: dict, name: str) -> np.ndarray:
    mean = x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + 1e-12)
    return (x - mean) / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def position_code(position: int, hidden: int) -> np.ndarray:
    code = np.zeros(hidden)
    for pair in range(hidden // 2):
        angle = position / 10_000 ** (2 * pair / hidden)
        code[2 * pair], code[2 * pair + 1] = math.sin(angle), math.cos(angle)
    return code


def naive_logits(model: bert.Bert, tokens: list[int]) -> np.ndarray:
    """Section 4.2 of the paper for one sequence, in float64, written out: the scores (S, V)."""
    w = {name: value.double().numpy() for name, value in model.state_dict().items()}
    hidden, heads = model.architecture.hidden, model.architecture.heads
    size, half = hidden // heads, model.architecture.intermediate // 2
    codes = np.stack([position_code(position, hidden) for position in range(len(tokens))])
    x = norm(w["embedding.word.weight"][tokens] + w["embedding.scale"] * codes, w, "embedding.norm")
    for block in (f"blocks.{index}" for index in range(model.architecture.layers)):
        q, k, v = np.split(norm(x, w, f"{block}.attention_norm") @ w[f"{block}.attention.qkv.weight"].T, 3, axis=1)
        mixed = np.zeros_like(x)
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            for query in range(len(tokens)):
                weights = np.exp([q[query, columns] @ k[key, columns] / math.sqrt(size) for key in range(len(tokens))])
                mixed[query, columns] = weights / weights.sum() @ v[:, columns]
        x = x + mixed @ w[f"{block}.attention.out.weight"].T
        inner = norm(x, w, f"{block}.ffn_norm") @ w[f"{block}.ffn.dense_in.weight"].T
        gate = inner[:, half:]
        gelu = gate * 0.5 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
        x = x + (gelu * inner[:, :half]) @ w[f"{block}.ffn.dense_out.weight"].T
    return norm(x, w, "norm") @ w["embedding.word.weight"].T


def test_the_default_is_the_papers_size():
    with torch.device("meta"):
        model = bert.Bert(Architecture(), 32_768, 128)
    assert sum(parameter.numel() for parameter in model.parameters()) == 119_589_889


def test_logits_are_those_of_the_model_written_out(small):
    tokens = some_tokens(2)
    with torch.no_grad():
        logits = small.logits(small.encode(tokens)).numpy()
    expected = np.stack([naive_logits(small, sequence.tolist()) for sequence in tokens])
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_block_is_modernberts_block_without_rotation(small):
    modernbert = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    config = modernbert.ModernBertConfig(
        hidden_size=SMALL.hidden,
        num_attention_heads=SMALL.heads,
        intermediate_size=SMALL.intermediate // 2,
        num_hidden_layers=2,
        layer_types=["full_attention", "full_attention"],
        norm_eps=1e-12,
        norm_bias=True,
        attn_implementation="eager",
    )
    theirs, ours = modernbert.ModernBertEncoderLayer(config, layer_idx=1).eval(), small.blocks[1]
    x, gate = ours.ffn.dense_in.weight.chunk(2)  # theirs has the gate first
    theirs.load_state_dict(
        {
            "attn_norm.weight": ours.attention_norm.weight,
            "attn_norm.bias": ours.attention_norm.bias,
            "attn.Wqkv.weight": ours.attention.qkv.weight,
            "attn.Wo.weight": ours.attention.out.weight,
            "mlp_norm.weight": ours.ffn_norm.weight,
            "mlp_norm.bias": ours.ffn_norm.bias,
            "mlp.Wi.weight": torch.cat([gate, x]),
            "mlp.Wo.weight": ours.ffn.dense_out.weight,
        }
    )
    states = torch.randn(3, LENGTH, SMALL.hidden, generator=torch.Generator().manual_seed(0))
    unturned = torch.ones(3, LENGTH, SMALL.hidden // SMALL.heads)
    with torch.no_grad():
        expected = theirs(states, position_embeddings=(unturned, torch.zeros_like(unturned)))
        torch.testing.assert_close(ours(states, None), expected, rtol=1e-5, atol=1e-5)


def test_positions_are_used(small):
    tokens = some_tokens(1)
    order = torch.arange(LENGTH).flip(0)
    with torch.no_grad():
        there, back = small.encode(tokens), small.encode(tokens[:, order])[:, order]
        assert (there - back).abs().max() > 0.01
        small.embedding.scale.zero_()  # without them the encoder cannot tell
        there, back = small.encode(tokens), small.encode(tokens[:, order])[:, order]
    torch.testing.assert_close(there, back, rtol=1e-5, atol=1e-5)


def test_every_token_sees_every_other(small):
    tokens = some_tokens(1)
    with torch.no_grad():
        before = small.encode(tokens)
        for changed in (0, LENGTH // 2, LENGTH - 1):
            other = tokens.clone()
            other[0, changed] = 5 + (other[0, changed] - 4) % (VOCABULARY - 5)
            assert (small.encode(other) - before).abs().amax(dim=-1).min() > 1e-4


def test_the_sparse_loss_is_the_dense_one_at_the_masked_positions(small):
    tokens = some_tokens(3)
    positions = torch.stack([torch.randperm(LENGTH, generator=torch.Generator().manual_seed(n))[:6] for n in range(3)])
    labels = torch.randint(5, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(9))
    sparse = small(tokens, positions, labels)
    wanted = torch.full_like(tokens, -100).scatter(1, positions, labels)
    dense = F.cross_entropy(small.logits(small.encode(tokens)).flatten(0, 1), wanted.flatten(), ignore_index=-100)
    torch.testing.assert_close(sparse, dense, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, list(small.parameters())) for loss in (sparse, dense))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_padding_is_not_looked_at(small):
    tokens = some_tokens(2, LENGTH // 2)
    with torch.no_grad():
        alone = small.encode(tokens, padded=True)
        padded = small.encode(F.pad(tokens, (0, LENGTH // 2), value=bert.PAD), padded=True)[:, : LENGTH // 2]
        looked = small.encode(F.pad(tokens, (0, LENGTH // 2), value=bert.PAD))[:, : LENGTH // 2]
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)
    assert (looked - alone).abs().max() > 0.01


def test_each_sequence_of_a_padded_batch_is_classified_as_if_alone(small):
    classifier = bert.Classifier(small, classes=3, dropout=0.0, seed=0).eval()
    inputs = [some_tokens(1, length)[0] for length in (3, 11, LENGTH)]
    batch = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=bert.PAD)
    with torch.no_grad():
        alone = torch.cat([classifier(tokens[None]) for tokens in inputs])
        torch.testing.assert_close(classifier(batch), alone, rtol=1e-5, atol=1e-5)


def test_a_saved_model_gives_the_same_logits(small, tmp_path):
    bert.save(small, tmp_path)
    loaded = bert.load(tmp_path).eval()
    assert (loaded.architecture, loaded.vocabulary, loaded.length) == (SMALL, VOCABULARY, LENGTH)
    tokens = some_tokens(2)
    with torch.no_grad():
        assert torch.equal(loaded.logits(loaded.encode(tokens)), small.logits(small.encode(tokens)))


def test_the_file_holds_every_parameter_once(small, tmp_path):
    bert.save(small, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in small.parameters())
    assert [name for name, tensor in tensors.items() if VOCABULARY in tensor.shape] == ["embedding.word.weight"]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def replace_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGE = {
    "nothing there": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "no folder": shutil.rmtree,
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "config no JSON": lambda folder: truncate(folder / "config.json", 20),
    "config no text": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
    "config a list": lambda folder: (folder / "config.json").write_text("[]"),
    "config of another model": lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'),
    "unknown architecture": lambda folder: replace_config(folder, architecture={"layers": 2, "rotary": True}),
    "architecture a number": lambda folder: replace_config(folder, architecture=5),
    "size a word": lambda folder: replace_config(folder, vocab_size="many"),
    "other size": lambda folder: replace_config(folder, vocab_size=VOCABULARY + 1),
    "weights empty": lambda folder: truncate(folder / "model.safetensors", 0),
    "weights cut in the header": lambda folder: truncate(folder / "model.safetensors", 100),
    "weights cut in the data": lambda folder: truncate(folder / "model.safetensors", 20_000),
    "weights junk": lambda folder: (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_no_model_is_refused_in_a_sentence(small, tmp_path, damage):
    folder = tmp_path / "model"
    folder.mkdir()
    bert.save(small, folder)
    damage(folder)
    with pytest.raises(InputError, match=r"(?s)holds no model that cram can load: .+Expected config\.json and"):
        bert.load(folder)


def test_the_pad_row_is_zero_at_the_start_and_learns_nothing_as_an_input():
    model = bert.Bert(SMALL, VOCABULARY, LENGTH)
    assert not model.embedding.word.weight[bert.PAD].any()
    tokens = some_tokens(2)
    tokens[:, -4:] = bert.PAD
    weights = torch.randn(2, LENGTH, SMALL.hidden, generator=torch.Generator().manual_seed(1))
    (model.encode(tokens) * weights).sum().backward()
    gradient = model.embedding.word.weight.grad
    assert not gradient[bert.PAD].any()
    assert gradient[tokens[tokens != bert.PAD]].any(dim=1).all()


def test_the_seed_gives_the_weights():
    one, same, other = (bert.Bert(SMALL, VOCABULARY, LENGTH, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    matrices = [name for name in one if one[name].ndim == 2]
    assert len(matrices) == 1 + 4 * SMALL.layers
    assert not any(torch.equal(one[name], other[name]) for name in matrices)


def test_matrices_start_at_deviation_two_hundredths_and_norms_at_one():
    model = bert.Bert(Architecture(layers=1, hidden=128, heads=4, intermediate=256), 2000, 32)
    for name, value in model.named_parameters():
        if value.ndim == 2:
            rows = value[1:] if "word" in name else value
            assert rows.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(rows.mean().item()) < 6 * 0.02 / rows.numel() ** 0.5, name
        elif "norm" in name:
            assert (value == (1 if name.endswith("weight") else 0)).all(), name
    assert model.embedding.scale.item() == pytest.approx(128**-0.5)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"hidden": 100, "heads": 12}, "hidden 100 is not a multiple of heads 12"),
        ({"hidden": 99, "heads": 3}, "must be even"),
        ({"intermediate": 3071}, "must be even"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_a_sentence(sizes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Architecture(**sizes)


def test_dropout_acts_in_training_only(small):
    tokens = some_tokens(2)
    with torch.no_grad():
        plain = small.encode(tokens)
        classifier = bert.Classifier(small, classes=2, dropout=0.5, seed=0)
        torch.manual_seed(0)
        classifier.train()
        assert not torch.equal(small.encode(tokens), small.encode(tokens))
        classifier.eval()
        assert torch.equal(small.encode(tokens), plain)
        assert torch.equal(classifier(tokens), classifier(tokens))
        small.set_dropout(0.0)
        small.train()
        assert torch.equal(small.encode(tokens), plain)


def test_dropout_acts_after_the_embedding_on_both_branches_on_attention_weights_and_in_the_head(small):
    classifier = bert.Classifier(small, classes=2, dropout=0.5, seed=0).train()
    x = torch.ones(1, LENGTH, SMALL.hidden)
    torch.manual_seed(0)
    with torch.no_grad():
        for block in small.blocks:
            assert not torch.equal(block.attention(x, None), block.attention(x, None))  # within, on the weights
        dropouts = [part for part in classifier.modules() if isinstance(part, torch.nn.Dropout)]
        assert len(dropouts) == 2 + SMALL.layers  # embedding, head, and one for both branches of each block
        called = [0] * len(dropouts)
        for index, part in enumerate(dropouts):
            part.register_forward_hook(lambda *_, index=index: called.__setitem__(index, called[index] + 1))
            assert part.p == 0.5
        classifier(some_tokens(1))
    assert sorted(called) == [1, 1] + [2] * SMALL.layers


def test_the_classifiers_head_is_dense_tanh_linear_on_the_first_state(small):
    classifier = bert.Classifier(small, classes=3, dropout=0.1, seed=4).eval()
    tokens = some_tokens(2)
    with torch.no_grad():
        state = small.encode(tokens)[:, 0].numpy()
        w = {name: value.numpy() for name, value in classifier.state_dict().items()}
        inner = np.tanh(state @ w["dense.weight"].T + w["dense.bias"])
        assert inner.shape == (2, 1024)
        expected = inner @ w["out.weight"].T + w["out.bias"]
        np.testing.assert_allclose(classifier(tokens).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_finetuning_with_the_tokens_of_the_task_alone_changes_nothing_else():
    """Rows of other tokens get no gradient, so without weight decay they stay, and the rest trains the same to the bit."""
    rows = np.random.default_rng(0).choice([2, 3, 7, 11, 30, 41], size=(64, 9))
    used = torch.tensor([0, 2, 3, 7, 11, 30, 41])
    settings, here = Finetuning(epochs=2, learning_rate=1e-2), Machine(torch.device("cpu"), torch.float32, False, 8)
    scores, encoders = [], []
    for compact in (False, True):
        encoder = bert.Bert(Architecture(layers=1, hidden=16, heads=2, intermediate=32), 50, 16)
        tokens = rows
        if compact:
            encoder.keep_tokens(used)
            tokens = np.searchsorted(used.numpy(), rows)
        classifier = bert.Classifier(encoder, 2, dropout=0.1, seed=1)
        examples = training.Examples(tokens.tolist(), (rows[:, 0] > 10).astype(int))
        before = encoder.embedding.word.weight.detach().clone()
        training.finetune(classifier, examples, settings, here, seed=3, report=lambda *_: None)
        scores.append(training.predict(classifier, examples, here))
        encoders.append((before, encoder.embedding.word.weight.detach()))
    assert np.array_equal(*scores)
    (before, after), (_, compacted) = encoders
    others = sorted(set(range(50)) - set(used.tolist()))
    assert torch.equal(before[others], after[others])
    assert torch.equal(after[used], compacted)
    assert not torch.equal(before[used], after[used])
