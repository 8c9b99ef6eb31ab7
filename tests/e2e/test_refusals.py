"""What the user has to mend ends as one clear line on stderr and exit code 2, through the real command."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer
from tests.support import until

from .support import Server, kvtier, make_tiny_model, valkey

pytestmark = pytest.mark.slow

PASSWORD, WRONG = "s3cret w:rd@x", "an0ther-s3cret"
QUOTED = "s3cret%20w%3Ard%40x"
DRAM = "--tier=dram://?capacity=4MiB"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("refusals") / "model")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ValkeyServer, int]]:
    """A server with a password, and its TCP port."""
    port = free_port()
    with valkey(tmp_path_factory.mktemp("locked"), port=port, password=PASSWORD) as server:
        yield server, port


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number: int = probe.getsockname()[1]
        return number


def refusal(*argv: str, **variables: str) -> str:
    """The one line of a command that ends with exit code 2. It shows no password."""
    done = kvtier(*argv, variables=variables)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvtier") and ": error: " in line, line
    for secret in (PASSWORD, QUOTED, WRONG):
        assert secret not in done.stdout + done.stderr
    return line


def started(command: str) -> list[str]:
    """A command with all that it needs besides flags."""
    return [command, "a prompt"] if command == "generate" else [command]


@pytest.mark.parametrize("command", ["generate", "serve", "demo"])
def test_a_missing_model_is_named(command: str, tmp_path: Path) -> None:
    redis = {"KVTIER_REDIS_URL": "redis://127.0.0.1:1/0"} if command == "demo" else {}
    line = refusal(*started(command), f"--model={tmp_path}/absent", **redis)
    assert f"no model at {tmp_path}/absent" in line and "SmolLM2-135M-Instruct" in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tier=s3://bucket"], ["'s3'", "dram", "nvme", "redis", "rediss"]),
        (["--tier=nvme:///tmp/x?capacty=1GiB"], ["'capacty'", "'capacity'"]),
        (["--hbm-block=7"], ["'--hbm-block'", "'--hbm-blocks'"]),
        (["--tier=redis://localhost:port/0"], ["port", "1 to 65535"]),
        ([f"--tier=redis://:{PASSWORD}@localhost/0"], ["reserved characters", "%-encoded"]),
        (["--tier=redis://localhost/zero"], ["database number"]),
        (["--tier=redis:localhost"], ["not a tier URL"]),
        (["--tier=dram://?capacity=1MiB"], ["first tier"]),
    ],
)
def test_a_wrong_tier_or_setting_says_what_would_be_right(model: Path, flags: list[str], says: list[str]) -> None:
    line = refusal("serve", f"--model={model}", DRAM, *flags)
    assert all(each in line for each in says), line


def test_settings_in_the_environment_and_in_a_file(tmp_path: Path) -> None:
    assert "'KVTIER_HBM_BLOCKS'" in refusal("serve", KVTIER_HBM_BLOKS="8")
    file = tmp_path / "kvtier.toml"
    file.write_text("[engine]\nhbm_bloks = 8\n")
    line = refusal("serve", f"--config={file}")
    assert str(file) in line and "'hbm_blocks'" in line


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_server_that_refuses_the_password_is_not_a_server_that_is_away(
    model: Path, locked: tuple[ValkeyServer, int], command: str
) -> None:
    for user in (f":{WRONG}@", "", f"somebody:{QUOTED}@"):
        line = refusal(*started(command), f"--model={model}", DRAM, f"--tier=redis://{user}127.0.0.1:{locked[1]}/0")
        assert "refuses the user name or password" in line and str(locked[1]) in line


def test_demo_says_which_redis_it_cannot_use(model: Path, locked: tuple[ValkeyServer, int], tmp_path: Path) -> None:
    away = f"redis://:{QUOTED}@127.0.0.1:{free_port()}/0"
    line = refusal("demo", f"--model={model}", "--hbm-blocks=64", KVTIER_REDIS_URL=away)
    assert "redis://:***@127.0.0.1" in line and "refused" in line
    wrong = f"redis://:{WRONG}@127.0.0.1:{locked[1]}/0"
    line = refusal("demo", f"--model={model}", "--hbm-blocks=64", KVTIER_REDIS_URL=wrong)
    assert "refuses the user name or password" in line


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[int]:
    """The TLS port of a real server."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    require_installed(binary and shutil.which("openssl"), "redis-server with TLS, and openssl (Debian's packages)")
    assert binary is not None
    key, made, port = tmp_path / "key.pem", tmp_path / "cert.pem", free_port()
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {made}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    options = {"--port": "0", "--tls-port": str(port), "--bind": "127.0.0.1", "--save": "", "--tls-auth-clients": "no"}
    files = {"--tls-cert-file": str(made), "--tls-key-file": str(key), "--tls-ca-cert-file": str(made)}
    words = [word for pair in (options | files).items() for word in pair]
    process = subprocess.Popen([binary, *words], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def listens() -> bool:
        require_installed(process.poll() is None, "a redis-server that was built with TLS")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens, 60.0, "the server listens")
        yield port
    finally:
        process.kill()
        process.wait(10.0)


def test_plain_text_to_a_tls_port_says_rediss(model: Path, tls: int) -> None:
    began = time.monotonic()
    line = refusal("serve", f"--model={model}", DRAM, f"--tier=redis://127.0.0.1:{tls}/0")
    assert "rediss://" in line, line
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tier=dram://?capacity=900TiB"], ["asked for 900TiB of memory", "are available ("]),
        (
            [DRAM, "--tier=nvme://{folder}/nvme?capacity=900TiB"],
            ["asked for 900TiB", "are available on", "{folder}/nvme"],
        ),
        ([DRAM, "--hbm-blocks=100000000"], ["100000000 HBM blocks: asked for", "are available ("]),
    ],
)
def test_a_capacity_that_is_not_there_says_asked_available_where(
    model: Path, tmp_path: Path, flags: list[str], says: list[str]
) -> None:
    line = refusal("serve", f"--model={model}", *(flag.format(folder=tmp_path) for flag in flags))
    assert all(each.format(folder=tmp_path) in line for each in says), line


def test_a_prompt_longer_than_the_model(model: Path) -> None:
    flags = [f"--model={model}", DRAM, "--hbm-blocks=200"]
    line = refusal("generate", *flags, "--raw", "a" * 2100)
    assert "2100 tokens" in line and "2048" in line
    with Server(*flags) as server:
        for body in ({"prompt": "a" * 2100}, {"prompt": "a" * 2000, "max_tokens": 100}):
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30.0)
            assert answer.status_code == 400
            assert "2048" in answer.json()["error"]["message"]
        assert server.complete([5, 6, 7], 4)[1] == 0, "and it goes on serving"
        assert server.terminate() == 0


def test_an_empty_prompt_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    for argv in (["generate"], ["generate", " \n"]):
        line = refusal(*argv, f"--model={tmp_path}/absent")
        assert "the prompt is empty; give it as an argument or on standard input" in line


def test_a_trace_is_not_written_over_and_told_before_anything_is_loaded(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("mine")
    line = refusal("serve", f"--model={tmp_path}/absent", "--port=0", f"--record={trace}")
    assert f"record: {trace} is there already" in line and trace.read_text() == "mine"
