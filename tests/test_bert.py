import cmath
import math
import random
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import roughen
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode
from toys import encoder, machine_of

from model import bert, finetuning, layers
from model.errors import InputError
from model.finetuning import Classifier, pool
from model.settings import Architecture, Finetuning

VOCABULARY = 60
LENGTH = 24
PAPER = Architecture(layers=4, hidden=32, heads=4, intermediate=48)


def changed(base: Architecture, **changes) -> Architecture:
    return Architecture(**base.model_dump() | changes)


# Together they have every axis both ways; the epsilons are large, so that a misplaced one shows.
FEW_NORMS = {"norm_bias": False, "norm_eps": 1e-2}
POST = {"norm_order": "post", "final_norm": False, "activation": "gelu", "positions": "learned", "head_transform": True}
BERT = changed(PAPER, **POST, bias=True, qkv_bias=True, decoder_bias=True, norm_eps=1e-2)
NARROW = {"positions": "sinusoidal", "embedding": 20, "ffn_every": 2, "funnel": 1, "tied": False, "zero_outputs": True}
LAYOUTS = {
    "paper": PAPER,
    "modernbert": changed(PAPER, **FEW_NORMS, positions="rotary", first_norm=False, head_transform=True),
    "bert": BERT,
    "albert": changed(BERT, embedding=16, different_layers=2, norm_eps=1e-12),
    "mixed": changed(PAPER, **FEW_NORMS, **NARROW, heads=2, norm="rmsnorm", embedding_norm=False, activation="relu2"),
    "convolved": changed(PAPER, **FEW_NORMS, positions="rotary", convolution=5),
}


def shaken(architecture: Architecture) -> bert.Bert:
    """A small encoder in which no parameter has a value of its own."""
    return roughen(bert.Bert(architecture, VOCABULARY, LENGTH, seed=3).eval())


@pytest.fixture(params=LAYOUTS)
def model(request) -> bert.Bert:
    return shaken(LAYOUTS[request.param])


def some_tokens(sequences: int, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sequences + length)
    return torch.randint(5, VOCABULARY, (sequences, length), generator=generator)


def padded_tokens(*lengths: int, width: int = LENGTH) -> torch.Tensor:
    return torch.cat([F.pad(some_tokens(1, length), (0, width - length), value=layers.PAD) for length in lengths])


