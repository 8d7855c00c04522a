"""States with one wrong value, loaded without fit: taken, or refused with nothing touched.

TrainStep, GradScaler, metrics, Dataset, Model.load, and what the command asks a folder.
"""

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.checkpoint.health import read_health
from halfstep.experiment.run_progress import finished_run
from halfstep.experiment.training_run import load_weights
from halfstep.metrics import Metrics
from tests.faults.test_mutated_checkpoints import RUNS, SAVED_STEP, hs_seed, make_dataset, saved_run
from tests.support.mutated_trees import mutate
from tests.support.run_endings import differences, leaves_by_path


@dataclass
class Owner:
    """Something that loads a state: its own, and how to load another and to go on with it."""

    state: Callable[[], Any]
    load: Callable[[Any], object]
    go_on: Callable[[], object]


def make_step(seed: int = 0, **options: Any) -> hs.TrainStep:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    step = hs.TrainStep(net, nn.MSELoss(), optimizer, **options)
    for _ in range(3):
        step(torch.randn(5, 4), torch.randn(5, 3))
    return step


def step_owner(**options: Any) -> Owner:
    with warnings.catch_warnings(action="ignore"):
        step = make_step(**options)
    return Owner(
        step.state_dict,
        step.load_state_dict,
        lambda: [step(torch.randn(5, 4), torch.randn(5, 3)) for _ in range(3)],
    )


def scaler_owner() -> Owner:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = hs.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def iterate(count: int = 3) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(5, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    iterate()
    return Owner(scaler.state_dict, scaler.load_state_dict, iterate)


class Counter:
    """A metric of the user's, which loads one entry after the other."""

    def __init__(self) -> None:
        self.hits = torch.zeros(3)
        self.calls = 0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.hits += torch.bincount(labels, minlength=3)
        self.calls += 1

    def compute(self) -> torch.Tensor:
        return self.hits.max() / self.calls

    def reset(self) -> None:
        self.hits.zero_()
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"hits": self.hits.clone(), "calls": self.calls}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.calls = int(saved["calls"])
        self.hits.copy_(saved["hits"].view(3))


def metrics_owner() -> Owner:
    metrics = Metrics({"acc": hs.metrics.Accuracy(), "hits": Counter(), "top": Counter()})
    batch = (torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]))

    def update() -> None:
        for metric in metrics.by_name.values():
            metric.update(*batch)

    update()
    return Owner(metrics.state_dict, metrics.load_state_dict, update)


def dataset_owner() -> Owner:
    data = make_dataset()
    batches = iter(data)
    for _ in range(2):
        next(batches)
    return Owner(data.state_dict, data.load_state_dict, lambda: list(data))


OWNERS: dict[str, Callable[[], Owner]] = {
    "TrainStep, fp32": step_owner,
    "TrainStep, O2 inside a cycle": lambda: step_owner(precision="O2", accumulate=2, ema=0.9),
    "TrainStep, fp16 with Kahan rounding": lambda: step_owner(
        precision=hs.Precision("fp16", rounding="kahan"), nonfinite="skip"
    ),
    "GradScaler": scaler_owner,
    "metrics": metrics_owner,
    "Dataset": dataset_owner,
}
# torch's own error for an empty state, and what a metric of the user's raises for itself.
OWN_ERRORS = {"GradScaler": (RuntimeError,), "metrics": (Exception,)}


@pytest.mark.parametrize("name", OWNERS)
def test_a_mutated_state_is_taken_or_refused_with_nothing_touched(name: str) -> None:
    refused = 0
    wrong = []
    for seed in range(60):
        hs_seed(seed)
        owner = OWNERS[name]()
        mutated, path, kind = mutate(owner.state(), random.Random(f"{name} {seed}"))
        label = f"seed {seed}, {kind} of {'.'.join(map(str, path))}"
        before = leaves_by_path(copy.deepcopy(owner.state()))
        try:
            with warnings.catch_warnings(action="ignore"):
                owner.load(mutated)
        except Exception as error:
            refused += 1
            if not isinstance(error, (ValueError, *OWN_ERRORS.get(name, ()))):
                wrong.append(f"{label}: a raw error {error!r}")
            changed = differences(leaves_by_path(owner.state()), before)
            if changed:
                wrong.append(f"{label}: refused, and changed {changed}: {error}")
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                owner.go_on()
        except hs.NonFiniteError:  # a NaN among the weights
            pass
        except Exception as error:
            if name != "metrics":
                wrong.append(f"{label}: loaded, then {error!r}")
    assert wrong == [], "\n".join(wrong)
    assert refused >= 20


