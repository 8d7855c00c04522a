"""A precision is one frozen value: what each word means, and what is refused."""

import math
import re
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.precision import TABLE

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64

# The table once more: name → parameters, compute, norms, output, scaled by default.
CONTRACT = {
    "fp64": (F64, F64, F64, F64, False),
    "fp32": (F32, F32, F32, F32, False),
    "tf32": (F32, F32, F32, F32, False),
    "O1": (F32, F16, F32, F32, True),
    "O2": (F32, F16, F32, F32, True),
    "O3": (F32, F16, F16, F32, False),
    "fp16": (F16, F16, F16, F32, False),
    "bf16": (BF16, BF16, BF16, F32, False),
}


def test_the_table_holds_exactly_the_contracted_names() -> None:
    assert set(TABLE) == set(CONTRACT)


@pytest.mark.parametrize("name", CONTRACT)
def test_a_name_means_its_row(name: str) -> None:
    p = hs.Precision.parse(name)
    params, compute, norms, output, scaled = CONTRACT[name]
    assert (p.params, p.compute, p.norms, p.output) == (params, compute, norms, output)
    assert p.scale == (hs.DynamicScale() if scaled else hs.NoScale())
    assert (p.rounding, p.kernels, p.keep, p.keep_batchnorm_fp32) == ("nearest", "auto", (), None)


@pytest.mark.parametrize(("alias", "name"), [("O0", "fp32"), ("mixed", "O1")])
def test_an_alias_is_the_same_value(alias: str, name: str) -> None:
    assert hs.Precision(alias) == hs.Precision(name)
    assert hs.Precision(alias).name == name
    assert hash(hs.Precision(alias)) == hash(hs.Precision(name))


def test_parse_passes_a_precision_through() -> None:
    p = hs.Precision("O2", dtype="bfloat16")
    assert hs.Precision.parse(p) is p


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", BF16])
def test_bfloat16_on_request_and_then_without_loss_scale(name: str, dtype: object) -> None:
    p = hs.Precision(name, dtype=dtype)
    assert (p.compute, p.params, p.scale) == (BF16, F32, hs.NoScale())
    assert p.norms == (BF16 if name == "O3" else F32)


@pytest.mark.parametrize("received", ["O4", "half", "", "o2", "FP32", "float16", "fp8", "auto"])
def test_an_unknown_name_is_refused_with_the_whole_table(received: str) -> None:
    with pytest.raises(ValueError, match="expected one of") as refusal:
        hs.Precision(received)
    text = str(refusal.value)
    assert repr(received) in text
    for name, row in TABLE.items():
        assert f"\n  {name:5} {row.description}" in text
    assert all(alias in text for alias in ("'O0'", "'mixed'"))
    assert ("planned" in text) == (received in ("fp8", "auto"))


@pytest.mark.parametrize("received", [None, 16, F16, ["O2"]])
def test_something_that_is_no_name_is_refused_with_the_whole_table(received: object) -> None:
    with pytest.raises(TypeError, match="expected a name or a Precision") as refusal:
        hs.Precision.parse(received)  # type: ignore[arg-type]
    assert all(f"\n  {name:5} " in str(refusal.value) for name in TABLE)


FOREIGN_NAMES = {
    "16-mixed": "O1",
    "bf16-mixed": "O1+bf16",
    "16-true": "fp16",
    "bf16-true": "bf16",
    "32-true": "fp32",
    "64-true": "fp64",
    16: "O1",
    32: "fp32",
    64: "fp64",
    "16": "O1",
    "32": "fp32",
    "no": "fp32",
    "amp": "O1",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "mixed_float16": "O2",
    "mixed_bfloat16": "O2+bf16",
    "fp16-mixed": "O1",
    "bf16_mixed": "O1+bf16",
    "16-mixed+bf16": "O1+bf16",
    "bf16-mixed+bf16": "O1+bf16",
    F16: "fp16",
    BF16: "bf16",
}


@pytest.mark.parametrize(("word", "suggestion"), FOREIGN_NAMES.items(), ids=str)
def test_the_words_of_other_libraries_are_answered_with_ours(word: object, suggestion: str) -> None:
    for make in (hs.Precision, hs.Precision.parse):
        with pytest.raises(
            (ValueError, TypeError), match=rf"\nDid you mean '{re.escape(suggestion)}'\?$"
        ):
            make(word)  # type: ignore[arg-type]
    precision = hs.Precision(suggestion)
    assert precision.name == suggestion.split("+")[0]
    assert (precision.compute == BF16) == ("bf16" in suggestion)


