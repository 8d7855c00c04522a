"""What halfstep raises and warns with, beside ValueError and TypeError."""


class NonFiniteError(FloatingPointError):
    """A gradient was inf or NaN and the step was told to raise; nothing of it was committed."""


class Notice(UserWarning):
    """Something the user should know once, about a choice made or a limit of the method."""


class UncapturableError(RuntimeError):
    """A step that cannot become a CUDA graph: the message names the operation, its module and its source line."""
