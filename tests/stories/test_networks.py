"""Networks and loops as people have them, in O1 and O2: they train, stay close to fp32, and are left as they were."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

PRECISIONS = ["O1", "O2"]
Batch = tuple[Any, ...]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.rnn, self.head = kind(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


class LanguageModel(nn.Module):
    """Input and output embedding are one parameter; a positional table is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.register_buffer("position", torch.linspace(-1, 1, 6 * 8).view(6, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.block(self.embed(tokens) + self.position, src_mask=mask, is_causal=True)
        out: Tensor = self.head(hidden).transpose(1, 2)
        return out


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(0.0), nn.Linear(4 * 4 * 4, 3),
        )  # fmt: skip


def classes(shape: tuple[int, ...]) -> Batch:
    return torch.randn(shape), torch.arange(shape[0]) % 3


def tokens() -> Batch:
    given = torch.arange(4 * 7).view(4, 7) * 5 % 11
    return given[:, :-1], given[:, 1:]


# network, its batch, updates, what fraction of the first loss the last may be
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], int, float]] = {
    "LSTM": (Recurrent, lambda: classes((6, 5, 4)), 30, 0.5),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: classes((6, 5, 4)), 30, 0.5),
    "tied language model": (LanguageModel, tokens, 30, 0.5),
    "convolutions": (Convolutional, lambda: classes((6, 1, 8, 8)), 20, 0.3),
}


def train(net: nn.Module, batch: Batch, precision: str, updates: int) -> list[float]:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    scale = (
        None if precision == "fp32" else 1024.0
    )  # fixed: a skipped first update would only delay the comparison
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, precision=hs.Precision(precision, scale=scale)
    )
    return [step(*batch).loss.item() for _ in range(updates)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_it_trains_close_to_fp32_and_is_left_as_it_was(
    name: str, precision: str, device: torch.device
) -> None:
    make, data, updates, fraction = NETWORKS[name]
    torch.manual_seed(1)
    batch = tuple(t.to(device) for t in data())
    net, twin = make().to(device), make().to(device)
    twin.load_state_dict(net.state_dict())
    objects = [(n, id(p), p.dtype) for n, p in net.named_parameters()]
    keys = [set(vars(m)) for m in net.modules()]
    low, high = train(net, batch, precision, updates), train(twin, batch, "fp32", updates)
    assert low[-1] < fraction * low[0]
    # A rounding to float16 is 2**-11 relative. The first loss carries a few of them; Adam's early steps have the size
    # of lr whatever the gradient's, so that a flipped sign of a tiny gradient moves later losses by some hundredths.
    assert low[0] == pytest.approx(high[0], rel=2.0**-8)
    assert low[-1] == pytest.approx(high[-1], abs=0.05)
    assert [(n, id(p), p.dtype) for n, p in net.named_parameters()] == objects
    assert [set(vars(m)) for m in net.modules()] == keys
    twin.load_state_dict(net.state_dict())
    assert torch.equal(
        net.eval()(batch[0]), twin.eval()(batch[0])
    )  # outside the step it is a plain fp32 network


def gan(device: torch.device) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)).to(device)
    return (
        generator,
        critic,
        torch.randn(12, 2, device=device) + 3.0,
        torch.randn(12, 2, device=device),
    )


def verdict(value: float, like: Tensor) -> Tensor:
    return torch.full((len(like), 1), value, device=like.device)


