"""A precision is one frozen value, read from one table of names."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from halfstep.errors import closest_name
from halfstep.precision.loss_scale import Scale, parse_scale

Cast: TypeAlias = Literal["none", "autocast", "copies", "whole"]
ROUNDINGS = ("nearest", "stochastic", "kahan")
KERNELS = ("auto", "torch")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
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


class Row(NamedTuple):
    """One line of the table. A dtype of None is the low dtype that the user chooses (`dtype=`, float16 by default)."""

    params: torch.dtype | None
    compute: torch.dtype | None
    norms: torch.dtype | None
    cast: Cast
    scaled: bool
    says: str


TABLE: dict[str, Row] = {
    "fp64": Row(F64, F64, F64, "whole", False, "parameters and compute in float64"),
    "fp32": Row(F32, F32, F32, "none", False, "parameters and compute in float32, TF32 off"),
    "tf32": Row(
        F32,
        F32,
        F32,
        "none",
        False,
        "float32 storage, products in TF32 (CUDA, compute capability 8.0 and up)",
    ),
    "O1": Row(
        F32,
        None,
        F32,
        "autocast",
        True,
        "fp32 parameters, autocast by op list, dynamic loss scale in float16",
    ),
    "O2": Row(
        F32,
        None,
        F32,
        "copies",
        True,
        "fp32 masters, whole network low, norms fp32, dynamic scale in float16",
    ),
    "O3": Row(
        F32,
        None,
        None,
        "copies",
        False,
        "fp32 masters, whole network low, norms too, no loss scale",
    ),
    "fp16": Row(F16, F16, F16, "whole", False, "parameters and compute in float16"),
    "bf16": Row(BF16, BF16, BF16, "whole", False, "parameters and compute in bfloat16"),
}
ALIASES = {"O0": "fp32", "mixed": "O1"}
# words of other libraries, for the question in an error; they are no names; the short ones only as they are
_ELSEWHERE = {
    "half": "fp16", "float16": "fp16", "bfloat16": "bf16", "single": "fp32", "float32": "fp32", "double": "fp64",
    "float64": "fp64", "amp": "O1",
}  # fmt: skip
_EXACT = {
    "16": "O1", "16-true": "fp16", "32": "fp32", "32-true": "fp32", "no": "fp32", "64": "fp64", "64-true": "fp64",
    "mixed-float16": "O2", "mixed-bfloat16": "O2+bf16",  # Keras: whole layers low, as in O2
}  # fmt: skip


def names() -> str:
    """The table as users see it in errors."""
    alias = {v: f" (also {k!r})" for k, v in ALIASES.items()}
    return "\n".join(f"  {name:5} {row.says}{alias.get(name, '')}" for name, row in TABLE.items())


@dataclass(frozen=True)
class Precision:
    """What one word means for every dtype in training. A plus adds a low dtype or a rounding: "O2+bf16", "fp16+kahan".

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
    """MindSpore's switch: True keeps norm layers in fp32, False runs them low; None follows the table."""
    scale: Any = None
    """Loss scale: "dynamic", "none", a number (fixed) or a DynamicScale / FixedScale; None follows the table."""
    rounding: str = "nearest"
    """How fp16/bf16 parameters store an update: "nearest" (torch's own), "stochastic" or "kahan"."""
    kernels: str = "auto"
    """"auto": fast half products on CPUs without half units; "torch": torch's own kernels everywhere."""

    def __post_init__(self) -> None:
        self._read_words()
        self._set("dtype", self._low())
        self._set(
            "keep",
            tuple(sorted((g, _dtype(d, f"keep[{g!r}]")) for g, d in dict(self.keep).items())),
        )
        self._check_choices()
        dynamic = TABLE[self.name].scaled and self.dtype == F16
        self._set(
            "scale",
            parse_scale(self.scale if self.scale is not None else "dynamic" if dynamic else "none"),
        )

    @classmethod
    def parse(cls, value: "str | Precision") -> "Precision":
        """A name of the table, with words after a plus or without, or a Precision as it is."""
        if isinstance(value, Precision):
            return value
        if not isinstance(value, str):
            raise TypeError(
                f"precision: expected a name or a Precision, received {type(value).__name__}; names:\n{names()}"
                f"{_hint(value, [])}"
            )
        return cls(value)

    @property
    def row(self) -> Row:
        return TABLE[self.name]

    @property
    def params(self) -> torch.dtype:
        return self.row.params or self.dtype

    @property
    def compute(self) -> torch.dtype:
        return self.row.compute or self.dtype

    @property
    def norms(self) -> torch.dtype:
        if self.keep_batchnorm_fp32 is None:
            return self.row.norms or self.dtype
        return F32 if self.keep_batchnorm_fp32 else self.compute

    @property
    def output(self) -> torch.dtype:
        """What loss, metrics and caller receive: at least float32."""
        return torch.promote_types(self.compute, F32)

    @property
    def cast(self) -> Cast:
        return self.row.cast

    @property
    def loss_scale(self) -> Scale:
        assert isinstance(self.scale, Scale)
        return self.scale

    @property
    def rules(self) -> Mapping[str, torch.dtype]:
        return dict(self.keep)

    def state_dict(self) -> dict[str, Any]:
        """The choices as plain values: `Precision(**p.state_dict())` is `p` again, scale settings included."""
        scale = {"kind": type(self.scale).__name__, **vars(self.scale)}
        keep = {g: _name(d) for g, d in self.keep}
        plain = {
            k: getattr(self, k) for k in ("name", "keep_batchnorm_fp32", "rounding", "kernels")
        }
        return {
            **plain,
            "dtype": _name(self.dtype) if self.row.compute is None else None,
            "keep": keep,
            "scale": scale,
        }

    def _read_words(self) -> None:
        """The name, and what stands after a plus, into the fields."""
        given = self.name
        name, *words = given.split("+") if isinstance(given, str) else [given]
        self._set("name", ALIASES.get(name, name))
        if self.name not in TABLE:
            raise ValueError(_unknown(given, name, words))
        for word in words:
            if word not in DTYPES and word not in ROUNDINGS:
                raise ValueError(_unknown_word(given, word))
            field, unsaid = ("dtype", None) if word in DTYPES else ("rounding", "nearest")
            if getattr(self, field) != unsaid:
                twice = f"{getattr(self, field)!r} too, expected one {field}"
                raise ValueError(
                    f"precision: received {given!r} and {twice}; leave one of them out"
                )
            self._set(field, word)

    def _low(self) -> torch.dtype:
        row = TABLE[self.name]
        if row.compute is not None:
            if self.dtype is not None and _dtype(self.dtype, "dtype") != row.compute:
                takes = f"{self.name!r} computes in {_name(row.compute)}; only O1, O2 and O3 take dtype="
                raise ValueError(f"dtype: received {self.dtype!r}, but {takes}")
            return row.compute
        low = F16 if self.dtype is None else _dtype(self.dtype, "dtype")
        if low not in (F16, BF16):
            raise ValueError(
                f"dtype: expected 'float16' or 'bfloat16' for {self.name!r}, received {self.dtype!r}"
            )
        return low

    def _check_choices(self) -> None:
        for field, options in (("rounding", ROUNDINGS), ("kernels", KERNELS)):
            if getattr(self, field) not in options:
                raise ValueError(
                    f"{field}: expected one of {', '.join(options)}, received {getattr(self, field)!r}"
                )
        if self.rounding != "nearest" and self.params not in (F16, BF16):
            stores = (
                f"{self.name!r} stores {_name(self.params)} parameters, where no update is lost"
            )
            raise ValueError(
                f"rounding: received {self.rounding!r}, but {stores}; use 'nearest', or 'fp16' or 'bf16'"
            )
        if self.keep_batchnorm_fp32 is not None and self.name not in ("O2", "O3", "fp16", "bf16"):
            raise ValueError(
                f"keep_batchnorm_fp32: expected None for {self.name!r}; it is for O2, O3, fp16, bf16"
            )
        if self.keep and self.name in ("fp32", "tf32"):
            raise ValueError(
                f"keep: expected no globs for {self.name!r}, which has one dtype; choose O1 or O2"
            )
        if self.name == "O1" and any(d != F32 for _, d in self.keep):
            raise ValueError(
                "keep: expected 'fp32' under O1, where a kept module leaves autocast; O2 takes others"
            )

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)


