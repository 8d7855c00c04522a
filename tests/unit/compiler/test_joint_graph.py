"""What is rewritten in networks with batch norms: when, and one program that has it all."""

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn

from halfstep.compiler.backend import _pass_settings
from halfstep.compiler.passes.joint_graph import JointGraphPass, has_batch_norm, inductor_settings

X = torch.randn(4, 3, 5, 5)


def test_torchs_cache_tells_passes_apart() -> None:
    assert JointGraphPass("cuda").uuid() == JointGraphPass("cuda").uuid()
    assert JointGraphPass("cuda").uuid() != JointGraphPass("cpu").uuid()


def network(*, normed: bool = True) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4) if normed else nn.Identity()
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))


@pytest.mark.parametrize("normed", [True, False])
def test_only_a_network_with_batch_norms_is_asked_for(normed: bool) -> None:
    seen: list[dict[str, Any]] = []

    def check_patches(graph: Any, inputs: Any) -> Any:
        assert has_batch_norm(graph) == normed
        patches, options = _pass_settings(graph, "cuda", True)
        seen.append(patches)
        assert set(options) == ({"decompositions"} if normed else set())
        with inductor.patch(joint_custom_post_pass=lambda graph: None):
            assert set(_pass_settings(graph, "cuda", True)[0]) == {"post_grad_custom_pre_pass"}
        return graph

    torch.compile(network(normed=normed), backend=check_patches)(X)
    assert isinstance(seen[0].get("joint_custom_post_pass"), JointGraphPass) == normed
    assert ("realize_reads_threshold" in seen[0]) == normed


def test_a_setting_of_the_users_own_stays() -> None:
    assert inductor_settings() == {"realize_reads_threshold": 6}
    with inductor.patch(realize_reads_threshold=2):
        assert inductor_settings() == {}
