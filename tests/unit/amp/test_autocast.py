"""autocast as context, decorator and switch: right dtypes, no stale casts, no state that leaks."""

import copy
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.grads import GradManager
from halfstep.precision.cpu_half import has_native

LOW_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
KERNELS = ("auto", "torch")
kernels = pytest.mark.parametrize("kernels", KERNELS)


@pytest.fixture
def net() -> nn.Linear:
    return nn.Linear(8, 4)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8)


def cpu_autocast(**kwargs: object) -> amp.autocast:
    return amp.autocast(device_type="cpu", **kwargs)  # type: ignore[arg-type]


# what is computed


@pytest.mark.parametrize("low", LOW_DTYPES)
def test_a_product_is_the_rounded_float32_product_of_the_rounded_operands(
    low: str, net: nn.Linear, x: Tensor
) -> None:
    if has_native(LOW_DTYPES[low]):
        pytest.skip("this CPU has units for it: torch's own kernel runs")
    wide = [t.detach().to(LOW_DTYPES[low]).float() for t in (x, net.weight, net.bias)]
    with cpu_autocast(low_prec_dtype=low):
        out = net(x)
    assert out.dtype == LOW_DTYPES[low]
    assert torch.equal(out, F.linear(*wide).to(LOW_DTYPES[low]))


@pytest.mark.parametrize("low", LOW_DTYPES)
def test_torch_kernels_are_torchs_autocast_without_cache(
    low: str, net: nn.Linear, x: Tensor
) -> None:
    with cpu_autocast(low_prec_dtype=low, kernels="torch"):
        out = net(x)
        loss = F.mse_loss(net(x), torch.zeros(3, 4))
    with torch.autocast("cpu", LOW_DTYPES[low], cache_enabled=False):
        assert torch.equal(out, net(x))
        assert torch.equal(loss, F.mse_loss(net(x), torch.zeros(3, 4)))


@kernels
def test_delicate_ops_run_in_float32(kernels: str, x: Tensor) -> None:
    with cpu_autocast(kernels=kernels):
        assert F.mse_loss(x.half(), x.half()).dtype == torch.float32


@kernels
def test_float32_casts_nothing_inside_another_block_too(
    kernels: str, net: nn.Linear, x: Tensor
) -> None:
    plain = net(x)
    with cpu_autocast(kernels=kernels):
        with cpu_autocast(low_prec_dtype="float32", kernels=kernels):
            assert torch.equal(net(x), plain)
        assert net(x).dtype == torch.float16


@pytest.mark.parametrize("name", ["bfloat16", "bf16", torch.bfloat16])
def test_names_and_dtypes_are_the_same(name: str | torch.dtype, net: nn.Linear, x: Tensor) -> None:
    with cpu_autocast(low_prec_dtype=name, high_prec_dtype=torch.float32):
        assert net(x).dtype == torch.bfloat16
    amp.low_prec_dtype = name
    assert amp.low_prec_dtype == "bfloat16"


def test_none_means_the_modules_dtype_at_entry(net: nn.Linear, x: Tensor) -> None:
    block = cpu_autocast()
    forward = block(net.forward)
    amp.low_prec_dtype = "bfloat16"
    assert forward(x).dtype == torch.bfloat16
    with block:
        amp.low_prec_dtype = "float16"
        assert net(x).dtype == torch.bfloat16  # an open block keeps the dtype of its entry
    assert forward(x).dtype == torch.float16


# no stale casts


def losses_in_one_context(context: object) -> list[float]:
    """w = 4, loss = w². Each update takes a quarter of w.

    The losses are 16, 9, 81/16, all exact in bfloat16.
    """
    w = nn.Parameter(torch.tensor([[4.0]]))
    losses = []
    with context:  # type: ignore[attr-defined]
        for _ in range(3):
            loss = F.linear(torch.ones(1, 1), w).float().square().sum()
            losses.append(loss.item())
            (grad,) = torch.autograd.grad(loss, w)
            with torch.no_grad():
                w.sub_(grad / 8)
    return losses


@kernels
def test_an_update_inside_one_context_is_seen(kernels: str) -> None:
    stale_losses = losses_in_one_context(torch.autocast("cpu", torch.bfloat16))
    assert stale_losses == [16, 16, 16]  # what the cache would do
    losses = losses_in_one_context(cpu_autocast(low_prec_dtype="bfloat16", kernels=kernels))
    assert losses == [16, 9, 81 / 16]


