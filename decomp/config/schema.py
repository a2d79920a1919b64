"""The whole configuration as frozen pydantic models: one crossing from YAML to Python.

Every model refuses unknown keys. Unions are tagged by ``kind``. This module imports no jax, so a login
node can validate a run without an accelerator. Rules that need two fields are in ``rules.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Layers = Literal["all"] | tuple[NonNegativeInt, ...]


class Model(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# ---------------------------------------------------------------- schedules (SPEC T2)
class Knot(Model):
    """One point of a schedule; ``interp`` names the segment that ENDS here."""

    at: Fraction
    frac: NonNegative
    interp: Literal["linear", "cosine", "quarter_cosine", "log", "hold"] = "linear"


class Curve(Model):
    """``max`` times a piecewise curve over ``knots`` with t = step / (steps - 1)."""

    max: NonNegative
    knots: Annotated[tuple[Knot, ...], Field(min_length=1)]


def _schedule_form(value: object) -> str:
    return "curve" if isinstance(value, dict | Curve) else "number"


# Told apart by shape, so that a wrong value gives one problem and not one for each form it could have had.
Schedule = Annotated[
    Annotated[NonNegative, Tag("number")] | Annotated[Curve, Tag("curve")], Discriminator(_schedule_form)
]


# ---------------------------------------------------------------- target
class LlamaTarget(Model):
    """A Hugging Face folder of the Llama architecture; ``builtin:<name>`` lies inside the package."""

    kind: Literal["llama"] = "llama"
    path: str


class Llama8bTarget(Model):
    """Llama-3.1-8B, whose shapes are known: ``plan`` needs no weights, and a run needs its folder."""

    kind: Literal["llama8b"] = "llama8b"
    path: str | None = None


Target = Annotated[LlamaTarget | Llama8bTarget, Field(discriminator="kind")]


# ---------------------------------------------------------------- sites
class Sites(Model):
    """Which matrices are decomposed (layers x kinds) and into how many components each.

    ``kinds`` is ``all``, ``attn``, ``mlp`` or a list of kinds (``q_proj``, ``down_proj``, ...). A kind that
    ``C`` does not name gets ``C_per_rank`` times its matrices' rank, rounded up to a multiple of 8.
    """

    layers: Layers = "all"
    kinds: Literal["all", "attn", "mlp"] | tuple[str, ...] = "all"
    C: dict[str, PositiveInt] = {}
    C_per_rank: PositiveFloat = 1.25


# ---------------------------------------------------------------- mesh and placement
class Mesh(Model):
    """Device mesh, outermost axis first; ``auto`` puts all devices found on ``fsdp``."""

    replicate: PositiveInt = 1
    fsdp: PositiveInt = 1
    tp: PositiveInt = 1
    auto: bool = False
    simulate: bool = False


Layout = Literal["owner", "zero1", "replicated"]


class Placement(Model):
    """Where masters and moments rest (SPEC D2-D5)."""

    components: Layout = "owner"
    ci_fn: Layout = "zero1"
    on_ragged: Literal["fallback", "error"] = "fallback"


# ---------------------------------------------------------------- CI function
class ChunkTransformer(Model):
    """One small bidirectional transformer per chunk of ``layers_per_chunk`` target blocks (SPEC 3)."""

    kind: Literal["chunk_transformer"] = "chunk_transformer"
    d_model: PositiveInt = 128
    n_blocks: PositiveInt = 1
    n_heads: PositiveInt = 4
    d_mlp: PositiveInt = 256
    layers_per_chunk: PositiveInt = 1
    taps: Literal["residual", "site_inputs"] = "residual"
    remat: bool = False


class ComponentMlp(Model):
    """SPD's: per component an MLP with ``d_gate`` hidden units on the one number x . V[:, c] (SPEC 3)."""

    kind: Literal["component_mlp"] = "component_mlp"
    d_gate: PositiveInt = 16


CiFn = Annotated[ChunkTransformer | ComponentMlp, Field(discriminator="kind")]


# ---------------------------------------------------------------- losses
class FaithfulnessWarmup(Model):
    """AdamW steps on faithfulness alone before step 0 (SPEC T6)."""

    steps: NonNegativeInt = 0
    lr: PositiveFloat = 1e-3


class Faithfulness(Model):
    coeff: Schedule = 1.0
    normalize: Literal["site", "numel"] = "site"
    warmup: FaithfulnessWarmup = FaithfulnessWarmup()


class SmoothL0(Model):
    kind: Literal["smooth_l0"] = "smooth_l0"
    gamma: Schedule = Curve(max=1.0, knots=(Knot(at=0.0, frac=1.0), Knot(at=1.0, frac=0.01, interp="log")))


class Lp(Model):
    kind: Literal["lp"] = "lp"
    p: Schedule = 1.0
    eps: PositiveFloat = 1e-12


class Minimality(Model):
    coeff: Schedule
    penalty: Annotated[SmoothL0 | Lp, Field(discriminator="kind")] = SmoothL0()


