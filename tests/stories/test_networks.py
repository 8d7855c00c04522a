"""Networks and loops as people have them, in O1 and O2.

They train, stay close to fp32, and the network is left as it was: recurrent networks, a language
model with tied weights, GANs, distillation, gradient penalties, Hugging Face models.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

PRECISIONS = ["O1", "O2"]
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread costs more than it saves."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads_before)


def with_fixed_scale(precision: str, scale: float) -> hs.Precision:
    """A loss scale that causes no skipped updates, which would delay the comparison with fp32."""
    if precision == "fp32":
        return hs.Precision("fp32", scale=None)
    return hs.Precision(precision, scale=scale)


def largest_difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def assert_close_parameters(net: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        assert (p - q).abs().max().item() <= tolerance


def parameter_identities(net: nn.Module) -> list[tuple[str, int, torch.dtype]]:
    """Name, object and dtype of every parameter."""
    return [(name, id(p), p.dtype) for name, p in net.named_parameters()]


# --- Architectures ---


class Recurrent(nn.Module):
    """Classifies a sequence by the last output of an LSTM or a GRU."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(4, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x)
        out: Tensor = self.head(hidden[:, -1])
        return out


class LanguageModel(nn.Module):
    """Input and output embedding are one parameter; the positions are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.register_buffer("position", torch.linspace(-1, 1, 6 * 8).view(6, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        embedded = self.embed(tokens) + self.position
        hidden = self.block(embedded, src_mask=mask, is_causal=True)
        out: Tensor = self.head(hidden).transpose(1, 2)
        return out


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.0),
            nn.Linear(4 * 4 * 4, 3),
        )


def make_class_batch(*shape: int) -> Batch:
    return torch.randn(shape), torch.arange(shape[0]) % 3


def make_token_batch() -> Batch:
    """Sequences whose next token is always the last one plus 5, modulo 11."""
    tokens = torch.arange(4 * 7).view(4, 7) * 5 % 11
    return tokens[:, :-1], tokens[:, 1:]


class NetworkCase(NamedTuple):
    """A network, its batch, how long it trains, and how low its loss must be then."""

    make_net: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    updates: int
    final_fraction: float  # of the first loss


NETWORKS: dict[str, NetworkCase] = {
    "LSTM": NetworkCase(Recurrent, lambda: make_class_batch(6, 5, 4), 30, 0.5),
    "GRU": NetworkCase(lambda: Recurrent(nn.GRU), lambda: make_class_batch(6, 5, 4), 30, 0.5),
    "tied language model": NetworkCase(LanguageModel, make_token_batch, 30, 0.5),
    "convolutions": NetworkCase(Convolutional, lambda: make_class_batch(6, 1, 8, 8), 20, 0.3),
}


def train(net: nn.Module, batch: Batch, precision: str, updates: int) -> list[float]:
    """Trains on one batch; the loss of every update."""
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.Adam(net.parameters(), lr=0.02),
        precision=with_fixed_scale(precision, 1024.0),
    )
    return [step(*batch).loss.item() for _ in range(updates)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_close_to_fp32_and_is_left_as_it_was(
    name: str, precision: str, device: torch.device
) -> None:
    case = NETWORKS[name]
    torch.manual_seed(1)
    x, y = case.make_batch()
    batch = (x.to(device), y.to(device))
    net = case.make_net().to(device)
    fp32_net = case.make_net().to(device)
    fp32_net.load_state_dict(net.state_dict())
    identities_before = parameter_identities(net)
    attributes_before = [set(vars(module)) for module in net.modules()]

    losses = train(net, batch, precision, case.updates)
    fp32_losses = train(fp32_net, batch, "fp32", case.updates)
    assert losses[-1] < case.final_fraction * losses[0]
    # A rounding to float16 is 2**-11 relative, and the first loss carries a few of them. Adam's
    # early steps have the size of lr, however small the gradient: a flipped sign of a tiny
    # gradient moves later losses by some hundredths.
    assert losses[0] == pytest.approx(fp32_losses[0], rel=2.0**-8)
    assert losses[-1] == pytest.approx(fp32_losses[-1], abs=0.05)

    assert parameter_identities(net) == identities_before
    assert [set(vars(module)) for module in net.modules()] == attributes_before
    # Outside the step it is a plain fp32 network.
    fp32_net.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(batch[0]), fp32_net.eval()(batch[0]))


# --- GANs ---


class Gan(NamedTuple):
    generator: nn.Module
    critic: nn.Module
    real: Tensor
    noise: Tensor


def make_gan(device: torch.device) -> Gan:
    torch.manual_seed(3)
    return Gan(
        generator=nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).to(device),
        critic=nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)).to(device),
        real=torch.randn(12, 2, device=device) + 3.0,
        noise=torch.randn(12, 2, device=device),
    )


def make_targets(value: float, samples: Tensor) -> Tensor:
    return torch.full((len(samples), 1), value, device=samples.device)


def train_gan(precision: str, device: torch.device, rounds: int) -> tuple[Gan, list[float]]:
    """A GAN as two steps: each trains its own network and must not change the other one.

    Returns the trained networks and the critic's losses.
    """
    gan = make_gan(device)
    generator, critic, real, noise = gan

    def judge(net: nn.Module, fake: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(torch.cat([real, fake]))
        return logits, torch.cat([make_targets(1.0, real), make_targets(0.0, fake)])

    def fool_critic(net: nn.Module, noise: Tensor) -> tuple[Tensor, Tensor]:
        return critic(net(noise)), make_targets(1.0, noise)

    critic_step = hs.TrainStep(
        critic,
        nn.BCEWithLogitsLoss(),
        torch.optim.SGD(critic.parameters(), lr=0.5),
        precision=with_fixed_scale(precision, 256.0),
        forward=judge,
    )
    generator_step = hs.TrainStep(
        generator,
        nn.BCEWithLogitsLoss(),
        torch.optim.SGD(generator.parameters(), lr=0.5),
        precision=with_fixed_scale(precision, 256.0),
        forward=fool_critic,
    )
    critic_losses = []
    for _ in range(rounds):
        weights_before = copy_tensors(generator.parameters())
        fake = generator(noise).detach()
        critic_losses.append(critic_step(fake).loss.item())
        assert_equal_tensors(generator.parameters(), weights_before)

        weights_before = copy_tensors(critic.parameters())
        generator_step(noise)
        assert_equal_tensors(critic.parameters(), weights_before)

        for p in [*critic.parameters(), *generator.parameters()]:
            assert p.grad is None
    return gan, critic_losses


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gan_of_two_steps_trains_close_to_fp32(precision: str, device: torch.device) -> None:
    gan, losses = train_gan(precision, device, rounds=10)
    fp32_gan, fp32_losses = train_gan("fp32", device, rounds=10)
    assert losses[5] < 0.8 * losses[0]  # the critic learns first
    # Ten updates of each network: gradients of order 1 with a few roundings of 2**-11.
    tolerance = 10 * 2 * 2.0**-9
    assert largest_difference(losses, fp32_losses) <= tolerance
    assert_close_parameters(gan.generator, fp32_gan.generator, tolerance)
    assert_close_parameters(gan.critic, fp32_gan.critic, tolerance)


def train_gan_by_hand(
    scaler: Any, autocast: Callable[[], Any], device: torch.device
) -> tuple[list[float], list[Tensor]]:
    """Two optimizers and one scaler, updated once a round; round 2 overflows in the critic only.

    Returns the scale and all weights after every round.
    """
    generator, critic, real, noise = make_gan(device)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    scales: list[float] = []
    weights: list[Tensor] = []
    for round_index in range(6):
        critic_optimizer.zero_grad()
        generator_optimizer.zero_grad()
        with autocast():
            fake = generator(noise)
            logits = critic(torch.cat([real, fake.detach().float()])).float()
            real_logits = logits[: len(real)]
            fake_logits = logits[len(real) :]
            critic_loss = F.softplus(fake_logits).mean() + F.softplus(-real_logits).mean()
            generator_loss = F.softplus(-critic(fake).float()).mean()
        if round_index == 2:
            critic_loss = critic_loss * 1e30

        scaler.scale(generator_loss).backward(inputs=list(generator.parameters()))
        scaler.scale(critic_loss).backward(inputs=list(critic.parameters()))
        scaler.step(critic_optimizer)
        scaler.step(generator_optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights += copy_tensors([*critic.parameters(), *generator.parameters()])
    return scales, weights


def test_a_gan_with_one_scaler_equals_torchs_bit_for_bit(device: torch.device) -> None:
    amp = pytest.importorskip("halfstep.amp")
    settings = {"init_scale": 1024.0, "growth_interval": 2, "device": device.type}
    scales, weights = train_gan_by_hand(
        amp.GradScaler(**settings),
        lambda: amp.autocast(kernels="torch"),
        device,
    )
    torch_scales, torch_weights = train_gan_by_hand(
        torch.amp.GradScaler(**settings),
        lambda: torch.autocast(device.type, torch.float16, cache_enabled=False),
        device,
    )
    assert_equal_tensors(weights, torch_weights)
    assert scales == torch_scales
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]


# --- Teachers, penalties and hooks ---


def make_mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_no_grad_forward_of_the_same_network_changes_no_gradient(
    precision: str, kernels: Any, device: torch.device
) -> None:
    """Self-distillation: the target comes from the network itself (pytorch#112583)."""

    def forward_twice(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            net(x)
        return net(x), y

    weights = []
    for forward in (None, forward_twice):
        torch.manual_seed(0)
        net = make_mlp().to(device)
        step = hs.TrainStep(
            net,
            nn.MSELoss(),
            torch.optim.SGD(net.parameters(), lr=0.1),
            precision=hs.Precision(precision, kernels=kernels),
            forward=forward,
        )
        record = step(torch.ones(2, 4, device=device), torch.zeros(2, 3, device=device))
        assert record.updated
        assert record.grad_norm > 0
        weights.append(copy_tensors(net.parameters()))
    assert_equal_tensors(weights[1], weights[0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_student_learns_from_a_teacher_that_stays_unchanged(
    precision: str, device: torch.device
) -> None:
    teacher = make_mlp().to(device)
    student = make_mlp().to(device)
    teacher_before = copy_tensors(teacher.parameters())
    x = torch.randn(32, 4, device=device)

    def distil(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = teacher(x)
        return net(x), target

    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    step = hs.TrainStep(student, nn.MSELoss(), optimizer, precision=precision, forward=distil)
    losses = [step(x).loss.item() for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert_equal_tensors(teacher.parameters(), teacher_before)


def train_with_gradient_penalty(
    precision: str, device: torch.device
) -> tuple[nn.Module, list[float]]:
    """A critic whose loss contains the gradient of its output by its input, as in WGAN-GP."""
    torch.manual_seed(5)
    net = make_mlp(outputs=1).to(device)

    def penalty_loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = net(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return penalty + 0.01 * out

    step = hs.TrainStep(
        net,
        None,
        torch.optim.SGD(net.parameters(), lr=0.1),
        precision=with_fixed_scale(precision, 64.0),
        forward=penalty_loss,
    )
    x = torch.randn(16, 4, device=device)
    return net, [step(x).loss.item() for _ in range(20)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_penalty_trains_close_to_fp32(precision: str, device: torch.device) -> None:
    net, losses = train_with_gradient_penalty(precision, device)
    fp32_net, fp32_losses = train_with_gradient_penalty("fp32", device)
    assert losses[-1] < losses[0] - 0.2
    # 20 updates with a few roundings each.
    tolerance = 20 * 2.0**-10
    assert largest_difference(losses, fp32_losses) <= tolerance
    assert_close_parameters(net, fp32_net, tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_features_from_a_hook_can_enter_the_loss(precision: str, device: torch.device) -> None:
    net = make_mlp().to(device)
    features: list[Tensor] = []
    net[1].register_forward_hook(lambda module, args, out: features.append(out))

    def loss_with_features(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features.clear()
        return F.mse_loss(net(x), y) + features[0].float().square().mean()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    step = hs.TrainStep(net, None, optimizer, precision=precision, forward=loss_with_features)
    x = torch.randn(16, 4, device=device)
    y = torch.zeros(16, 3, device=device)
    losses = [step(x, y).loss.item() for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]


# --- Batches of any structure ---


class NestedInputs(nn.Module):
    """Takes a dict with a tensor, a list of tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        x = inputs["a"] + inputs["rest"][0]
        out: Tensor = self.linear(x) * inputs["factor"]
        return out


def mse_loss_mixes_dtypes(device: torch.device) -> bool:
    """Whether plain torch can run backward through an mse_loss of two dtypes."""
    x = torch.ones(1, device=device, requires_grad=True)
    target = torch.ones(1, dtype=torch.float64, device=device)
    try:
        F.mse_loss(x, target).backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("form", ["nested", "dict", "float64 target"])
def test_batches_of_any_structure_give_plain_torchs_update(form: str, device: torch.device) -> None:
    """fp32, so that it must be plain torch bit for bit. Batches arrive on the CPU and are moved."""
    net = NestedInputs().to(device)
    torch_net = NestedInputs().to(device)
    torch_net.load_state_dict(net.state_dict())
    inputs = {"a": torch.randn(3, 4), "rest": [torch.randn(3, 4)], "factor": 2.0}
    target = torch.randn(3, 2)
    if form == "float64 target":
        if not mse_loss_mixes_dtypes(device):
            pytest.skip("torch's mse_loss refuses float32 beside float64: on CUDA, and in 2.11")
        target = target.double()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if form == "dict":
        step = hs.TrainStep(
            net,
            nn.MSELoss(),
            optimizer,
            forward=lambda net, batch: (net(batch["x"]), batch["y"]),
        )
        loss = step({"x": inputs, "y": target}).loss
    else:
        step = hs.TrainStep(net, nn.MSELoss(), optimizer)
        loss = step(inputs, target).loss

    x = (inputs["a"] + inputs["rest"][0]).to(device)
    torch_loss = F.mse_loss(torch_net.linear(x) * 2.0, target.to(device))
    torch_loss.backward()
    torch.optim.SGD(torch_net.parameters(), lr=0.1).step()
    assert torch.equal(loss, torch_loss)
    assert torch.equal(net.linear.weight, torch_net.linear.weight)


# --- Hugging Face models, which return their own loss ---


def make_hugging_face_net(kind: str) -> nn.Module:
    """A randomly initialised model of a few thousand parameters; nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()  # no remarks on a vocabulary of 13
    tokens = {"vocab_size": 13, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    size = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    net: nn.Module
    if kind == "GPT2":
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, **tokens)
        net = transformers.GPT2LMHeadModel(config)
    elif kind == "Llama":
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **tokens))
    elif kind == "Bert":
        config = transformers.BertConfig(**size, **tokens, max_position_embeddings=8)
        net = transformers.BertForMaskedLM(config)
    elif kind == "T5":
        config = transformers.T5Config(
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            **tokens,
        )
        net = transformers.T5ForConditionalGeneration(config)
    else:
        assert kind == "Llava"
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**size, **tokens),
            vision_config=transformers.CLIPVisionConfig(**size, image_size=8, patch_size=4),
        )
        net = transformers.LlavaForConditionalGeneration(config)
    return net.eval()  # no dropout: micro-batches must see what the full batch sees


def make_uneven_batch(device: torch.device) -> dict[str, Tensor]:
    """Eight sequences: the first has 7 labels, the next 6, and so on, the last none."""
    ids = torch.randint(1, 13, (8, 7), generator=torch.Generator().manual_seed(4))
    label_counts = torch.arange(7, -1, -1).unsqueeze(1)
    has_label = torch.arange(7).expand(8, 7) < label_counts
    return {
        "input_ids": ids.to(device),
        "attention_mask": torch.ones_like(ids).to(device),
        "labels": torch.where(has_label, ids, -100).to(device),
    }


def split_batch(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    micro_batches = []
    start = 0
    for size in sizes:
        micro_batches.append({name: x[start : start + size] for name, x in batch.items()})
        start += size
    assert start == 8
    return micro_batches


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert"])
def test_a_transformer_with_its_own_loss_trains_close_to_fp32(
    kind: str, precision: str, device: torch.device
) -> None:
    batch = make_uneven_batch(device)
    losses = {}
    for name in ("fp32", precision):
        net = make_hugging_face_net(kind).to(device)
        identities_before = parameter_identities(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
        step = hs.TrainStep(net, None, optimizer, precision=with_fixed_scale(name, 256.0))
        losses[name] = [step(batch).loss.item() for _ in range(25)]
        assert parameter_identities(net) == identities_before

    low = losses[precision]
    fp32 = losses["fp32"]
    assert low[-1] < 0.7 * low[0]
    # A few roundings of 2**-11; later Adam's steps of size lr amplify them, as above.
    assert low[0] == pytest.approx(fp32[0], rel=2.0**-8)
    assert low[-1] == pytest.approx(fp32[-1], abs=0.1)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert", "T5", "Llava"])
@pytest.mark.parametrize("sizes", [[4, 4], [1, 6, 1], [7, 1]])
def test_uneven_micro_batches_equal_the_full_batch_in_fp64(
    kind: str, sizes: list[int], device: torch.device
) -> None:
    batch = make_uneven_batch(device)
    results = []
    for batch_sizes in ([8], sizes):
        net = make_hugging_face_net(kind).to(device).double()
        step = hs.TrainStep(
            net,
            None,
            torch.optim.SGD(net.parameters(), lr=1.0),
            precision="fp64",
            accumulate=len(batch_sizes),
        )
        for micro_batch in split_batch(batch, batch_sizes):
            record = step(micro_batch)
        results.append([record.cycle_loss, record.grad_norm, *copy_tensors(net.parameters())])

    # Bert stays in float64. The others cast to float32 in their loss or norms (2**-24).
    tolerance = 1e-12 if kind == "Bert" else 1e-6
    for expected, result in zip(*results, strict=True):
        assert torch.allclose(expected, result, rtol=tolerance, atol=tolerance)


def test_the_mean_of_uneven_micro_batches_means_is_another_loss(device: torch.device) -> None:
    """So that the test above cannot pass by averaging means."""
    net = make_hugging_face_net("Bert").to(device)
    batch = make_uneven_batch(device)
    losses = [net(**sample).loss.item() for sample in split_batch(batch, [1] * 8)[:7]]
    assert abs(sum(losses) / 7 - net(**batch).loss.item()) > 1e-3


def test_the_loss_of_a_full_batch_is_the_models_own(device: torch.device) -> None:
    net = make_hugging_face_net("Bert").to(device)
    batch = make_uneven_batch(device)
    expected_loss = net(**batch).loss.detach()
    step = hs.TrainStep(net, None, torch.optim.SGD(net.parameters(), lr=1.0))
    assert torch.equal(step(batch).loss, expected_loss)


# --- Rotary positions ---


def make_llama(transformers: Any) -> nn.Module:
    """A language model whose attention follows its positions, as a trained one does."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
    )
    net: nn.Module = transformers.LlamaForCausalLM(config)
    return net


# The relative error of the logits. Before, when the table of frequencies was rounded: 0.046 and
# 0.083; what is left is the low products.
LLAMA_TOLERANCE = {"float16": 0.004, "bfloat16": 0.028}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("low", LLAMA_TOLERANCE)
@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_rotary_positions_are_exact_at_position_2048(
    precision: str, low: str, kernels: str, device: torch.device
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = make_llama(transformers).eval().to(device)
    tokens = torch.randint(64, (2, 16), device=device)
    positions = torch.linspace(0, 2048, 16, device=device).long().expand(2, -1)
    batch = {"input_ids": tokens, "position_ids": positions}
    with torch.no_grad():
        exact = copy.deepcopy(net).double()(**batch).logits

    evaluate = hs.EvalStep(net, precision=hs.Precision(precision, dtype=low, kernels=kernels))
    logits = evaluate.predict(batch).logits
    error = (logits.double() - exact).norm() / exact.norm()
    assert error.item() <= LLAMA_TOLERANCE[low]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_t5_with_relative_positions_and_padding_stays_close_to_fp64(
    precision: str, kernels: str, device: torch.device
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    net = transformers.T5ForConditionalGeneration(config).eval().to(device)
    tokens = torch.randint(64, (2, 16), device=device)
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    with torch.no_grad():
        exact = copy.deepcopy(net).double()(**batch)
    evaluate = hs.EvalStep(net, precision=hs.Precision(precision, kernels=kernels))
    out = evaluate.predict(batch)
    error = (out.logits.double() - exact.logits).norm() / exact.logits.norm()
    assert error.item() <= 4 * torch.finfo(torch.float16).eps
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-3)
