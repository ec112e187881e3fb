"""What "auto" comes to where the model's files have to be looked into: forms of weights, and the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.checkpoint import ModelArchitecture, ModelSource
from headrace.config import EngineConfig
from headrace.serve.settings import ServerConfig

if TYPE_CHECKING:
    from headrace.platforms.base import Platform
    from headrace.quant.base import WeightHome

Choices = dict[str, tuple[Any, str]]
"""{setting: (value, why)}."""


def weight_choices(
    config: EngineConfig, source: ModelSource, architecture: ModelArchitecture, platform: Platform
) -> Choices:
    """Of ``quantization`` and ``linear_inputs``. Reads headers; raises CheckpointError and ConfigError."""
    from headrace.loader.tensor_names import matrix_modules
    from headrace.quant.overview import kept_forms, second_rounding, spell_forms

    home, names = _weight_home(config, source, architecture, platform), matrix_modules(architecture)
    forms, warning = kept_forms(home, names), second_rounding(home, names)
    choices: Choices = {}
    if config.model.quantization == "auto":
        choices["quantization"] = (
            spell_forms(forms),
            _why_forms(home, names, forms.total() - forms["dense"]),
        )
    if warning is not None:
        value = choices.get("quantization", (config.model.quantization,))[0]
        choices["quantization"] = (value, f"WARNING: {warning}")
    if config.model.linear_inputs == "auto":
        inputs = {8: "int8", 16: "int16", 32: "float"}[home.input_bits]
        why = "of packed weights; int16 on a CPU with native kernels"
        choices["linear_inputs"] = (inputs, why if home.input_bits < 32 else "of packed weights, as they are")
    return choices


def _weight_home(
    config: EngineConfig, source: ModelSource, architecture: ModelArchitecture, platform: Platform
) -> WeightHome:
    from headrace.kernels.registry import Ops
    from headrace.loader.base import open_weights
    from headrace.quant.base import WeightHome
    from headrace.quant.precision import Precision

    model = config.model
    return WeightHome(
        open_weights(source, architecture, model.load_format, model.seed),
        Ops.for_device(platform.device, config.device.kernels),
        platform.resolve_dtype(model.dtype, architecture.torch_dtype),
        platform.device,
        architecture.quantization,
        Precision.parse(model.quantization, model.quantization_overrides, model.linear_inputs),
    )


def _why_forms(home: WeightHome, names: list[str], num_packed: int) -> str:
    from headrace.quant.select import stored_form

    if num_packed:
        return f"the checkpoint's own: {num_packed} of {len(names)} matrices stay packed, the most frequent form first"
    if any(stored_form(home, name) for name in names):
        return "decoded while loading: packed weights have no fast kernels here"
    return "the checkpoint's own"


def chat_choices(config: EngineConfig, server: ServerConfig, source: ModelSource) -> Choices:
    """Of ``tool_parser`` and ``reasoning_parser``, which the chat template decides. Raises CheckpointError."""
    asked = {name for name in ("tool_parser", "reasoning_parser") if getattr(server, name) == "auto"}
    if not asked:
        return {}
    if config.model.skip_tokenizer_init:
        return dict.fromkeys(asked, (None, "without a tokenizer nobody chats"))
    from headrace.engine.front_end import open_tokenizer

    tokenizer = open_tokenizer(config.model, source)
    template = tokenizer.template_source(True)
    if template is None:
        why = "the model has no chat template: requests bring one, and it decides"
        return dict.fromkeys(asked, (None, why))
    found = of_templates(template, tokenizer.template_source(False) or "")
    return {name: choice for name, choice in found.items() if name in asked}


def of_templates(for_tools: str, plain: str) -> Choices:
    """The same for templates: the one of conversations with tools, and the one of others."""
    from headrace.serve.tools.reasoning import REASONING_PARSERS, tags_of_template
    from headrace.serve.tools.registry import FORMATS, automatic_format, knows_tools

    form, tags = automatic_format(for_tools), tags_of_template(plain)
    if form is None:
        unknown = (
            f"the chat template has tools in a format that is not known; set one of {', '.join(FORMATS)}"
        )
        tools: tuple[Any, str] = (None, unknown)
    elif knows_tools(for_tools):
        tools = (form.name, "the chat template's marks")
    else:
        tools = (form.name, "the chat template knows no tools: they are put in words")
    names = [name for name, each in REASONING_PARSERS.items() if each is tags]
    reasoning = (names[0], "the chat template's tags") if names else ("none", "the chat template has no tags")
    return {"tool_parser": tools, "reasoning_parser": reasoning}
