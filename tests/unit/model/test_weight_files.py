"""`model.save` writes what the suffix of the file says; `load` reads it, checked."""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halfstep as hs
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
DATA = hs.data.Dataset((X, X[:, :3].argmax(1))).batch(6)


class TiedNet(nn.Module):
    """Batch norm with its counter, a tied weight, a buffer that is not saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.middle.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.tied(self.middle(self.norm(self.first(x)).relu())))
        return out


class NetWithExtraState(nn.Linear):
    """A module that adds a value of its own to its state_dict."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 3)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def make_trained(precision: str = "O2", **options: Any) -> hs.Model:
    net = TiedNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, **options)
    model.fit(1, DATA)
    return model


@pytest.mark.parametrize("precision", ["fp32", "O2", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["w.pt", "w.pth", "W.PT"])
def test_a_pt_file_is_a_state_dict_that_torch_reads(
    name: str, precision: str, tmp_path: Path
) -> None:
    model = make_trained(precision)
    path = tmp_path / name
    model.save(path)

    state = torch.load(path, weights_only=True)
    assert type(state) is OrderedDict
    expected = model.net.state_dict()
    assert list(state) == list(expected)
    assert_equal_tensors(state.values(), expected.values())
    assert state["middle.weight"].data_ptr() == state["tied.weight"].data_ptr()
    assert state._metadata == expected._metadata

    # Plain torch takes it, strictly.
    net = TiedNet(seed=5).to(model.net.first.weight.dtype)
    assert str(net.load_state_dict(state)) == "<All keys matched successfully>"

    # And so does load.
    other_net = TiedNet(seed=6).to(model.net.first.weight.dtype)
    other = hs.Model(other_net, None, None, precision)
    account = other.load(path)
    assert account.complete
    assert len(account.matched) == len(expected)
    assert_equal_tensors(other.net.state_dict().values(), expected.values())


def test_a_pt_file_that_torch_wrote_loads(tmp_path: Path) -> None:
    net = TiedNet(seed=2)
    new_format = tmp_path / "new.bin"  # the content decides, not the name
    old_format = tmp_path / "old.pt"
    torch.save(net.state_dict(), new_format)
    torch.save(net.state_dict(), old_format, _use_new_zipfile_serialization=False)
    for path in (new_format, old_format):
        model = hs.Model(TiedNet(seed=3))
        model.load(path)
        assert_equal_tensors(model.net.state_dict().values(), net.state_dict().values())


def test_averages_are_what_is_written(tmp_path: Path) -> None:
    model = make_trained(ema=0.5)
    weights = copy_tensors(model.net.parameters())
    model.save(tmp_path / "w.pt")
    model.save(tmp_path / "w.safetensors")
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert not torch.equal(state["head.weight"], model.net.head.weight)
    in_safetensors = load_file(tmp_path / "w.safetensors")
    assert set(in_safetensors) == set(state)
    for name, value in state.items():
        assert torch.equal(value, in_safetensors[name])
    assert_equal_tensors(model.net.parameters(), weights)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_training_goes_on_equally_from_either_file(name: str, tmp_path: Path) -> None:
    model = make_trained("fp32")
    model.save(tmp_path / name)
    copied = TiedNet(seed=9)
    other = hs.Model(
        copied, nn.CrossEntropyLoss(), torch.optim.SGD(copied.parameters(), lr=0.1), "fp32"
    )
    other.load(tmp_path / name)
    expected = TiedNet(seed=10)
    expected.load_state_dict(model.net.state_dict())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    other.fit(1, DATA)
    for x, y in DATA:
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()
    assert_equal_tensors(copied.parameters(), expected.parameters())


def test_a_name_without_a_suffix_is_safetensors(tmp_path: Path) -> None:
    """As it was before .pt and .pth were known."""
    model = hs.Model(TiedNet())
    model.save(tmp_path / "w")
    model.save(tmp_path / "w.safetensors")
    assert (tmp_path / "w").read_bytes() == (tmp_path / "w.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["w.bin", "w.h5", "w.pkl", "w.safetensor", "w.npz"])
def test_another_suffix_says_which_are_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"save: expected .*\.safetensors.*\.pt.*\.pth.*got "):
        hs.Model(TiedNet()).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_lightning_suffix_is_answered_with_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hs\.Checkpoint\(folder\)"):
        hs.Model(TiedNet()).save(tmp_path / "w.ckpt")


# torch 2.11 itself, in torch.export.load
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_program_files_are_answered_with_their_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = hs.Model(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    with pytest.raises(ValueError, match=r"torch\.onnx\.export\(model\.net\.eval\(\)"):
        model.save("w.onnx")
    with pytest.raises(ValueError, match=r"a program, not weights alone") as caught:
        model.save("w.pt2")

    # The advice works.
    line = re.search(r"as example: (.*)$", str(caught.value))
    assert line is not None
    example = X[:2]
    exec(line[1], {"torch": torch, "model": model, "example": example})
    exported = torch.export.load("w.pt2")
    assert torch.equal(exported.module()(example), model.net(example))
    with pytest.raises(ValueError, match=r"w\.pt2: expected weights, found a program"):
        model.load("w.pt2")


class Unknown:
    """A class that the restricted reader does not know."""


def test_extra_state_that_torch_would_not_read_back_is_refused(tmp_path: Path) -> None:
    model = hs.Model(NetWithExtraState({"kept": [1, 2.5, "a"]}))
    model.save(tmp_path / "w.pt")
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert state["_extra_state"] == {"kept": [1, 2.5, "a"]}
    model.load(tmp_path / "w.pt")

    before = (tmp_path / "w.pt").read_bytes()
    with pytest.raises(ValueError, match=r"got Unknown as _extra_state.*\.safetensors"):
        hs.Model(NetWithExtraState(Unknown())).save(tmp_path / "w.pt")
    assert (tmp_path / "w.pt").read_bytes() == before


def test_meta_tensors_are_refused(tmp_path: Path) -> None:
    model = hs.Model(nn.Linear(2, 2))
    model.net.to("meta")
    with pytest.raises(ValueError, match="weight on the device meta"):
        model.save(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TiedNet(), "found other Python objects beside them, such as a whole network"),
        ({"weight": Unknown()}, "found other Python objects"),
        ([1, 2], "expected a state_dict, tensors by name, found list"),
        (
            {"epoch": 3, "model_state_dict": {"weight": torch.ones(2)}},
            r"found a larger file that has one as 'model_state_dict': model\.load\(torch\.load\(",
        ),
        ({"weight": torch.ones(2), "lr": 0.1}, "received .* as 'lr'"),
    ],
)
def test_other_content_is_named_and_nothing_is_loaded(
    content: Any, message: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "w.pt")
    model = hs.Model(TiedNet())
    before = copy_tensors(model.net.state_dict().values())
    with pytest.raises(ValueError, match=message) as caught:
        model.load(tmp_path / "w.pt")
    assert str(tmp_path / "w.pt") in str(caught.value)
    assert_equal_tensors(model.net.state_dict().values(), before)


class Bomb:
    """Runs code where a pickle of it is loaded by Python's own reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_file_that_would_run_code_runs_none(new_format: bool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "w.pt"
    state = {**TiedNet().state_dict(), "bomb": Bomb(mark)}
    torch.save(state, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(ValueError, match="which would run code to load"):
        hs.Model(TiedNet()).load(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()


def test_a_file_cut_anywhere_is_a_value_error(tmp_path: Path) -> None:
    model = hs.Model(TiedNet())
    model.save(tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in (4, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.pt: expected a file of torch\.save"):
            model.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"cut\.pt: expected a safetensors file or one of torch"):
        model.load(path)
