"""Every tree comes back bit for bit, with its strides and shared memory, or is refused."""

import copy
import itertools
import json
import struct
from collections import defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.checkpoint import check, pack, unpack
from halfstep.checkpoint.tensors import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def through_json(tree: Any) -> Any:
    """The tree after pack, JSON text, unpack."""
    skeleton, tensors = pack(tree)
    return unpack(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


def element_bytes(tensor: Tensor) -> list[bytes]:
    """The bytes of each element in index order, by the definition of strides."""
    memory = bytes(tensor.cpu().untyped_storage().tolist())
    itemsize = tensor.itemsize
    elements = []
    for index in itertools.product(*map(range, tensor.shape)):
        distances = [i * stride for i, stride in zip(index, tensor.stride(), strict=True)]
        start = itemsize * (tensor.storage_offset() + sum(distances))
        elements.append(memory[start : start + itemsize])
    return elements


def tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, list | tuple):
        return []
    return [tensor for item in tree for tensor in tensors_of(item)]


def same_tree(a: Any, b: Any) -> bool:
    """Equal in structure, types and bits."""
    if isinstance(a, Tensor):
        alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return type(b) is Tensor and alike and element_bytes(a) == element_bytes(b)
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return type(b) is dict and keys and all(map(same_tree, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_tree, a, b))
    if isinstance(a, float):
        return type(b) is float and struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and a == b


def share_memory_alike(a: Any, b: Any) -> bool:
    """Whether any two tensors share a storage in `b`, at the same distance, as in `a`."""
    pairs = [(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True) if x.numel()]
    for (x1, y1), (x2, y2) in itertools.combinations(pairs, 2):
        shared = x1.untyped_storage().data_ptr() == x2.untyped_storage().data_ptr()
        if shared != (y1.untyped_storage().data_ptr() == y2.untyped_storage().data_ptr()):
            return False
        if shared and x1.data_ptr() - x2.data_ptr() != y1.data_ptr() - y2.data_ptr():
            return False
    return True


@st.composite
def tensor_views(draw: st.DrawFn, bases: list[Tensor]) -> Tensor:
    """A tensor of any dtype, sizes and strides, over one of the bases."""
    base = draw(st.sampled_from(bases))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    size = draw(st.lists(st.integers(0, 3), max_size=3))
    stride = draw(st.lists(st.integers(0, 5), min_size=len(size), max_size=len(size)))
    last_element = base.numel() // dtype.itemsize - 1
    while size and sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n) > last_element:
        size = size[1:]
        stride = stride[1:]
    extent = 0
    if 0 not in size:
        extent = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    offset = draw(st.integers(0, last_element - extent))
    return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), offset, size, stride)


@st.composite
def trees(draw: st.DrawFn) -> Any:
    bases = [
        torch.tensor(list(draw(st.binary(min_size=n, max_size=n))), dtype=torch.uint8)
        for n in draw(st.lists(st.sampled_from([16, 48, 80]), min_size=1, max_size=3))
    ]
    bits = st.integers(0, 2**64 - 1).map(lambda i: struct.unpack("=d", struct.pack("=Q", i))[0])
    text = st.text(st.characters(exclude_categories=["Cs"]))
    scalar = st.none() | st.booleans() | st.integers() | st.floats() | bits | text | st.binary()
    keys = st.integers() | text
    leaf = scalar | tensor_views(bases)
    return draw(
        st.recursive(
            leaf,
            lambda inner: (
                st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner)
            ),
            max_leaves=12,
        )
    )


@given(tree=trees())
def test_any_tree_comes_back(tree: Any) -> None:
    check(tree)
    back = through_json(tree)
    assert same_tree(tree, back)
    assert share_memory_alike(tree, back)