def play(
    precision: str, device: torch.device, rounds: int
) -> tuple[nn.Module, nn.Module, list[float]]:
    """A GAN as two steps: each trains its own network and leaves the other one alone."""
    generator, critic, real, noise = gan(device)
    loss, chosen = (
        nn.BCEWithLogitsLoss(),
        hs.Precision(precision, scale=None if precision == "fp32" else 256.0),
    )

    def judge(net: nn.Module, fake: Tensor) -> tuple[Tensor, Tensor]:
        return net(torch.cat([real, fake])), torch.cat([verdict(1.0, real), verdict(0.0, fake)])

    def fool(net: nn.Module, z: Tensor) -> tuple[Tensor, Tensor]:
        return critic(net(z)), verdict(1.0, z)

    d = hs.TrainStep(
        critic, loss, torch.optim.SGD(critic.parameters(), lr=0.5), precision=chosen, forward=judge
    )
    g = hs.TrainStep(
        generator,
        loss,
        torch.optim.SGD(generator.parameters(), lr=0.5),
        precision=chosen,
        forward=fool,
    )
    losses = []
    for _ in range(rounds):
        before = [p.detach().clone() for p in generator.parameters()]
        losses.append(d(generator(noise).detach()).loss.item())
        assert all(torch.equal(a, b) for a, b in zip(before, generator.parameters(), strict=True))
        before = [p.detach().clone() for p in critic.parameters()]
        g(noise)
        assert all(torch.equal(a, b) for a, b in zip(before, critic.parameters(), strict=True))
        assert all(p.grad is None for p in [*critic.parameters(), *generator.parameters()])
    return generator, critic, losses


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gan_as_two_steps(precision: str, device: torch.device) -> None:
    low, high = play(precision, device, 10), play("fp32", device, 10)
    assert low[2][5] < 0.8 * low[2][0]  # the critic learns first
    # ten updates of each network, whose gradients carry a few roundings of 2**-11 and are of order 1
    assert max(abs(a - b) for a, b in zip(low[2], high[2], strict=True)) <= 10 * 2 * 2.0**-9
    for p, q in zip(
        [*low[0].parameters(), *low[1].parameters()],
        [*high[0].parameters(), *high[1].parameters()],
        strict=True,
    ):
        assert (p - q).abs().max().item() <= 10 * 2 * 2.0**-9


def hand_written_gan(
    scaler: Any, autocast: Callable[[], Any], device: torch.device
) -> list[Tensor]:
    """Two optimizers, one scaler, one update of the scale per round; the third round overflows in the critic only."""
    generator, critic, real, noise = gan(device)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator)]
    seen: list[Tensor] = []
    for turn in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast():
            fake = generator(noise)
            logits = critic(torch.cat([real, fake.detach().float()])).float()
            d_loss = (
                F.softplus(logits[len(real) :]).mean() + F.softplus(-logits[: len(real)]).mean()
            )
            g_loss = F.softplus(-critic(fake).float()).mean()
        scaler.scale(g_loss).backward(inputs=list(generator.parameters()))
        scaler.scale(d_loss * (1e30 if turn == 2 else 1.0)).backward(
            inputs=list(critic.parameters())
        )
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        seen += [
            torch.tensor(scaler.get_scale()),
            *(p.detach().clone() for n in (critic, generator) for p in n.parameters()),
        ]
    return seen


def test_a_gan_with_one_scaler_is_torchs_bit_for_bit(device: torch.device) -> None:
    amp = pytest.importorskip("halfstep.amp")
    settings = {"init_scale": 1024.0, "growth_interval": 2, "device": device.type}
    ours = hand_written_gan(
        amp.GradScaler(**settings), lambda: amp.autocast(kernels="torch"), device
    )
    theirs = hand_written_gan(
        torch.amp.GradScaler(**settings),
        lambda: torch.autocast(device.type, torch.float16, cache_enabled=False),
        device,
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    scales = [t.item() for t in ours if t.dim() == 0]
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]


@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_no_grad_forward_of_the_same_network_changes_no_gradient(
    precision: str, kernels: str, device: torch.device
) -> None:
    """Self-distillation: the target comes from the student itself, without gradient (pytorch#112583)."""

    def with_teacher(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            net(x)
        return net(x), y

    after = []
    for forward in (None, with_teacher):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        chosen = hs.Precision(precision, kernels=kernels)
        step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision=chosen, forward=forward)
        record = step(torch.ones(2, 4, device=device), torch.zeros(2, 3, device=device))
        assert record.updated
        assert record.grad_norm > 0
        after.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_student_learns_from_a_teacher_that_stays_as_it_is(
    precision: str, device: torch.device
) -> None:
    teacher, student = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device) for _ in range(2)
    )
    before, x = (
        [p.detach().clone() for p in teacher.parameters()],
        torch.randn(32, 4, device=device),
    )

    def distil(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = teacher(x)
        return net(x), target

    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    step = hs.TrainStep(student, nn.MSELoss(), optimizer, precision=precision, forward=distil)
    losses = [step(x).loss.item() for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))


