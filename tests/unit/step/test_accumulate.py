"""A cycle equals the full batch: any split gives its gradient, its update and its reported loss."""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 4
IGNORED = -100
# DESIGN contract 1; float64 sums of at most 200 terms in another order differ by some 1e-14.
EXACT = 1e-12
SPLITS = st.lists(st.integers(0, 5), min_size=1, max_size=6)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.1),
}
Batch = tuple[Tensor, ...]
Cycles = list[list[Batch]]
LossAndGrads = tuple[Tensor, list[Tensor]]


def network(out: int = CLASSES, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, out)).to(DEVICE, dtype)


def random_values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def random_labels(*shape: int, label_rate: float = 0.7) -> Tensor:
    """Returns random classes, of which about 1 − `label_rate` are ignored."""
    target = torch.randint(CLASSES, shape)
    return torch.where(torch.rand(shape) < label_rate, target, IGNORED).to(DEVICE)


def train_full_batches(
    net: nn.Module, make_optimizer: Any, loss: Any, cycles: Cycles
) -> list[LossAndGrads]:
    """Runs one update per full batch in plain torch; returns the loss and the gradients of each."""
    optimizer = make_optimizer(net.parameters())
    losses_and_grads = []
    for micro_batches in cycles:
        *inputs, target = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        optimizer.zero_grad()
        loss_value = loss(net(*inputs), target).sum()
        loss_value.backward()
        optimizer.step()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        losses_and_grads.append((loss_value.detach(), grads))
    return losses_and_grads


