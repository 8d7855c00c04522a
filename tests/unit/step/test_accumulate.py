"""An update cycle is the full batch: any split gives its gradient, its update and its reported loss."""

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
CLASSES, IGNORED = 4, -100
EXACT = 1e-12  # DESIGN contract 1; float64 sums of at most 200 terms in another order differ by some 1e-14
SPLITS = st.lists(st.integers(0, 5), min_size=1, max_size=6)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.1),
}
Batch = tuple[Tensor, ...]
Cycles = list[list[Batch]]


def network(out: int = CLASSES, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, out)).to(DEVICE, dtype)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def labels(*shape: int, keep: float = 0.7) -> Tensor:
    target = torch.randint(CLASSES, shape)
    return torch.where(torch.rand(shape) < keep, target, IGNORED).to(DEVICE)


def full_steps(
    net: nn.Module, make: Any, loss: Any, cycles: Cycles
) -> list[tuple[Tensor, list[Tensor]]]:
    """Plain torch: one update per full batch; the loss and the gradients of each."""
    optimizer, seen = make(net.parameters()), []
    for micros in cycles:
        *inputs, target = (torch.cat(parts) for parts in zip(*micros, strict=True))
        optimizer.zero_grad()
        value = loss(net(*inputs), target).sum()
        value.backward()
        optimizer.step()
        seen.append(
            (value.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None])
        )
    return seen


