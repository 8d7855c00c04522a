"""Random words as the numbers that transforms need: intervals, angles, a beta distribution.

Everything is sums, products, quotients and square roots of float64, each rounded on its own: the
same bits come out for any batch size and on any device. torch's own exp and sin differ in their
last bits between devices, and between the middle and the end of a vector.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_LN2 = math.log(2)
_HALF_PI = math.pi / 2

# Taylor series on the reduced ranges |x| <= ln2 / 2 and |x| <= pi / 4, off by at most 3e-13.
_EXP = tuple(1 / math.factorial(n) for n in range(11))
_SIN = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(7))
_COS = tuple((-1) ** n / math.factorial(2 * n) for n in range(8))

# A quantile table has 2^8 cells for each power of two of the probability, down to 2^-33.
_OCTAVES = 33
_CELL_BITS = 8
_MANTISSA_BITS = 52
_CELL_SHIFT = _MANTISSA_BITS - _CELL_BITS
_FIRST_CELL = (1023 - _OCTAVES) << _CELL_BITS  # 1023 is the exponent of 1.0

# Never emptied: captured graphs read these tensors at their addresses.
_TABLES: dict[tuple[float, torch.device], Tensor] = {}


def uniform(words: Tensor, low: float, high: float) -> Tensor:
    """Uniform float64 in [low, high]: 2^32 values, evenly spaced."""
    return words.to(torch.float64) * ((high - low) * 2.0**-32) + low


def is_below(words: Tensor, p: float) -> Tensor:
    """True with probability p, met to within 2^-32; 0 and 1 are met exactly."""
    return words < round(p * 2**32)


def exp(x: Tensor) -> Tensor:
    """e^x of float64, to 12 digits, for |x| below 700."""
    power = (x * (1 / _LN2)).round()
    rest = x - power * _LN2
    result = _polynomial(rest, _EXP)
    two_to_power = ((power.to(torch.int64) + 1023) << _MANTISSA_BITS).view(torch.float64)
    return result * two_to_power


def sin_cos(radians: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of float64, to 12 digits."""
    quarter = (radians * (1 / _HALF_PI)).round()
    rest = radians - quarter * _HALF_PI
    square = rest * rest
    sine = rest * _polynomial(square, _SIN)
    cosine = _polynomial(square, _COS)

    # Quarter turns exchange the two, and change their signs.
    quarter = quarter.to(torch.int64) & 3
    is_odd = (quarter & 1) == 1
    sine_sign = 1 - (quarter & 2)
    cosine_sign = 1 - ((quarter + 1) & 2)
    return (
        torch.where(is_odd, cosine, sine) * sine_sign,
        torch.where(is_odd, sine, cosine) * cosine_sign,
    )


def symmetric_beta(words: Tensor, alpha: float) -> Tensor:
    """float64 of the distribution Beta(alpha, alpha), by its quantiles.

    They are interpolated between cells of 2^-8 of the probability's power of two, and so off by at
    most 2^-16 / alpha^2 of themselves. For alpha 1 they are the words, uniform.
    """
    # The distribution is symmetric: a word's lowest bit chooses the half, the others the place.
    probability = (words >> 1).to(torch.float64) * 2.0**-32 + 2.0**-33  # in (0, 1/2)
    if alpha == 1.0:
        quantile = probability
    else:
        table = _quantile_table(alpha, words.device)
        # A float64's exponent and first bits number the cell; its other bits are the place in it.
        bits = probability.view(torch.int64)
        cell = (bits >> _CELL_SHIFT) - _FIRST_CELL
        place = (bits & ((1 << _CELL_SHIFT) - 1)).to(torch.float64) * 2.0**-_CELL_SHIFT
        low = table[cell]
        quantile = low + (table[cell + 1] - low) * place
    return torch.where((words & 1) == 1, 1 - quantile, quantile)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _quantile_table(alpha: float, device: torch.device) -> Tensor:
    """The table on a device, copied there once."""
    key = (alpha, device)
    if key not in _TABLES:
        # An inference tensor could not be used with autograd later. A capture allows copies from
        # pinned memory, which must stay: a replay copies again.
        with torch.inference_mode(False):
            table = torch.from_numpy(beta_quantiles(alpha).copy())
            if device.type == "cuda":
                pinned = table.pin_memory()
                _TABLES[(alpha, pinned.device)] = pinned
                if torch.cuda.is_current_stream_capturing():
                    return pinned.to(device, non_blocking=True)  # its memory is the graph's
            _TABLES[key] = table.to(device)
    return _TABLES[key]


@lru_cache(64)
def beta_quantiles(alpha: float) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The quantiles of Beta(alpha, alpha) at the lower ends of the table's cells, up to 1/2."""
    # With x = 1 / (1 + e^-s) the density becomes (4 x (1 - x))^alpha ds, smooth for every alpha,
    # and falls as e^(-alpha |s|): its integral by trapezoids, from where it is below 2^-40.
    step = 0.002 / max(1.0, math.sqrt(alpha))
    lowest = -(28 + 2 * abs(math.log(alpha))) / alpha - 3
    points = min(int(-lowest / step), 4_000_000)
    s = np.linspace(lowest, 0.0, points)
    log_density = alpha * (math.log(4) + s - 2 * np.log1p(np.exp(s)))
    density = np.exp(log_density)
    integral = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    integral += density[0] / alpha / (s[1] - s[0])  # the tail below, e^(alpha s)
    integral *= 0.5 / integral[-1]

    cells = np.arange(((_OCTAVES - 1) << _CELL_BITS) + 1, dtype=np.int64)
    probabilities = ((cells + _FIRST_CELL) << _CELL_SHIFT).view(np.float64)
    at = np.interp(np.log(probabilities), np.log(integral), s)
    # One more, for the place behind the last cell.
    quantiles = np.exp(at - np.log1p(np.exp(at)))
    return np.append(quantiles, quantiles[-1])
