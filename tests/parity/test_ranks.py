"""Several ranks against one process: real processes under torchrun, on gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_jobs import run_case, run_cases

ORDINARY = ["masked_cycles", "summed_loss", "layer_of_one_rank", "mixed_parameters"]
EXACT = ["exact_fp32", "exact_fp32_cycles", "exact_O1", "exact_O2", "exact_bf16"]
EXACT += ["exact_mixed", "exact_buffers"]
OVERFLOWS = ["overflow_in_first_lane", "overflow_in_last_lane"]
ALL = [*ORDINARY, *EXACT, *OVERFLOWS, "parts_and_metrics", "sunk", "time_limits"]

# What is refused on several ranks → words of the error.
REFUSALS = {
    "other_network": "ValueError: rank 1 has another network than rank 0, for instance in bias",
    "other_options": "ValueError: rank 1 has accumulate = 2, rank 0 has 1: expected one program",
    "other_order": "ValueError: rank 1 has the parameters of rank 0 in another order",
    "other_rate": "ValueError: step 2: rank 1 has other weights than rank 0",
    "shuffled_otherwise": "ValueError: step 6: rank 1 was given another batch than rank 0",
    "longer_data": "ValueError: rank 1 has data of {'training': 4, 'valid': 2} batches, rank 0",
    "longer_valid_data": "ValueError: rank 1 has data of {'training': 3, 'valid': 3} batches",
    "other_parts": "ValueError: loss: expected the same parts on all ranks",
    "growing_buffer": "ValueError: expected buffers that keep their number, shapes and dtypes",
    "sizes_in_a_tuple": "TypeError: expected tensors, or lists of text, to be divided",
    "dicts_in_a_dict": "TypeError: expected a batch of tensors whose first dimension counts",
    "other_batches": "ValueError: step 1: rank 1 was given another batch than rank 0",
    "lists_of_samples": "TypeError: expected a batch of tensors whose first dimension counts",
    "wrapped_network": "TypeError: net: expected the plain network",
    "distributed_sampler": "ValueError: expected the same batches on every rank",
    "unknown_loss": "ValueError: a batch in 2 slices: expected to know how many terms",
    "too_few_slices": "ValueError: logical=1: expected at least as many micro-batches as ranks",
    "sparse_gradients": "ValueError: expected dense gradients, to be summed over ranks",
}

# Sums of some 40 terms of size 1 in another order, in float64, over 8 updates of AdamW.
FP64_BOUND = 1e-12

# More ranks than cores take their time.
COUNTS = [
    2,
    pytest.param(3, marks=pytest.mark.slow),
    pytest.param(4, marks=pytest.mark.slow),
    pytest.param(6, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: run_case(name) for name in ALL}


@pytest.fixture(scope="module", params=COUNTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_cases(request.param, folder, ALL)


@pytest.mark.parametrize("name", ORDINARY)
def test_ranks_give_the_result_of_one_process(name: str, ranks: Any, alone: Any) -> None:
    for outcomes in ranks:
        for key, expected in alone[name]["net"].items():
            value = outcomes[name]["net"][key]
            assert torch.allclose(value, expected, rtol=0, atol=FP64_BOUND), key
        difference = outcomes[name]["records"] - alone[name]["records"]
        assert difference.abs().max() <= FP64_BOUND
        assert outcomes[name]["updates"] == alone[name]["updates"] > 0


@pytest.mark.parametrize("name", EXACT)
def test_exact_bits_are_those_of_one_process(name: str, ranks: Any, alone: Any) -> None:
    for outcomes in ranks:
        for key, expected in alone[name]["net"].items():
            assert torch.equal(outcomes[name]["net"][key], expected), key
        # As integers: the norm of an overflow is NaN.
        records = outcomes[name]["records"].view(torch.int64)
        assert torch.equal(records, alone[name]["records"].view(torch.int64))
        assert outcomes[name]["fingerprint"] == alone[name]["fingerprint"]


@pytest.mark.parametrize("name", ORDINARY)
def test_all_ranks_hold_the_same_bits(name: str, ranks: Any) -> None:
    assert len({outcomes[name]["fingerprint"] for outcomes in ranks}) == 1


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_on_one_rank_is_skipped_by_all(name: str, ranks: Any) -> None:
    for outcomes in ranks:
        before = outcomes[name]["before"]
        after = outcomes[name]["after"]
        assert after["skips"] == before["skips"] + 1
        assert after["updates"] == before["updates"]
        for key, value in before["net"].items():
            assert torch.equal(after["net"][key], value), key


def test_dropout_differs_between_lanes_and_weights_move(alone: Any) -> None:
    # What is compared above is neither constant nor without random numbers.
    first, last = alone["exact_fp32"]["records"][[0, -1], 0]
    assert first != last
    without_cycles = alone["exact_fp32"]["net"]
    with_cycles = alone["exact_fp32_cycles"]["net"]
    assert not torch.equal(without_cycles["0.weight"], with_cycles["0.weight"])


def test_parts_metrics_and_scores_are_those_of_one_process(ranks: Any, alone: Any) -> None:
    for outcomes in ranks:
        assert outcomes["parts_and_metrics"] == alone["parts_and_metrics"]
    assert {"loss", "entropy", "size", "acc"} <= set(alone["parts_and_metrics"]["history"][0])


def test_a_sunk_step_is_the_same_step(ranks: Any) -> None:
    for outcomes in ranks:
        through_sink, one_by_one = outcomes["sunk"]["fingerprints"]
        assert through_sink == one_by_one


def test_a_time_limit_ends_with_its_run(ranks: Any) -> None:
    for outcomes in ranks:
        assert outcomes["time_limits"]["position"] == 51


def test_what_cannot_be_divided_is_refused_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_cases(2, tmp_path, list(REFUSALS))
    for outcome in outcomes:
        for name, words in REFUSALS.items():
            assert outcome[name]["error"].startswith(words), (name, outcome[name]["error"])
