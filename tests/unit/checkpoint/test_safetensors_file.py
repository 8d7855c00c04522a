"""The file is, byte for byte, the one that the package safetensors writes."""

import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as library_bytes
from torch import nn

from halfstep.checkpoint.safetensors_file import SAFETENSORS_DTYPES, write_safetensors
from halfstep.model.weights import save_weights

METADATA = {"format": "pt"}


def raw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits, also those of NaNs."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def test_all_dtypes_and_shapes(tmp_path: Path) -> None:
    tensors = {}
    for i, dtype in enumerate(SAFETENSORS_DTYPES):
        tensors[f"z.{i}"] = raw(dtype, 3, 5)
        tensors[f"a.{i}"] = raw(dtype, 1)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 3)
    tensors['né"\\\n'] = torch.zeros(2)
    write_safetensors(tmp_path / "file", tensors, METADATA)
    assert (tmp_path / "file").read_bytes() == library_bytes(tensors, metadata=METADATA)


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    """Transposed, expanded, overlapping, conjugated; and one storage under two names."""
    base = torch.randn(6, 4)
    tensors = {
        "t": base.t(),
        "row": base[3],
        "expanded": base[:1].expand(5, 4),
        "tied": base,
        "again": base,
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "param": nn.Parameter(base * 2),
    }
    write_safetensors(tmp_path / "file", tensors, METADATA)
    back = load_file(tmp_path / "file")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.resolve_conj()), name


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128 in x"),
        (torch.eye(2).to_sparse(), "x of layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "x on the device meta"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_the_old_file_is_touched(
    tensor: torch.Tensor, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ValueError, match=words):
        write_safetensors(tmp_path / "file", {"x": tensor}, METADATA)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_saving_weights_needs_no_copy_of_them(tmp_path: Path) -> None:
    """Nothing near the 16 MiB of the weights is allocated, by Python or by torch."""
    net = nn.Linear(2048, 2048)
    save_weights(net, tmp_path / "warm-up.safetensors")
    tracemalloc.start()
    save_weights(net, tmp_path / "file.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with torch.profiler.profile(profile_memory=True) as profile:
        save_weights(net, tmp_path / "file.safetensors")
    allocated = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    assert peak < 4 << 20
    assert allocated < 1 << 20