@kernels
@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_a_teacher_without_gradients_changes_no_gradient(
    kernels: str, quiet: Callable[[], torch.no_grad], net: nn.Linear, x: Tensor
) -> None:
    def gradient(teach: bool) -> Tensor:
        with cpu_autocast(kernels=kernels):
            with quiet():
                # the student's own weights: the case that loses its history
                target = net(x).clone() if teach else None
            out = net(x)
            loss = out.float().square().sum() + (0 if target is None else 0 * target.detach().sum())
        (grad,) = torch.autograd.grad(loss, net.weight)
        return grad

    assert gradient(teach=True).abs().sum() > 0
    assert torch.equal(gradient(teach=True), gradient(teach=False))


@kernels
def test_distillation_trains_the_student_as_if_the_targets_were_constants(
    kernels: str, x: Tensor
) -> None:
    teacher = nn.Linear(8, 4)
    trained = []
    for inside in (True, False):
        torch.manual_seed(1)
        student = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        with torch.no_grad(), cpu_autocast(kernels=kernels):
            targets_before = teacher(x)
        for _ in range(3):
            with cpu_autocast(kernels=kernels):
                with torch.no_grad():
                    target = teacher(x) if inside else targets_before
                loss = F.mse_loss(student(x), target)
                loss.backward()
                optimizer.step()  # inside the context, as MegEngine's pattern has it
                optimizer.zero_grad()
        trained.append(student.weight.detach())
    assert torch.equal(*trained)


# nesting, recursion, threads


@kernels
def test_disabled_turns_an_outer_block_off_and_it_comes_back(
    kernels: str, net: nn.Linear, x: Tensor
) -> None:
    plain = net(x)
    with cpu_autocast(kernels=kernels):
        low = net(x)
        for off in (amp.autocast(enabled=False), cpu_autocast(enabled=False)):
            with off:
                assert torch.equal(net(x), plain)
                with cpu_autocast(kernels=kernels):
                    assert torch.equal(net(x), low)
                assert torch.equal(net(x), plain)
        assert torch.equal(net(x), low)


def test_the_innermost_block_decides_dtype_and_kernels(net: nn.Linear, x: Tensor) -> None:
    def alone(low: str, kernels: str) -> Tensor:
        with cpu_autocast(low_prec_dtype=low, kernels=kernels):
            return net(x)

    cases = [(low, kernels) for low in LOW_DTYPES for kernels in KERNELS]
    expected = {case: alone(*case) for case in cases}
    for outer in cases:
        with cpu_autocast(low_prec_dtype=outer[0], kernels=outer[1]):
            for inner in cases:
                assert torch.equal(alone(*inner), expected[inner])
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                assert net(x).dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                assert net(x).dtype == torch.bfloat16
            assert torch.equal(net(x), expected[outer])


@kernels
def test_one_instance_entered_again_restores_each_level(
    kernels: str, net: nn.Linear, x: Tensor
) -> None:
    block = cpu_autocast(kernels=kernels)
    with block:
        with block, block:
            assert net(x).dtype == torch.float16
        assert net(x).dtype == torch.float16
    assert net(x).dtype == torch.float32


@kernels
def test_recursion_through_one_decorator(kernels: str, net: nn.Linear, x: Tensor) -> None:
    dtypes = []

    @cpu_autocast(kernels=kernels)
    def descend(depth: int) -> None:
        dtypes.append(net(x).dtype)
        if depth:
            with amp.autocast(enabled=False):
                dtypes.append(net(x).dtype)
                descend(depth - 1)
            dtypes.append(net(x).dtype)

    descend(2)
    half = torch.float16
    full = torch.float32
    assert dtypes == [half, full, half, full, half, half, half]
    assert net(x).dtype == full


def test_an_exception_leaves_nothing_on(net: nn.Linear, x: Tensor) -> None:
    @cpu_autocast()
    def fail() -> None:
        amp.enabled = False
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        fail()
    assert not amp.enabled
    assert net(x).dtype == torch.float32


def run_in_threads(n: int, work: Callable[[int], object]) -> list[object]:
    results: list[object] = [None] * n

    def run(i: int) -> None:
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@kernels
def test_one_decorated_function_in_several_threads(kernels: str, net: nn.Linear, x: Tensor) -> None:
    barrier = threading.Barrier(4)  # all four are inside at once, and leave in any order

    @cpu_autocast(kernels=kernels)
    def forward() -> Tensor:
        barrier.wait(60)
        out: Tensor = net(x)
        barrier.wait(60)
        return out

    def work(_: int) -> tuple[torch.dtype, torch.dtype, bool]:
        inside = forward().dtype
        return inside, net(x).dtype, amp.enabled

    assert run_in_threads(4, work) == [(torch.float16, torch.float32, False)] * 4


