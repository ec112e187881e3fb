"""select_method: how a module's weights are read and kept, from what the checkpoint has and what the user wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.quant.awq import AWQMethod
from headrace.quant.base import QuantMethod, WeightHome
from headrace.quant.compressed_tensors import CompressedTensorsMethod
from headrace.quant.gguf import gguf_method
from headrace.quant.gptq import GPTQMethod
from headrace.quant.precision import Rounding
from headrace.quant.rounded import RoundedMethod
from headrace.quant.unquantized import UNQUANTIZED, DequantizedMethod

KNOWN = ("gptq", "awq", "compressed-tensors", "gguf")


def select_method(home: WeightHome, name: str) -> QuantMethod:
    """The method of the module ``name``.

    Raises:
        UnsupportedModelError: the checkpoint's quantization is not known.
    """
    form = home.precision.form_of(name)
    is_gguf = (home.quantization or {}).get("quant_method") == "gguf"
    if is_gguf and form != "auto":
        stored: QuantMethod = UNQUANTIZED  # which decodes blocks
    else:
        stored = _stored_method(home, name)
    if isinstance(form, Rounding):
        return RoundedMethod(form, stored)
    if form == "none" and stored is not UNQUANTIZED:
        return DequantizedMethod(stored)
    return stored


def stored_form(home: WeightHome, name: str) -> str | None:
    """The quantized form in which the checkpoint holds the module ``name``; None: it is dense. Raises as above."""
    if (home.quantization or {}).get("quant_method") == "gguf":
        ggml_type = home.weights.ggml_type(f"{name}.weight")
        return None if ggml_type is None else ggml_type.name
    method = _stored_method(home, name)
    return None if method is UNQUANTIZED else method.form


def _stored_method(home: WeightHome, name: str) -> QuantMethod:
    config = home.quantization
    if config is None:
        return UNQUANTIZED
    method = config.get("quant_method")
    if method == "gguf":
        return gguf_method(home.weights.ggml_type(f"{name}.weight"), home)
    if method in ("gptq", "awq"):
        # modules that a checkpoint leaves as they were have no packed tensor; lists of exceptions say no more
        found = _word_method(config)
        return found if home.weights.has(f"{name}.{found.marker}") else UNQUANTIZED
    if method == "compressed-tensors":
        return CompressedTensorsMethod.from_config(config, name) or UNQUANTIZED
    raise UnsupportedModelError(
        f"the weights of '{name}' are quantized with {method!r}, which is not supported (known: {', '.join(KNOWN)}, "
        "or none)"
    )


def _word_method(config: Mapping[str, Any]) -> GPTQMethod | AWQMethod:
    if config.get("quant_method") == "gptq":
        return GPTQMethod.from_config(config)
    return AWQMethod.from_config(config)