def some_masks(sequences: int, masks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, no two the same in a sequence, and labels."""
    generator = torch.Generator().manual_seed(masks)
    positions = torch.stack([torch.randperm(LENGTH, generator=generator)[:masks] for _ in range(sequences)])
    return positions, torch.randint(5, VOCABULARY, (sequences, masks), generator=generator)


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# The model written out


def position_code(position: int, width: int) -> np.ndarray:
    code = np.zeros(width)
    for pair in range(width // 2):
        angle = position / 10_000 ** (2 * pair / width)
        code[2 * pair] = math.sin(angle)
        code[2 * pair + 1] = math.cos(angle)
    return code


def turned(vector: np.ndarray, position: int) -> np.ndarray:
    """A query or key of one head: its two halves are the real and imaginary parts of numbers on which a turn acts."""
    half = len(vector) // 2
    turns = [cmath.exp(1j * position * 10_000 ** (-pair / half)) for pair in range(half)]
    numbers = (vector[:half] + 1j * vector[half:]) * turns
    return np.concatenate([numbers.real, numbers.imag])


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


class Naive:
    """All axes for one sequence, in float64, written out; the paper's are its section 4.2."""

    def __init__(self, model: bert.Bert) -> None:
        self.a = model.architecture
        self.w = {name: value.double().numpy() for name, value in model.state_dict().items()}

    def norm(self, x, name):
        if self.a.norm == "layernorm":
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.a.norm_eps) * self.w[f"{name}.weight"]
        return x + self.w[f"{name}.bias"] if self.a.norm_bias else x

    def dense(self, x, name, bias):
        x = x @ self.w[f"{name}.weight"].T
        return x + self.w[f"{name}.bias"] if bias else x

    def embed(self, tokens):
        x = self.w["embedding.word.weight"][tokens]
        codes = np.stack([position_code(position, x.shape[1]) for position in range(len(tokens))])
        if self.a.positions == "learned":
            x = x + self.w["embedding.position.weight"][: len(tokens)]
        elif self.a.positions == "sinusoidal":
            x = x + codes
        elif self.a.positions == "scaled-sinusoidal":
            x = x + self.w["embedding.scale"] * codes
        if self.a.embedding_norm:
            x = self.norm(x, "embedding.norm")
        return self.dense(x, "embedding.project", self.a.bias) if self.a.embedding else x

    def attend(self, x, name):
        q, k, v = (self.dense(x, f"{name}.{part}", self.a.qkv_bias) for part in ("query", "key", "value"))
        mixed = np.zeros_like(x)
        width = self.a.hidden // self.a.heads
        for head in range(self.a.heads):
            columns = slice(head * width, (head + 1) * width)
            queries = list(q[:, columns])
            keys = list(k[:, columns])
            if self.a.positions == "rotary":
                queries, keys = ([turned(one, place) for place, one in enumerate(each)] for each in (queries, keys))
            for place, query in enumerate(queries):
                scores = np.array([query @ key / math.sqrt(width) for key in keys])
                weights = np.exp(scores - scores.max())
                mixed[place, columns] = weights / weights.sum() @ v[:, columns]
        return self.dense(mixed, f"{name}.out", self.a.bias)

    def feed_forward(self, x, name):
        x = self.dense(x, f"{name}.dense_in", self.a.bias)
        if self.a.activation == "geglu":
            half = self.a.intermediate * 2 // 3
            x = gelu(x[:, :half]) * x[:, half:]
        else:
            x = gelu(x) if self.a.activation == "gelu" else np.maximum(x, 0) ** 2
        return self.dense(x, f"{name}.dense_out", self.a.bias)

    def convolve(self, x, name):
        mixed = x.copy()
        reach = self.a.convolution // 2
        for place in range(len(x)):
            for other in range(max(0, place - reach), min(len(x), place + reach + 1)):
                mixed[place] += self.w[f"{name}.weight"][other - place + reach, 0] * x[other]
        return mixed

    def block(self, x, index):
        name = f"blocks.{index}"
        if self.a.convolution:
            x = self.convolve(x, f"{name}.convolution")
        if self.a.norm_order == "post":
            x = self.norm(x + self.attend(x, f"{name}.attention"), f"{name}.attention_norm")
        else:
            inner = self.norm(x, f"{name}.attention_norm") if index or self.a.first_norm else x
            x = x + self.attend(inner, f"{name}.attention")
        if (index + 1) % self.a.ffn_every:
            return x
        if self.a.norm_order == "post":
            return self.norm(x + self.feed_forward(x, f"{name}.ffn"), f"{name}.ffn_norm")
        return x + self.feed_forward(self.norm(x, f"{name}.ffn_norm"), f"{name}.ffn")

    def encode(self, tokens):
        x = self.embed(tokens)
        longer = []
        for layer, halvings in enumerate(layers.halvings(self.a)):
            if halvings > len(longer):
                longer.append(x)
                x = (x[0::2] + x[1::2]) / 2
            elif halvings < len(longer):
                x = longer.pop() + np.repeat(x, 2, axis=0)
            x = self.block(x, layer % (self.a.different_layers or self.a.layers))
        return self.norm(x, "norm") if self.a.final_norm else x

    def logits(self, tokens):
        x = self.encode(tokens)
        if self.a.embedding or self.a.head_transform:
            x = self.dense(x, "head.dense", self.a.bias)
        if self.a.head_transform:
            x = self.norm(gelu(x), "head.norm")
        x = x @ self.w["embedding.word.weight" if self.a.tied else "head.decoder.weight"].T
        return x + self.w["head.bias"] if self.a.decoder_bias else x


