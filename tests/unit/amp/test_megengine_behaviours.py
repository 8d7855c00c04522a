"""What MegEngine's documents, sources and tests promise of amp and autodiff, one by one.

`SAME` is what works as there. `LISTED` is what does not: each is in the table of
docs/guide/moving.md, in the words of its key, and its function shows what happens here.
"""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep import amp
from halfstep.grads import GradManager

MOVING = Path(__file__).resolve().parents[3] / "docs/guide/moving.md"
Case = Callable[[], object]
SAME: dict[str, Case] = {}
LISTED: dict[str, Case] = {}


def same(case: Case) -> Case:
    SAME[case.__name__] = case
    return case


def listed(words: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        LISTED[words] = case
        return case

    return add


@pytest.mark.parametrize("name", SAME)
def test_as_in_megengine(name: str) -> None:
    SAME[name]()


@pytest.mark.parametrize("words", LISTED)
def test_otherwise_than_in_megengine_and_in_the_table(words: str) -> None:
    LISTED[words]()
    section = MOVING.read_text(encoding="utf-8").partition("## MegEngine")[2]
    assert words in section


def test_how_many() -> None:
    section = MOVING.read_text(encoding="utf-8").partition("## MegEngine")[2]
    count = len(SAME) + len(LISTED)
    assert f"Of {count} behaviours" in section
    assert f"{len(SAME)} are the same here" in section


# Helpers


def make(**options: Any) -> amp.GradScaler:
    return amp.GradScaler(**{"init_scale": 16.0, "device": "cpu", **options})


def leaf(*values: float) -> Tensor:
    return torch.tensor(values)


def item(grad: Tensor | None) -> float:
    assert grad is not None
    return grad.item()


def overflow(scaler: amp.GradScaler) -> None:
    """One update whose gradient is not finite, in the automatic gear."""
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        scaler.backward(gm, (w * math.inf).sum())


def finite(scaler: amp.GradScaler) -> Tensor:
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        scaler.backward(gm, (w * 3).sum())
    return w


# autocast


def low_product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@same
def autocast_is_a_block() -> None:
    with amp.autocast():
        assert low_product() == torch.float16
    assert low_product() == torch.float32


@same
def autocast_is_a_decorator() -> None:
    assert amp.autocast()(low_product)() == torch.float16


@same
def autocast_keeps_the_name_of_what_it_decorates() -> None:
    assert amp.autocast()(low_product).__name__ == "low_product"


@same
def enabled_is_a_switch() -> None:
    amp.enabled = True
    assert low_product() == torch.float16
    amp.enabled = False
    assert low_product() == torch.float32


@same
def enabled_can_be_read() -> None:
    assert amp.enabled is False
    with amp.autocast():
        assert amp.enabled is True
    assert amp.enabled is False


@same
def the_dtypes_are_strings_with_these_defaults() -> None:
    assert (amp.low_prec_dtype, amp.high_prec_dtype) == ("float16", "float32")


@same
def a_block_shows_its_dtypes() -> None:
    with amp.autocast(low_prec_dtype="bfloat16", high_prec_dtype="float32"):
        assert (amp.low_prec_dtype, amp.high_prec_dtype) == ("bfloat16", "float32")
        with amp.autocast(low_prec_dtype="float16"):
            assert amp.low_prec_dtype == "float16"
        assert amp.low_prec_dtype == "bfloat16"


@same
def after_a_block_the_dtypes_are_as_before() -> None:
    amp.low_prec_dtype = "bfloat16"
    with amp.autocast(low_prec_dtype="float16"):
        pass
    assert amp.low_prec_dtype == "bfloat16"


@same
def the_dtypes_can_be_set_and_put_back() -> None:
    origin = amp.low_prec_dtype
    amp.low_prec_dtype = "bfloat16"
    amp.enabled = True
    assert low_product() == torch.bfloat16
    amp.low_prec_dtype = origin
    assert low_product() == torch.float16
    amp.enabled = False


@same
def a_block_that_is_not_enabled_changes_nothing() -> None:
    with amp.autocast(enabled=False, low_prec_dtype="bfloat16"):
        assert amp.low_prec_dtype == "float16"
        assert low_product() == torch.float32


@same
def losses_and_exponentials_widen() -> None:
    with amp.autocast():
        assert F.mse_loss(torch.ones(2).half(), torch.ones(2)).dtype == torch.float32


@same
def parameters_stay_float32_and_so_do_their_gradients() -> None:
    net = nn.Linear(2, 2)
    gm = GradManager().attach(net.parameters())
    with amp.autocast(), gm:
        gm.backward(net(torch.ones(1, 2)).sum())
    assert net.weight.grad is not None
    assert net.weight.dtype == net.weight.grad.dtype == torch.float32


@same
def backward_and_step_stand_inside_the_decorated_function() -> None:
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    gm = GradManager().attach(net.parameters())
    scaler = make()

    @amp.autocast()
    def train_step(image: Tensor, label: Tensor) -> Tensor:
        with gm:
            loss = F.cross_entropy(net(image), label)
            scaler.backward(gm, loss)
        opt.step()
        opt.zero_grad()
        return loss

    before = net.weight.detach().clone()
    assert train_step(torch.ones(1, 2), torch.zeros(1, dtype=torch.long)).isfinite()
    assert not torch.equal(net.weight, before)


@listed("`enabled=False` turns an outer block off")
def disabled_inside_enabled() -> None:
    with amp.autocast(), amp.autocast(enabled=False):
        assert low_product() == torch.float32


@listed("`high_prec_dtype` is float32 only")
def high_dtype() -> None:
    with pytest.raises(ValueError, match="torch's op lists widen to float32 only"):
        amp.high_prec_dtype = "float16"


# GradScaler


@same
def it_is_built_by_position() -> None:
    scaler = amp.GradScaler(32.0, 4.0, 0.25, 7)
    state = scaler.state_dict()
    assert [state[key] for key in ("scale", "growth_factor", "backoff_factor")] == [32, 4, 0.25]
    assert state["growth_interval"] == 7


@same
def the_seed_is_the_scale() -> None:
    w = leaf(1.0, 1.0)
    with GradManager().attach(w) as gm:
        make().backward(gm, w * 2, unscale_grad=False)
    assert w.grad is not None
    assert w.grad.tolist() == [32.0, 32.0]


@same
def a_seed_of_ones_own_is_scaled() -> None:
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        make().backward(gm, w * 2, torch.tensor([3.0]), unscale_grad=False)
    assert item(w.grad) == 96.0


@same
def several_outputs_and_seeds() -> None:
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        make().backward(gm, [w * 2, w * 3], [leaf(1.0), leaf(10.0)], unscale_grad=False)
    assert item(w.grad) == 16 * 32


@same
def backward_unscales() -> None:
    assert item(finite(make()).grad) == 3.0


@same
def unscale_returns_the_scaler() -> None:
    scaler = make()
    scaler.scale_factor  # noqa: B018 # makes the scale
    assert scaler.unscale([]) is scaler


@same
def unscale_takes_any_iterable_and_leaves_out_tensors_without_gradient() -> None:
    scaler = make()
    w = leaf(1.0)
    unused = leaf(1.0)
    gm = GradManager().attach([w, unused])
    with gm:
        scaler.backward(gm, w * 2, unscale_grad=False)
    scaler.unscale(filter(lambda t: t.grad is not None, gm.attached_tensors()))
    assert (item(w.grad), unused.grad) == (2.0, None)
    scaler.unscale([None, unused])


@same
def a_nonfinite_gradient_takes_all_away() -> None:
    scaler = make()
    w = leaf(1.0)
    v = leaf(1.0)
    with GradManager().attach([w, v]) as gm:
        scaler.backward(gm, w * math.inf + v)
    assert (w.grad, v.grad) == (None, None)


@same
def then_the_optimizer_changes_nothing() -> None:
    w = nn.Parameter(leaf(1.0))
    opt = torch.optim.Adam([w], lr=0.1)
    with GradManager().attach(w) as gm:
        make().backward(gm, w * math.nan)
    opt.step()
    assert w.item() == 1.0
    assert not opt.state


@same
def an_overflow_backs_off() -> None:
    scaler = make()
    overflow(scaler)
    assert scaler.scale_factor == 8.0


@same
def an_overflow_begins_the_tracker_again() -> None:
    scaler = make(growth_interval=3)
    finite(scaler)
    overflow(scaler)
    assert scaler.state_dict()["_growth_tracker"] == 0


@same
def the_scale_grows_after_the_interval() -> None:
    scaler = make(growth_interval=3)
    scales = []
    for _ in range(7):
        finite(scaler)
        scales.append(float(scaler.scale_factor))
    assert scales == [16, 16, 32, 32, 32, 64, 64]


@same
def a_tracker_beyond_the_interval_grows_too() -> None:
    scaler = make(growth_interval=3)
    scaler.load_state_dict(megengine_state(_growth_tracker=10))
    finite(scaler)
    assert scaler.scale_factor == 64.0


@same
def factors_of_ones_own() -> None:
    scaler = make(growth_factor=3.0, backoff_factor=0.25, growth_interval=1)
    finite(scaler)
    overflow(scaler)
    assert scaler.scale_factor == 12.0


@same
def update_takes_a_new_scale() -> None:
    scaler = make()
    scaler.update(64.0)
    assert scaler.scale_factor == 64.0


@same
def a_new_scale_keeps_the_tracker() -> None:
    scaler = make()
    finite(scaler)
    scaler.update(64.0)
    assert scaler.state_dict()["_growth_tracker"] == 1


@same
def a_new_scale_forgets_the_overflow() -> None:
    scaler = make()
    scaler.scale_factor  # noqa: B018
    w = leaf(1.0)
    w.grad = leaf(math.inf)
    scaler.unscale([w])
    scaler.update(64.0)
    finite(scaler)
    assert scaler.scale_factor == 64.0


@same
def the_scale_can_be_assigned() -> None:
    scaler = make()
    scaler.scale_factor = 32.0
    scaler.scale_factor *= 2
    assert scaler.scale_factor == 64.0


@same
def the_scale_is_printed_and_computed_with_as_a_number() -> None:
    scale = make().scale_factor
    assert f"{scale:g}" == "16"
    assert math.log2(scale) == 4.0
    assert (scale == 16.0, scale > 8, 1 / scale == 0.0625) == (True, True, True)


@same
def the_manual_gear() -> None:
    scaler = make()
    w = leaf(1.0)
    gm = GradManager().attach(w)
    with gm:
        gm.backward(w * 2, dy=scaler.scale_factor)
    scaler.unscale(gm.attached_tensors())
    scaler.update()
    assert item(w.grad) == 2.0
    assert scaler.state_dict()["_growth_tracker"] == 1


@same
def accumulation_unscales_once() -> None:
    scaler = make()
    w = leaf(1.0)
    gm = GradManager().attach(w)
    for _ in range(3):
        with gm:
            scaler.backward(gm, w * 2, unscale_grad=False)
    scaler.unscale(gm.attached_tensors())
    scaler.update()
    assert item(w.grad) == 6.0
    assert scaler.state_dict()["_growth_tracker"] == 1


@same
def without_unscaling_nothing_is_updated() -> None:
    scaler = make(growth_interval=1)
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        scaler.backward(gm, w * 2, unscale_grad=False)
    assert scaler.scale_factor == 16.0


@same
def update_scale_false_leaves_the_scale() -> None:
    scaler = make(growth_interval=1)
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        scaler.backward(gm, w * 2, update_scale=False)
    assert scaler.scale_factor == 16.0


@same
def an_interval_of_zero_fixes_the_scale() -> None:
    scaler = make(growth_interval=0)
    for _ in range(3):
        finite(scaler)
    overflow(scaler)
    assert scaler.scale_factor == 16.0


@same
def its_state_holds_factors_interval_and_tracker() -> None:
    state = make(growth_interval=7).state_dict()
    keys = ("growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    assert [state[key] for key in keys] == [2.0, 0.5, 7, 0]


def megengine_state(**changes: float) -> dict[str, Any]:
    return {
        "scale_factor": 32.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 1,
        **changes,
    }


@same
def a_state_of_megengines_is_loaded() -> None:
    for scaler in (make(), make()):
        finite(scaler)
        scaler.load_state_dict(megengine_state())
        assert scaler.scale_factor == 32.0
        finite(scaler)
        finite(scaler)
        assert scaler.scale_factor == 64.0


@same
def a_scaler_goes_on_from_its_own_state() -> None:
    scaler = make(growth_interval=3)
    finite(scaler)
    fresh = make()
    fresh.load_state_dict(scaler.state_dict())
    assert fresh.state_dict() == scaler.state_dict()


@listed("`scaler.scale_factor` is a tensor on the device")
def scale_is_a_tensor() -> None:
    scale = make().scale_factor
    assert not isinstance(scale, float)
    assert isinstance(float(scale), float)
    assert make().get_scale() == 16.0


@listed("`amp.GradScaler()` starts at 2^4")
def starts_higher() -> None:
    assert amp.GradScaler().get_scale() == 2.0**16


@listed('`scaler.state_dict()["scale_factor"]`')
def scale_in_the_state() -> None:
    assert "scale_factor" not in make().state_dict()
    assert make().state_dict()["scale"] == 16.0


@listed("`scaler.growth_factor`, `backoff_factor`, `growth_interval`")
def attributes_are_methods() -> None:
    assert not hasattr(make(), "growth_factor")
    assert make().get_growth_factor() == 2.0


@listed("`update()` without a checked gradient counts as a finite update")
def update_counts_checked_ones() -> None:
    scaler = make(growth_interval=1)
    with pytest.raises(AssertionError):
        scaler.update()  # before the scale was ever used
    scaler.scale_factor  # noqa: B018
    scaler.update()
    assert scaler.scale_factor == 16.0


@listed("`growth_interval=0` checks nothing, and `update(new_scale)` is ignored")
def fixed_scale() -> None:
    scaler = make(growth_interval=0)
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        scaler.backward(gm, w * math.inf)
    assert w.grad is None
    scaler.update(64.0)
    assert scaler.scale_factor == 64.0


@listed("`growth_factor=1`")
def growth_factor_one() -> None:
    with pytest.raises(ValueError, match="pass growth_interval=0 for a fixed scale"):
        make(growth_factor=1.0)


@listed("the scale has no floor and never gives up")
def floor_and_streak() -> None:
    scaler = make(max_skips=3)
    overflow(scaler)
    overflow(scaler)
    with pytest.raises(amp.OverflowStreak):
        overflow(scaler)
    endless = make(floor=0, max_skips=None)
    for _ in range(60):
        overflow(endless)
    assert endless.scale_factor == 2.0**-56


# GradManager


@same
def record_and_backward() -> None:
    w = leaf(2.0)
    gm = GradManager().attach([w])
    gm.record()
    gm.backward(w * 3)
    gm.release()
    assert item(w.grad) == 3.0


@same
def the_context_records() -> None:
    w = leaf(2.0)
    with GradManager().attach([w]) as gm:
        gm.backward(w * 3)
    assert item(w.grad) == 3.0


@same
def attach_returns_the_manager() -> None:
    gm = GradManager()
    assert gm.attach([leaf(1.0)]) is gm


@same
def attach_takes_one_tensor() -> None:
    w = leaf(1.0)
    assert GradManager().attach(w).attached_tensors() == [w]


@same
def attached_tensors_are_in_order_each_once() -> None:
    w1 = leaf(2.0)
    w2 = leaf(2.0)
    gm = GradManager().attach(w1).attach(w2).attach(w1)
    assert [id(t) for t in gm.attached_tensors()] == [id(w1), id(w2)]


@same
def gradients_are_added() -> None:
    w = leaf(2.0)
    gm = GradManager().attach(w)
    for _ in range(2):
        with gm:
            gm.backward(w * 3)
    assert item(w.grad) == 6.0


@same
def a_seed_of_the_shape_of_y() -> None:
    w = leaf(2.0)
    with GradManager().attach(w) as gm:
        gm.backward(w * 3, dy=leaf(2.5))
    assert item(w.grad) == 7.5


@same
def the_seed_is_ones_whatever_the_shape() -> None:
    w = leaf(1.0, 2.0)
    with GradManager().attach(w) as gm:
        gm.backward(w * 3)
    assert w.grad is not None
    assert w.grad.tolist() == [3.0, 3.0]


@same
def attach_inside_the_block_takes_effect_at_once() -> None:
    a = leaf(1.0).requires_grad_()
    gm = GradManager()
    with gm:
        b = a * 3
        gm.attach(b)
        gm.backward(b + 1)
    assert item(b.grad) == 1.0


@same
def temporary_tensors_are_let_go() -> None:
    w = leaf(2.0)
    gm = GradManager().attach(w)
    for i in range(3):
        with gm:
            x = leaf(float(i))
            gm.attach(x, callbacks=lambda t, g: g)
            gone = weakref.ref(x)
            gm.backward(x * w)
        del x
        assert gone() is None


@same
def a_tensor_without_dependency_keeps_no_gradient() -> None:
    w = leaf(1.0)
    unused = leaf(1.0)
    with GradManager().attach([w, unused]) as gm:
        gm.backward(w * 3)
    assert unused.grad is None


@same
def an_unused_branch_of_where_has_zeros() -> None:
    x = torch.full((4,), 0.5)
    y = torch.ones(4)
    with GradManager().attach([x, y]) as gm:
        gm.backward(torch.where(x > 0.7, x, y).sum())
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad == 0).all()
    assert (y.grad == 1).all()


@same
def callbacks_are_chained() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w, [lambda t, g: g + 1, lambda t, g: g * 10])
    with gm:
        gm.backward(w * 2)
    assert item(w.grad) == 30.0


