"""Parse and format sizes, times and rates: ``"8GiB"`` <-> bytes."""

import re
from math import inf

from oocgemm.errors import InputError

_FACTORS = {
    "": 1,
    "B": 1,
    **{p + "IB": 1024 ** (i + 1) for i, p in enumerate("KMGTP")},
    **{p + "B": 1000 ** (i + 1) for i, p in enumerate("KMGTP")},
    **{p: 1024 ** (i + 1) for i, p in enumerate("KMGTP")},
}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_SIZE_LIMIT = 2**63  # bytes; larger sizes would overflow the int64 of compiled libraries


def parse_size(text: str | int) -> int:
    """Convert a size to bytes. Units are B, KB, KiB, MB, MiB, ...; K, M, G, T and P are binary.

    Raises `InputError` if the text does not parse, or if the size is not positive or not below 8 EiB.

    >>> parse_size("2GiB"), parse_size("1.5 MB"), parse_size("64k"), parse_size(4096)
    (2147483648, 1500000, 65536, 4096)
    """
    if isinstance(text, int):
        size = text
    else:
        from fractions import Fraction

        match = _SIZE.fullmatch(str(text))
        factor = _FACTORS.get(match[2].upper()) if match else None
        if match is None or factor is None:
            raise InputError(
                f"cannot read {text!r} as a size: write a number and a unit, such as 512MiB or 2GiB"
            )
        size = int(Fraction(match[1]) * factor)
    if size <= 0:
        raise InputError(f"a size must be positive, not {text!r}")
    if size >= _SIZE_LIMIT:
        raise InputError(f"a size must be below 8 EiB, not {text!r}")
    return size


def parse_rate(text: str | float) -> float:
    """Convert a rate to bytes per second. Text is a size, as for `parse_size`, and "/s".

    Raises `InputError` if the text does not parse, or if the rate is not positive and finite.

    >>> parse_rate("100GB/s"), parse_rate("1.5 GiB/s"), parse_rate(2e9)
    (100000000000.0, 1610612736.0, 2000000000.0)
    """
    if not isinstance(text, str):
        if not 0 < text < inf:
            raise InputError(f"a rate must be positive and finite, not {text:g} bytes per second")
        return float(text)
    size, slash, second = text.rpartition("/")
    if not slash or second.strip() != "s":
        raise InputError(f"cannot read {text!r} as a rate: write a size per second, such as 20GB/s")
    return float(parse_size(size))


def format_size(size: float) -> str:
    """Format a size in binary units, with three significant digits.

    >>> format_size(2147483648), format_size(1000), format_size(1.5 * 2**20)
    ('2 GiB', '1000 B', '1.5 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    value, unit = float(size), units.pop(0)
    while abs(value) >= 1024 and units:
        value, unit = value / 1024, units.pop(0)
    return f"{value:.4g} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def ceil_size(size: int) -> str:
    """Round a size in bytes up to whole MiB and format it, so that `parse_size` reads it back.

    Sizes of more than 9999 MiB are rounded up to whole GiB, and so on.

    >>> ceil_size(16787456), ceil_size(1), ceil_size(10 * 2**40 + 1)
    ('17MiB', '1MiB', '11TiB')
    """
    unit, factor = "MiB", 1 << 20
    for larger in ("GiB", "TiB", "PiB"):
        if size <= 9999 * factor or larger == "PiB":
            break
        unit, factor = larger, factor << 10
    return f"{-(-max(1, size) // factor)}{unit}"


def format_time(seconds: float) -> str:
    """Format a duration in seconds, in ms, s or h:mm:ss.

    >>> format_time(0.0042), format_time(12.34), format_time(3725), format_time(2e-20)
    ('4.2 ms', '12.3 s', '1:02:05', '0 ms')
    """
    if abs(seconds) < 1e-12:  # a rounding error
        return "0 ms"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def format_rate(rate: float, unit: str = "B") -> str:
    """Format a rate in units per second, with three significant digits and a decimal prefix.

    >>> format_rate(54.23e9), format_rate(5.2e13, "FLOP"), format_rate(0)
    ('54.2 GB/s', '52 TFLOP/s', '0 B/s')
    """
    prefixes = ["", "k", "M", "G", "T", "P"]
    value, prefix = float(rate), prefixes.pop(0)
    while abs(value) >= 999.5 and prefixes:
        value, prefix = value / 1000, prefixes.pop(0)
    return f"{value:.3g} {prefix}{unit}/s"


def format_share(share: float | None) -> str:
    """Format a fraction in percent; None gives a dash.

    >>> format_share(0.314), format_share(0.0432), format_share(None)
    ('31%', '4.3%', '-')
    """
    if share is None:
        return "-"
    return f"{100 * share:.1f}%" if share < 0.0995 else f"{100 * share:.0f}%"


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1.

    >>> counted(1, "tile"), counted(0, "tile")
    ('1 tile', '0 tiles')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_percent(share: float | None) -> str:
    """Format a fraction in percent, always with one decimal, so that parts of a whole can be added up.

    None gives a dash.

    >>> format_percent(0.314), format_percent(0.00432), format_percent(None)
    ('31.4%', '0.4%', '-')
    """
    return "-" if share is None else f"{100 * share:.1f}%"
