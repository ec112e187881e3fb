"""load_hf_tokenizer: a tokenizer from a Hugging Face folder's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.load import read_json_object
from headrace.errors import CheckpointError
from headrace.tokenizer.base import SpecialTokens, Tokenizer

if TYPE_CHECKING:
    import tokenizers

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """Reads tokenizer.json, and the special tokens and chat templates beside it.

    Start and end tokens are added as tokenizer.json's own post-processor says.

    Raises:
        CheckpointError: there is no tokenizer.json, or a file is wrong; the message names it.
    """
    backend = _read_backend(folder)
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    map_path = folder / "special_tokens_map.json"
    texts = _special_texts(read_json_object(map_path) if map_path.is_file() else {}, map_path)
    texts |= _special_texts(config, config_path)
    templates = _chat_templates(folder, config, config_path)
    bos, eos = (
        backend.token_to_id(texts[name]) if name in texts else None for name in ("bos_token", "eos_token")
    )
    return Tokenizer(backend, SpecialTokens(bos, eos, texts, templates), str(folder / "tokenizer.json"))


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [
            name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()
        ]
        hint = (
            f" ({', '.join(others)} alone cannot be read: save the tokenizer anew with transformers)"
            if others
            else ""
        )
        raise CheckpointError(f"{path}: is missing{hint}")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from error
    # Files often keep the settings of the last training run; a server must neither cut nor fill prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_texts(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Special tokens by name; each is a string or an object with 'content'."""
    texts = {}
    for name in _NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise CheckpointError(f"{path}: key '{name}' is {config[name]!r}, not a token's text")
        texts[name] = value
    return texts


def _chat_templates(folder: Path, config: Mapping[str, Any], config_path: Path) -> dict[str, str]:
    """Templates by name: the .jinja files beside the config win over those inside it, as in transformers."""
    inside = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inside, str):
        templates["default"] = inside
    elif inside is not None:
        items = inside if isinstance(inside, list) else [None]
        for item in items:
            name = item.get("name") if isinstance(item, Mapping) else None
            template = item.get("template") if isinstance(item, Mapping) else None
            if not isinstance(name, str) or not isinstance(template, str):
                raise CheckpointError(
                    f"{config_path}: key 'chat_template' is neither a text nor a list of named texts"
                )
            templates[name] = template
    for name, path in [
        ("default", folder / "chat_template.jinja"),
        *((path.stem, path) for path in sorted(folder.glob("additional_chat_templates/*.jinja"))),
    ]:
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return templates