@pytest.mark.parametrize("name", RUNS)
def test_weights_of_a_mutated_checkpoint(name: str, tmp_path: Path) -> None:
    """Model.load, `halfstep eval` and the question whether a run is finished."""
    tree, _ = saved_run(name)
    wrong = []
    for seed in range(40):
        mutated, path, kind = mutate(tree, random.Random(f"weights {name} {seed}"))
        folder = checkpoint.save(tmp_path / str(seed) / checkpoint.name_of(SAVED_STEP), mutated)
        hs_seed(1)
        with warnings.catch_warnings(action="ignore"):
            parts = RUNS[name](tmp_path)
        model = parts.model
        before = {key: value.clone() for key, value in model.net.state_dict().items()}
        actions: list[Callable[[], object]] = [
            lambda m=model, f=folder: m.load(f),
            lambda f=folder: finished_run(f.parent, 1),
        ]
        if "net" in tree["step"]:
            actions.append(lambda m=model, f=folder: load_weights(m, f))
        for action in actions:
            try:
                with warnings.catch_warnings(action="ignore"):  # of NaN, which is loaded
                    action()
            except (ValueError, OSError) as error:
                after = model.net.state_dict()
                if differences(dict(after), before):
                    wrong.append(f"{seed}, {kind} of {path}: refused, and changed: {error}")
            except Exception as error:
                wrong.append(f"{seed}, {kind} of {path}: a raw error {error!r}")
            before = {key: value.clone() for key, value in model.net.state_dict().items()}
    assert wrong == [], "\n".join(wrong)


def small_model() -> hs.Model:
    torch.manual_seed(0)
    return hs.Model(nn.Linear(4, 3), nn.MSELoss())


GIVEN: dict[str, tuple[Any, str]] = {
    "a training state": (
        {"model": {"weight": torch.ones(3, 4)}, "epoch": 3},
        r"received a dict of 1 as 'model'\. If these are the weights, load them: "
        r"load\(state\['model'\]\)",
    ),
    "a number": ({"weight": torch.ones(3, 4), "bias": 3}, "received 3 as 'bias'"),
    "a complex tensor": (
        {"weight": torch.ones(3, 4, dtype=torch.complex64), "bias": torch.ones(3)},
        r"weight: expected float values of shape \[3, 4\], received complex64 \[3, 4\]",
    ),
    "a meta tensor": (
        {"weight": torch.ones(3, 4), "bias": torch.ones(3, device="meta")},
        "bias: expected float values .* received a meta tensor, without values",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_cannot_be_copied_are_named_before_any_is(name: str, strict: bool) -> None:
    state, words = GIVEN[name]
    model = small_model()
    before = {key: value.clone() for key, value in model.net.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        model.load(state, strict=strict)
    assert all(torch.equal(model.net.state_dict()[key], before[key]) for key in before)


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    model = small_model()
    model.save(tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    for length in (0, 4, 20, len(content) - 1):
        (tmp_path / "w.safetensors").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"w\.safetensors: expected a safetensors file"):
            model.load(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"{", b'{"nonfinite": 3}', b'{"updates": "x"}', b'{"stalled": null}']
)
def test_a_mutated_health_file_is_named(content: bytes, tmp_path: Path) -> None:
    tree, _ = saved_run(next(iter(RUNS)))
    folder = tmp_path / checkpoint.name_of(SAVED_STEP)
    checkpoint.save(folder, tree, extra_files={"health.json": content})
    with pytest.raises(checkpoint.CheckpointError, match=r"health\.json: expected what halfstep"):
        read_health(folder)