NUMBERS = {  # valid and other values of the axes that are numbers
    "layers": (1, 3, 4, 6, 8),
    "hidden": (32, 48, 33),
    "heads": (4, 2, 3),
    "intermediate": (48, 24, 32),
    "norm_eps": (1e-12, 0.5),
    "embedding": (None, 12, 32, 13),
    "different_layers": (None, 1, 2, 3),
    "ffn_every": (1, 2, 3),
    "funnel": (0, 1, 3, 4),
    "convolution": (0, 3, 5, 4),
}


def values(field: str) -> tuple:
    kind = Architecture.model_fields[field].annotation
    if kind is bool:
        return (False, True)
    return get_args(kind) if get_origin(kind) is Literal else NUMBERS[field]


def test_every_choice_of_axes_is_refused_by_a_name_or_computes_what_is_written_out_and_trains_all_parameters():
    rng = random.Random(0)
    refused = 0
    layouts = list(LAYOUTS.values())
    while len(layouts) < 65:
        drawn = {field: rng.choice(values(field)) for field in Architecture.model_fields}
        try:
            layouts.append(Architecture(**drawn))
        except ValidationError as error:
            (problem,) = error.errors()
            assert any(field in problem["msg"] for field in drawn), problem
            refused += 1
    assert refused > 60
    tokens = some_tokens(2)
    for layout in layouts:
        model = shaken(layout).double()  # in fp32 the error of a deep one depends on the machine
        expected = Naive(model).logits(tokens[0].tolist())
        found = model.logits(model.encode(tokens))[0].detach().numpy()
        assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max(), layout
        model(tokens, *some_masks(2, 3)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (name, layout)
            assert parameter.grad.isfinite().all(), (name, layout)


# Sizes


def test_every_activation_has_as_many_parameters():
    layouts = [changed(PAPER, activation=activation) for activation in ("geglu", "gelu", "relu2")]
    assert len({size(bert.Bert(layout, VOCABULARY, LENGTH)) for layout in layouts}) == 1


COUNTED = LAYOUTS | {
    "funnel": changed(PAPER, layers=7, funnel=3),
    "factorised with a transform": changed(PAPER, embedding=12, head_transform=True, tied=False),
    "shared, few feed-forward layers": changed(BERT, different_layers=2, ffn_every=2, embedding=48),
}


@pytest.mark.parametrize("layout", COUNTED.values(), ids=COUNTED)
def test_operations_are_those_that_torch_counts(layout):
    tokens = some_tokens(3)
    masks = 5
    with FlopCounterMode(display=False) as counter:
        shaken(layout)(tokens, *some_masks(3, masks)).backward()
    expected = bert.operations(layout, VOCABULARY, LENGTH, masks) * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-12)


# Loss, attention, padding


