"""autocast in its three forms: a block, a decorator, a switch. One result.

System: MegEngine (automatic mixed precision, the autocast interface).

    python examples/autocast_forms.py

Targets: float16 comes out of each form, with the same bits; each ends where it should; and a
float16 product is what its definition says: the exact product of the rounded operands, rounded
once.
"""

import argparse

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import amp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    net = hs.nets.resnet18().to(DEVICE).eval()
    x = torch.randn(1, 3, 64, 64, device=DEVICE)

    # A block.
    with amp.autocast():
        from_block = net(x)

    # A decorator.
    @amp.autocast()
    def forward(x: Tensor) -> Tensor:
        return net(x)

    from_decorator = forward(x)

    # A switch.
    amp.enabled = True
    from_switch = net(x)
    amp.enabled = False
    outside = net(x)

    outputs = {
        "block": from_block,
        "decorator": from_decorator,
        "switch": from_switch,
        "outside": outside,
    }
    for name, output in outputs.items():
        print(f"{name:>10}: {output.dtype}, logit 0 = {output[0, 0].item():.6f}")
    assert from_block.dtype == torch.float16
    assert torch.equal(from_block, from_decorator)
    assert torch.equal(from_block, from_switch)
    assert outside.dtype == torch.float32

    # Nested blocks. MegEngine's inner False leaves the outer block on; this one does not.
    with amp.autocast(low_prec_dtype="bfloat16"):
        assert net(x).dtype == torch.bfloat16
        with amp.autocast(enabled=False):
            assert net(x).dtype == torch.float32

    # What a float16 product is. float32 sums fall on the other side of a tie now and then.
    layer = nn.Linear(256, 128, bias=False).to(DEVICE)
    a = torch.randn(64, 256, device=DEVICE)
    with amp.autocast():
        product = layer(a)
    exact = (a.half().double() @ layer.weight.half().double().T).half()
    equal_fraction = (product == exact).double().mean().item()
    print(
        f"{equal_fraction:.2%} of the products are the exact product of the rounded operands, "
        "rounded once"
    )
    assert equal_fraction > 0.99


if __name__ == "__main__":
    main()