class Frequency(Model):
    """SPEC L3. ``reference_count`` null means batch x length."""

    coeff: Schedule
    reference_count: PositiveFloat | None = None
    ema_halflife_steps: PositiveFloat | None = None


class AdamSource(Model):
    kind: Literal["adam"] = "adam"
    lr: Schedule = 0.01
    betas: tuple[Fraction, Fraction] = (0.5, 0.99)
    eps: PositiveFloat = 1e-8


class SignSource(Model):
    kind: Literal["sign"] = "sign"
    lr: Schedule = 0.01


SourceShape = Literal["c", "bc", "sc", "bsc"]


class UniformSource(Model):
    """U[0,1], fresh per draw."""

    kind: Literal["uniform"] = "uniform"


class ConstantSource(Model):
    """``value`` everywhere, no delta path: 0 is CI as mask, 1 is unmasked."""

    kind: Literal["constant"] = "constant"
    value: Fraction = 0.0


class FreshPgdSource(Model):
    """Projected sign ascent from scratch in every step (SPEC M2, M5)."""

    kind: Literal["fresh_pgd"] = "fresh_pgd"
    init: Literal["random", "ones", "zeros"] = "random"
    steps: PositiveInt = 20
    step_size: PositiveFloat = 0.1
    shape: SourceShape = "c"


class PersistentSource(Model):
    """Sources that live through the run and have their own optimizer (SPEC 6).

    ``dtype`` is what they rest in (SPEC P1): float32, the masters' precision, or uint16 with moments in bfloat16.
    """

    kind: Literal["persistent"] = "persistent"
    shape: SourceShape = "bsc"
    num_warmup_steps: NonNegativeInt = 2
    parametrize: Literal["clip", "sigmoid"] = "clip"
    dtype: Literal["float32", "uint16"] = "float32"
    optim: Annotated[AdamSource | SignSource, Field(discriminator="kind")] = AdamSource()


class MixedSource(Model):
    """Per batch element: persistent (all routed) with probability ``adv_fraction``, else fresh uniform."""

    kind: Literal["mixed"] = "mixed"
    adv_fraction: Fraction = 0.5
    persistent: PersistentSource = PersistentSource()


Source = Annotated[
    UniformSource | ConstantSource | FreshPgdSource | PersistentSource | MixedSource, Field(discriminator="kind")
]


class RouteAll(Model):
    kind: Literal["all"] = "all"


class RouteUniformK(Model):
    """Per position k ~ U{1..n_sites}, then a uniform k-subset of sites."""

    kind: Literal["uniform_k"] = "uniform_k"


class RoutePerSite(Model):
    """One forward per site, with only that site routed (SPD's layerwise term); the term is their mean."""

    kind: Literal["per_site"] = "per_site"


class RouteProbability(Model):
    kind: Literal["probability"] = "probability"
    p: Fraction = 0.5


Routing = Annotated[RouteAll | RouteUniformK | RoutePerSite | RouteProbability, Field(discriminator="kind")]


Capture = Literal["residual", "block_inputs", "site_inputs", "site_outputs"]


class HiddenActivation(Model):
    """SPEC L7: + coeff * mean over ``captures`` of ||masked - clean||^2 / ||clean||^2."""

    coeff: NonNegative
    captures: Annotated[
        tuple[Literal["residual", "block_inputs", "site_inputs", "site_outputs"], ...], Field(min_length=1)
    ]


class Recon(Model):
    """One reconstruction term: a mask source, a routing, a coefficient (SPEC L5-L7)."""

    coeff: Schedule
    source: Source
    routing: Routing = RouteAll()
    draws: PositiveInt = 1
    hidden: HiddenActivation | None = None


class Loss(Model):
    """Losses by name; a term set to null is absent. ``delta`` off removes the delta component everywhere.

    ``remat`` recomputes each layer of a masked forward in its backward; ``kl_chunk`` positions share one block of
    logits.
    """

    faithfulness: Faithfulness | None = Faithfulness()
    minimality: Minimality | None = None
    frequency: Frequency | None = None
    recon: dict[str, Recon | None] = {}
    delta: bool = True
    remat: bool = False
    kl_chunk: PositiveInt = 2048


# ---------------------------------------------------------------- optimizer groups (SPEC T1-T5)
def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Match = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class AdamW(Model):
    """SPEC T4. ``match``: patterns on ``components.<site>`` / ``ci_fn.<leaf>`` or a prefix of them."""

    kind: Literal["adamw"] = "adamw"
    match: Match
    lr: Schedule
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.0
    clip: PositiveFloat | None = None


class Muon(Model):
    """SPEC T5; vectors and bias stacks of the group take Adam at ``adam_lr``."""

    kind: Literal["muon"] = "muon"
    match: Match
    lr: Schedule
    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    ns_dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    consistent_rms: bool = True
    weight_decay: NonNegative = 0.0
    adam_lr: Schedule = 1e-3
    clip: PositiveFloat | None = None


