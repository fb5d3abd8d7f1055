"""Numbers for people: three significant digits, never an exponent."""

from __future__ import annotations

from math import floor, log10


def short(value: float) -> str:
    """1287.06 -> '1,290', 0.35217 -> '0.352', 0 -> '0'.

    >>> short(1287.06), short(12.345), short(0.35217), short(0)
    ('1,290', '12.3', '0.352', '0')
    """
    if not value:
        return "0"
    digits = 2 - floor(log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(min(digits, 6), 0)}f}"
