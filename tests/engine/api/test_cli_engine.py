"""`forebay engine`: what it prints, where, and what it says when it can't."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from forebay import cli, engine_wiring
from tests.engine.api.model_folder import VOCABULARY, save_tiny_model

QUICK = ("--store", "none", "--precision", "fp32", "--block-tokens", "16", "--pool-bytes", "8MiB")


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    logger = logging.getLogger("forebay")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FOREBAY_SSD_BYTES", "0")
    monkeypatch.setenv("COLUMNS", "200")


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["engine", *args], input=stdin)


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_every_command_teaches_by_example(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0 and "Example" in done.stdout and f"forebay engine {command}" in done.stdout
    assert "--store" in done.stdout and "embedded" in done.stdout


def test_generate_prints_one_answer_the_same_from_an_argument_and_from_stdin(model_folder: Path) -> None:
    about = (str(model_folder), "--max-tokens", "12", *QUICK)
    said = run("generate", *about[:1], "One two three", *about[1:])
    assert said.exit_code == 0 and said.stdout.strip() and "three" not in said.stderr
    assert run("generate", *about[:1], "-", *about[1:], stdin="One two three").stdout == said.stdout
    as_chat = run("generate", *about[:1], "One two three", "--chat", *about[1:])
    assert as_chat.exit_code == 0 and as_chat.stdout != said.stdout


def test_a_chat_answers_each_line_until_an_empty_one_and_says_what_was_reused(model_folder: Path) -> None:
    lines = "One two three four five six seven eight nine ten\nAnd again\n\nnever read\n"
    done = run("chat", str(model_folder), "--max-tokens", "8", "--seed", "5", *QUICK, stdin=lines)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("prompt tokens reused") == 2 and "tokens a second" in done.stderr
    assert "\n0 of " in done.stderr and len(done.stdout.splitlines()) >= 2


def test_a_chat_that_fills_its_context_ends_with_a_word(model_folder: Path) -> None:
    done = run("chat", str(model_folder), "--max-context", "32", "--max-tokens", "8", *QUICK, stdin="ten " * 40 + "\n")
    assert done.exit_code == 0 and "fills the context" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("generate", "/no/such/folder", "x", *QUICK), 1, "/no/such/folder"),
        (("generate", "MODEL", "ten " * 6000, *QUICK), 1, "takes prompts of up to 4095 tokens"),
        (("generate", "MODEL", "x", *QUICK, "--temperature", "1000"), 1, "temperature"),
        (("generate", "MODEL", "x", "--precision", "fp8"), 2, "int8, int4"),
        (("generate", "MODEL", "x", "--pool-bytes", "many"), 2, "is not a size"),
        (("generate", "MODEL", "x", *QUICK, "--pool-bytes", "500"), 1, "smaller than one block"),
        (("generate", "MODEL", "x", *QUICK, "--pool-bytes", "0"), 1, "smaller than one block"),
        (("generate", "MODEL", "x", "--threads", "100000"), 2, "at most"),
        (("generate", "MODEL", "x", "--store", "udp://x"), 2, "tcp://HOST:PORT"),
        (("serve", "MODEL", "--host", "0.0.0.0"), 2, "other machines can reach that"),
        (("serve", "MODEL", "--api-keys-file", "/no/such/file"), 2, "cannot be read"),
    ],
)
def test_what_a_user_can_act_on_is_a_line_and_an_exit_code(
    args: tuple[str, ...], code: int, words: str, model_folder: Path
) -> None:
    done = run(*(str(model_folder) if arg == "MODEL" else arg for arg in args))
    assert (done.exit_code, "Traceback" in done.stderr) == (code, False)
    assert words in " ".join(done.stderr.replace("│", " ").split())


def test_keys_that_others_may_read_are_refused(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a-key-of-some-length\n")
    file.chmod(0o644)
    done = run("serve", str(model_folder), "--api-keys-file", str(file))
    assert done.exit_code == 2 and "chmod 600" in done.stderr and "sk-a" not in done.stderr


def test_keys_that_were_named_and_are_not_there_do_not_mean_none(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# the keys go here\n\n")
    file.chmod(0o600)
    done = run("serve", str(model_folder), "--api-keys-file", str(file))
    assert done.exit_code == 2 and "holds no key" in " ".join(done.stderr.replace("│", " ").split())
    monkeypatch.setenv("FOREBAY_ENGINE_API_KEY", "")
    done = run("serve", str(model_folder))
    assert done.exit_code == 2 and "FOREBAY_ENGINE_API_KEY is set and holds no key" in done.stderr


def test_a_store_where_nothing_answers_is_said_at_the_start(model_folder: Path, tmp_path: Path) -> None:
    about = ("--max-tokens", "2", *QUICK, "--store", str(tmp_path / "none.sock"))
    done = run("generate", str(model_folder), "One", *about)
    assert done.exit_code == 0 and done.stderr.count("nothing answers there yet") == 1


def test_a_broken_chat_template_is_said_at_the_start_and_refuses_chats_only(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "broken")
    (model / "chat_template.jinja").write_text("{% for %}")
    done = run("generate", str(model), "One", "--max-tokens", "2", *QUICK)
    assert done.exit_code == 0 and "chats will be refused" in done.stderr
    done = run("generate", str(model), "One", "--chat", *QUICK)
    assert done.exit_code == 1 and "chat template can't be read" in done.stderr


def test_a_taken_port_is_named_with_what_to_do(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", str(model_folder), "--port", str(taken.getsockname()[1]), *QUICK)
    assert done.exit_code == 1 and "that port is taken: choose another with --port" in done.stderr


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    def missing(*args: Any) -> None:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(engine_wiring, "load_model", missing)
    done = run("generate", str(model_folder), "x", *QUICK)
    assert done.exit_code == 1 and "pip install 'forebay[engine]'" in done.stderr


def test_without_torch_the_command_line_still_helps_and_says_what_is_missing(model_folder: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from forebay.cli import main; main()"
    for arguments, code, words in (
        (("--help",), 0, "engine"),
        (("engine", "chat", str(model_folder)), 1, "forebay[engine]"),
    ):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == code and words in done.stdout + done.stderr, done.stderr


def test_ctrl_c_cuts_an_answer_short_and_keeps_what_was_said(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "endless")
    for name in ("config.json", "generation_config.json"):  # an end that it never comes to say, greedily
        about = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(about | {"eos_token_id": VOCABULARY - 1}))
    command = [sys.executable, "-m", "forebay", "engine", "generate", str(model), "One two", "--max-tokens", "4000"]
    with subprocess.Popen(
        [*command, *QUICK, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        rest, problems = process.communicate(timeout=30)
    assert process.returncode == 0 and first and rest.endswith(b"\n"), problems
    assert len(rest) < 4000