OptimGroup = Annotated[AdamW | Muon, Field(discriminator="kind")]


# ---------------------------------------------------------------- data, evaluation, checkpoints, logging
class StdlibData(Model):
    """Source text of the running interpreter's standard library, split by file."""

    kind: Literal["stdlib"] = "stdlib"
    batch_size: PositiveInt = 16
    seq_len: Annotated[int, Field(ge=2)] = 128
    microbatches: PositiveInt = 1


Data = StdlibData


class EvalMask(Model):
    """KL and CE on held-out data under one kind of mask.

    ``unmasked`` is every component at 1, ``ci`` is CI as mask, ``rounded`` is CI > threshold, ``stochastic`` a fresh
    uniform source, ``zero`` every component at 0.
    """

    kind: Literal["mask"] = "mask"
    mask: Literal["unmasked", "ci", "rounded", "stochastic", "zero"]
    threshold: Fraction = 0.0


class EvalL0(Model):
    """Mean number of components with lower CI > ``threshold`` per position, by site."""

    kind: Literal["l0"] = "l0"
    threshold: Fraction = 0.0


class EvalPgd(Model):
    """KL under a fresh sign-PGD attack on the sources."""

    kind: Literal["pgd"] = "pgd"
    steps: PositiveInt = 20
    step_size: PositiveFloat = 0.1
    shape: SourceShape = "c"


EvalMetric = Annotated[EvalMask | EvalL0 | EvalPgd, Field(discriminator="kind")]


class Eval(Model):
    """Held-out evaluation every ``every`` updates and at the end; ``metrics`` by name, null is absent."""

    every: PositiveInt = 500
    batches: PositiveInt = 4
    metrics: dict[str, EvalMetric | None] = {}


class Checkpoint(Model):
    """A save every ``every`` updates; where that update is skipped, after the next that is not. Kept are the newest
    ``keep_last``, every ``keep_every``-th, and the one whose ``keep_best``, a metric of metrics.jsonl such as
    ``eval/kl_ci``, is the lowest (or the highest) of all."""

    every: PositiveInt = 500
    keep_last: PositiveInt = 2
    keep_every: PositiveInt | None = None
    keep_best: str | None = None
    best_is: Literal["lowest", "highest"] = "lowest"


class Logger(Model):
    """metrics.jsonl every ``every`` updates is the truth; ``progress`` draws a bar where there is a terminal."""

    every: PositiveInt = 10
    progress: bool = True


class LocalLauncher(Model):
    """In the process that was started."""

    kind: Literal["local"] = "local"


class SlurmLauncher(Model):
    """A job of one process per node; the nodes follow from the mesh and ``devices_per_node``.

    The run is asked to save ``save_before`` seconds before the time limit, and the job is requeued until the run is
    complete, ``max_requeues`` times at most. ``sbatch`` and ``srun`` are further options by name, ``true`` for one
    without a value; ``setup`` are shell lines, ``env`` variables of the job. ``dry_run`` prints the script.
    """

    kind: Literal["slurm"] = "slurm"
    devices_per_node: PositiveInt = 8
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    mem: str | None = None
    cpus_per_task: PositiveInt | None = None
    save_before: PositiveInt = 180
    max_requeues: NonNegativeInt = 100
    sbatch: dict[str, str | int | bool] = {}
    srun: dict[str, str | int | bool] = {}
    setup: tuple[str, ...] = ()
    env: dict[str, str] = {}
    python: str | None = None
    dry_run: bool = False


Launcher = Annotated[LocalLauncher | SlurmLauncher, Field(discriminator="kind")]


class Precision(Model):
    """``auto`` is bf16 on an accelerator and fp32 on CPU; ``fp64`` is a test mode for the whole step (SPEC 10)."""

    kind: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    deterministic: bool = False


class Profile(Model):
    """``steps`` = [first, last]: a jax.profiler trace of these updates goes to the run folder."""

    steps: tuple[NonNegativeInt, NonNegativeInt] | None = None


class RunConfig(Model):
    """Everything a run is made from; written to config.yaml, the only config a run reads.

    Schedules span ``schedule_steps`` updates, by default ``steps``, and hold their last value after them (SPEC T2).
    A new run begins with the decomposition of the run folder ``init_from``, its newest or that after ``init_from_step``
    updates.
    """

    experiment: str
    seed: NonNegativeInt = 0
    steps: PositiveInt
    schedule_steps: PositiveInt | None = None
    stop_after: PositiveInt | None = None
    max_skipped: PositiveInt = 10
    init_from: str | None = None
    init_from_step: NonNegativeInt | None = None
    output_dir: str = "outputs"
    target: Target
    sites: Sites
    mesh: Mesh
    placement: Placement
    ci_fn: CiFn
    loss: Loss
    optim: dict[str, OptimGroup | None]
    data: Data
    eval: Eval
    checkpoint: Checkpoint
    logger: Logger
    launcher: Launcher
    precision: Precision
    profile: Profile = Profile()
