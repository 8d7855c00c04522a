"""Model.fit on several ranks: the run of one process, bit for bit, also resumed on others."""

from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs
from tests.support import rank_fit
from tests.support.rank_jobs import check_restarts, run_ranks


def fit_on_ranks(count: int, folder: Path, **settings: object) -> dict[str, Any]:
    words = [f"{name}={value}" for name, value in settings.items()]
    result = run_ranks(count, rank_fit.__file__, folder, *words, restarts=1)
    assert result.returncode == 0, result.stderr[-4000:]
    if not check_restarts(result):
        assert result.stdout.count("has ended") == count
    outcome: dict[str, Any] = torch.load(folder / "outcome.pt")
    return outcome


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, rank_fit.outcome(*rank_fit.train(folder))


def assert_same_run(
    folder: Path, outcome: dict[str, Any], alone: tuple[Path, dict[str, Any]]
) -> None:
    expected_folder, expected = alone
    for name, value in expected["net"].items():
        assert torch.equal(outcome["net"][name], value), name
    assert outcome["fingerprint"] == expected["fingerprint"]
    assert outcome["history"] == expected["history"]
    assert (folder / "log.csv").read_bytes() == (expected_folder / "log.csv").read_bytes()
    names = sorted(path.name for path in folder.glob("step-*"))
    assert names == sorted(path.name for path in expected_folder.glob("step-*"))


@pytest.mark.slow
def test_two_ranks_then_three_give_the_run_of_one_process(tmp_path: Path, alone: Any) -> None:
    fit_on_ranks(2, tmp_path, epochs=1)
    outcome = fit_on_ranks(3, tmp_path, epochs=2)
    assert_same_run(tmp_path, outcome, alone)


def test_one_process_goes_on_where_two_ranks_stopped(tmp_path: Path, alone: Any) -> None:
    fit_on_ranks(2, tmp_path, epochs=1)
    outcome = rank_fit.outcome(*rank_fit.train(tmp_path))
    assert_same_run(tmp_path, outcome, alone)


def test_checkpoints_are_saved_when_the_cycle_has_ended(alone: Any) -> None:
    folder, _ = alone
    # 13 batches a pass, in cycles of 3 with a tail.
    cycle_ends = {3, 6, 9, 12, 13, 16, 19, 22, 25, 26}
    steps = {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}
    # Every 5th step is due at 5, 10, …, 25; those left by keep=5 are the later ones.
    assert {12, 16, 22, 25, 26} <= steps <= cycle_ends


@pytest.mark.slow
def test_ordinary_sums_train_as_well(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "alone").mkdir()
    outcome = fit_on_ranks(2, tmp_path / "ranks", exact="none", precision="fp32")
    _, run = rank_fit.train(tmp_path / "alone", exact=None, precision="fp32")
    # Other dropout masks and another order of sums: the same training, not the same bits.
    assert outcome["history"][-1]["loss"] == pytest.approx(run.history[-1]["loss"], rel=0.15)


def test_exact_bits_refuse_what_depends_on_the_machine() -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match="compile: expected 'auto' or False beside exact='bits'"):
        hs.TrainStep(net, loss, optimizer, exact="bits", compile=True)
    with pytest.raises(ValueError, match="strategy: expected 'auto', 'ddp' or 'none'"):
        hs.TrainStep(net, loss, optimizer, strategy="fsdp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logical: expected 1 or more"):
        hs.TrainStep(net, loss, optimizer, exact="bits", logical=0)
