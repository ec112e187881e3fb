"""load_hf_tokenizer against transformers, on small tokenizers trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.checkpoint import ModelSource
from headrace.errors import CheckpointError, RequestError, UnsupportedModelError
from headrace.tokenizer import load_tokenizer
from tests.tokenizer.texts import TEXTS, random_texts

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("ünïque", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>:0", "$A:0"], pair=["<s>:0", "$A:0", "$B:0"], special_tokens=[("<s>", 0)]
    )
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    letters = sorted({char for text in TEXTS for char in text.replace(" ", "▁") if char < "\u0100"})
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += [char for char in letters if char not in vocabulary]
    if "▁" not in vocabulary:
        vocabulary.append("▁")
    merges = [("▁", "w"), ("o", "r"), ("▁w", "or"), ("▁", "▁")]
    vocabulary += ["".join(pair) for pair in merges]
    model = models.BPE(
        {token: index for index, token in enumerate(vocabulary)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> ModelSource:
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return ModelSource("hf", folder, "tiny")


@pytest.mark.parametrize("make", [byte_level_backend, sentencepiece_backend])
def test_agrees_with_transformers(make: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = save(tmp_path, make())
    ours = load_tokenizer(source)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in [*TEXTS, *random_texts(300, seed=8), "<s>a</s><tool> x"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), repr(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, repr(text)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_long_texts_take_the_other_way_with_the_same_result(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level_backend()))
    text = "".join(TEXTS) * 60
    assert len(text) > 20_000
    assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "<s>" + text


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level_backend()))
    for text in ("\ud800", "ok \udfff", "\udc00" * 30_000):
        with pytest.raises(RequestError, match="lone surrogate") as caught:
            tokenizer.encode(text)
        assert caught.value.param == "prompt"
        with pytest.raises(RequestError, match="lone surrogate"):
            tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]))


def test_cutting_and_filling_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(save(tmp_path, backend))
    text = "Hello world, and more"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_added_token_stands_for_its_own_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level_backend()))
    assert tokenizer.decode(tokenizer.encode("a ünïque é")) == "a ünïque é"


def test_where_templates_come_from(tmp_path: Path) -> None:
    backend = byte_level_backend()
    assert load_tokenizer(save(tmp_path, backend, chat_template=None)).chat_template is None
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    tokenizer = load_tokenizer(save(tmp_path, backend, chat_template=named))
    user = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(user) == "one"
    assert tokenizer.apply_chat_template(user, tools=[{}]) == "two"
    (tmp_path / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    assert load_tokenizer(ModelSource("hf", tmp_path, "tiny")).chat_template == "file ü"
    for wrong in (3, [{"name": "default"}], {"a": "b"}):
        with pytest.raises(CheckpointError, match=r"tokenizer_config.json: key 'chat_template'|unhashable"):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": wrong}))
            load_tokenizer(ModelSource("hf", tmp_path, "tiny"))


def test_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(ModelSource("hf", tmp_path, "tiny"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 1)


def test_files_that_are_missing_or_wrong(tmp_path: Path) -> None:
    source = ModelSource("hf", tmp_path, "tiny")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is missing$"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is missing \(tokenizer.model alone cannot be read"):
        load_tokenizer(source)
    for text in ("", "{", "{}", "[]", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read as a tokenizer"):
            load_tokenizer(source)
    save(tmp_path, byte_level_backend(), eos_token=[1])
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: key 'eos_token' is \[1\]"):
        load_tokenizer(source)


def test_decoders_of_other_model_kinds_are_refused_by_name(tmp_path: Path) -> None:
    backend = byte_level_backend()
    for decoder in (decoders.WordPiece(), decoders.CTC(), decoders.Replace("x", "y")):
        backend.decoder = decoder
        with pytest.raises(
            UnsupportedModelError, match=r"decoder .* is not supported \(known|is not supported$"
        ):
            load_tokenizer(save(tmp_path, backend))


def test_metaspace_decoder(tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    backend.decoder = decoders.Metaspace()
    tokenizer = load_tokenizer(save(tmp_path, backend))
    ids = tokenizer.encode("word or", add_special_tokens=False)
    assert tokenizer.decode(ids) == "word or" == backend.decode(ids)
