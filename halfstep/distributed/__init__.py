"""Several processes that train one network: who they are, and how they add up their gradients.

torch.distributed does all communication. Nothing in here knows of steps, losses or precisions:
tensors in, tensors out.
"""

from halfstep.distributed.gradient_sum import AllReduceSum, GradientSum, TreeSum
from halfstep.distributed.host_requests import HostRequests, Request
from halfstep.distributed.process_group import (
    Ranks,
    find_ranks,
    job_of_environment,
)

__all__ = [
    "AllReduceSum",
    "GradientSum",
    "HostRequests",
    "Ranks",
    "Request",
    "TreeSum",
    "find_ranks",
    "job_of_environment",
]
