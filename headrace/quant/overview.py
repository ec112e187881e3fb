"""In which forms a model's matrices are stored and kept, told from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.quant.base import WeightHome
from headrace.quant.precision import Rounding
from headrace.quant.select import select_method, stored_form


def kept_forms(home: WeightHome, names: Iterable[str]) -> Counter[str]:
    """{form: number of matrices that are kept in it}. Raises UnsupportedModelError as ``select_method``."""
    return Counter(select_method(home, name).form for name in names)


def second_rounding(home: WeightHome, names: Iterable[str]) -> str | None:
    """A warning where the user's settings round matrices that the checkpoint has rounded already; else None."""
    stored: Counter[str] = Counter()
    rounded: Counter[str] = Counter()
    for name in names:
        form = home.precision.form_of(name)
        if isinstance(form, Rounding) and (before := stored_form(home, name)) is not None:
            stored[before] += 1
            rounded[str(form)] += 1
    if not stored:
        return None
    return (
        f"{stored.total()} of the model's matrices are rounded a second time: the checkpoint holds them in "
        f"{spell_forms(stored)}, and the settings make them {spell_forms(rounded)}, so that answers bear both "
        "errors; leave quantization at 'auto', which keeps the checkpoint's own numbers, or take a checkpoint of "
        "floating-point weights"
    )


def spell_forms(forms: Counter[str]) -> str:
    """The most frequent first."""
    return ", ".join(form for form, _ in forms.most_common())
