"""The automatic gear: hand over network, loss and optimizer; fit, evaluate, predict."""

from halfstep.model.model import Model

__all__ = ["Model"]