def _unknown(given: Any, name: Any, words: list[str]) -> str:
    if name in ("fp8", "auto"):
        return f"precision: received {given!r} (planned, not there yet), expected one of\n{names()}"
    return f"precision: received {given!r}, expected one of\n{names()}{_hint(name, words)}"


def _hint(name: Any, words: list[str]) -> str:
    word = str(name).removeprefix("torch.").casefold().replace("_", "-")
    mixed = (
        ("O1+bf16" if "bf" in word else "O1") if "mixed" in word and word != "mixed" else None
    )  # 16-mixed: not fp16
    close = _EXACT.get(word) or mixed or closest_name(word, [*TABLE, *ALIASES, *_ELSEWHERE])
    if close is None:
        return ""
    said = "+".join(dict.fromkeys([*_ELSEWHERE.get(close, close).split("+"), *words]))
    return f"\nDid you mean {said!r}?"


def _unknown_word(given: str, word: str) -> str:
    close = closest_name(word, [*DTYPES, *ROUNDINGS])
    hint = f" Did you mean {given.replace(f'+{word}', f'+{close}')!r}?" if close else ""
    known = f"fp16, bf16 or a rounding ({', '.join(ROUNDINGS)}) after the plus"
    return f"precision: received {given!r}, expected {known}, as in O2+bf16 or fp16+kahan.{hint}"


def _dtype(value: Any, where: str) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else DTYPES.get(value)
    if found not in (F16, BF16, F32, F64):
        raise ValueError(f"{where}: expected one of {', '.join(DTYPES)}, received {value!r}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
