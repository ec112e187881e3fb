"""String formats: those that a grammar library checks by itself, and those that are spelled out as patterns here,
since no library has them exactly (days of months, leap years and seconds, lengths of host names)."""

from __future__ import annotations

from typing import Any

LIBRARY_FORMATS = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})

_LONG, _SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_HOUR, _FRACTION = "([01][0-9]|2[0-3])", "([.][0-9]{1,9})?"
_PLAIN_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}([zZ]|[+-]{_HOUR}:[0-5][0-9])"
_TIME = f"({_PLAIN_TIME}|23:59:60{_FRACTION}([zZ]|[+-]00:00))"
_LABEL = "([a-zA-Z0-9]{1,63}|[a-zA-Z0-9](-?[a-zA-Z0-9]){0,31})"

PATTERNS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"pattern": f"^{_LABEL}([.]{_LABEL})*$", "maxLength": 253},
}
FORMATS = LIBRARY_FORMATS | set(PATTERNS)