@settings(max_examples=40)
@given(tree=trees())
def test_same_tree_gives_the_same_bytes(tree: Any) -> None:
    first_json, first = pack(tree)
    second_json, second = pack(copy.deepcopy(tree))
    assert json.dumps(first_json) == json.dumps(second_json)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_in_every_layout(name: str) -> None:
    dtype = DTYPES[name]
    limit = 2 if name == "bool" else 256
    values = torch.randint(0, limit, (60 * dtype.itemsize,), dtype=torch.uint8)
    plain = torch.empty(0, dtype=dtype).set_(values.untyped_storage(), 0, (3, 4, 5), (20, 5, 1))
    layouts = [
        plain,
        plain.transpose(0, 2),
        plain[:, 1:3, ::2],
        plain[1, 2, 3],
        plain[:, :0],
        plain[0, 0].expand(2, 5),
    ]
    for tensor in layouts:
        assert same_tree(tensor, through_json(tensor))
    assert share_memory_alike(layouts, through_json(layouts))


def test_integers_of_any_size() -> None:
    for value in (10**5000, -(10**5000), 2**63, -(2**63), -(2**63) - 1, 2**63 - 1, 2**64):
        assert through_json(value) == value


@pytest.mark.parametrize(
    "bits", ["7ff8000000000000", "fff8000000000001", "7ff0000000000001", "7ff0000000000000"]
)
def test_floats_that_json_lacks_keep_their_bits(bits: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", through_json(value)).hex() == bits


def test_minus_zero_keeps_its_sign() -> None:
    assert struct.pack(">d", through_json(-0.0)).hex() == "8000000000000000"


def test_keys_keep_type_and_order() -> None:
    tree = {"1": "text", 1: "number", "b": 0, "a": {}, -3: [], 2**70: (), "": None}
    assert list(through_json(tree).items()) == list(tree.items())


def test_ordered_dict_and_parameter_come_back_plain() -> None:
    net = nn.Linear(2, 3)
    back = through_json({"net": net.state_dict(), "weight": net.weight})
    assert type(back["net"]) is dict
    assert same_tree(dict(net.state_dict()), back["net"])
    assert (type(back["weight"]), back["weight"].requires_grad) == (Tensor, False)


def test_one_tensor_in_two_places_is_one_tensor() -> None:
    tensor = torch.randn(3)
    skeleton, tensors = pack({"a": tensor, "b": [tensor]})
    assert sum(flat.numel() for flat in tensors.values()) == 12
    back = unpack(skeleton, tensors)
    assert back["a"] is back["b"][0]


def test_a_write_through_one_view_is_seen_by_the_others() -> None:
    base = torch.arange(12.0)
    back = through_json(
        {"rows": base.view(3, 4), "tail": base[8:], "bits": base.view(torch.int32), "base": base}
    )
    back["tail"].fill_(-1)
    assert torch.equal(back["base"], torch.tensor([*range(8), *[-1] * 4], dtype=torch.float32))
    assert torch.equal(back["rows"], back["base"].view(3, 4))
    assert torch.equal(back["bits"], back["base"].view(torch.int32))


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    net[1].weight = net[0].weight
    back = through_json(net.state_dict())
    back["0.weight"].zero_()
    assert not back["1.weight"].any()


def test_unpack_makes_a_copy() -> None:
    tensor = torch.ones(64)
    skeleton, tensors = pack(tensor)
    back = unpack(skeleton, tensors)
    tensor.zero_()
    assert back.sum() == 64


def test_storage_is_cut_to_what_is_used() -> None:
    large = torch.randn(1000, 1000)
    skeleton, tensors = pack(
        {"row": large[500], "again": large[500, 10:20], "one": torch.randn(9)[8]}
    )
    assert [flat.numel() for flat in tensors.values()] == [4000, 4]
    assert torch.equal(unpack(skeleton, tensors)["row"], large[500])


def test_cut_keeps_offsets_whole_for_every_dtype() -> None:
    base = torch.randint(256, (64,), dtype=torch.uint8)
    # Bytes 19 to 32: from 16 on, both offsets are whole.
    tree = [base[19:23], base.view(torch.float64)[3:4]]
    skeleton, tensors = pack(tree)
    assert tensors["storage.0"].numel() == 16
    assert same_tree(tree, unpack(skeleton, tensors))


def test_bytes_between_elements_are_not_written() -> None:
    values = torch.arange(6).view(3, 2)
    files = []
    for fill in (7, 8):
        base = torch.full((3, 5), fill)
        base[:, 1:3] = values
        files.append(pack(base[:, 1:3])[1]["storage.0"])
    assert torch.equal(*files)
    assert files[0].view(torch.int64).tolist() == [0, 1, 0, 0, 0, 2, 3, 0, 0, 0, 4, 5]


def test_even_strides_that_fill_the_extent_are_not_taken_for_dense() -> None:
    base = torch.arange(9)
    # 9 elements within 9, but the odd ones are not among them.
    tensor = base.as_strided((3, 3), (2, 2))
    assert pack(tensor)[1]["storage.0"].view(torch.int64).tolist() == [0, 0, 2, 0, 4, 0, 6, 0, 8]
    assert same_tree(tensor, through_json(tensor))


@pytest.mark.parametrize("strides", [(0, 4, 0), (0, 0, 0), (2**40, 1, 1)])
def test_tensors_without_elements_keep_any_strides(strides: tuple[int, ...]) -> None:
    tensor = torch.zeros(12).as_strided((0, 3, 0), strides, 4)
    skeleton, tensors = pack([tensor, tensor.view(torch.int32)])
    assert [flat.numel() for flat in tensors.values()] == [0, 0]
    assert [back.stride() for back in unpack(skeleton, tensors)] == [strides, strides]


def test_conjugate_and_negative_views_are_resolved() -> None:
    z = torch.randn(2, 3, dtype=torch.complex64)
    back = through_json({"conj": z.conj(), "neg": z.conj().imag})
    assert torch.equal(back["conj"], torch.complex(z.real.clone(), -z.imag.clone()))
    assert torch.equal(back["neg"], -z.imag.clone())
    assert not back["conj"].is_conj()
    assert not back["neg"].is_neg()


def test_devices_are_mapped_once_per_storage(device: torch.device) -> None:
    base = torch.randn(6, device=device)
    mapped = []

    def map_device(saved: torch.device) -> torch.device:
        mapped.append(saved)
        return saved

    skeleton, tensors = pack([base, base[2:], torch.empty(0, device=device)])
    assert all(flat.device.type == "cpu" for flat in tensors.values())
    assert all(tensor.device.type == "cpu" for tensor in unpack(skeleton, tensors))
    first, second, empty = unpack(skeleton, tensors, device=map_device)
    assert mapped == [device, device]
    assert {first.device, second.device, empty.device} == {device}
    first.zero_()
    assert not second.any()


Pair = namedtuple("Pair", "a b")
CYCLE: dict[str, Any] = {"deep": []}
CYCLE["deep"].append(CYCLE)


class Sub(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "received", "advice"),
    [
        ({1, 2}, "got set", r"sorted\(values\)"),
        # A subclass of float: it would come back as a float.
        (np.float64(1), r"got numpy\.float64", r"value\.item\(\)"),
        (np.zeros(3), r"got numpy\.ndarray", r"torch\.from_numpy"),
        (torch.float32, r"got torch\.dtype", r"str\(dtype\)"),
        (torch.device("cpu"), r"got torch\.device", r"str\(device\)"),
        (torch.Size([2]), r"got torch\.Size", r"tuple\(size\)"),
        (defaultdict(int), r"got collections\.defaultdict", r"dict\(values\)"),
        (Pair(1, 2), r"got .*\.Pair", "Turn it into one of these"),
        (print, "got builtin_function_or_method", "Turn it into one of these"),
        (1j, "got complex", "Turn it into one of these"),
        ("a\ud800", "got 'a", r"os\.fsencode"),
        ({1.5: 0}, r"got the key 1\.5, a float", r"str\(key\)"),
        ({True: 0}, "got the key True, a bool", r"str\(key\)"),  # it would meet the key 1
        ({"\udfff": 0}, "got '", r"os\.fsencode"),
        (torch.eye(2).to_sparse(), "got a tensor of layout torch.sparse_coo", "to_dense"),
        (torch.empty(2, device="meta"), "got a meta tensor", "to_empty"),
        (torch.randn(2).as_subclass(Sub), "got the tensor subclass Sub", "plain tensors"),
        (
            nn.UninitializedParameter(),
            "got the tensor subclass UninitializedParameter",
            "plain tensors",
        ),
    ],
)
def test_everything_else_is_refused_by_its_path(value: Any, received: str, advice: str) -> None:
    tree = {"optimizer": {"state": {3: {"exp_avg": value}}, "layer.0": torch.ones(1)}}
    for act in (check, pack):
        with pytest.raises(
            TypeError, match=rf"^optimizer\.state\[3\]\.exp_avg: expected .*{received}.*{advice}"
        ):
            act(tree)