def train_micro_batches(
    net: nn.Module, make_optimizer: Any, loss: Any, cycles: Cycles, **options: Any
) -> list[LossAndGrads]:
    """Does the same through TrainStep, micro-batch by micro-batch.

    A cycle shorter than `accumulate` ends by flush.
    """
    optimizer = make_optimizer(net.parameters())
    grads: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: grads.append([p.grad.clone() for p in net.parameters()])
    )
    step = hs.TrainStep(net, loss, optimizer, precision="fp64", **options)
    losses = []
    for micro_batches in cycles:
        records = [step(*micro_batch) for micro_batch in micro_batches]
        is_full = len(micro_batches) == step.options.accumulate
        last_record = records[-1] if is_full else step.flush()
        assert last_record is not None
        assert not any(record.updated for record in records[:-1])
        losses.append(last_record.cycle_loss)
    return list(zip(losses, grads, strict=True))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Asserts a difference within 1e-12 of the largest element.

    An element that cancels to nearly nothing has no relative accuracy of its own.
    """
    assert actual.dtype == expected.dtype, f"expected {expected.dtype}, received {actual.dtype}"
    assert (actual - expected).abs().max() <= EXACT * expected.abs().max()


def assert_near_weights(net: nn.Module, expected_net: nn.Module) -> None:
    for actual, expected in zip(net.parameters(), expected_net.parameters(), strict=True):
        assert_near(actual.detach(), expected.detach())


def assert_same_training(
    make_optimizer: Any, loss: Any, cycles: Cycles, *, out: int = CLASSES, **options: Any
) -> None:
    """Asserts near losses, gradients and weights of split and full batches."""
    plain_net = network(out)
    split_net = network(out)
    full = train_full_batches(plain_net, make_optimizer, loss, cycles)
    split = train_micro_batches(split_net, make_optimizer, loss, cycles, **options)
    for (loss_value, grads), (full_loss, full_grads) in zip(split, full, strict=True):
        assert_near(loss_value, full_loss)
        for grad, full_grad in zip(grads, full_grads, strict=True):
            assert_near(grad, full_grad)
    assert_near_weights(split_net, plain_net)


def has_terms(micro_batches: list[Batch]) -> bool:
    return any((target != IGNORED).any() for *_, target in micro_batches)


@settings(max_examples=60)
@given(
    splits=st.lists(SPLITS, min_size=1, max_size=2),
    seed=st.integers(0, 2**20),
    ignored_index=st.integers(0, 5),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    label_rate=st.sampled_from([1.0, 0.6, 0.2]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_any_split_with_masks_and_class_weights_is_the_full_batch(
    splits: list[list[int]],
    seed: int,
    ignored_index: int,
    weighted: bool,
    smoothing: float,
    label_rate: float,
    optimizer: str,
) -> None:
    torch.manual_seed(seed)
    weight = None
    if weighted:
        weight = torch.tensor([0.3, 2.0, 1.0, 0.7], dtype=torch.float64, device=DEVICE)

    def random_batch(size: int) -> Batch:
        return random_values(size, 3), random_labels(size, label_rate=label_rate)

    cycles = [[random_batch(size) for size in sizes] for sizes in splits]
    # One micro-batch of each cycle has only ignored targets.
    for micro_batches in cycles:
        _, target = micro_batches[ignored_index % len(micro_batches)]
        target.fill_(IGNORED)
    cycles = [micro_batches for micro_batches in cycles if has_terms(micro_batches)]
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    assert_same_training(OPTIMIZERS[optimizer], loss, cycles, accumulate=max(map(len, splits)))


@settings(max_examples=20)
@given(sizes=SPLITS.filter(any), tokens=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_any_split_of_masked_sequences_is_the_full_batch(
    sizes: list[int], tokens: int, seed: int
) -> None:
    """Losses per token over [B, T] labels, by torch's table and by a mean with count=."""

    def masked_mean(out: Tensor, target: Tensor) -> Tensor:
        mask = target != IGNORED
        # [B, T], 0 where the label is ignored.
        token_losses = F.cross_entropy(out.transpose(1, 2), target, reduction="none")
        return (token_losses * mask).sum() / mask.sum()

    def count_tokens(batch: Any) -> Tensor:
        return (batch[1] != IGNORED).sum()

    def flatten_tokens(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return net(x).flatten(0, 1), y.flatten()

    torch.manual_seed(seed)
    make_sgd = OPTIMIZERS["sgd"]
    micro_batches = []
    for size in sizes:
        x = random_values(size, tokens, 3)
        y = random_labels(size, tokens, label_rate=0.5)
        micro_batches.append((x, y))
    cycles = [micro_batches] if has_terms(micro_batches) else []

    # The hand-written mean.
    assert_same_training(make_sgd, masked_mean, cycles, accumulate=len(sizes), count=count_tokens)

    # torch's table of losses.
    plain_net = network()
    split_net = network()
    full = train_full_batches(plain_net, make_sgd, masked_mean, cycles)
    split = train_micro_batches(
        split_net,
        make_sgd,
        nn.CrossEntropyLoss(),
        cycles,
        forward=flatten_tokens,
        accumulate=len(sizes),
    )
    for (loss_value, _), (full_loss, _) in zip(split, full, strict=True):
        assert torch.isclose(loss_value, full_loss, rtol=EXACT, atol=0)
    assert_near_weights(split_net, plain_net)


@settings(max_examples=20)
@given(
    sizes=SPLITS.filter(any),
    seed=st.integers(0, 2**20),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.HuberLoss(), nn.MSELoss(reduction="sum"), nn.L1Loss(reduction="none")]
)
def test_any_split_of_a_regression_is_the_full_batch(
    loss: Any, sizes: list[int], seed: int, optimizer: str
) -> None:
    """Means are weighted by their elements; sums, and losses that stay arrays, add up."""
    torch.manual_seed(seed)
    micro_batches = [(random_values(size, 3), random_values(size, 2)) for size in sizes]
    cycles = [micro_batches, micro_batches]
    accumulate = len(sizes) + seed % 2
    assert_same_training(OPTIMIZERS[optimizer], loss, cycles, out=2, accumulate=accumulate)


class CausalModel(nn.Module):
    """Like a Hugging Face causal model, it returns its own loss.

    It takes labels, shifts them, and averages over those that are not -100.
    """

    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 3)
        self.head = network()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.embed(input_ids))[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 4), min_size=2, max_size=5), seed=st.integers(0, 2**20))