def test_methods_static_methods_and_modules(x: Tensor) -> None:
    class Net(nn.Linear):
        @cpu_autocast()
        def forward(self, input: Tensor) -> Tensor:
            """Ours."""
            return super().forward(input)

        @staticmethod
        @cpu_autocast()
        def product(a: Tensor, *, b: Tensor) -> Tensor:
            return a @ b

    net = Net(8, 4)
    assert Net.forward.__doc__ == "Ours."
    assert net(x).dtype == Net.product(x, b=x.T).dtype == torch.float16
    assert copy.deepcopy(net)(x).dtype == torch.float16


def test_a_block_can_be_copied_and_pickled(net: nn.Linear, x: Tensor) -> None:
    with (
        pickle.loads(pickle.dumps(cpu_autocast(low_prec_dtype="bf16"))),
        copy.deepcopy(cpu_autocast()),
    ):
        assert net(x).dtype == torch.float16


def test_megengines_pattern_with_backward_and_step_inside(net: nn.Linear, x: Tensor) -> None:
    gm = GradManager().attach(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.weight.detach().clone()

    @cpu_autocast()
    def train_step() -> Tensor:
        with gm:
            loss = F.cross_entropy(net(x), torch.tensor([0, 1, 2]))
            gm.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert train_step().dtype == torch.float32
    assert net.weight.dtype == torch.float32
    assert not torch.equal(net.weight, before)


# the switch


def test_the_switch(net: nn.Linear, x: Tensor) -> None:
    assert not amp.enabled
    amp.enabled = True
    amp.enabled = True  # twice is once
    assert amp.enabled
    assert net(x).dtype == torch.float16
    with amp.autocast(enabled=False):
        assert not amp.enabled
        assert net(x).dtype == torch.float32
    assert net(x).dtype == torch.float16
    with cpu_autocast(low_prec_dtype="bfloat16"):
        assert amp.enabled
        assert net(x).dtype == torch.bfloat16
    amp.enabled = False
    amp.enabled = False
    assert net(x).dtype == torch.float32


def test_a_switch_set_inside_a_block_ends_with_it(net: nn.Linear, x: Tensor) -> None:
    with cpu_autocast():
        amp.enabled = False
        assert net(x).dtype == torch.float32
        amp.enabled = True
        assert net(x).dtype == torch.float16
        amp.enabled = False
    assert not amp.enabled
    with amp.autocast(enabled=False):
        amp.enabled = True
        assert net(x).dtype == torch.float16
    assert not amp.enabled
    assert net(x).dtype == torch.float32


def test_the_switch_follows_the_modules_dtype_and_a_block_inside_delays_it(
    net: nn.Linear, x: Tensor
) -> None:
    amp.enabled = True
    amp.low_prec_dtype = "bfloat16"
    assert net(x).dtype == torch.bfloat16
    with cpu_autocast():
        amp.low_prec_dtype = "float16"
        assert net(x).dtype == torch.bfloat16
    assert net(x).dtype == torch.float16
    amp.low_prec_dtype = "float32"
    assert amp.enabled
    assert net(x).dtype == torch.float32


def test_the_switch_belongs_to_its_thread(net: nn.Linear, x: Tensor) -> None:
    amp.enabled = True

    def work(i: int) -> tuple[bool, torch.dtype, torch.dtype]:
        before = amp.enabled
        dtype = net(x).dtype
        amp.enabled = True
        return before, dtype, net(x).dtype

    assert run_in_threads(2, work) == [(False, torch.float32, torch.float16)] * 2
    assert amp.enabled


def test_the_switch_ends_inside_a_function_mode_that_began_after_it(
    net: nn.Linear, x: Tensor
) -> None:
    amp.enabled = True
    with torch.overrides.BaseTorchFunctionMode() as mode:
        amp.enabled = False
        assert net(x).dtype == torch.float32
        assert torch.overrides._get_current_function_mode() is mode
    with torch.device("cpu"), amp.autocast():
        assert net(x).dtype == torch.float16


# refusals


@pytest.mark.parametrize("value", ["float8", "half", 16, torch.float64, torch.int8, "fp64"])
def test_low_dtypes_are_listed(value: object) -> None:
    with pytest.raises(
        ValueError, match=r"expected one of fp16, float16, bf16, bfloat16, fp32, float32 or"
    ):
        amp.autocast(low_prec_dtype=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="low_prec_dtype: expected one of"):
        amp.low_prec_dtype = value  # type: ignore[assignment]
    assert amp.low_prec_dtype == "float16"


def test_high_dtypes_other_than_float32_are_refused_with_the_reason() -> None:
    amp.high_prec_dtype = torch.float32
    assert amp.high_prec_dtype == "float32"
    with pytest.raises(
        ValueError,
        match=r"fp32, float32 or the torch.dtype \(torch's op lists widen to float32 only\)",
    ):
        amp.high_prec_dtype = "float64"
    with pytest.raises(ValueError, match="high_prec_dtype"):
        amp.autocast(high_prec_dtype="bfloat16")


def test_other_refusals() -> None:
    with pytest.raises(
        TypeError, match=r"do write the parentheses when decorating: @amp.autocast\(\)"
    ):
        amp.autocast(lambda: None)  # type: ignore[arg-type]
    advice = (
        "do write amp.autocast(), which is for every device of this machine; "
        "a dtype is low_prec_dtype='float16',"
    )
    for arguments, keywords, problem in (
        (["cuda"], {}, "enabled: expected True or False, received 'cuda'"),
        (["cpu", torch.bfloat16], {}, "enabled: expected True or False, received 'cpu'"),
        ([torch.device("cpu")], {}, "enabled: expected True or False, received device(type='cpu')"),
        ([torch.bfloat16], {}, "enabled: expected True or False, received torch.bfloat16"),
        (["cuda"], {"dtype": torch.float16}, "there is no dtype="),
        (
            [],
            {"device_type": "cpu", "dtype": torch.bfloat16, "cache_enabled": False},
            "no dtype=, cache_enabled=",
        ),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{problem}, {advice}")):
            amp.autocast(*arguments, **keywords)
    with amp.autocast(low_prec_dtype="bfloat16"):  # as it says
        assert F.linear(torch.ones(1, 2), torch.ones(3, 2)).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="expected True or False, received 1"):
        amp.enabled = 1
    with pytest.raises(ValueError, match="kernels: expected one of 'auto', 'torch'"):
        amp.autocast(kernels="fast")
    for kind in ("gpu", 0, "meta"):
        with pytest.raises(ValueError, match="device_type: expected 'cpu', 'cuda'"):
            amp.autocast(device_type=kind)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator is there")
def test_a_missing_device_is_refused_at_entry_not_replaced(net: nn.Linear, x: Tensor) -> None:
    block = amp.autocast(device_type="cuda")
    with (
        pytest.raises(ValueError, match=r"has \(cpu\), received 'cuda', do leave device_type=None"),
        block,
    ):
        pass
    with amp.autocast(device_type=None):
        assert net(x).dtype == torch.float16
        with amp.autocast(enabled=False, device_type="cuda"):  # the CPU is not what it turns off
            assert net(x).dtype == torch.float16


def test_only_plain_functions_can_be_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for fn in (generator, coroutine):
        with pytest.raises(TypeError, match=r"do write `with amp.autocast\(\):`"):
            amp.autocast()(fn)
    with pytest.raises(
        TypeError, match=r"received a staticmethod, do put @amp.autocast\(\) below that line"
    ):
        amp.autocast()(staticmethod(lambda: None))
    for thing in (nn.Linear, 3):
        with pytest.raises(TypeError, match="do decorate its method"):
            amp.autocast()(thing)  # type: ignore[arg-type]


def test_import_changes_nothing_in_torch() -> None:
    code = (
        "import torch\n"
        "before = torch.is_autocast_cache_enabled(), torch.get_autocast_dtype('cpu')\n"
        "from halfstep import amp\n"
        "assert before == (torch.is_autocast_cache_enabled(), torch.get_autocast_dtype('cpu'))\n"
        "assert not torch.is_autocast_enabled('cpu')\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not amp.enabled\n"
        "from halfstep.amp import *\n"
        "assert autocast is amp.autocast and 'enabled' not in globals()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
def test_on_cuda_none_is_cuda_and_disabled_turns_both_off() -> None:
    net = nn.Linear(8, 4).cuda()
    x = torch.randn(3, 8, device="cuda")
    with amp.autocast():
        low = net(x)
        with cpu_autocast():
            assert net.cpu()(x.cpu()).dtype == torch.float16
            with amp.autocast(enabled=False):
                assert net(x.cpu()).dtype == torch.float32
                assert net.cuda()(x).dtype == torch.float32
    with torch.autocast("cuda", torch.float16, cache_enabled=False):
        assert torch.equal(net(x), low)