@pytest.mark.filterwarnings("ignore:.*[qQ]uantiz")
def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^\['layer\.0'\]\[1\]: .* got a quantized tensor\. Save tensor\.int_repr"
    ):
        check({"layer.0": [None, torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)]})


def test_cycles_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^deep\[0\]: expected a tree, got a dict that contains itself"
    ):
        check(CYCLE)


def test_shared_containers_are_no_cycle() -> None:
    shared = [1, torch.ones(2)]
    back = through_json({"a": shared, "b": shared})
    assert same_tree(back["a"], back["b"])


def nested_lists(levels: int) -> list[Any]:
    return [nested_lists(levels - 1)] if levels > 1 else []


def test_depth_is_limited() -> None:
    assert through_json(nested_lists(100)) == nested_lists(100)
    with pytest.raises(TypeError, match="expected at most 100 levels, got more"):
        check(nested_lists(101))


def test_the_root_has_a_name() -> None:
    with pytest.raises(TypeError, match=r"^the tree: expected dict, list"):
        check(object())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    data = torch.linspace(-1, 1, 24).view(4, 6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(data).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(1e-2)}),
        (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}),
        (torch.optim.LBFGS, {"history_size": 3}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_optimizers_go_on_as_if_nothing_happened(kind: Any, options: dict[str, Any]) -> None:
    net = nn.Linear(6, 3)
    other = nn.Linear(6, 3)
    optimizer = kind(net.parameters(), **options)
    train(net, optimizer, 3)
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    back = through_json(state)
    assert same_tree(json.loads(json.dumps(pack(state)[0])), json.loads(json.dumps(pack(back)[0])))
    twin = kind(other.parameters(), **options)
    other.load_state_dict(back["net"])
    twin.load_state_dict(back["optimizer"])
    train(net, optimizer, 3)
    train(other, twin, 3)
    assert torch.equal(net.weight, other.weight)


def test_channels_last_weights_keep_their_strides() -> None:
    net = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    back = through_json(net.state_dict())
    assert back["weight"].stride() == net.weight.stride() != (27, 9, 3, 1)
    assert torch.equal(back["weight"], net.weight)


def test_scaler_and_random_state() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    scaler.scale(torch.ones(1))
    state = {"scaler": scaler.state_dict(), "rng": torch.get_rng_state()}
    expected = torch.rand(5)
    back = through_json(state)
    assert back["scaler"] == scaler.state_dict()
    torch.set_rng_state(back["rng"])
    assert torch.equal(torch.rand(5), expected)


def test_wrong_tensors_are_refused() -> None:
    skeleton, tensors = pack(torch.ones(3))
    with pytest.raises(ValueError, match=r"expected 12 uint8 under 'storage\.0', found none"):
        unpack(skeleton, {})
    with pytest.raises(ValueError, match=r"found torch\.float32 of shape \(3,\)"):
        unpack(skeleton, {"storage.0": tensors["storage.0"].view(torch.float32)})