def split_steps(
    net: nn.Module, make: Any, loss: Any, cycles: Cycles, **options: Any
) -> list[tuple[Tensor, list[Tensor]]]:
    """The same through TrainStep, micro-batch by micro-batch; a cycle shorter than `accumulate` ends by flush."""
    optimizer, grads = make(net.parameters()), []
    optimizer.register_step_pre_hook(
        lambda o, *_: grads.append([p.grad.clone() for p in net.parameters()])
    )
    step = hs.TrainStep(net, loss, optimizer, precision="fp64", **options)
    losses = []
    for micros in cycles:
        records = [step(*micro) for micro in micros]
        last = records[-1] if len(micros) == step.options.accumulate else step.flush()
        assert last is not None
        assert not any(r.updated for r in records[:-1])
        losses.append(last.cycle_loss)
    return list(zip(losses, grads, strict=True))


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Within 1e-12 of the largest element: one that cancels to nearly nothing has no relative accuracy of its own."""
    assert got.dtype == expected.dtype, f"expected {expected.dtype}, received {got.dtype}"
    assert (got - expected).abs().max() <= EXACT * expected.abs().max()


def assert_same_training(
    make: Any, loss: Any, cycles: Cycles, *, out: int = CLASSES, **options: Any
) -> None:
    plain, split = network(out), network(out)
    expected = full_steps(plain, make, loss, cycles)
    for got, want in zip(split_steps(split, make, loss, cycles, **options), expected, strict=True):
        assert_near(got[0], want[0])
        for g, w in zip(got[1], want[1], strict=True):
            assert_near(g, w)
    for p, q in zip(split.parameters(), plain.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


def has_terms(micros: list[Batch]) -> bool:
    return any((micro[-1] != IGNORED).any() for micro in micros)


@settings(max_examples=60)
@given(
    splits=st.lists(SPLITS, min_size=1, max_size=2),
    seed=st.integers(0, 2**20),
    blank=st.integers(0, 5),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    keep=st.sampled_from([1.0, 0.6, 0.2]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_any_split_with_masks_and_class_weights_is_the_full_batch(
    splits: list[list[int]],
    seed: int,
    blank: int,
    weighted: bool,
    smoothing: float,
    keep: float,
    optimizer: str,
) -> None:
    torch.manual_seed(seed)
    weight = (
        torch.tensor([0.3, 2.0, 1.0, 0.7], dtype=torch.float64, device=DEVICE) if weighted else None
    )
    cycles = [[(draw(n, 3), labels(n, keep=keep)) for n in sizes] for sizes in splits]
    for micros in cycles:  # one micro-batch of each cycle holds nothing but ignored targets
        micros[blank % len(micros)][1].fill_(IGNORED)
    cycles = [micros for micros in cycles if has_terms(micros)]
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    assert_same_training(OPTIMIZERS[optimizer], loss, cycles, accumulate=max(map(len, splits)))


@settings(max_examples=20)
@given(sizes=SPLITS.filter(any), tokens=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_any_split_of_masked_sequences_is_the_full_batch(
    sizes: list[int], tokens: int, seed: int
) -> None:
    """Per-token losses over [B, T] labels, by torch's table and by a hand-written mean with count=."""

    def masked_mean(out: Tensor, target: Tensor) -> Tensor:
        mask = target != IGNORED
        each = F.cross_entropy(
            out.transpose(1, 2), target, reduction="none"
        )  # [B, T], 0 where ignored
        return (each * mask).sum() / mask.sum()

    def tokens_in(batch: Any) -> Tensor:
        return (batch[1] != IGNORED).sum()

    torch.manual_seed(seed)
    micros = [(draw(n, tokens, 3), labels(n, tokens, keep=0.5)) for n in sizes]
    cycles = [micros] if has_terms(micros) else []
    assert_same_training(
        OPTIMIZERS["sgd"], masked_mean, cycles, accumulate=len(sizes), count=tokens_in
    )
    by_table = {
        "forward": lambda net, x, y: (net(x).flatten(0, 1), y.flatten()),
        "accumulate": len(sizes),
    }
    plain, split = network(), network()
    expected = full_steps(plain, OPTIMIZERS["sgd"], masked_mean, cycles)
    got = split_steps(split, OPTIMIZERS["sgd"], nn.CrossEntropyLoss(), cycles, **by_table)
    assert all(
        torch.isclose(a[0], b[0], rtol=EXACT, atol=0) for a, b in zip(got, expected, strict=True)
    )
    for p, q in zip(split.parameters(), plain.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


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
    """Means are weighted by their elements; sums, and losses that stay arrays, add up as they are."""
    torch.manual_seed(seed)
    micros = [(draw(n, 3), draw(n, 2)) for n in sizes]
    assert_same_training(
        OPTIMIZERS[optimizer], loss, [micros, micros], out=2, accumulate=len(sizes) + seed % 2
    )


class OwnLoss(nn.Module):
    """Like a Hugging Face causal model: it takes labels, shifts them, and averages over those that are not -100."""

    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 3), network()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.embed(input_ids))[:, :-1]
        return SimpleNamespace(
            loss=F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), logits=logits
        )


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 4), min_size=2, max_size=5), seed=st.integers(0, 2**20))
def test_any_split_of_a_network_with_its_own_loss_is_the_full_batch(
    sizes: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    micros = [{"input_ids": labels(n, 5, keep=1), "labels": labels(n, 5, keep=0.3)} for n in sizes]
    whole = {key: torch.cat([m[key] for m in micros]) for key in micros[0]}
    if not (whole["labels"][:, 1:] != IGNORED).any():
        return
    nets = [OwnLoss().to(DEVICE, torch.float64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    step = hs.TrainStep(
        nets[0],
        None,
        torch.optim.SGD(nets[0].parameters(), lr=1.0),
        precision="fp64",
        accumulate=len(sizes),
    )
    for micro in micros:
        record = step(micro)
    loss = nets[1](**whole).loss
    loss.backward()
    assert_near(record.cycle_loss, loss.detach())
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert q.grad is not None
        assert_near(p.detach(), (q - q.grad).detach())


def test_sparse_gradients_accumulate_and_a_micro_batch_without_terms_adds_none() -> None:
    def mean(out: Tensor, target: Tensor) -> Tensor:
        mask = target != IGNORED
        return (
            (out.squeeze(-1) - target) ** 2 * mask
        ).sum() / mask.sum()  # 0/0 when nothing is left

    def embedding(*, sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(CLASSES, 1, sparse=sparse).to(DEVICE, torch.float64)

    micros = [(labels(n, keep=1), labels(n, keep=keep)) for n, keep in ((4, 1), (3, 0), (5, 0.5))]
    plain, net = embedding(sparse=False), embedding(sparse=True)
    full_steps(plain, partial(torch.optim.SGD, lr=0.5), mean, [micros])
    options = {"accumulate": 3, "count": lambda b: (b[1] != IGNORED).sum(), "precision": "fp64"}
    step = hs.TrainStep(net, mean, torch.optim.SGD(net.parameters(), lr=0.5), **options)
    records = [step(*micro) for micro in micros]
    assert records[-1].updated
    assert_near(net.weight.detach(), plain.weight.detach())


def test_63_batches_at_cycle_8_are_8_updates_and_nothing_leaks_into_the_next_pass() -> None:
    batches = [(draw(2, 3), draw(2, 2)) for _ in range(63)]
    plain, split = network(2), network(2)
    cycles = [batches[i : i + 8] for i in range(0, 63, 8)] * 2
    assert [len(c) for c in cycles[:8]] == [8] * 7 + [7]
    full_steps(plain, OPTIMIZERS["adam"], nn.MSELoss(), cycles)
    step = hs.TrainStep(
        split, nn.MSELoss(), OPTIMIZERS["adam"](split.parameters()), precision="fp64", accumulate=8
    )
    for passes in (1, 2):
        updated = [bool(step(*batch).updated) for batch in batches]
        assert updated == ([False] * 7 + [True]) * 7 + [False] * 7
        tail = step.flush()
        assert tail is not None
        assert tail.updated
        assert step.flush() is None, "nothing is left"
        assert int(step.state.updates) == 8 * passes
    for p, q in zip(split.parameters(), plain.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float64, 1e-12),
        (
            torch.float32,
            10 * 2.0**-23,
        ),  # ten AdamW updates of weights below 2, each rounded to within one ulp
    ],
)
def test_the_seed_network_at_batch_8_and_cycle_8_lands_where_batch_64_does(
    dtype: torch.dtype, bound: float
) -> None:
    """Seed 001's data: 63 samples, so that the last of the eight batches holds 7. Its loss has shape (1,)."""

    def squared(out: Tensor, y: Tensor) -> Tensor:
        return ((y - out) ** 2).mean(dim=0)

    def trained(batch: int, cycle: int) -> list[Tensor]:
        torch.manual_seed(42)
        net = nn.Sequential(
            nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)
        ).to(DEVICE, dtype)
        for p in net.parameters():
            nn.init.uniform_(p)
        y = torch.arange(1, 64, dtype=dtype, device=DEVICE).unsqueeze(1)
        x = torch.cat([torch.zeros_like(y), y.log(), y * 5], dim=1)
        precision = "fp64" if dtype == torch.float64 else "fp32"
        options = {"precision": precision, "accumulate": cycle, "count": lambda b: len(b[1])}
        step = hs.TrainStep(net, squared, torch.optim.AdamW(net.parameters()), **options)
        for _ in range(10):
            for pair in zip(x.split(batch), y.split(batch), strict=True):
                assert step(*pair).loss.shape == ()
            step.flush()
        assert int(step.state.updates) == 10
        return [p.detach() for p in net.parameters()]

    for p, q in zip(trained(8, 8), trained(64, 1), strict=True):
        assert (p - q).abs().max() <= bound


@pytest.mark.parametrize("accumulate", [1, 3])
def test_sens_multiplies_the_gradient_and_leaves_the_reported_loss(accumulate: int) -> None:
    micros = [(draw(n, 3), draw(n, 2)) for n in (4, 1, 2)[:accumulate]]
    sgd = partial(torch.optim.SGD, lr=1.0)
    (loss, plain), *_ = split_steps(network(2), sgd, nn.MSELoss(), [micros], accumulate=accumulate)
    for sens in (-3.0, torch.tensor(-3.0), torch.tensor(-3.0, dtype=torch.float64, device=DEVICE)):
        (same, grads), *_ = split_steps(
            network(2), sgd, nn.MSELoss(), [micros], accumulate=accumulate, sens=sens
        )
        assert torch.equal(same, loss)
        for g, p in zip(grads, plain, strict=True):
            assert_near(g, -3 * p)


def test_an_array_loss_is_summed_and_a_sens_of_its_shape_weights_its_entries() -> None:
    def row_means(out: Tensor, target: Tensor) -> Tensor:
        return ((out - target) ** 2).mean(1)

    x, y, sens, sgd = draw(4, 3), draw(4, 2), draw(4), partial(torch.optim.SGD, lr=1.0)
    for weights in (None, sens):
        plain, net = network(2), network(2)
        rows = row_means(plain(x), y)
        rows.backward(torch.ones_like(rows) if weights is None else weights)
        options = {} if weights is None else {"sens": weights}
        (value, grads), *_ = split_steps(net, sgd, row_means, [[(x, y)]], accumulate=1, **options)
        assert torch.equal(value, rows.detach().sum())
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, plain.parameters(), strict=True))


