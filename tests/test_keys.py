"""Draws depend on names, numbers and global positions, and on nothing else (SPEC R1, R2)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from decomp.keys import fold, key_of, normals, site_keys, uniform_block


def draw(key: object, example0: int = 0, shape: tuple[int, int, int] = (8, 16, 32), **kw: int) -> np.ndarray:
    return np.asarray(uniform_block(jnp.asarray(key), example0, shape, kw.get("width", 32), kw.get("offset", 0)))


def test_a_shard_draws_its_part_of_the_whole() -> None:
    key = key_of(0, "recon/stochastic", 3)
    whole = draw(key)
    part = draw(key, example0=5, shape=(3, 16, 8), width=32, offset=16)
    np.testing.assert_array_equal(part, whole[5:, :, 16:24])


def test_draws_are_uniform_and_uncorrelated() -> None:
    u = draw(key_of(1, "a"), shape=(64, 64, 32))
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    chi2 = np.sum((counts - u.size / 64) ** 2 / (u.size / 64))
    assert 20 < chi2 < 130, chi2  # 63 degrees of freedom: outside by chance once in 1e6
    centred = u - 0.5
    for axis in range(3):
        neighbours = np.mean(np.delete(centred, 0, axis) * np.delete(centred, -1, axis)) * 12
        assert abs(neighbours) < 5 / np.sqrt(u.size)


def test_streams_of_different_names_steps_seeds_and_sites_are_independent() -> None:
    streams = [
        draw(k)
        for k in (
            key_of(0, "recon/a"), key_of(0, "recon/b"), key_of(1, "recon/a"), key_of(0, "recon/a", 1),
            key_of(0, "recon/a", 2), *np.asarray(site_keys(key_of(0, "recon/a"), ["x", "y", "x/delta"])),
        )
    ]  # fmt: skip
    correlation = np.corrcoef(np.stack([s.ravel() for s in streams]))
    off = correlation[~np.eye(len(streams), dtype=bool)]
    assert np.abs(off).max() < 6 / np.sqrt(streams[0].size)


def test_folding_a_traced_number_equals_folding_it_on_the_host() -> None:
    np.testing.assert_array_equal(np.asarray(fold(key_of(7), jnp.int32(12))), np.asarray(fold(key_of(7), 12)))


def test_large_batches_and_widths_do_not_wrap_around() -> None:
    key = key_of(0, "wide")
    far = draw(key, example0=500, shape=(2, 4, 8), width=49152, offset=49144)
    near = draw(key, example0=0, shape=(2, 4, 8), width=49152)
    assert not np.isin(far, near).any()


def test_normals_have_the_moments_of_normals() -> None:
    x = np.asarray(normals(jnp.asarray(key_of(3, "n")), (256, 256), jnp.float32))
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.01
    assert abs((x**4).mean() - 3) < 0.15
    assert np.isfinite(x).all()
