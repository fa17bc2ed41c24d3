"""Whether the machine holds the verifier, loads it in time, and runs this build of the libraries.

Memory and load time are judged from the site file before a job is sent, and from the GPUs
themselves when a stage opens. The estimates are capture/footprint.py's; no GPU was at hand here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kimi_eagle.contracts.engine import READS_STATES, STAGES, engines, undivided
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.recipe import EngineSection

GPU_GIB: dict[str, float | None] = {
    "rtxpro6000": 95.6,
    "rtx6000pro": 95.6,
    "h100": 79.6,
    "h100nvl": 93.6,
    "h800": 79.6,
    "h200": 140.4,
    "gh200": None,
    "h20": 95.6,
    "b200": 178.4,
    "b300": 268.0,
    "l40s": 45.0,
}
"""Memory that a driver reports, GiB, by a part of the type's name; None: of several sizes, as is
the A100, which is left out."""

WEIGHTS = ("verifier-config", "verifier-index-current")
"""Rules without which the weights' headers say nothing."""

ROOM_GIB = 4.0
"""Below this much to spare the estimate is too close to call: CUDA graphs take 1 to 3 GiB."""


def gpu_gib(gpu_type: str) -> float | None:
    """Memory of a GPU type as Slurm names it (`h200`, `nvidia_a100_80gb_pcie`, a MIG slice's
    `3g.40gb`), GiB; None if not known."""
    told = re.search(r"(?<!\d)(\d{2,3})gb", gpu_type.lower())
    if told and int(told[1]) <= max(filter(None, GPU_GIB.values())):
        return float(told[1])  # more is a Grace processor's memory: gh200_480gb
    plain = re.sub(r"[^a-z0-9]", "", gpu_type.lower())
    known = [name for name in GPU_GIB if re.search(rf"{name}(?!\d)", plain)]
    return GPU_GIB[max(known, key=len)] if known else None


@rule(
    "machine-memory",
    what="Each GPU of the site holds its share of the weights, a step's work and the cache of one "
    "sequence of max_model_len, states included.",
    why="vLLM 0.31.0 loads everything first and only then finds no room: 'No available memory for "
    "the cache blocks' or 'larger than the available KV cache memory' (v1/core/kv_cache_utils.py), "
    "a quarter of an hour into the job. Kimi-K2.5's 595 GB on 8 x 80 GB leave nothing.",
    how="Weight headers, the cache's row a token (512 + 64 values a layer for Kimi-K2.5, whole on "
    "every rank), 2 bytes x layers x hidden a token for extracted states, against the site's "
    "gpu_memory_gib (or the GPU type's) x gpu_memory_utilization. A lower bound: the "
    "benchmark's draft and CUDA graphs are not counted.",
    fix="choose GPUs with more memory, or a larger tp over as many GPUs",
    needs=("site",),
    after=(*WEIGHTS, "engine-tp-divides", "engine-on-a-node", "engine-pipeline"),
)
def memory(facts: Facts) -> Iterator[Problem | Note]:
    site = facts.site
    known = site.gpu_memory_gib
    if known is None and site.gpu_type:
        known = gpu_gib(site.gpu_type)
    if known is None:
        raise NotConcerned("the site says neither gpu_memory_gib nor a gpu_type of known memory")
    if site.gpu_memory_gib is None:
        yield Note(f"{known} GiB a GPU taken from gpu_type {site.gpu_type}")
    yield from _judge_memory(facts, known, f"site {site.name}")


@rule(
    "machine-memory-here",
    what="Each GPU of this machine holds what `machine-memory` says.",
    why="As there; here with the memory that the driver reports, for sites that name none.",
    how="The smallest GPU that nvidia-smi shows.",
    fix="choose GPUs with more memory, or a larger tp over as many GPUs",
    needs=("gpu",),
    stages=STAGES,
    after=(*WEIGHTS, "engine-tp-divides", "engine-on-a-node", "engine-pipeline"),
)
def memory_here(facts: Facts) -> Iterator[Problem | Note]:
    from kimi_eagle.capture.settings import vllm_build

    if facts.recipe.engine.device == "auto" and facts.versions and vllm_build()[1] == "cpu":
        raise NotConcerned("the installed vLLM is built for the CPU")
    yield from _judge_memory(facts, min(g.memory for g in facts.gpus), "this machine")


