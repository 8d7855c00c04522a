"""A precision is one frozen value, read from one table of names."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from halfstep.errors import closest_name
from halfstep.precision.loss_scale import Scale, parse_scale
from halfstep.utils.checks import one_of
from halfstep.utils.text import dtype_name

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64

Cast: TypeAlias = Literal["none", "autocast", "copies", "whole"]
"""How a network gets its dtype.

"none": it does not. "autocast": torch casts op by op. "copies": low copies of float32 parameters.
"whole": the parameters themselves are stored in it.
"""

# Every word, for editors and type checkers. A word that is computed: Precision(word).
PrecisionName: TypeAlias = (
    Literal["fp64", "fp32", "tf32", "fp16", "bf16", "O0", "O1", "O2", "O3", "mixed"]
    | Literal["O1+bf16", "O2+bf16", "O3+bf16", "mixed+bf16"]
    | Literal["O1+fp16", "O2+fp16", "O3+fp16", "mixed+fp16"]
    | Literal["O1+bfloat16", "O2+bfloat16", "O3+bfloat16", "mixed+bfloat16"]
    | Literal["O1+float16", "O2+float16", "O3+float16", "mixed+float16"]
    | Literal["fp16+kahan", "fp16+stochastic", "bf16+kahan", "bf16+stochastic"]
)
ROUNDINGS = ("nearest", "stochastic", "kahan")
KERNELS = ("auto", "torch")
DTYPES = {
    "fp16": F16,
    "float16": F16,
    "bf16": BF16,
    "bfloat16": BF16,
    "fp32": F32,
    "float32": F32,
    "fp64": F64,
    "float64": F64,
}


class PrecisionRow(NamedTuple):
    """One line of the table.

    A dtype of None is the low dtype, which the user chooses (`dtype=`, float16 by default).
    """

    params: torch.dtype | None
    compute: torch.dtype | None
    norms: torch.dtype | None
    cast: Cast
    scales_fp16: bool  # a dynamic loss scale by default, where the low dtype is float16
    description: str


TABLE: dict[str, PrecisionRow] = {
    "fp64": PrecisionRow(
        params=F64,
        compute=F64,
        norms=F64,
        cast="whole",
        scales_fp16=False,
        description="parameters and compute in float64",
    ),
    "fp32": PrecisionRow(
        params=F32,
        compute=F32,
        norms=F32,
        cast="none",
        scales_fp16=False,
        description="parameters and compute in float32, TF32 off",
    ),
    "tf32": PrecisionRow(
        params=F32,
        compute=F32,
        norms=F32,
        cast="none",
        scales_fp16=False,
        description="float32 storage, products in TF32 (CUDA, compute capability 8.0 and up)",
    ),
    "O1": PrecisionRow(
        params=F32,
        compute=None,
        norms=F32,
        cast="autocast",
        scales_fp16=True,
        description="fp32 parameters, autocast by op list, dynamic loss scale in float16",
    ),
    "O2": PrecisionRow(
        params=F32,
        compute=None,
        norms=F32,
        cast="copies",
        scales_fp16=True,
        description="fp32 masters, whole network low, norms fp32, dynamic scale in float16",
    ),
    "O3": PrecisionRow(
        params=F32,
        compute=None,
        norms=None,
        cast="copies",
        scales_fp16=False,
        description="fp32 masters, whole network low, norms too, no loss scale",
    ),
    "fp16": PrecisionRow(
        params=F16,
        compute=F16,
        norms=F16,
        cast="whole",
        scales_fp16=False,
        description="parameters and compute in float16",
    ),
    "bf16": PrecisionRow(
        params=BF16,
        compute=BF16,
        norms=BF16,
        cast="whole",
        scales_fp16=False,
        description="parameters and compute in bfloat16",
    ),
}
ALIASES = {"O0": "fp32", "mixed": "O1"}
PLANNED = ("fp8", "auto")

# Words of other libraries. They are not accepted; an error suggests ours instead.
_FOREIGN_NAMES = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "single": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float64": "fp64",
    "amp": "O1",
}
# Those that are recognized only if they are written exactly like this.
_EXACT_FOREIGN_NAMES = {
    "16": "O1",
    "16-true": "fp16",
    "32": "fp32",
    "32-true": "fp32",
    "no": "fp32",
    "64": "fp64",
    "64-true": "fp64",
    "mixed-float16": "O2",  # Keras: whole layers low, as in O2
    "mixed-bfloat16": "O2+bf16",
}


@dataclass(frozen=True)
class Precision:
    """What one word means for every dtype in training.

    A plus adds a low dtype or a rounding: "O2+bf16", "fp16+kahan".

    >>> Precision("O2", dtype="bfloat16", keep={"head*": "fp32"}).compute
    torch.bfloat16
    >>> Precision("O2+bf16") == Precision("O2", dtype="bfloat16")
    True
    """

    name: str = "fp32"
    _: KW_ONLY
    dtype: Any = None
    """The low dtype of O1, O2 and O3: "float16" (default) or "bfloat16"."""
    keep: Any = ()
    """Module glob → dtype, for instance {"head*": "fp32"}: those modules run in that dtype."""
    keep_batchnorm_fp32: bool | None = None
    """MindSpore's switch: True keeps norm layers in fp32, False runs them low; None: the table."""
    keep_inputs: tuple[str, ...] = ()
    """Names of forward's arguments that are not cast, for instance ("positions",).

    A dictionary's key is named behind its argument: "batch.positions".
    """
    scale: Any = None
    """Loss scale: "dynamic", "none", a number (fixed) or a DynamicScale / FixedScale.

    None follows the table.
    """
    rounding: str = "nearest"
    """How fp16/bf16 parameters store an update: "nearest" (torch's), "stochastic" or "kahan"."""
    kernels: str = "auto"
    """"auto": fast half products on CPUs without half units; "torch": torch's own everywhere."""

    def __post_init__(self) -> None:
        # The choices, from words to values.
        self._parse_name()
        self._set("dtype", self._compute_dtype())
        rules = {glob: _parse_dtype(f"keep[{glob!r}]", d) for glob, d in dict(self.keep).items()}
        self._set("keep", tuple(sorted(rules.items())))
        self._set("keep_inputs", _parse_names("keep_inputs", self.keep_inputs))

        # What follows from them, as plain attributes. They are no fields: equality, repr and
        # state_dict see the choices only.
        self.row: PrecisionRow
        self.params: torch.dtype
        self.compute: torch.dtype
        self.norms: torch.dtype
        self.output: torch.dtype  # what loss, metrics and caller receive: at least float32
        self.cast: Cast
        self.loss_scale: Scale
        row = TABLE[self.name]
        self._set("row", row)
        self._set("params", row.params or self.dtype)
        self._set("compute", self.dtype)
        self._set("norms", self._norm_dtype(row))
        self._set("output", torch.promote_types(self.dtype, F32))
        self._set("cast", row.cast)

        self._check_choices()
        if self.scale is None:
            is_dynamic = row.scales_fp16 and self.dtype == F16
            self._set("scale", "dynamic" if is_dynamic else "none")
        self._set("scale", parse_scale(self.scale))
        self._set("loss_scale", self.scale)

    @classmethod
    def parse(cls, value: "str | Precision") -> "Precision":
        """A name of the table, with words after a plus or without, or a Precision as it is."""
        if isinstance(value, Precision):
            return value
        if not isinstance(value, str):
            raise TypeError(
                "precision: expected a name or a Precision, "
                f"received {type(value).__name__}; names:\n{describe_table()}"
                f"{_suggest_name(value, [])}"
            )
        return cls(value)

    @property
    def rules(self) -> Mapping[str, torch.dtype]:
        """`keep` as a dictionary: module glob → dtype."""
        return dict(self.keep)

    def state_dict(self) -> dict[str, Any]:
        """The choices as plain values: `Precision(**p.state_dict())` is equal to `p`."""
        chosen_dtype = None
        if self.row.compute is None:
            chosen_dtype = dtype_name(self.dtype)
        # Checkpoints from before there was keep_inputs do not have it.
        kept: dict[str, Any] = {"keep_inputs": list(self.keep_inputs)} if self.keep_inputs else {}
        return {
            "name": self.name,
            "keep_batchnorm_fp32": self.keep_batchnorm_fp32,
            "rounding": self.rounding,
            "kernels": self.kernels,
            "dtype": chosen_dtype,
            "keep": {glob: dtype_name(dtype) for glob, dtype in self.keep},
            "scale": {"kind": type(self.scale).__name__, **vars(self.scale)},
            **kept,
        }

    def _parse_name(self) -> None:
        """Splits the name at its pluses, and puts the words behind them into their fields."""
        received = self.name
        name: Any = received
        words: list[str] = []
        if isinstance(received, str):
            name, *words = received.split("+")
        self._set("name", ALIASES.get(name, name))
        if self.name not in TABLE:
            raise ValueError(_unknown_name_message(received, name, words))

        for word in words:
            if word in DTYPES:
                field, default = "dtype", None
            elif word in ROUNDINGS:
                field, default = "rounding", "nearest"
            else:
                raise ValueError(_unknown_word_message(received, word))
            present = getattr(self, field)
            if present != default:
                raise ValueError(
                    f"precision: received {received!r} and {present!r} too, "
                    f"expected one {field}; leave one of them out"
                )
            self._set(field, word)

    def _compute_dtype(self) -> torch.dtype:
        """The dtype that the network computes in: the table's, or the low one that was chosen."""
        fixed = TABLE[self.name].compute
        if fixed is not None:
            if self.dtype is not None and _parse_dtype("dtype", self.dtype) != fixed:
                raise ValueError(
                    f"dtype: received {self.dtype!r}, but {self.name!r} computes in "
                    f"{dtype_name(fixed)}; only O1, O2 and O3 take dtype="
                )
            return fixed

        if self.dtype is None:
            return F16
        low = _parse_dtype("dtype", self.dtype)
        if low not in (F16, BF16):
            raise ValueError(
                f"dtype: expected 'float16' or 'bfloat16' for {self.name!r}, "
                f"received {self.dtype!r}"
            )
        return low

    def _norm_dtype(self, row: PrecisionRow) -> torch.dtype:
        if self.keep_batchnorm_fp32 is None:
            return row.norms or self.compute
        return F32 if self.keep_batchnorm_fp32 else self.compute

    def _check_choices(self) -> None:
        """Raises a ValueError for choices that this precision cannot honour."""
        one_of("rounding", self.rounding, ROUNDINGS)
        one_of("kernels", self.kernels, KERNELS)
        if self.rounding != "nearest" and self.params not in (F16, BF16):
            raise ValueError(
                f"rounding: received {self.rounding!r}, but {self.name!r} stores "
                f"{dtype_name(self.params)} parameters, where no update is lost; "
                "use 'nearest', or 'fp16' or 'bf16'"
            )
        if self.keep_batchnorm_fp32 is not None and self.name not in ("O2", "O3", "fp16", "bf16"):
            raise ValueError(
                f"keep_batchnorm_fp32: expected None for {self.name!r}; "
                "it is for O2, O3, fp16, bf16"
            )
        if self.keep and self.name in ("fp32", "tf32"):
            raise ValueError(
                f"keep: expected no globs for {self.name!r}, which has one dtype; choose O1 or O2"
            )
        if self.name == "O1" and any(dtype != F32 for _, dtype in self.keep):
            raise ValueError(
                "keep: expected 'fp32' under O1, where a kept module leaves autocast; "
                "O2 takes others"
            )

    def _set(self, attribute: str, value: Any) -> None:
        """Sets an attribute of the frozen instance, while it is constructed."""
        object.__setattr__(self, attribute, value)