@same
def attaching_again_appends_callbacks() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w, lambda t, g: g + 1).attach(w, lambda t, g: g * 10)
    with gm:
        gm.backward(w * 2)
    assert item(w.grad) == 30.0


@same
def a_callback_gets_the_tensor() -> None:
    w = leaf(1.0)
    seen = []
    with GradManager().attach(w, lambda t, g: seen.append(t) or g) as gm:
        gm.backward(w * 2)
    assert seen[0] is w


@same
def a_callback_that_returns_none_drops_the_gradient() -> None:
    w = leaf(1.0)
    with GradManager().attach(w, lambda t, g: None) as gm, pytest.warns(hs.Notice, match="None"):
        gm.backward(w * 2)
    assert w.grad is None


@same
def recording_twice_is_an_error() -> None:
    gm = GradManager().attach(leaf(1.0))
    gm.record()
    with pytest.raises(RuntimeError):
        gm.record()


@same
def backward_at_rest_is_an_error() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w)
    with pytest.raises(RuntimeError):
        gm.backward(w * 2)


@same
def backward_releases() -> None:
    w = leaf(1.0)
    with GradManager().attach(w) as gm:
        gm.backward(w * 2)
        assert not gm.recording


@same
def a_group_serves_each_of_its_managers() -> None:
    x = leaf(0.5)
    gm = GradManager().attach([x])
    gm2 = GradManager().attach([x])
    with gm | gm2:
        y = x.cos()
        gm.backward(y)
        gm2.backward(y)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -2 * x.detach().sin())