def test_any_split_of_a_network_with_its_own_loss_is_the_full_batch(
    sizes: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    micro_batches = []
    for size in sizes:
        input_ids = random_labels(size, 5, label_rate=1)
        labels = random_labels(size, 5, label_rate=0.3)
        micro_batches.append({"input_ids": input_ids, "labels": labels})
    full_batch = {}
    for key in ("input_ids", "labels"):
        full_batch[key] = torch.cat([micro_batch[key] for micro_batch in micro_batches])
    if not (full_batch["labels"][:, 1:] != IGNORED).any():
        return

    net = CausalModel().to(DEVICE, torch.float64)
    plain_net = CausalModel().to(DEVICE, torch.float64)
    plain_net.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    step = hs.TrainStep(net, None, optimizer, precision="fp64", accumulate=len(sizes))
    for micro_batch in micro_batches:
        record = step(micro_batch)

    loss = plain_net(**full_batch).loss
    loss.backward()
    assert_near(record.cycle_loss, loss.detach())
    for param, plain_param in zip(net.parameters(), plain_net.parameters(), strict=True):
        assert plain_param.grad is not None
        assert_near(param.detach(), (plain_param - plain_param.grad).detach())


def test_sparse_gradients_accumulate_and_a_micro_batch_without_terms_adds_none() -> None:
    def masked_mean(out: Tensor, target: Tensor) -> Tensor:
        """0/0 where every target is ignored."""
        mask = target != IGNORED
        squares = (out.squeeze(-1) - target) ** 2
        return (squares * mask).sum() / mask.sum()

    def embedding(*, sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(CLASSES, 1, sparse=sparse).to(DEVICE, torch.float64)

    micro_batches = []
    for size, label_rate in ((4, 1), (3, 0), (5, 0.5)):
        ids = random_labels(size, label_rate=1)
        target = random_labels(size, label_rate=label_rate)
        micro_batches.append((ids, target))
    plain_net = embedding(sparse=False)
    net = embedding(sparse=True)
    make_sgd = partial(torch.optim.SGD, lr=0.5)
    train_full_batches(plain_net, make_sgd, masked_mean, [micro_batches])
    step = hs.TrainStep(
        net,
        masked_mean,
        make_sgd(net.parameters()),
        accumulate=3,
        count=lambda batch: (batch[1] != IGNORED).sum(),
        precision="fp64",
    )
    records = [step(*micro_batch) for micro_batch in micro_batches]
    assert records[-1].updated
    assert_near(net.weight.detach(), plain_net.weight.detach())


def test_63_batches_at_cycle_8_are_8_updates_and_nothing_leaks_into_the_next_pass() -> None:
    batches = [(random_values(2, 3), random_values(2, 2)) for _ in range(63)]
    plain_net = network(2)
    net = network(2)
    make_adam = OPTIMIZERS["adam"]
    cycles = [batches[i : i + 8] for i in range(0, 63, 8)] * 2
    assert [len(cycle) for cycle in cycles[:8]] == [8] * 7 + [7]
    train_full_batches(plain_net, make_adam, nn.MSELoss(), cycles)
    step = hs.TrainStep(
        net, nn.MSELoss(), make_adam(net.parameters()), precision="fp64", accumulate=8
    )
    for passes in (1, 2):
        updated = [bool(step(*batch).updated) for batch in batches]
        assert updated == ([False] * 7 + [True]) * 7 + [False] * 7
        tail = step.flush()
        assert tail is not None
        assert tail.updated
        assert step.flush() is None, "nothing is left"
        assert int(step.state.updates) == 8 * passes
    assert_near_weights(net, plain_net)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float64, 1e-12),
        # Ten AdamW updates of weights below 2, each rounded to within one ulp.
        (torch.float32, 10 * 2.0**-23),
    ],
)
def test_the_seed_network_at_batch_8_and_cycle_8_lands_where_batch_64_does(
    dtype: torch.dtype, bound: float
) -> None:
    """The data of seed 001: 63 samples, so that the last of the eight batches has 7.

    Its loss has shape (1,).
    """

    def squared_error(out: Tensor, y: Tensor) -> Tensor:
        return ((y - out) ** 2).mean(dim=0)

    def train(batch_size: int, accumulate: int) -> list[Tensor]:
        torch.manual_seed(42)
        net = nn.Sequential(
            nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)
        ).to(DEVICE, dtype)
        for p in net.parameters():
            nn.init.uniform_(p)
        y = torch.arange(1, 64, dtype=dtype, device=DEVICE).unsqueeze(1)
        x = torch.cat([torch.zeros_like(y), y.log(), y * 5], dim=1)
        step = hs.TrainStep(
            net,
            squared_error,
            torch.optim.AdamW(net.parameters()),
            precision="fp64" if dtype == torch.float64 else "fp32",
            accumulate=accumulate,
            count=lambda batch: len(batch[1]),
        )
        for _ in range(10):
            for batch in zip(x.split(batch_size), y.split(batch_size), strict=True):
                assert step(*batch).loss.shape == ()
            step.flush()
        assert int(step.state.updates) == 10
        return [p.detach() for p in net.parameters()]

    for split, full in zip(train(8, 8), train(64, 1), strict=True):
        assert (split - full).abs().max() <= bound