def describe_table() -> str:
    """The names and what they mean, as users see them in errors."""
    alias_notes = {name: f" (also {alias!r})" for alias, name in ALIASES.items()}
    lines = []
    for name, row in TABLE.items():
        lines.append(f"  {name:5} {row.description}{alias_notes.get(name, '')}")
    return "\n".join(lines)


def _unknown_name_message(received: Any, name: Any, words: list[str]) -> str:
    table = describe_table()
    if name in PLANNED:
        return (
            f"precision: received {received!r} (planned, not there yet), expected one of\n{table}"
        )
    suggestion = _suggest_name(name, words)
    return f"precision: received {received!r}, expected one of\n{table}{suggestion}"


def _suggest_name(name: Any, words: list[str]) -> str:
    """The closest name of the table as the end of a message, an empty text where none is close.

    `words` are those behind the plus, which the suggestion keeps.
    """
    word = str(name).removeprefix("torch.").casefold().replace("_", "-")
    close: str | None
    if word in _EXACT_FOREIGN_NAMES:
        close = _EXACT_FOREIGN_NAMES[word]
    elif "mixed" in word and word != "mixed":  # Lightning's 16-mixed is autocast, not fp16
        close = "O1+bf16" if "bf" in word else "O1"
    else:
        close = closest_name(word, [*TABLE, *ALIASES, *_FOREIGN_NAMES])
    if close is None:
        return ""

    our_words = _FOREIGN_NAMES.get(close, close).split("+")
    suggestion = "+".join(dict.fromkeys([*our_words, *words]))
    return f"\nDid you mean {suggestion!r}?"