def test_the_sparse_loss_is_the_dense_one_at_the_masked_positions(model):
    tokens = some_tokens(3)
    positions, labels = some_masks(3, 6)
    sparse = model(tokens, positions, labels)
    wanted = torch.full_like(tokens, -100).scatter(1, positions, labels)
    dense = F.cross_entropy(model.logits(model.encode(tokens)).flatten(0, 1), wanted.flatten(), ignore_index=-100)
    torch.testing.assert_close(sparse, dense, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, list(model.parameters())) for loss in (sparse, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("pooling", ["cls", "mean", "compare"])
def test_each_sequence_of_a_padded_batch_is_classified_as_if_alone(model, pooling):
    classifier = Classifier(model, classes=3, dropout=0.0, seed=0, pooling=pooling, texts=2).eval()
    lengths = (1, 6, 11, LENGTH)  # odd ones end within a pair of a funnel
    with torch.no_grad():
        alone = torch.cat([classifier(some_tokens(1, length)) for length in lengths])
        model.embedding.word.weight[layers.PAD].normal_()
        torch.testing.assert_close(classifier(padded_tokens(*lengths)), alone, rtol=1e-5, atol=1e-5)


def test_pooled_states_are_the_first_the_mean_or_the_comparison_of_the_means_of_two_texts(model):
    given = padded_tokens(LENGTH, 11)
    ends = (9, 4)  # of the first text
    given[given == layers.SEP] += 1
    for row, end in enumerate(ends):
        given[row, end - 1] = given[row, end + 3] = layers.SEP  # the text itself may hold a second one
    with torch.no_grad():
        states = model.encode(given, padded=True)
        first, mean, single = (pool(model, given, True, *about) for about in (("cls", 2), ("mean", 2), ("compare", 1)))
        both = pool(model, given, True, "compare", 2)
    torch.testing.assert_close(first, states[:, 0])
    assert torch.equal(single, mean)
    for row, (end, length) in enumerate(zip(ends, (LENGTH, 11), strict=True)):
        u = states[row, :end].mean(dim=0)
        v = states[row, end:length].mean(dim=0)
        torch.testing.assert_close(mean[row], states[row, :length].mean(dim=0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both[row], torch.cat([u, v, (u - v).abs(), u * v]), rtol=1e-5, atol=1e-5)


# Blocks that work at a shorter length


def test_a_funnels_blocks_are_spread_evenly_and_each_length_follows_its_neighbour():
    for depth in range(1, 40):
        for funnel in range(min(9, (depth + 1) // 2)):
            halvings = layers.halvings(Architecture(layers=depth, funnel=funnel))
            turns = [place for place in range(1, depth) if halvings[place] != halvings[place - 1]]
            assert len(turns) == 2 * funnel
            assert {abs(halvings[place] - halvings[place - 1]) for place in turns} <= {1}
            assert (halvings[0], max(halvings), halvings[-1]) == (0, funnel, 0)
            stays = np.diff([0, *turns, depth])
            assert max(stays) - min(stays) <= 1


def test_a_funnel_takes_sequences_of_any_length_and_ignores_how_much_padding_follows():
    """Also one that ends within a group: a group's mean is of its real tokens, and a group without one is masked."""
    model = shaken(changed(PAPER, layers=7, funnel=3))
    for length in range(1, 17):
        with torch.no_grad():
            alone = model.encode(some_tokens(1, length))
            for width in (16, LENGTH):
                model.embedding.word.weight[layers.PAD].normal_()  # is masked too
                padded = model.encode(padded_tokens(length, width=width), padded=True)[:, :length]
                torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)


def test_a_length_that_a_funnel_cannot_halve_is_refused():
    with pytest.raises(InputError, match=r"tokenize\.length is 20, .*pretrain\.architecture\.funnel"):
        bert.Bert(changed(PAPER, layers=7, funnel=3), VOCABULARY, 20)


# Initialisation


def test_the_pad_row_is_zero_at_the_start_and_learns_nothing_as_an_input():
    model = bert.Bert(PAPER, VOCABULARY, LENGTH)
    assert not model.embedding.word.weight[layers.PAD].any()
    tokens = padded_tokens(LENGTH - 4, LENGTH)
    weights = torch.randn(2, LENGTH, PAPER.hidden, generator=torch.Generator().manual_seed(1))
    (model.encode(tokens) * weights).sum().backward()
    gradient = model.embedding.word.weight.grad
    assert not gradient[layers.PAD].any()
    assert gradient[tokens[tokens != layers.PAD]].any(dim=1).all()


def test_the_seed_gives_the_weights():
    one, same, other = (bert.Bert(PAPER, VOCABULARY, LENGTH, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not any(torch.equal(value, other[name]) for name, value in one.items() if "norm" not in name and value.ndim)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_matrices_start_at_deviation_two_hundredths_biases_and_convolutions_at_zero_and_norms_at_one(layout):
    model = bert.Bert(changed(layout, hidden=128, intermediate=384, zero_outputs=False), 2000, 64)
    for name, value in model.named_parameters():
        if "convolution" in name:
            assert (value == 0).all(), name
        elif value.ndim == 2:
            rows = value[1:] if "word" in name else value
            assert rows.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(rows.mean().item()) < 6 * 0.02 / rows.numel() ** 0.5, name
        elif name == "embedding.scale":
            assert value.item() == pytest.approx(128**-0.5)
        else:
            assert (value == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("layout", ["paper", "modernbert", "albert"])
def test_zero_outputs_are_zero_and_nothing_else_is(layout):
    plain, zero = (
        bert.Bert(changed(LAYOUTS[layout], zero_outputs=given), VOCABULARY, LENGTH, seed=1) for given in (False, True)
    )
    for (name, value), other in zip(plain.named_parameters(), zero.parameters(), strict=True):
        if name.endswith(("attention.out.weight", "ffn.dense_out.weight")):
            assert not other.any()
        else:
            assert torch.equal(value, other)


# Attention and dropout


def test_on_a_gpu_attention_is_that_of_torchs_kernel_which_is_given_everything(monkeypatch):
    handed = [*torch.empty(3, 2, 4, LENGTH, 8, device="meta"), torch.ones(1, dtype=torch.bool), 0.3]
    given = []
    monkeypatch.setattr(
        bert.F,
        "scaled_dot_product_attention",
        lambda *parts, attn_mask, dropout_p: given.extend([*parts, attn_mask, dropout_p]),
    )
    bert.attend(*handed)
    assert all(one is other for one, other in zip(given, handed, strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_halves_are_swapped_forward_and_backward_the_way_of_either_device(device):
    x = torch.arange(24.0).view(2, 2, 6).requires_grad_()
    swapped = layers.swap_halves(x, device)
    assert torch.equal(swapped, torch.cat([x[..., 3:], x[..., :3]], dim=-1))
    slopes = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(0))
    swapped.backward(slopes)
    assert torch.equal(x.grad, torch.cat([slopes[..., 3:], slopes[..., :3]], dim=-1))


# The feed-forward layer


def geglu(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The formula, from the weights of the layer."""
    wide = x @ weights["dense_in.weight"].T + weights.get("dense_in.bias", 0)
    half = wide.shape[-1] // 2
    gated = wide[..., :half] * 0.5 * (1 + torch.erf(wide[..., :half] / math.sqrt(2))) * wide[..., half:]
    return gated @ weights["dense_out.weight"].T + weights.get("dense_out.bias", 0)


def of_ffn(ffn: layers.FeedForward, x: torch.Tensor, forward) -> list[torch.Tensor]:
    """The output, and the gradients of the inputs and weights."""
    output = forward(x)
    slopes = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output, *torch.autograd.grad((output * slopes).sum(), [x, *ffn.parameters()])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_halves", [False, True])
def test_both_ways_to_multiply_by_a_geglu_layer_give_the_formulas_outputs_and_gradients(monkeypatch, bias, by_halves):
    monkeypatch.setattr(layers, "multiplies_by_halves", lambda device: by_halves)
    ffn = roughen(layers.FeedForward(changed(PAPER, bias=bias)))
    x = torch.randn(3, 5, PAPER.hidden, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = dict(ffn.named_parameters())
    expected = of_ffn(ffn, x, lambda x: geglu(weights, x))
    for found, correct in zip(of_ffn(ffn, x, ffn), expected, strict=True):
        torch.testing.assert_close(found, correct, rtol=1e-5, atol=1e-5 * correct.abs().max().item())


@pytest.mark.parametrize(("device", "products"), [("cpu", 2), ("meta", 3)])
def test_compiled_for_a_gpu_each_half_of_a_geglu_layer_is_a_product(device, products):
    targets = []

    def kept(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    ffn = layers.FeedForward(PAPER).to(device)
    torch.compile(ffn, backend=kept, fullgraph=True, dynamic=False)(torch.empty(2, 3, PAPER.hidden, device=device))
    assert targets.count(torch._C._nn.linear) == products
    assert not layers.multiplies_by_halves(device)  # eager


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.001])
def test_dropout_has_its_probability_and_scale_wherever_the_bits_come_from(probability):
    torch.manual_seed(0)
    x = torch.full((1000, 1001), 2.0, requires_grad=True)
    y = bert.drop(x, probability)
    torch.testing.assert_close(y[y != 0].unique(), torch.tensor([2.0 / (1 - probability)]))
    gone = (y == 0).detach().double().flatten()
    deviation = math.sqrt(probability * (1 - probability))
    for lane in range(4):  # of each 64 bits that are drawn
        part = gone[lane::4]
        assert part.mean().item() == pytest.approx(probability, abs=5 * deviation / math.sqrt(len(part)))
    for distance in (1, 2, 3, 4, 1001):
        both = (gone[distance:] * gone[:-distance]).mean().item()
        assert both == pytest.approx(probability**2, abs=6 * probability / math.sqrt(len(gone)))
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.equal(bert.drop(x, 0.0), x)
    assert torch.equal(bert.drop(x, 1.0), x * 0)


def test_dropout_takes_embedding_branches_weights_of_attention_and_the_heads_input_but_never_the_stream(model):
    """With all dropped, a block adds nothing: what is left is what came in, normalised if the norm is after the sum."""
    classifier = Classifier(model, classes=2, dropout=1.0, seed=0).train()
    tokens = some_tokens(2)
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for block in model.blocks:
            post = model.architecture.norm_order == "post"
            stream = x if block.convolution is None else block.convolution(x, None)
            left = block.ffn_norm(block.attention_norm(stream)) if post else stream
            torch.testing.assert_close(block(x, None), left)
            torch.testing.assert_close(block.attention(x, None), block.attention.out(torch.zeros_like(x)))
        states = model.encode(tokens)
        torch.testing.assert_close(states, states[:1, :1].expand(2, LENGTH, 32))
        torch.testing.assert_close(classifier(tokens), classifier.classifier.out.bias.expand(2, 2))


# Finetuning


def test_finetuning_with_the_tokens_of_the_task_alone_changes_nothing_else():
    """Rows of other tokens get no gradient, so without weight decay they stay, and the rest trains identically."""
    rows = np.random.default_rng(0).choice([2, 3, 7, 11, 30, 41], size=(64, 9))
    made = []
    settings = Finetuning(epochs=2, learning_rate=1e-2)
    here = machine_of()
    for compact in (False, True):
        model = encoder(50)
        before = model.embedding.word.weight.detach().clone()
        examples = finetuning.Examples.of(rows.tolist(), (rows[:, 0] > 10).astype(int))
        if compact:
            examples = finetuning.keep_used(model, {"train": examples})["train"]
            assert len(model.embedding.word.weight) == 8  # those, [PAD] and [UNK]
        classifier = Classifier(model, 2, dropout=0.1, seed=1)
        finetuning.finetune(classifier, examples, settings, here, seed=3, report=lambda *_: None)
        scores = finetuning.predict(classifier, examples, here)
        if compact:
            model.restore_tokens()
        made.append((scores, model.embedding.word.weight.detach().numpy()))
    np.testing.assert_array_equal(*(scores for scores, _ in made))
    np.testing.assert_array_equal(*(embedding for _, embedding in made))
    assert not torch.equal(before[[2, 3, 7]], model.embedding.word.weight[[2, 3, 7]])


@pytest.mark.parametrize("layout", ["bert", "convolved"])
def test_states_between_blocks_are_what_training_asks_for_and_else_as_the_weights(layout: str):
    model = bert.Bert(LAYOUTS[layout], VOCABULARY, LENGTH)
    tokens = torch.randint(5, VOCABULARY, (2, LENGTH))
    seen = {}
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, states: seen.setdefault(states.dtype))
    bf16 = torch.bfloat16
    fp16 = torch.float16
    for model.trained_in, products in ((bf16, bf16), (None, bf16), (None, fp16)):
        for training in (True, False):
            seen.clear()
            with torch.autocast("cpu", dtype=products):
                assert model.train(training).encode(tokens).dtype == torch.float32
            assert [*seen] == [model.trained_in if training and model.trained_in else torch.float32]
