"""Case 6 for real: small runs that use every kind of section between them, and record which fields are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from decomp.config import schema

# Runs the command line with every read of a config field recorded, but for those of decomp.config itself.
RECORD = """
import json, sys
from decomp.config import schema

reads = set()
plain = schema.Model.__getattribute__

def recorded(self, name):
    if not sys._getframe(1).f_globals["__name__"].startswith(("decomp.config", "pydantic")):
        reads.add((type(self).__name__, name))
    return plain(self, name)

schema.Model.__getattribute__ = recorded
sys.argv = ["decomp", *{overrides}]
from decomp.__main__ import main
code = main()
assert code == {code}, code
print("READS", json.dumps(sorted(reads)))
"""

SMALL = ["experiment=smoke", "steps=2", "stop_after=2", "eval.every=2", "logger.every=1", "checkpoint.every=2"]
RUNS = [  # exit code, what is typed
    (0, [
        *SMALL,
        "profile.steps=[1,1]",
        "loss.recon.stochastic.hidden={coeff: 1, captures: [residual]}",
        "loss.frequency.ema_halflife_steps=10",
    ]),
    (0, [
        *SMALL,
        "optim=muon",
        "loss.minimality.penalty={kind: lp}",
        "loss.recon.stochastic.source={kind: mixed, persistent: {optim: {kind: sign}}}",
        "loss.recon.adversarial.source={kind: fresh_pgd, steps: 1}",
        # a gradient whose norm overflows: both updates are skipped, fewer than max_skipped
        "+loss.recon.constant={coeff: 1e30, source: {kind: constant}, routing: {kind: probability}}",
    ]),
    (0, [
        *SMALL,
        *("ci_fn=component_mlp", "~ci_fn.d_model", "~ci_fn.n_heads", "~ci_fn.d_mlp"),  # smoke's, of a transformer
        "loss.recon.stochastic.routing={kind: per_site}",
    ]),
    (2, ["target=llama8b"]),
    (2, [*SMALL, "init_from={empty}", "init_from_step=3"]),  # no checkpoint there
    (0, [*SMALL, "launcher=slurm", "launcher.dry_run=true"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_field_of_every_kind_is_read(simulated: Callable[..., str], tmp_path: Path):
    """A dtype, a flag, a threshold or a decay that is parsed and then never used fails here, whatever its name."""
    read: set[tuple[str, str]] = set()
    (tmp_path / "checkpoints").mkdir()
    for code, words in RUNS:
        run = [word.replace("{empty}", str(tmp_path)) for word in words]
        out = simulated(RECORD.replace("{overrides}", repr(run)).replace("{code}", str(code)), devices=1, timeout=420)
        (line,) = [line for line in out.splitlines() if line.startswith("READS ")]
        read |= {(owner, name) for owner, name in json.loads(line.removeprefix("READS "))}
    models = [m for m in vars(schema).values() if isinstance(m, type) and issubclass(m, schema.Model)]
    fields = {(m.__name__, name) for m in models if m is not schema.Model for name in m.model_fields if name != "kind"}
    assert fields - read == set()