@pytest.mark.parametrize("accumulate", [1, 3])
def test_sens_multiplies_the_gradient_and_leaves_the_reported_loss(accumulate: int) -> None:
    sizes = (4, 1, 2)[:accumulate]
    cycles = [[(random_values(size, 3), random_values(size, 2)) for size in sizes]]

    def train(**options: Any) -> LossAndGrads:
        make_sgd = partial(torch.optim.SGD, lr=1.0)
        options["accumulate"] = accumulate
        return train_micro_batches(network(2), make_sgd, nn.MSELoss(), cycles, **options)[0]

    plain_loss, plain_grads = train()
    on_device = torch.tensor(-3.0, dtype=torch.float64, device=DEVICE)
    for sens in (-3.0, torch.tensor(-3.0), on_device):
        loss, grads = train(sens=sens)
        assert torch.equal(loss, plain_loss)
        for grad, plain_grad in zip(grads, plain_grads, strict=True):
            assert_near(grad, -3 * plain_grad)


def test_an_array_loss_is_summed_and_a_sens_of_its_shape_weights_its_entries() -> None:
    def row_means(out: Tensor, target: Tensor) -> Tensor:
        return ((out - target) ** 2).mean(1)

    x = random_values(4, 3)
    y = random_values(4, 2)
    sens = random_values(4)
    make_sgd = partial(torch.optim.SGD, lr=1.0)
    cases: list[tuple[Tensor, dict[str, Any]]] = [
        (torch.ones_like(sens), {}),
        (sens, {"sens": sens}),
    ]
    for row_weights, options in cases:
        plain_net = network(2)
        rows = row_means(plain_net(x), y)
        rows.backward(row_weights)

        cycles = [[(x, y)]]
        steps = train_micro_batches(
            network(2), make_sgd, row_means, cycles, accumulate=1, **options
        )
        loss, grads = steps[0]
        assert torch.equal(loss, rows.detach().sum())
        for grad, plain_param in zip(grads, plain_net.parameters(), strict=True):
            assert torch.equal(grad, plain_param.grad)


def test_an_unknown_loss_needs_a_count_and_the_advice_in_the_error_works() -> None:
    def own_loss(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).abs().pow(1.5).mean()

    make_sgd = OPTIMIZERS["sgd"]
    cycles = [[(random_values(size, 3), random_values(size, 2)) for size in (1, 4)]]
    message = r"accumulate=2: .*own_loss is not a loss of torch.nn; give count="
    with pytest.raises(ValueError, match=message) as error:
        train_micro_batches(network(2), make_sgd, own_loss, cycles, accumulate=2)
    advice = str(error.value).partition("for instance count=")[2]
    assert_same_training(make_sgd, own_loss, cycles, out=2, accumulate=2, count=eval(advice))


def test_batch_norm_in_a_cycle_gets_one_notice() -> None:
    def build(accumulate: int) -> hs.TrainStep:
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hs.TrainStep(net, nn.MSELoss(), optimizer, accumulate=accumulate)

    build(1)  # no notice: warnings are errors
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = build(2)
        for _ in range(4):
            step(random_values(4, 3).float(), random_values(4, 2).float())
    (notice,) = caught
    assert notice.category is hs.Notice
    assert "batch-coupled layers see micro-batches: '1'" in str(notice.message), (
        "the layer is named"
    )
    assert notice.filename == __file__


def test_a_cycle_without_terms_does_not_age_the_scale() -> None:
    """Neither the scale nor the count of finite updates since it last moved."""
    net = nn.Linear(3, 2).to(DEVICE)
    precision = hs.Precision("fp32", scale=hs.DynamicScale(init=8.0, interval=2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)
    x = torch.randn(4, 3, device=DEVICE)
    y = torch.randint(0, 2, (4,), device=DEVICE)
    step(x, y)
    for _ in range(3):
        step(x, torch.full_like(y, -100))
    assert step.state.growth.item() == 1
    assert step.state.scale.item() == 8.0
    step(x, y)
    assert step.state.scale.item() == 16.0