def _judge_memory(facts: Facts, gib: float, where: str) -> Iterator[Problem | Note]:
    from kimi_eagle.capture.footprint import GIB, need

    for engine, section in engines(facts).items():
        stages = _stages(facts, engine)
        if engine.device == "cpu" or set(stages) <= set(facts.recipe.slurm.cpu_stages):
            continue
        states = len(facts.recipe.extract.layers) if "extract" in stages else 0
        wanted = need(facts.weights, facts.verifier, engine, states)
        usable = gib * engine.gpu_memory_utilization
        least, left = wanted.least / GIB, usable - wanted.least / GIB
        parts = (
            f"{wanted.weights / GIB:.1f} GiB of weights, {wanted.step / GIB:.1f} of a step's work,"
            f" {wanted.sequence / GIB:.1f} of cache for one sequence of {engine.max_model_len}"
        )
        if left < 0:
            yield Problem(
                f"{least:.1f} GiB a GPU at tp {engine.tp}, pp {engine.pp}: {parts}",
                where=f"{where}: {section}",
                expected=f"at most {usable:.1f} GiB ({gib:g} x gpu_memory_utilization "
                f"{engine.gpu_memory_utilization:g})",
                fix=would_do(facts, engine, gib, states),
            )
            continue
        held = wanted.sequences(usable * GIB)
        if left < ROOM_GIB:
            yield Note(f"{section}: only {left:.1f} GiB a GPU to spare, not counting CUDA graphs")
        if held < engine.max_num_seqs:
            yield Note(
                f"{section}: {parts}; about {held} sequences of full length at once, "
                f"max_num_seqs {engine.max_num_seqs} is reached by shorter ones"
            )


def _stages(facts: Facts, engine: EngineSection) -> list[str]:
    return [s for s in STAGES if facts.recipe.engine_for(s) == engine]


