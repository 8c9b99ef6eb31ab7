"""A cache that outlives its process belongs to the weights that filled it, and to the dtype that they were run in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtier.engine.checkpoint import open_checkpoint
from kvtier.key import Identity
from tests.engine.tiny import make_tiny_checkpoint

from .support import Tiers, dram, nvme, prompt


def identity_of(path: Path, kv_dtype: str = "auto", revision: str | None = None) -> Identity:
    return open_checkpoint(str(path), revision=revision).identity(16, kv_dtype)


def nudge(path: Path) -> None:
    """Change one value of one tensor."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[7] += 0.5
    save_file(tensors, file)


def test_new_weights_under_an_old_name_never_read_its_cache(tmp_path: Path) -> None:
    old, new = (make_tiny_checkpoint(tmp_path / which / "served", seed=1) for which in ("old", "new"))
    below = nvme(tmp_path / "nvme", "16MiB")
    first = identity_of(old)
    assert identity_of(new) == first, "a copy is the same model"
    with Tiers(dram(32, first), below, identity=first) as tiers:
        tiers.save(prompt(1, 4, identity=first))
        tiers.only_below()
        assert tiers.load(prompt(1, 4, identity=identity_of(new))) == 4
    nudge(new)
    second = identity_of(new)
    assert second.model == first.model
    with Tiers(dram(32, second), below, identity=second) as tiers:
        assert tiers.found(prompt(1, 4, identity=second)) == 0


def share_nothing(folder: Path, one: Identity, other: Identity) -> None:
    """What one saves into a directory it finds there again, and the other does not."""
    below = nvme(folder / "nvme", "16MiB")
    with Tiers(dram(32, one), below, identity=one) as tiers:
        tiers.save(prompt(1, 4, identity=one))
        tiers.only_below()
        assert tiers.found(prompt(1, 4, identity=one)) == 4
    with Tiers(dram(32, other), below, identity=other) as tiers:
        assert tiers.found(prompt(1, 4, identity=other)) == 0


def test_two_revisions_of_one_model_share_nothing(tmp_path: Path) -> None:
    """As the hub keeps them: equal files, but the revision is what they are named by."""
    snapshots = tmp_path / "models--somebody--model" / "snapshots"
    one, other = (identity_of(make_tiny_checkpoint(snapshots / name, seed=1)) for name in ("aaa", "bbb"))
    assert one.model == other.model == "somebody/model"
    share_nothing(tmp_path, one, other)


def test_a_branch_that_has_moved_on_is_another_revision(tmp_path: Path) -> None:
    """Both runs ask for ``main``; what the hub gave for it are different commits."""
    snapshots = tmp_path / "models--somebody--model" / "snapshots"
    one, other = (
        identity_of(make_tiny_checkpoint(snapshots / commit, seed=seed), revision="main")
        for seed, commit in enumerate(("aaa", "bbb"))
    )
    share_nothing(tmp_path, one, other)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_an_automatic_kv_dtype_is_the_one_that_it_becomes(tmp_path: Path, stored: str) -> None:
    """Run again with the dtype spelt out the cache is found; with another one it is not."""
    path = make_tiny_checkpoint(tmp_path / "model", dtype=getattr(torch, stored))
    became = {"bfloat16": "bf16", "float16": "fp16"}[stored]
    automatic, spelt = identity_of(path), identity_of(path, became)
    assert automatic == spelt
    others = [identity_of(path, kv_dtype) for kv_dtype in ("bf16", "fp16", "fp32") if kv_dtype != became]
    span = prompt(1, 4, identity=automatic)
    with Tiers(dram(32, automatic), identity=automatic) as tiers:
        tiers.save(span)
        assert tiers.found(prompt(1, 4, identity=spelt)) == 4
        for other in others:
            assert tiers.found(prompt(1, 4, identity=other)) == 0
        assert tiers.found(prompt(1, 4, identity=replace(automatic, kv_dtype="auto"))) == 0