@pytest.mark.parametrize("word", ["", "true", "on", "nope", "int8", 8, 161, True, None])
def test_what_resembles_nothing_gets_no_question(word: object) -> None:
    with pytest.raises((ValueError, TypeError), match="expected") as refusal:
        hs.Precision.parse(word)  # type: ignore[arg-type]
    assert "Did you mean" not in str(refusal.value)


def test_mixed_bfloat16_is_taken_wherever_a_precision_is_named() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, nn.MSELoss(), optimizer, "O1+bf16")
    assert model.step.precision == hs.Precision("O1", dtype="bfloat16")
    step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision="O1+bf16")
    assert step.precision == hs.Precision("O1", dtype="bfloat16")


# Name, choice, words of the message: the field first, then what would do.
REFUSED = [
    ("fp32", {"dtype": "float16"}, ["dtype:", "float32", "O1, O2"]),
    ("fp16", {"dtype": "bfloat16"}, ["dtype:", "float16", "O1, O2"]),
    ("O2", {"dtype": "float32"}, ["dtype:", "'float16' or 'bfloat16'"]),
    ("O2", {"dtype": "float8"}, ["dtype:", "fp16, float16, bf16, bfloat16"]),
    ("O2", {"keep": {"head": "int8"}}, ["keep['head']:", "fp16, float16, bf16"]),
    ("fp32", {"keep": {"head": "fp32"}}, ["keep:", "'fp32'", "O2"]),
    ("tf32", {"keep": {"head": "fp32"}}, ["keep:", "'tf32'", "O2"]),
    ("O1", {"keep": {"head": "bf16"}}, ["keep:", "'fp32'", "O2"]),
    ("fp32", {"keep_batchnorm_fp32": True}, ["keep_batchnorm_fp32:", "None", "O2, O3"]),
    ("fp64", {"keep_batchnorm_fp32": True}, ["keep_batchnorm_fp32:", "None", "O2, O3"]),
    ("O1", {"keep_batchnorm_fp32": False}, ["keep_batchnorm_fp32:", "None", "O2, O3"]),
    ("O2", {"rounding": "kahan"}, ["rounding:", "'kahan'", "'fp16'", "'bf16'"]),
    ("fp32", {"rounding": "stochastic"}, ["rounding:", "'stochastic'", "'fp16'", "'bf16'"]),
    ("fp16", {"rounding": "up"}, ["rounding:", "'nearest', 'stochastic', 'kahan'", "'up'"]),
    ("O2", {"kernels": "fast"}, ["kernels:", "'auto', 'torch'", "'fast'"]),
    ("O2", {"scale": "static"}, ["scale:", "'dynamic', 'none'", "'static'"]),
    ("O2", {"scale": True}, ["scale:", "'dynamic', 'none'", "True"]),
    ("O2", {"scale": 0}, ["positive", "0"]),
    ("O2", {"scale": math.inf}, ["positive finite", "inf"]),
    ("O2", {"scale": math.nan}, ["positive finite", "nan"]),
]


@pytest.mark.parametrize(("name", "choice", "words"), REFUSED)
def test_a_choice_that_cannot_be_honoured_is_refused(
    name: str, choice: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        hs.Precision(name, **choice)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_keep_batchnorm_fp32_has_mindspores_meaning() -> None:
    """O2, False: norms low, still scaled. O3, True: O2's casts without scaling. None: the table."""
    low_norms = hs.Precision("O2", keep_batchnorm_fp32=False)
    fp32_norms = hs.Precision("O3", keep_batchnorm_fp32=True)
    assert (low_norms.norms, low_norms.scale) == (F16, hs.DynamicScale())
    assert (fp32_norms.norms, fp32_norms.scale, fp32_norms.cast) == (
        F32,
        hs.NoScale(),
        hs.Precision("O2").cast,
    )
    assert hs.Precision("O2", keep_batchnorm_fp32=True).norms == hs.Precision("O2").norms == F32
    assert hs.Precision("O3", keep_batchnorm_fp32=False).norms == hs.Precision("O3").norms == F16
    assert hs.Precision("bf16", keep_batchnorm_fp32=True).norms == F32


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, hs.DynamicScale()),
        ("dynamic", hs.DynamicScale()),
        ("none", hs.NoScale()),
        (128, hs.FixedScale(value=128.0)),
        (0.5, hs.FixedScale(value=0.5)),
        (hs.DynamicScale(init=4.0, interval=3), hs.DynamicScale(init=4.0, interval=3)),
    ],
)
def test_a_scale_is_a_word_a_number_or_a_value(value: object, expected: object) -> None:
    assert hs.Precision("O2", scale=value).scale == expected