def _unknown_word_message(received: str, word: str) -> str:
    suggestion = ""
    close = closest_name(word, [*DTYPES, *ROUNDINGS])
    if close:
        corrected = received.replace(f"+{word}", f"+{close}")
        suggestion = f" Did you mean {corrected!r}?"
    return (
        f"precision: received {received!r}, "
        f"expected fp16, bf16 or a rounding ({', '.join(ROUNDINGS)}) after the plus, "
        f"as in O2+bf16 or fp16+kahan.{suggestion}"
    )


def _parse_names(argument: str, value: Any) -> tuple[str, ...]:
    """Names in order, each once. A single string is refused: it would be taken letter by letter."""
    names = () if isinstance(value, str) else tuple(value)
    is_valid = not isinstance(value, str) and all(isinstance(name, str) for name in names)
    if not is_valid:
        raise TypeError(
            f"{argument}: expected names of forward's arguments, as in ('positions',), "
            f"received {value!r}"
        )
    return tuple(sorted(set(names)))


def _parse_dtype(argument: str, value: Any) -> torch.dtype:
    """A dtype from its name or itself; only those of DTYPES."""
    dtype = value if isinstance(value, torch.dtype) else DTYPES.get(value)
    if dtype not in (F16, BF16, F32, F64):
        raise ValueError(f"{argument}: expected one of {', '.join(DTYPES)}, received {value!r}")
    return dtype