def test_an_unknown_loss_needs_a_count_and_the_advice_in_the_error_works() -> None:
    def mine(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).abs().pow(1.5).mean()

    micros = [(draw(n, 3), draw(n, 2)) for n in (1, 4)]
    with pytest.raises(
        ValueError, match=r"accumulate=2: .*mine is not a loss of torch.nn; give count="
    ) as error:
        split_steps(network(2), OPTIMIZERS["sgd"], mine, [micros], accumulate=2)
    advice = str(error.value).partition("for instance count=")[2]
    assert_same_training(OPTIMIZERS["sgd"], mine, [micros], out=2, accumulate=2, count=eval(advice))


def test_batch_norm_in_a_cycle_gets_one_notice() -> None:
    def build(accumulate: int) -> hs.TrainStep:
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(DEVICE)
        return hs.TrainStep(
            net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1), accumulate=accumulate
        )

    build(1)  # no notice: warnings are errors
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = build(2)
        for _ in range(4):
            step(draw(4, 3).float(), draw(4, 2).float())
    (notice,) = caught
    assert notice.category is hs.Notice
    assert "batch-coupled layers see micro-batches: '1'" in str(notice.message), (
        "the layer is named"
    )
    assert notice.filename == __file__


def test_a_cycle_without_terms_does_not_age_the_scale() -> None:
    """Neither the scale nor the count of finite updates since it last moved."""
    net = nn.Linear(3, 2).to(DEVICE)
    scale = hs.Precision("fp32", scale=hs.DynamicScale(init=8.0, interval=2))
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), precision=scale
    )
    x, y = torch.randn(4, 3, device=DEVICE), torch.randint(0, 2, (4,), device=DEVICE)
    step(x, y)
    for _ in range(3):
        step(x, torch.full_like(y, -100))
    assert (step.state.growth.item(), step.state.scale.item()) == (1, 8.0)
    step(x, y)
    assert step.state.scale.item() == 16.0