def test_a_scale_on_request_where_the_table_has_none() -> None:
    assert hs.Precision("O3", scale="dynamic").scale == hs.DynamicScale()
    assert hs.Precision("O2", dtype="bfloat16", scale=8).scale == hs.FixedScale(value=8.0)


def test_keep_is_stored_in_one_order_so_that_equal_rules_are_equal() -> None:
    first = hs.Precision("O2", keep={"head*": "fp32", "body.0": F64})
    second = hs.Precision("O2", keep={"body.0": "float64", "head*": F32})
    assert first == second
    assert hash(first) == hash(second)
    assert first.rules == {"head*": F32, "body.0": F64}
    assert len({first, second, hs.Precision("O2")}) == 2


@pytest.mark.parametrize("field", [f.name for f in fields(hs.Precision)])
def test_no_field_can_be_set(field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(hs.Precision("O2"), field, None)


PERTURBED = {
    "name": hs.Precision("O3"),
    "dtype": hs.Precision("O2", dtype="bfloat16", scale="dynamic"),
    "keep": hs.Precision("O2", keep={"head*": "fp32", "a.b": "float64"}),
    "keep_batchnorm_fp32": hs.Precision("O2", keep_batchnorm_fp32=False),
    "keep_inputs": hs.Precision("O2", keep_inputs=["positions", "batch.time"]),
    "scale": hs.Precision("O2", scale=64),
    "rounding": hs.Precision("fp16", rounding="kahan"),
    "kernels": hs.Precision("O2", kernels="torch"),
}


def test_every_field_is_perturbed_below() -> None:
    assert set(PERTURBED) == {f.name for f in fields(hs.Precision)}


@pytest.mark.parametrize("field", PERTURBED)
def test_state_dict_round_trips_every_field(field: str) -> None:
    p = PERTURBED[field]
    assert getattr(p, field) != getattr(hs.Precision("O2"), field)
    assert hs.Precision(**p.state_dict()) == p
    # keep_inputs is saved only where it is used: checkpoints of before do not have it.
    always_saved = {f.name for f in fields(hs.Precision)} - {"keep_inputs"}
    assert set(p.state_dict()) - {"keep_inputs"} == always_saved
    assert ("keep_inputs" in p.state_dict()) == bool(p.keep_inputs)


@pytest.mark.parametrize("name", TABLE)
def test_state_dict_round_trips_every_name(name: str) -> None:
    assert hs.Precision(**hs.Precision(name).state_dict()) == hs.Precision(name)


SCALES = [
    hs.DynamicScale(init=3.0),
    hs.DynamicScale(growth=3.0),
    hs.DynamicScale(backoff=0.25),
    hs.DynamicScale(interval=7),
    hs.DynamicScale(floor=1.0),
    hs.DynamicScale(cap=2.0**20),
    hs.DynamicScale(max_skips=3),
    hs.DynamicScale(on_skips="bf16"),
    hs.FixedScale(value=5.0),
    hs.FixedScale(value=5.0, max_skips=2),
    hs.FixedScale(value=5.0, on_skips="fp32"),
    hs.NoScale(),
]


@pytest.mark.parametrize("scale", SCALES, ids=repr)
def test_state_dict_round_trips_every_scale_setting(scale: object) -> None:
    saved = hs.Precision("O2", scale=scale).state_dict()
    assert all(isinstance(v, str | int | float | None) for v in saved["scale"].values())
    assert hs.Precision(**saved).scale == scale


def test_an_eps_that_half_parameters_cannot_hold_gives_a_notice(device: torch.device) -> None:
    """Adam's 1e-8 is 0 in float16: 0 / 0 where the square of a gradient underflows."""

    def step(precision: str | hs.Precision, eps: float) -> None:
        net = nn.Linear(4, 3).to(device)
        hs.TrainStep(
            net, nn.MSELoss(), torch.optim.Adam(net.parameters(), eps=eps), precision=precision
        )

    with pytest.warns(
        hs.Notice, match=r"Adam: eps=1e-08 is 0 in float16.*give eps=1e-4, or rounding='kahan'"
    ):
        step("fp16", 1e-8)
    for precision, eps in (
        ("fp16", 1e-4),
        ("O2", 1e-8),
        ("bf16", 1e-8),
        (hs.Precision("fp16", rounding="kahan"), 1e-8),
    ):
        step(precision, eps)  # warnings are errors here: there is none
