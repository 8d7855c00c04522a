"""Forward and backward compiled by torch's compiler, with halfstep's roundings and passes.

What the passes buy is said in their files (compiler/passes/). To switch them off: a pass of your
own in torch's `post_grad_custom_pre_pass` or `joint_custom_post_pass` takes their place, and
`compile=False` compiles nothing.
"""

from typing import Any


def compile_graph(
    graph: Any, inputs: Any, *, low: bool, chip: str | None, own_random_numbers: bool = True
) -> Any:
    """Compiles a graph's forward and backward pass, both at once: they fail here or not at all.

    `low`: the program computes in a 16-bit dtype. `chip`: the type of device ("cuda") whose graphs
    our passes rewrite; None rewrites nothing. `own_random_numbers=False`: it draws those that the
    uncompiled operations draw, by calls of torch's kernels.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {}
    if not own_random_numbers:
        patches["fallback_random"] = True
    # Fused 16-bit operations round where single ones do: whether a value overflows must not depend
    # on what was fused.
    if low:
        patches["emulate_precision_casts"] = True

    # Backward runs outside autocast, as it does uncompiled. torch would trace it inside, and 16-bit
    # products would enter float32 modules.
    with functorch_config.patch(
        force_non_lazy_backward_lowering=True, backward_pass_autocast="off"
    ):
        pass_patches, options = _pass_settings(graph, chip, low)
        patches.update(pass_patches)
        return compile_fx(graph, inputs, config_patches=patches or None, **options)


def _pass_settings(
    graph: Any, chip: str | None, low: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """torch's settings that hold our passes, and more arguments for compile_fx.

    What the user has set stays. 16-bit programs get their casts joined; float32 products, which
    have no tensor cores, are split along K. Networks with batch norms get more.
    """
    if chip is None:
        return {}, {}
    import torch._inductor.config as inductor_config

    from halfstep.compiler.passes import joint_graph
    from halfstep.compiler.passes.join_casts import JoinCasts
    from halfstep.compiler.passes.split_k import SplitK

    patches: dict[str, Any] = {}
    if inductor_config.post_grad_custom_pre_pass is None:
        patches["post_grad_custom_pre_pass"] = JoinCasts(chip) if low else SplitK(chip)

    options: dict[str, Any] = {}
    if inductor_config.joint_custom_post_pass is None and joint_graph.has_batch_norm(graph):
        patches["joint_custom_post_pass"] = joint_graph.JointGraphPass(chip)
        patches.update(joint_graph.inductor_settings())
        options["decompositions"] = joint_graph.decompositions()
    return patches, options
