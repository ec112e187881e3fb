from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cli import main as main_module
from tests.cli.conftest import CommandLine

START = [sys.executable, "-c", "from headrace.cli.main import main; main()"]


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from headrace.cli.main import run\n"
        "code = run(['--help'])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'rich.console', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else code)\n"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        times.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    for name, (_, help_line) in main_module.COMMANDS.items():
        assert name in done.stdout and help_line in done.stdout
    assert min(times) < 0.5


def test_no_arguments_show_the_help(headrace: CommandLine) -> None:
    assert headrace() == 0 and "Usage: headrace" in headrace.out


@pytest.mark.parametrize("own", [None, "active"])
def test_compute_threads_sleep_between_steps(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    """Unless the user says otherwise; set before torch is imported, and inherited by the engine's process."""
    monkeypatch.setattr("sys.argv", ["headrace", "--version"])
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    with pytest.raises(SystemExit):
        main_module.main()
    assert os.environ["OMP_WAIT_POLICY"] == (own or "passive")


def test_version(headrace: CommandLine) -> None:
    assert headrace("--version") == 0 and headrace.out == f"headrace {__version__}\n"


@pytest.mark.parametrize("name", list(main_module.COMMANDS))
def test_each_command_has_help(headrace: CommandLine, name: str) -> None:
    assert headrace(name, "--help") == 0 and f"Usage: headrace {name}" in headrace.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generat"], "'generate'"),
        (["generate", "--max-tokns", "3"], "--max-tokens"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "x", "--block-size", "many"], "--block-size"),
        (["generate", "--prompt", "x", "--block-size", "many"], "'many'"),
        (["generate", "--prompt", "x", "--stream-interval=7", "--stream-interval=-x"], "'-x'"),
        (["serve", "--port", "1e3"], "'1e3'"),
        (["generate", "--prompt", "x", "--block-size", "3"], "power of two"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature must be in [0, 100]"),
        (["generate", "--model", "smollm2", "--prompt", "x"], "first argument, as headrace generate smollm2"),
        (["chat", "--model=smollm2"], "first argument, as headrace chat smollm2"),
        (["serve", "--port", "1", "--model"], "first argument"),
        (["explain", "-m", "smollm2"], "-m is no option: the model is the first argument"),
        (
            ["serve", "smollm2", "--enforce-eager"],
            "--enforce-eager has no counterpart here: max_graph_tokens",
        ),
        (["generate", "--prompt", "x", "--dtype", "foo"], "'--dtype': 'foo' is not one of 'auto', 'float32'"),
        (["generate", "--prompt", "x", "--kv-cache-bytes", "4GB"], "as 4294967296 or 4GiB; got '4GB'"),
        (["serve", "--max-body-bytes", "many"], "max_body_bytes must be a whole number of bytes"),
        (["generate", "--prompt", "x", "--host-cache-bytes", "-1"], "host_cache_bytes must be in [0,"),
        (["bench"], "'WORKLOAD'"),
        (["bench", "single", "--request-rate", "3"], "--request-rate needs --base-url"),
        (["bench", "single", "--api-key", "x"], "--api-key needs --base-url"),
        (["bench", "single", "--only", "b64"], "--only b64 picks from a file"),
        (["bench", "single", "--base-url", "localhost"], "as http://host"),
        (
            ["bench", "single", "--base-url", "http://x", "--no-enable-prefix-caching"],
            "--no-enable-prefix-caching sets",
        ),
        (
            ["bench", "single", "--base-url", "http://x", "--block-size", "16"],
            "--block-size sets up an engine",
        ),
        (["bench", "smollm2", "single", "more"], "more"),
        (["generate", "no/such/model.gguf", "--prompt", "x"], "no such file"),
        (["generate", "--prompt", "x", "--system", "be brief"], "--chat"),
        (["generate", "--prompt", "x", "--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_mistakes_are_one_line(headrace: CommandLine, arguments: list[str], words: str) -> None:
    assert words in headrace.fails(*arguments)


def test_a_fault_of_ours_is_one_line_too(headrace: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("headrace.cli.generate.write_answers", fail)
    monkeypatch.setattr("headrace.engine.llm.LLM.from_config", fail)
    assert "RuntimeError: two lines" in headrace.fails("generate", "--prompt", "x", code=1)


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    wrong = ["generate", "no/such/model.gguf", "--prompt", "x"]
    done = subprocess.run([*START, *wrong, "--debug"], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr
    done = subprocess.run([*START, *wrong], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from headrace.cli.main import main; main()' generate --help | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("redirect", "words"),
    [("> /dev/full", "cannot write the output: No space left"), (">&-", "standard output is closed")],
)
def test_output_that_cannot_be_written_is_one_line(redirect: str, words: str) -> None:
    if redirect.endswith("full") and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    program = "import sys; sys.argv[0] = 'headrace'; from headrace.cli.main import main; main()"
    command = f'{sys.executable} -c "{program}" explain --device cpu {redirect}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert "fault" not in done.stderr


def test_a_log_message_goes_to_the_present_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = main_module.StderrHandler()
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler.emit(logging.makeLogRecord({"msg": "beside the bar"}))
    assert stream.getvalue() == "beside the bar\n"