def penalised(precision: str, device: torch.device) -> tuple[nn.Module, list[float]]:
    """A critic whose loss holds the gradient of its own output by its input, as WGAN-GP does."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)

    def penalty(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = net(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + 0.01 * out

    chosen = hs.Precision(precision, scale=None if precision == "fp32" else 64.0)
    step = hs.TrainStep(
        net, None, torch.optim.SGD(net.parameters(), lr=0.1), precision=chosen, forward=penalty
    )
    x = torch.randn(16, 4, device=device)
    return net, [step(x).loss.item() for _ in range(20)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_penalty_differentiates_twice(precision: str, device: torch.device) -> None:
    (low, losses), (high, exact) = penalised(precision, device), penalised("fp32", device)
    assert losses[-1] < losses[0] - 0.2
    assert (
        max(abs(a - b) for a, b in zip(losses, exact, strict=True)) <= 20 * 2.0**-10
    )  # 20 updates of a few roundings
    for p, q in zip(low.parameters(), high.parameters(), strict=True):
        assert (p - q).abs().max().item() <= 20 * 2.0**-10


@pytest.mark.parametrize("precision", PRECISIONS)
def test_features_taken_by_a_hook_can_enter_the_loss(precision: str, device: torch.device) -> None:
    net, features = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device), []
    net[1].register_forward_hook(lambda m, args, out: features.append(out))

    def with_features(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features.clear()
        return F.mse_loss(net(x), y) + features[0].float().square().mean()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    step = hs.TrainStep(net, None, optimizer, precision=precision, forward=with_features)
    x, y = torch.randn(16, 4, device=device), torch.zeros(16, 3, device=device)
    losses = [step(x, y).loss.item() for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        out: Tensor = self.linear(inputs["a"] + inputs["rest"][0]) * inputs["factor"]
        return out


def mixes(device: torch.device) -> bool:
    """Whether plain torch goes back through an mse_loss of two dtypes."""
    x = torch.ones(1, device=device, requires_grad=True)
    try:
        F.mse_loss(x, torch.ones(1, dtype=torch.float64, device=device)).backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("form", ["nested", "dict", "float64 target"])
def test_batches_of_any_structure_give_plain_torchs_update(form: str, device: torch.device) -> None:
    """fp32, so that it must be plain torch bit for bit. Batches arrive on the CPU and are moved."""
    net, twin = TwoInputs().to(device), TwoInputs().to(device)
    twin.load_state_dict(net.state_dict())
    inputs, y = (
        {"a": torch.randn(3, 4), "rest": [torch.randn(3, 4)], "factor": 2.0},
        torch.randn(3, 2),
    )
    if form == "float64 target" and not mixes(device):
        pytest.skip(
            "torch's own mse_loss refuses float32 beside float64 in its backward: on CUDA, and in 2.11"
        )
    target = y.double() if form == "float64 target" else y
    forward = (lambda n, b: (n(b["x"]), b["y"])) if form == "dict" else None
    step = hs.TrainStep(
        net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1), forward=forward
    )
    batch = ({"x": inputs, "y": target},) if form == "dict" else (inputs, target)
    loss = step(*batch).loss
    theirs = F.mse_loss(
        twin.linear((inputs["a"] + inputs["rest"][0]).to(device)) * 2.0, target.to(device)
    )
    theirs.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert torch.equal(loss, theirs)
    assert torch.equal(net.linear.weight, twin.linear.weight)


def hugging_face(kind: str) -> nn.Module:
    """A randomly initialised model of a few thousand parameters; nothing is downloaded."""
    t = pytest.importorskip("transformers")
    t.logging.set_verbosity_error()  # its notes on special tokens of a vocabulary of 13
    ids = {"vocab_size": 13, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    size = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    eyes = {**size, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    models = {
        "GPT2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, **ids)
        ),
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**size, **ids)),
        "Bert": lambda: t.BertForMaskedLM(t.BertConfig(**size, **ids, max_position_embeddings=8)),
        "T5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=8,
                d_kv=4,
                d_ff=16,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
                **ids,
            )
        ),
        "Llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(
                text_config=t.LlamaConfig(**size, **ids), vision_config=t.CLIPVisionConfig(**eyes)
            )
        ),
    }
    net: nn.Module = models[kind]()
    return net.eval()  # no dropout: micro-batches must see what the full batch sees


def ragged(device: torch.device) -> dict[str, Tensor]:
    """Eight sequences; the first has 7 labels, the next 6, and so on, the last none."""
    ids = torch.randint(1, 13, (8, 7), generator=torch.Generator().manual_seed(4))
    kept = torch.arange(7).expand(8, 7) < torch.arange(7, -1, -1).unsqueeze(1)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.where(kept, ids, -100),
    }
    return {k: v.to(device) for k, v in batch.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert"])
def test_a_transformer_that_returns_its_own_loss(
    kind: str, precision: str, device: torch.device
) -> None:
    batch, runs = ragged(device), {}
    for name in ("fp32", precision):
        net = hugging_face(kind).to(device)
        objects = [(n, id(p), p.dtype) for n, p in net.named_parameters()]
        chosen = hs.Precision(name, scale=None if name == "fp32" else 256.0)
        step = hs.TrainStep(
            net, None, torch.optim.Adam(net.parameters(), lr=0.03), precision=chosen
        )
        runs[name] = [step(batch).loss.item() for _ in range(25)]
        assert [(n, id(p), p.dtype) for n, p in net.named_parameters()] == objects
    low, high = runs[precision], runs["fp32"]
    assert low[-1] < 0.7 * low[0]
    assert low[0] == pytest.approx(high[0], rel=2.0**-8)  # a few roundings of 2**-11
    assert low[-1] == pytest.approx(
        high[-1], abs=0.1
    )  # Adam's steps of size lr amplify them, see above


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert", "T5", "Llava"])
@pytest.mark.parametrize("sizes", [[4, 4], [1, 6, 1], [7, 1]])
def test_ragged_micro_batches_equal_the_full_batch_in_fp64(
    kind: str, sizes: list[int], device: torch.device
) -> None:
    batch, after = ragged(device), []
    for split in ([8], sizes):
        net = hugging_face(kind).to(device).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        step = hs.TrainStep(net, None, optimizer, precision="fp64", accumulate=len(split))
        parts = zip(*(v.split(split) for v in batch.values()), strict=True)
        record = [step(dict(zip(batch, part, strict=True))) for part in parts][-1]
        after.append([record.cycle_loss, record.grad_norm, *(p.detach() for p in net.parameters())])
    # The others have casts to float32 of their own, in the loss or in their norms (2**-24); Bert stays in float64.
    tolerance = 1e-12 if kind == "Bert" else 1e-6
    assert all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*after, strict=True)
    )


def test_the_mean_of_those_micro_batches_means_would_have_been_another_loss(
    device: torch.device,
) -> None:
    net, batch = hugging_face("Bert").to(device), ragged(device)
    parts = [net(**{k: v[i : i + 1] for k, v in batch.items()}).loss.item() for i in range(7)]
    assert abs(sum(parts) / 7 - net(**batch).loss.item()) > 1e-3


def test_the_full_batch_is_what_the_model_itself_computes(device: torch.device) -> None:
    net, batch = hugging_face("Bert").to(device), ragged(device)
    loss = net(**batch).loss.detach()
    record = hs.TrainStep(net, None, torch.optim.SGD(net.parameters(), lr=1.0))(batch)
    assert torch.equal(record.loss, loss)
