"""Which precision to use: one decision, and the documentation's table is the same one."""

import re
from pathlib import Path

import pytest
import torch

from halfstep.precision import Precision
from halfstep.precision.advice import (
    HalfUnits,
    StepTime,
    advise,
    begin_with,
    describe_pace,
    find_half_units,
    precisions_to_compare,
    why_slow,
)
from halfstep.precision.backend_flags import check_supported
from halfstep.precision.cpu_half import has_native

NO_UNITS = HalfUnits("CPU", ())
BF16_CPU = HalfUnits("CPU", ("bf16",))
OLD_GPU = HalfUnits("GPU", ("fp16",))
NEW_GPU = HalfUnits("GPU", ("bf16", "fp16"))
CHOOSING = Path(__file__).parents[3] / "docs/guide/choosing.md"


@pytest.mark.parametrize(
    ("units", "speedups", "precision", "reason"),
    [
        (NEW_GPU, {"bf16": 8.0, "fp16": 10.0}, "O1+bf16", "bf16 products are 8.0 × as fast"),
        (NEW_GPU, {"bf16": 1.4, "fp16": 1.5}, "O1", "its loss scale|loss scale that adapts"),
        (NEW_GPU, {"bf16": 1.4, "fp16": 1.49}, "fp32", "are not 1.5 × as fast here"),
        (OLD_GPU, {"fp16": 8.0}, "O1", "fp16 products are 8.0 ×"),
        (BF16_CPU, {"bf16": 3.0}, "O1+bf16", "a small network, .* stays with fp32"),
        (BF16_CPU, {}, "O1+bf16", "this CPU has bf16 units, and bf16 needs no loss scale"),
        (NO_UNITS, {}, "fp32", "this CPU has no half-precision units: .* not for speed"),
        # Fast, but emulated: torch's CPU kernels are no units.
        (NO_UNITS, {"fp16": 9.0}, "fp32", "no half-precision units"),
    ],
)
def test_products_decide_before_units(
    units: HalfUnits, speedups: dict[str, float], precision: str, reason: str
) -> None:
    advice = advise(units, product_speedups=speedups)
    assert advice.precision == precision
    assert re.search(reason, advice.reason)


def test_steps_decide_before_products() -> None:
    """The units are fast, and this network is too small for them."""
    steps = [StepTime("fp32", 2.0, False), StepTime("O1+bf16", 2.6, False)]
    advice = advise(BF16_CPU, product_speedups={"bf16": 3.0}, steps=steps)
    assert advice == ("fp32", "O1+bf16 is slower (2.6 ms a step against 2)")
    faster = [StepTime("fp32", 2.0, False), StepTime("O1+bf16", 1.0, True)]
    assert advise(BF16_CPU, steps=faster) == (
        "O1+bf16",
        "2 × as fast as fp32 (1 ms a step against 2)",
    )


def test_what_is_not_proved_is_not_recommended_however_fast() -> None:
    steps = [
        StepTime("fp32", 4.0, False, "reference", "reference"),
        StepTime("bf16", 1.0, True, "worse", "worse by 2.0 ± 0.3"),
        StepTime("fp16", 1.5, True, "unknown", "cannot tell"),
        StepTime("O2", 2.0, True, "same", "same within 0.5 points"),
        StepTime("O1", 3.0, True, "better", "better by 0.4 ± 0.3"),
    ]
    advice = advise(NEW_GPU, steps=steps)
    assert advice.precision == "O2"
    assert advice.reason == (
        "same within 0.5 points as fp32, and 2 × as fast (2 ms a step against 4)"
    )


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.31, "1.31 × as slow as fp32"),
        (0.5, "2 × as fast as fp32"),
        (1.05, "as fast as fp32"),
        (0.951, "as fast as fp32"),
        (1.06, "1.06 × as slow as fp32"),
    ],
)
def test_a_pace_in_words(ratio: float, text: str) -> None:
    assert describe_pace(3 * ratio, 3, "fp32") == text


@pytest.mark.parametrize(
    ("units", "precisions", "reason"),
    [
        (NO_UNITS, ["O2"], "this CPU has no half-precision units"),
        (BF16_CPU, ["O2"], "this CPU has no fp16 units"),
        (BF16_CPU, ["O2+bf16"], "the bf16 units of this CPU save less than the casts cost"),
        (BF16_CPU, ["O2", "bf16"], "no fp16 units, and in a network of this size the bf16"),
        (NO_UNITS, ["fp64"], "^$"),
        (NEW_GPU, ["tf32", "fp64"], "^$"),
    ],
)
def test_a_slow_precision_has_a_reason(
    units: HalfUnits, precisions: list[str], reason: str
) -> None:
    assert re.search(reason, why_slow(units, precisions))


def test_what_is_compared_by_default_is_what_the_device_is_good_for() -> None:
    assert precisions_to_compare(NO_UNITS) == ("fp32", "fp16", "O1", "O2")
    assert precisions_to_compare(BF16_CPU) == ("fp32", "bf16", "O1+bf16", "O2+bf16")
    assert precisions_to_compare(OLD_GPU) == ("fp32", "fp16", "O1", "O2")
    assert precisions_to_compare(NEW_GPU) == (
        *("fp32", "fp16", "O1", "O2"),
        *("bf16", "O1+bf16", "O2+bf16"),
    )
    for units in (NO_UNITS, BF16_CPU, OLD_GPU, NEW_GPU):
        names = precisions_to_compare(units)
        assert begin_with(units) in names
        assert len({Precision.parse(name) for name in names}) == len(names)


def test_the_units_of_this_cpu_are_what_its_kernels_go_by() -> None:
    units = find_half_units(torch.device("cpu"))
    assert ("bf16" in units.dtypes) == has_native(torch.bfloat16)
    assert ("fp16" in units.dtypes) == has_native(torch.float16)


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [((9, 0), ("bf16", "fp16")), ((8, 0), ("bf16", "fp16")), ((7, 5), ("fp16",)), ((6, 1), ())],
)
def test_the_units_of_a_gpu_follow_from_its_capability(
    capability: tuple[int, int], dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capability is all that is asked of a device; no test machine has all of these."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert find_half_units(torch.device("cuda", 0)) == HalfUnits("GPU", dtypes)


def test_an_error_recommends_nothing_that_the_device_is_slow_at() -> None:
    begin = begin_with(find_half_units(torch.device("cpu")))
    with pytest.raises(ValueError, match="needs a CUDA device") as error:
        check_supported(Precision("tf32"), torch.device("cpu"))
    advice = str(error.value).rpartition("; ")[2]
    expected = "use 'fp32'" if begin == "fp32" else f"use 'fp32', or {begin!r} for speed"
    assert advice == expected


def test_the_documented_table_is_this_decision() -> None:
    """docs/guide/choosing.md, question 2: the row of each device has what `begin_with` says."""
    rows = re.findall(r"^\|[^|]*\| (a[^|]*) \| `([^`]+)`", CHOOSING.read_text(), re.MULTILINE)
    documented = {device: precision for device, precision in rows if "GPU" in device}
    expected = {
        "bfloat16 units": begin_with(NEW_GPU),
        "older GPU with float16 units": begin_with(OLD_GPU),
        "neither": begin_with(NO_UNITS),
    }
    assert len(documented) == len(expected)
    for words, precision in expected.items():
        [found] = [value for device, value in documented.items() if words in device]
        assert found == precision
    assert begin_with(BF16_CPU) == begin_with(NEW_GPU)  # one row for both
