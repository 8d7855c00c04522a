"""TensorBoard's event files, where the package is installed, and what is said where it is not."""

from pathlib import Path

import numpy as np
import pytest

from halfstep.callbacks import TensorBoard
from tests.unit.callbacks.test_logs import stop_at, train_logged
from tests.unit.callbacks.test_monitors import fit, make_samples, plain_losses


def test_without_its_package_tensorboard_names_the_extra(tmp_path: Path) -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install 'halfstep\[tensorboard\]'"):
            fit(1, TensorBoard(tmp_path))
    else:
        fit(1, TensorBoard(tmp_path))


def test_tensorboard_holds_every_scalar(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(2, TensorBoard(tmp_path), valid=make_samples(30).batch(7), sink=7)
    events = reader.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert set(events.Tags()["scalars"]) >= {
        "loss",
        "lr",
        "scale",
        "skipped",
        "grad_norm",
        "valid/loss",
        "valid/acc",
    }
    losses = [np.float32(v) for v in plain_losses(2)]
    assert [(e.step, np.float32(e.value)) for e in events.Scalars("loss")] == list(
        zip(range(1, 27), losses, strict=True)
    )
    assert [e.step for e in events.Scalars("valid/acc")] == [13, 26]


def test_a_resumed_tensorboard_shows_every_step_once(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(KeyboardInterrupt):
        train_logged(tmp_path, TensorBoard(tmp_path / "tb"), stop_at(18), sink=1)
    train_logged(tmp_path, TensorBoard(tmp_path / "tb"), resume="auto")
    events = reader.EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(1, 27))
    assert [e.step for e in events.Scalars("valid/acc")] == [4, 8, 12, 13, 16, 20, 24, 26]
