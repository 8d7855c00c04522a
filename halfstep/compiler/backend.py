"""Forward and backward in code of torch's compiler, with the roundings of the precision and graphs rewritten."""

from typing import Any


def generate(graph: Any, inputs: Any, *, low: bool, chip: str | None) -> Any:
    """Code for forward and backward at once, so that both fail here or not at all.

    Fused half operations round where single ones do: an overflow must not depend on what was fused. Backward runs
    outside autocast, as it does uncompiled; torch would trace it inside, and low products would enter fp32 modules.
    `chip` is the device whose graphs are rewritten.
    """
    import torch._functorch.config as config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(force_non_lazy_backward_lowering=True, backward_pass_autocast="off"):
        patches: dict[str, Any] = {"emulate_precision_casts": True} if low else {}
        mine, more = _rewriting(graph, chip, low)
        return compile_fx(graph, inputs, config_patches={**patches, **mine} or None, **more)


def _rewriting(graph: Any, chip: str | None, low: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings that have torch rewrite graphs, and more for compile_fx; what the user has set stays instead.

    Low casts are joined; float32 products, which have no tensor cores, are cut along K; networks with batch norms get
    more, and settings of torch's compiler that suit them.
    """
    import torch._inductor.config as config

    if chip is None:
        return {}, {}
    from halfstep.compiler.passes.join_casts import Fewer
    from halfstep.compiler.passes.joint_graph import Joint, decompositions, normalizes, settings
    from halfstep.compiler.passes.split_k import Cut

    mine: dict[str, Any] = {}
    if config.post_grad_custom_pre_pass is None:
        mine["post_grad_custom_pre_pass"] = Fewer(chip) if low else Cut(chip)
    if config.joint_custom_post_pass is not None or not normalizes(graph):
        return mine, {}
    return {**mine, "joint_custom_post_pass": Joint(chip), **settings()}, {
        "decompositions": decompositions()
    }
