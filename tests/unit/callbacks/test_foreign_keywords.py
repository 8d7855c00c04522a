"""Keywords of callbacks as other libraries call them: the error says the one to write."""

from pathlib import Path
from typing import Any

import pytest

import halfstep as hs

RENAMED: list[tuple[Any, str, str]] = [
    (hs.EarlyStopping, "monitor", "metric"),
    (hs.EarlyStopping, "restore_best_weights", "restore_best"),
    (hs.EarlyStopping, "patiense", "patience"),
    (hs.ReduceLROnPlateau, "monitor", "metric"),
    (hs.ReduceLROnPlateau, "threshold", "min_delta"),
    (hs.Checkpoint, "filepath", "folder"),
    (hs.Checkpoint, "dirpath", "folder"),
    (hs.Checkpoint, "save_top_k", "keep"),
    (hs.Checkpoint, "every_n_epochs", "every_epochs"),
    (hs.CSVLog, "filename", "path"),
    (hs.JSONLLog, "save_dir", "path"),
    (hs.TensorBoard, "log_dir", "folder"),
]


@pytest.mark.parametrize(("callback", "word", "ours"), RENAMED)
def test_a_word_of_another_library_is_answered_with_ours(
    callback: Any, word: str, ours: str
) -> None:
    with pytest.raises(TypeError) as caught:
        callback(**{word: "val_loss"})
    message = str(caught.value)
    expected = f"{callback.__name__}: unknown option {word!r}; did you mean {ours!r}? options are: "
    assert message.startswith(expected)
    assert ours in message.removeprefix(expected).split(", ")


@pytest.mark.parametrize("word", ["save_best_only", "save_weights_only", "filename"])
def test_a_word_that_has_no_single_counterpart_gets_a_sentence(word: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"^Checkpoint: unknown option '{word}'; \w+") as caught:
        hs.Checkpoint(tmp_path, **{word: True})
    assert "did you mean" not in str(caught.value)


def test_monitor_is_best(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"unknown option 'monitor'; did you mean 'best'\?"):
        hs.Checkpoint(tmp_path, monitor="val_loss")  # type: ignore[call-arg]