def would_do(facts: Facts, engine: EngineSection, gib: float, states: int) -> str:
    """What would hold the engine: more memory with tp and pp as they are, or on GPUs of this size
    the smallest tp, and where states do not forbid it the smallest pp, with the nodes they take."""
    from kimi_eagle.capture.footprint import GIB, need

    def least(tp: int, pp: int) -> float:
        changed = engine.model_copy(update={"tp": tp, "pp": pp})
        return need(facts.weights, facts.verifier, changed, states).least / GIB

    share, gpus = engine.gpu_memory_utilization, facts.recipe.slurm.gpus
    now = least(engine.tp, engine.pp)
    offers = [f"GPUs of at least {now / share + 1:.0f} GiB as they are"]
    larger = [t for t in (2, 4, 8, 16, 32, 64) if t > engine.tp and not undivided(facts, t)]
    ways = [[(tp, engine.pp) for tp in larger]]
    latent = bool(facts.verifier.text_config.get("kv_lora_rank"))
    if not (latent and set(READS_STATES) & set(_stages(facts, engine))):
        ways.append([(engine.tp, pp) for pp in (2, 4, 8) if pp > engine.pp])
    for way in ways:
        for tp, pp in way:
            if least(tp, pp) + ROOM_GIB > gib * share:
                continue
            nodes, size = -(-tp * pp // gpus), f"{least(tp, pp):.0f} GiB a GPU"
            over = f" over {nodes} nodes of {gpus} GPUs" if nodes > 1 else ""
            later = " (one engine over several nodes cannot be started yet)" if nodes > 1 else ""
            offers.append(f"tp {tp}, pp {pp}{over}, {size}{later}")
            break
    if share < 0.95 and now + ROOM_GIB / 2 <= gib * 0.95:
        offers.append("gpu_memory_utilization = 0.95")
    return "; or ".join(offers)


@rule(
    "machine-load-time",
    what="A job's time limit has room for three loads of the verifier.",
    why="Every job starts with a load; one that ends before it is through does no unit, is sent "
    "again and ends the same way. 595 GB at 1 GiB/s are nine minutes.",
    how="Bytes of the weights over the site's load_gib_per_second, or [slurm] engine_load_minutes "
    "where that is longer, against the site's time limits.",
    fix="lengthen time (or times) in the site file; copy the verifier to faster storage",
    needs=("site",),
    after=WEIGHTS,
)
def load_time(facts: Facts) -> Iterator[Problem | Note]:
    from kimi_eagle.capture.footprint import GIB
    from kimi_eagle.site import minutes
    from kimi_eagle.slurm.jobs import LOADS_IN_A_JOB

    site, told = facts.site, facts.recipe.slurm.engine_load_minutes
    speed = site.load_gib_per_second
    if speed is None and not told:
        raise NotConcerned("neither the site's load_gib_per_second nor engine_load_minutes is set")
    read = facts.weights.total / GIB / speed / 60 if speed else 0.0
    load = max(read, told)
    if speed and told and read > 1.5 * told:
        yield Note(f"reading takes {read:.0f} minutes, engine_load_minutes says {told:g}")
    for group in facts.recipe.slurm.groups:
        stages = [s for s in group if s in STAGES]
        if not stages or set(group) <= set(facts.recipe.slurm.cpu_stages):
            continue
        limit = max(minutes(site.times.get(s, site.time)) for s in group)
        if limit < LOADS_IN_A_JOB * load:
            yield Problem(
                f"a time limit of {limit} minutes for {', '.join(group)}",
                where=f"site {site.name}: time",
                expected=f"at least {LOADS_IN_A_JOB} loads of {load:.0f} minutes",
            )


DRIVERS = {13: 580, 12: 525, 11: 450}
"""CUDA's major version -> first branch of the driver that runs it (NVIDIA, CUDA Compatibility,
'Minor Version Compatibility', table 1)."""


def driver_fault(driver: str, cuda: str) -> str | None:
    """What is wrong with a driver ("570.86.10") for a build of torch for CUDA ("13.0"); None where
    nothing is, or where one of the two is no version that we can read."""
    own, built = (re.match(r"\d+", text) for text in (driver, cuda))
    least = DRIVERS.get(int(built[0])) if built else None
    if own is None or least is None or int(own[0]) >= least:
        return None
    return f"driver {driver} under CUDA {cuda}: expected {least} or newer"


@rule(
    "machine-driver",
    what="The NVIDIA driver runs the CUDA that torch was built for.",
    why="The driver is the host's, the rest the image's: an older one shows torch no GPU at all "
    "('The NVIDIA driver on your system is too old'), and everything would run on the CPU.",
    how="The driver's version in /proc against torch.version.cuda.",
    fix="ask for nodes with a newer driver, or use an image for an older CUDA",
    needs=("torch",),
    stages=(*STAGES, "train"),
)
def driver(facts: Facts) -> Iterator[Problem]:
    found, (cuda, _) = facts.driver, facts.cuda
    if not found or cuda is None:
        raise NotConcerned("no NVIDIA driver here, or a build of torch without CUDA")
    if fault := driver_fault(found, cuda):
        what, _, expected = fault.partition(": expected ")
        yield Problem(what, where="this machine", expected=expected)


def architecture_fault(capability: tuple[int, int], built_for: list[str]) -> str | None:
    """What is wrong with a GPU for a build of torch; built_for: torch.cuda.get_arch_list().

    Code for sm_XY runs on later minor versions of the same major one; compute_XY (PTX) on any
    later architecture. bfloat16, of states and weights, needs 8.0.
    """
    major, minor = capability
    name = f"sm_{major}{minor}"
    if capability < (8, 0):
        return f"{name} has no bfloat16: expected a GPU of compute capability 8.0 or newer"
    for text in built_for:
        kind, _, number = text.partition("_")
        digits = re.sub(r"\D", "", number)
        built = (int(digits[:-1]), int(digits[-1]))
        if built[0] == major and built[1] <= minor or kind == "compute" and built <= capability:
            return None
    return f"this build of torch has no code for {name}: expected one of {', '.join(built_for)}"


@rule(
    "machine-architecture",
    what="The GPUs are of an architecture that torch was built for, with bfloat16.",
    why="'no kernel image is available for execution on the device', in the first step. Known to "
    "matter: RTX PRO 6000 (Blackwell, sm_120) needs builds for CUDA 12.8 or newer.",
    how="Compute capability of each GPU against torch.cuda.get_arch_list(). On sm_120 vLLM 0.31.0 "
    "has one kernel for latent attention (TRITON_MLA, platforms/cuda.py), which is said.",
    fix="use an image built for these GPUs",
    needs=("gpu", "torch"),
    stages=(*STAGES, "train"),
)
def architecture(facts: Facts) -> Iterator[Problem | Note]:
    cuda, built = facts.cuda
    if cuda is None:
        raise NotConcerned("a build of torch without CUDA")
    for capability in sorted({g.capability for g in facts.gpus}):
        if fault := architecture_fault(capability, built):
            what, _, expected = fault.partition(": expected ")
            yield Problem(what, where="this machine", expected=expected)
        elif capability[0] == 12 and facts.verifier.text_config.get("kv_lora_rank"):
            yield Note(
                "sm_120: latent attention runs on vLLM's Triton kernel (TRITON_MLA) alone; without "
                "NVLink more than two GPUs reduce through NCCL (custom_all_reduce.py)"
            )
