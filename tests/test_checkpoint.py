"""decomp/checkpoint.py: SPEC 11, cases 20-26, 28."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_trainer import config
from small_disk import fill, small_disk

from decomp import checkpoint, folder, manifest
from decomp.checkpoint import Checkpoints, Failed, Saved, restore_decomposition
from decomp.config.errors import UserError
from decomp.loop import identity
from decomp.manifest import good_steps, step_folders

IDENTITY = {"sites": {"model.layers.0.mlp.down_proj": {"C": 3}}}
State = tuple[dict[str, Any], dict[str, Any]]


def _state(seed: int, rows: int = 2) -> State:
    v = jax.random.normal(jax.random.key(seed), (rows, 5, 3), jnp.float32)
    odd = jnp.asarray([jnp.nan, -0.0, jnp.inf, 1e-42], jnp.float32)  # bit patterns that == does not see
    decomposition = {"components": {"4x4_C3": {"V": v, "U": v * jnp.float32(2)}}, "ci_fn": {"q.proj/x@1": odd}}
    progress = {"step": jnp.asarray(seed, jnp.int32), "optim": {"mu": v.astype(jnp.bfloat16)}, "sources": {}}
    return decomposition, progress | {"u": jnp.arange(rows * 3, dtype=jnp.uint16)}


def _abstract(state: State) -> State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _same_bits(a: Any, b: Any) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


class Run:
    """Checkpoints and what they said."""

    def __init__(self, path: Path, keep_last: int = 2, keep_every: int | None = None, identity: Any = IDENTITY):
        self.path, self.said = path, []
        self.checkpoints = Checkpoints(path, keep_last, keep_every, identity, self.said.append)
        self.root = self.checkpoints.root

    def save(self, step: int, state: State | None = None) -> list[Saved | Failed]:
        self.checkpoints.save(step, state or _state(step))
        return self.checkpoints.wait()

    def restore(self, step: int | None = None, like: State | None = None) -> tuple[int, State] | None:
        return self.checkpoints.restore(_abstract(like or _state(0)), step)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_saved_is_announced_once_and_restores_bit_for_bit(run: Run) -> None:
    (event,) = run.save(3)
    assert isinstance(event, Saved) and event.step == 3 and event.nbytes > 0
    assert run.checkpoints.poll() == []
    found = run.restore()
    assert found is not None and found[0] == 3
    assert _same_bits(found[1], _state(3))
    assert {p.name for p in (run.root / "3").iterdir()} >= {"decomposition", "progress", "manifest.json"}


def test_no_checkpoint_at_all(run: Run) -> None:
    assert run.restore() is None


def test_state_may_be_donated_while_it_is_being_written(run: Run) -> None:
    """An asynchronous save must not write what later updates put into the donated buffers."""
    state = _state(1, rows=200_000)
    expected = jax.tree.map(np.array, state)
    scramble = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    run.checkpoints.save(1, state)
    for _ in range(5):
        state = scramble(state)
    jax.block_until_ready(state)
    run.checkpoints.wait()
    found = run.restore(like=_state(0, rows=200_000))
    assert found is not None and _same_bits(found[1], expected)


def test_nothing_is_announced_before_it_is_durable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.write_manifest

    def slow(*arguments: Any) -> int:
        time.sleep(0.5)
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "write_manifest", slow)
    run.checkpoints.save(1, _state(1))
    assert run.checkpoints.poll() == [] and good_steps(run.root) == []
    assert [type(e) for e in run.checkpoints.wait()] == [Saved]


@pytest.mark.parametrize("every, kept", [(None, [6, 7]), (3, [3, 6, 7])])
def test_retention_keeps_the_newest_and_every_kth(tmp_path: Path, every: int | None, kept: list[int]) -> None:
    """Case 28."""
    run = Run(tmp_path, keep_last=2, keep_every=every)
    for step in range(1, 8):
        run.save(step)
    assert step_folders(run.root) == kept


def _damage_file(step: Path) -> None:
    largest = max((p for p in (step / "decomposition").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)


def _truncate_file(step: Path) -> None:
    largest = max((p for p in (step / "progress").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def _delete_file(step: Path) -> None:
    next(p for p in (step / "progress").rglob("*") if p.is_file()).unlink()


def _empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


@pytest.mark.parametrize("harm", [_damage_file, _truncate_file, _delete_file, _empty])
def test_damaged_newest_falls_back_says_so_and_saves_on(run: Run, harm: Callable[[Path], None]) -> None:
    """SPEC K4, case 21; then the same step is saved anew."""
    run.save(10)
    run.save(20)
    harm(run.root / "20")
    again = Run(run.path)
    found = again.restore()
    assert found is not None and found[0] == 10 and _same_bits(found[1], _state(10))
    assert len(again.said) == 1 and "checkpoint 20 is damaged" in again.said[0] and "going back to 10" in again.said[0]
    assert (run.root / "20.damaged.aside").is_dir()
    assert isinstance(again.save(20)[0], Saved)
    assert sorted(p.name for p in run.root.iterdir()) == ["10", "20"]
    newest = again.restore()
    assert newest is not None and newest[0] == 20


def test_nothing_whole_left_is_an_error_not_a_fresh_start(run: Run) -> None:
    run.save(10)
    _delete_file(run.root / "10")
    with pytest.raises(UserError, match=r"no whole checkpoint is left: 10 is damaged \(progress/.* is missing\)"):
        run.restore()
    assert step_folders(run.root) == [10]


def test_rolling_back_and_training_on_saves_again(run: Run) -> None:
    """Orbax silently ignores a step below its newest (DESIGN 6)."""
    run.save(10)
    run.save(20)
    found = run.restore(step=10)
    assert found is not None and found[0] == 10
    assert isinstance(run.save(15)[0], Saved)
    assert step_folders(run.root) == [10, 15]
    with pytest.raises(UserError, match="no checkpoint of step 99; there are 10, 15"):
        run.restore(step=99)


def test_leftovers_of_a_killed_save_do_not_block_it(run: Run) -> None:
    """Case 22."""
    (run.root / "5.orbax-checkpoint-tmp" / "decomposition").mkdir(parents=True)
    again = Run(run.path)
    assert not list(run.root.iterdir())
    assert isinstance(again.save(5)[0], Saved)


def test_what_a_kill_left_of_an_old_step_goes_with_the_next_save(run: Run) -> None:
    """Killed while step 5 was being deleted: its manifest is gone, its bytes are not."""
    run.save(10)
    (run.root / "5" / "progress").mkdir(parents=True)
    assert [type(e) for e in run.save(15)] == [Saved]
    assert step_folders(run.root) == [10, 15]


def test_full_disk_is_reported_retried_and_never_counted(tmp_path: Path) -> None:
    """Case 20, with room for the first save and half of the second: the write fails, not the check before it."""
    state = _state(1, rows=20_000)
    size = checkpoint.tree_bytes(state)
    with small_disk(tmp_path / "disk", f"{int(2.6 * size) // 1024}k") as disk:
        run = Run(disk, keep_last=1)
        (first,) = run.save(1, state)
        assert isinstance(first, Saved)
        ballast = fill(disk, leave=size // 2)
        for free in (checkpoint._free, lambda _: 1 << 60):  # told beforehand; found out on the way
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint, "_free", free)
                (event,) = run.save(2, state)
            assert isinstance(event, Failed) and event.step == 2 and "no space left" in event.reason
            assert "\n" not in event.reason and len(event.reason) < 250
            assert good_steps(run.root) == [1] and sorted(p.name for p in run.root.iterdir()) == ["1"]
        ballast.unlink()
        assert isinstance(run.save(3, state)[0], Saved)
        assert good_steps(run.root) == [3]


def test_folder_gone_is_reported_and_retried(run: Run) -> None:
    """And no thread of orbax is left that would hold the process at its end."""
    run.save(1)
    before = threading.active_count()
    shutil.rmtree(run.root)
    run.root.write_text("in the way")
    (event,) = run.save(2)
    assert isinstance(event, Failed)
    assert threading.active_count() <= before
    run.root.unlink()
    assert isinstance(run.save(3)[0], Saved)


def test_a_disk_that_cannot_hold_two_saves_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        run = Run(disk)
        run.checkpoints.check_space(400_000)
        with pytest.raises(
            UserError, match=r"two checkpoints need 1\.2 MB .* and the disk has .* free: free some space"
        ):
            run.checkpoints.check_space(600_000)


@pytest.mark.parametrize(
    "other, like, message",
    [
        ({"sites": {"model.layers.0.mlp.down_proj": {"C": 4}}}, None, r"down_proj\.C is 3 in the checkpoint, 4 here"),
        ({"sites": {}}, None, r"sites\.model\.layers\.0\.mlp\.down_proj is in the checkpoint only"),
        (IDENTITY, _state(0, rows=4), r"float32\[2, 5, 3\] in the checkpoint, float32\[4, 5, 3\] here.*and \d more"),
        (IDENTITY, ({}, _state(0)[1]), r"decomposition/.* is in the checkpoint only"),
    ],
)
def test_another_decomposition_is_refused_by_name(run: Run, other: Any, like: State | None, message: str) -> None:
    """Case 25."""
    run.save(10)
    with pytest.raises(UserError, match=message) as caught:
        Run(run.path, identity=other).restore(like=like)
    assert "\n" not in str(caught.value)


def test_decomposition_opens_alone(run: Run) -> None:
    """SPEC K1, case 24: no optimizer, no devices, no byte of progress; and nothing in the folder changes."""
    run.save(10)
    shutil.rmtree(run.root / "10" / "progress")
    step, tree, stored = restore_decomposition(run.path)
    assert step == 10 and stored["identity"] == IDENTITY
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(tree))
    assert _same_bits(tree, _state(10)[0])
    _damage_file(run.root / "10")
    with pytest.raises(UserError, match="10 is damaged"):
        restore_decomposition(run.path)
    with pytest.raises(UserError, match="no checkpoint yet"):
        restore_decomposition(run.path / "10")
    assert step_folders(run.root) == [10]


def test_a_newer_format_is_refused_wherever_it_is_opened(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(10)
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    run.save(20)
    monkeypatch.undo()
    for opened in (run.restore, lambda: restore_decomposition(run.path)):
        with pytest.raises(UserError, match=r"checkpoints/20: written by a newer decomp .*: update decomp"):
            opened()
    assert step_folders(run.root) == [10, 20]


def test_any_sharding_restores_bit_for_bit(simulated: Callable[..., str]) -> None:
    """SPEC K1, case 26: saved split over four devices, restored over two, on one, and split another way."""
    simulated(
        """
        from pathlib import Path
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from decomp.checkpoint import Checkpoints

        def mesh(n): return Mesh(np.array(jax.devices()[:n]).reshape(n), ("x",))
        def placed(n, spec): return NamedSharding(mesh(n), spec)
        value = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)
        state = ({"V": jax.device_put(value, placed(4, P("x")))}, {"step": jax.device_put(np.int32(3), placed(4, P()))})
        checkpoints = Checkpoints(Path("run"), 2, None, {})
        checkpoints.save(3, state)
        assert not any("Failed" in repr(e) for e in checkpoints.wait())
        for n, spec in ((2, P(None, "x")), (1, P()), (4, P(None, "x", None)), (4, P())):
            target = placed(n, spec)
            abstract = (
                {"V": jax.ShapeDtypeStruct((4, 8, 6), jnp.float32, sharding=target)},
                {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=placed(n, P()))},
            )
            step, (decomposition, progress) = checkpoints.restore(abstract)
            assert step == 3 and int(progress["step"]) == 3
            assert decomposition["V"].sharding.is_equivalent_to(target, 3)
            assert np.asarray(decomposition["V"]).tobytes() == value.tobytes()
        """,
        devices=4,
        timeout=120,
    )


def test_kill_9_in_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    """SPEC K4: the process dies as soon as the second save's temporary folder appears."""
    script = Path(__file__).with_name("fake_trainer.py")
    arguments = [tmp_path, "megabytes=60", "checkpoint.every=1", "steps=500"]
    child = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.DEVNULL, env=_env())
    try:
        root = _wait_for(lambda: next((p for p in tmp_path.glob("fake/*/checkpoints") if good_steps(p)), None), child)
        _wait_for(lambda: list(root.glob("*.orbax-checkpoint-tmp")) or None, child)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
    from fake_trainer import FakeTrainer

    trainer = FakeTrainer(folder.read_config(root.parent), megabytes=60)
    abstract = trainer.abstract_state()
    found = Checkpoints(root.parent, 2, None, identity(trainer)).restore((abstract.decomposition, abstract.progress))
    assert found is not None and found[0] >= 1
    assert int(found[1][1]["step"]) == found[0]
    assert not list(root.glob("*tmp*"))
    assert config(tmp_path).experiment == root.parent.parent.name


def _env() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def _wait_for(thing: Callable[[], Any], child: subprocess.Popen[bytes], seconds: float = 150) -> Any:
    end = time.monotonic() + seconds
    while (found := thing()) is None:
        assert child.poll() is None, f"the run ended with {child.returncode}"
        assert time.monotonic() < end, f"nothing in {seconds} s"
        time.sleep(0.002)
    return found