@same
def groups_can_be_joined() -> None:
    tensors = [leaf(1.0) for _ in range(3)]
    a, b, c = (GradManager().attach(t) for t in tensors)
    with (a | b) | c, pytest.raises(RuntimeError):
        c.record()


@same
def a_second_gradient() -> None:
    x = leaf(0.5)
    gm = GradManager().attach([x])
    with gm:
        with GradManager().attach([x]) as gm2:
            gm2.backward(x.cos())
        assert x.grad is not None
        gm.backward(x.grad)
    torch.testing.assert_close(x.grad, -x.detach().sin() - x.detach().cos())


@same
def forward_mode_by_two_managers() -> None:
    x = leaf(0.5)
    with GradManager() as gm:
        with GradManager().attach([x]) as gm2:
            y = x.sin()
            seed = torch.zeros_like(y)
            gm.attach(seed)
            gm2.backward(y, seed)
        assert x.grad is not None
        gm.backward(x.grad)
    torch.testing.assert_close(seed.grad, x.detach().cos())


@same
def integers_cannot_be_attached() -> None:
    with pytest.raises(TypeError):
        GradManager().attach([torch.ones(1, dtype=torch.int32)])


@same
def halves_can_be_attached() -> None:
    assert len(GradManager().attach([torch.ones(1).half()]).attached_tensors()) == 1


@listed("`gm.backward()` without y, and a y without history")
def y_without_history() -> None:
    x = leaf(0.5)
    gm = GradManager().attach([x])
    gm2 = GradManager().attach([x])
    with gm | gm2:
        gm2.backward(x.cos())
        assert x.grad is not None
        with pytest.raises(ValueError, match="expected y with history"):
            gm.backward(x.grad)
    with gm, pytest.raises(TypeError, match="do pass the loss"):
        gm.backward(None)  # type: ignore[arg-type]


@listed("the forward before `with gm:` is not recorded")
def an_earlier_forward_counts() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w)
    y = w * 3
    with gm:
        gm.backward(y)
    assert item(w.grad) == 3.0


@listed("attached tensors that are changed in place")
def no_snapshots() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w)
    with gm:
        y = w * w
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gm.backward(y)


@listed("`opt.step().clear_grad()`")
def torchs_optimizer() -> None:
    w = nn.Parameter(leaf(1.0))
    w.grad = leaf(1.0)
    opt = torch.optim.SGD([w], lr=1.0)
    assert opt.step() is None
    opt.zero_grad()
    assert w.grad is None
