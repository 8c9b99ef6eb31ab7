"""`kvtier stress` as a user runs it, and that its verdict can be the other one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import stress_run
from kvtier.cli.stress import FAULTS, _folder, chosen
from kvtier.cli.stress_plan import NVME_BYTES, make_plan
from kvtier.cli.stress_run import Life, Run, Verdict
from kvtier.errors import ConfigError

from .support import environment, valkey

pytestmark = pytest.mark.timeout(300)


def test_everything_may_fail_and_every_answer_is_right(tmp_path: Path) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "stress", "--minutes=0.2", f"--seed={seed}", f"--json={verdict}"],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("PASSED")
    told = json.loads(verdict.read_text())
    assert told["passed"] and told["answers"] > 0 and sum(told["faults"].values()) > 0
    assert sum(told["hits"].values()) > 0, "the tiers were used"


def test_a_wrong_answer_is_a_failure(tmp_path: Path) -> None:
    with valkey(tmp_path) as server:
        make_plan(tmp_path, server.url, 7, aborts=False)
        raw = json.loads((tmp_path / "plan.json").read_text())
        for expected in raw["expected"]:  # of all prompts: whichever is served first, however slow the machine is
            expected[-1] = (expected[-1] + 1) % 320
        (tmp_path / "plan.json").write_text(json.dumps(raw))
        verdict = Run(tmp_path, server, [], 7, NVME_BYTES, lambda text: None).go(0.05)
    assert not verdict.passed
    assert any(text.startswith("prompt ") for text in verdict.wrong), verdict


def test_an_engine_that_does_not_start_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress_run, "START_SECONDS", 0.0)
    with valkey(tmp_path) as server:
        make_plan(tmp_path, server.url, 7, aborts=False)
        run = Run(tmp_path, server, [], 7, NVME_BYTES, lambda text: None)
        with pytest.raises(ConfigError, match="did not start"):
            run.go(0.05)
    assert run.life.process.poll() is not None


@pytest.fixture
def spent(tmp_path: Path) -> Life:
    """A life that has ended, to be told whatever a test wants to be so."""
    life = Life(tmp_path / "no plan", tmp_path / "log")
    life.kill()
    life.last = {"answers": stress_run.WARM_ANSWERS + 1, "aborted": 2, "stuck": 0, "wrong": [], "oldest": 0.1}
    life.first = life.warm = life.most = 100 << 20
    return life


def test_what_is_stuck_or_grows_is_a_failure(spent: Life) -> None:
    def verdict() -> Verdict:
        made = Verdict(7, {"abort": 0})
        made.take(spent)
        return made

    assert verdict().passed
    assert (verdict().faults, verdict().watched) == ({"abort": 2}, 1)
    spent.last["stuck"] = 1
    assert not verdict().passed
    spent.last["stuck"] = 0
    spent.most = 106 << 20
    assert [text.partition(":")[0] for text in verdict().growth] == ["resident memory grew"]
    assert not verdict().passed


def test_no_kill_hides_what_may_be_stuck(tmp_path: Path, spent: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, None, ["kill", "abort"], 7, NVME_BYTES, lambda text: None)  # type: ignore[arg-type]  # no server
    run._life, now = spent, spent.started + 60.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    spent.told, run._kills_until = now - 1.0, now + 60.0
    assert run._able() == ["kill"]
    for thing, name, value in (
        (spent, "last", {"oldest": 11.0}),
        (spent, "told", now - 11.0),
        (spent, "started", now - 1.0),
        (run, "_kills_until", now - 1.0),
    ):
        with monkeypatch.context() as doubt:
            doubt.setattr(thing, name, value)
            assert run._able() == [], name
    assert run._able() == ["kill"]


def test_faults_are_chosen_by_name() -> None:
    assert chosen("all") == list(FAULTS)
    assert chosen("none") == []
    assert chosen("kill, flip-file") == ["kill", "flip-file"]
    with pytest.raises(ConfigError, match="kill-redis"):
        chosen("kil-redis")


@pytest.mark.parametrize("kept", ["file", "file/below"])
def test_a_folder_that_cannot_be_kept_is_named(kept: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"--keep: {tmp_path / kept}: "), _folder(tmp_path / kept):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda _path, _mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=f"--keep: {tmp_path}: Permission denied"), _folder(tmp_path):
        pass
