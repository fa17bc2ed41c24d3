"""Where the time of decoding goes: traces read, steps recorded. traces.py says where they are from.

The last test is a campaign: a real engine with and without a draft, profiled after its benchmark.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import traces

from kimi_eagle.bench import breakdown, measure, trace
from kimi_eagle.bench.measure import Case, Spec
from kimi_eagle.bench.workload import make_workload
from kimi_eagle.errors import RunError

RECORDED = sorted(Path(__file__).with_name("recorded").glob("toy-rank*.json.gz"))
WORKLOAD = make_workload(["a", "b"], [[7, 7], [8, 8]], 40, 1)


def write(path: Path, data: object, *, packed: bool = True) -> Path:
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


# ------------------------------------------------------------------------ what a trace says


def test_the_recorded_trace_of_two_cpu_ranks() -> None:
    """Counts follow from the toy: 8 layers, the first without experts, 2 steps; a sum over ranks
    after the embedding and twice a layer, one gathering of logits."""
    found = breakdown.combined(RECORDED)
    assert found["device"] == "cpu" and len(found["ranks"]) == 2
    assert found["steps"] == {"number": 2, "with_prefill": 0, "requests": 2.0, "tokens": 2.0}
    calls = {x["name"]: (x["kind"], x["calls"]) for x in found["longest"]}
    assert calls["_C::shm_allreduce"] == ("communication", 2 * (1 + 2 * 8))
    assert calls["_C::shm_all_gather"] == ("communication", 2)
    assert calls["_C::cpu_fused_moe"] == ("moe", 2 * 7)
    assert calls["_C::cpu_attention_with_kv_cache"] == ("attention", 2 * 8)
    assert calls["_C::onednn_mm"][0] == "dense"
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert 0.5 < found["shares"]["communication"] < 0.9  # two ranks on a busy machine wait
    least = min(r["shares"]["communication"] for r in found["ranks"])
    assert found["communication_least"] == least <= found["shares"]["communication"]


def test_no_time_of_operators_is_counted_twice_or_lost() -> None:
    """Own times add up to the time in which any operator ran: there is one thread."""
    for path in RECORDED:
        found = trace.look(trace.read(path))
        assert sum(found["seconds"].values()) == pytest.approx(found["busy_seconds"], rel=1e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_kernels_of_a_gpu_alone_are_counted_where_there_are_any(tmp_path: Path, packed) -> None:
    found = breakdown.combined([write(tmp_path / "r0.x", traces.cuda(8), packed=packed)])
    assert found["device"] == "cuda"
    assert found["steps"] == {"number": 8, "with_prefill": 0, "requests": 4.0, "tokens": 16.0}
    for kind, share in traces.SHARES.items():
        assert found["shares"][kind] == pytest.approx(share / 1000), kind
        assert found["seconds"][kind] == pytest.approx(8 * share / 1e6)
    assert found["busy_seconds"] == pytest.approx(8e-3)
    assert found["wall_seconds"] == pytest.approx(8e-3 + 7 * 250e-6)
    assert found["idle_share"] == pytest.approx(7 * 250 / (8000 + 7 * 250))
    assert found["longest"][0]["calls"] == 8 and "AllReduce" in found["longest"][0]["name"]


def test_kernels_side_by_side_are_busy_once(tmp_path: Path) -> None:
    data = traces.cuda(2)
    more = [dict(e, tid=8) for e in data["traceEvents"] if e.get("cat") == "kernel"]
    data["traceEvents"] += more
    found = breakdown.combined([write(tmp_path / "r0.x", data)])
    assert found["busy_seconds"] == pytest.approx(2e-3)
    assert sum(found["seconds"].values()) == pytest.approx(4e-3)
    assert found["shares"]["communication"] == pytest.approx(0.515)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void vllm::cross_device_reduce_2stage<__half, 8>(vllm::RankData*)", "communication"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>",
         "communication"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<0>",
         "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("gloo:all_reduce", "communication"),
        ("c10d::allreduce_", "communication"),
        ("fused_moe_kernel", "moe"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "moe"),
        ("void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l>", "moe"),
        ("bmm_Bfloat16_MxInt4Bfloat16_Fp32_t128x8x256_s6_et128x8_m128x8x16", "moe"),
        ("void marlin::Marlin<1125899906909960l, 256, 1, 8, 8, 4>", "dense"),
        ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "dense"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>",
         "attention"),
        ("fmhaSm100fKernel_QkvBfloat16OBfloat16HQk576HV512", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<0, 2, 8>", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>", "rest"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "rest"),
        ("Memcpy DtoH (Device -> Pinned)", "rest"),
    ],
)  # fmt: skip
def test_kinds_of_names_that_profiles_of_vllm_show(name: str, kind: str) -> None:
    assert trace.kind_of(name) == kind


def operators(*events: tuple[str, float, float]) -> list[trace.Event]:
    return [trace.Event(name, "cpu_op", start, time, (1, 1)) for name, start, time in events]


def test_an_operator_belongs_to_what_it_runs_in() -> None:
    """A product inside attention is attention; a sum over ranks is communication anywhere."""
    found = trace.look(
        operators(
            ("vllm::unified_mla_attention_with_output", 0, 100),
            ("aten::bmm", 10, 30),
            ("aten::copy_", 15, 5),
            ("vllm::moe_forward", 100, 100),
            ("aten::topk", 110, 10),
            ("vllm::all_reduce", 150, 40),
            ("aten::empty", 151, 2),
            ("aten::linear", 200, 50),
            ("aten::t", 205, 5),
            ("aten::add", 250, 10),
        )
    )
    microseconds = {k: round(1e6 * v) for k, v in found["seconds"].items()}
    wanted = {"communication": 40, "attention": 100, "moe": 60, "dense": 50, "rest": 10}
    assert microseconds == wanted
    assert {x["name"]: x["kind"] for x in found["longest"]}["aten::topk"] == "moe"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"traceEvents": 3}', b'{"traceEvents": [{"ph": "X", "name": "a"}]}',
     gzip.compress(b'{"traceEvents": []}')[:-9], b"\x1f\x8bxx", b'{"other": []}',
     b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon", "dur": 1}]}'],
)  # fmt: skip
def test_what_is_no_trace_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(RunError, match="no trace of torch's profiler"):
        trace.read(tmp_path / "t")


def test_a_trace_with_nothing_to_count_is_told() -> None:
    with pytest.raises(RunError, match="neither kernels nor operators"):
        trace.look([trace.Event("cudaLaunchKernel", "cuda_runtime", 0, 5, (1, 1))])


# ------------------------------------------------------------------------ the steps recorded


class Engine:
    """Prefills one prompt a step, then gives each its token; the profiler's start is noted."""

    def __init__(self, target: Path, *, tokens: int = 1000, traced: object = None) -> None:
        self.target, self.traced, self.tokens = target, traced, tokens
        self.params: dict[str, SimpleNamespace] = {}
        self.made: dict[str, int] = {}
        self.started: list[dict[str, int]] = []
        self.steps = self.recorded = 0
        self.llm_engine = self

    def add_request(self, name: str, prompt: dict, params: SimpleNamespace) -> None:
        self.params[name], self.made[name] = params, 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.made)

    def step(self) -> list[SimpleNamespace]:
        fresh = [n for n, made in self.made.items() if not made]
        now = fresh[:1] or list(self.made)
        self.steps += 1
        for name in now:
            self.made[name] += 1
            if self.made[name] >= self.tokens:
                del self.made[name]
        return [SimpleNamespace(request_id=n, finished=False) for n in now]

    def start_profile(self) -> None:
        self.started.append(dict(self.made))
        self.steps = 0

    def stop_profile(self) -> None:
        self.recorded = self.steps
        if isinstance(self.traced, Exception):
            raise self.traced
        if self.traced:
            write(self.target / "rank0.1.pt.trace.json.gz", self.traced)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.made.pop(name, None)


@pytest.fixture
def spec(vllm_parameters: None) -> Spec:
    engine = {"max_model_len": 512}
    more = {"draft": "/d", "draft_digest": "d", "k": 3, "profile": Case(3)}
    return Spec("/v", "v", engine, {}, WORKLOAD, (Case(1), Case(3)), **more)


def test_only_decoding_is_recorded_and_enough_of_it(spec: Spec, tmp_path: Path) -> None:
    target = breakdown.place(spec, tmp_path)
    engine = Engine(target, traced=traces.cuda(8))
    found = breakdown.profiled(engine, spec, tmp_path, steps=8)
    assert list(engine.started[0].values()) == [1, 1, 1], "each has its first token, no more"
    assert engine.recorded >= 8 and not engine.made
    assert all(p.ignore_eos and p.temperature == 0 for p in engine.params.values())
    room = {p.max_tokens for p in engine.params.values()}
    assert room == {(8 + 32 + 3) * 4}, "k + 1 tokens a step at most"
    assert (found["batch_size"], found["k"], found["context_tokens"]) == (3, 3, 2.0)
    assert found["shares"]["communication"] == pytest.approx(0.515)
    assert found["missing_ranks"] == 0
    assert breakdown.found(spec, tmp_path) == found
    assert not breakdown.wanted(spec, tmp_path)
    config = breakdown.settings(spec, tmp_path, steps=8)
    assert config["torch_profiler_dir"] == str(target) and config["max_iterations"] == 8


def test_a_rank_without_a_trace_is_told(spec: Spec, tmp_path: Path) -> None:
    wide = replace(spec, engine={"max_model_len": 512, "tp": 4, "pp": 2})
    engine = Engine(breakdown.place(wide, tmp_path), traced=traces.cuda(8))
    assert breakdown.profiled(engine, wide, tmp_path, steps=8)["missing_ranks"] == 7


def test_a_context_that_ends_early_ends_the_recording(spec: Spec, tmp_path: Path) -> None:
    spec = replace(spec, engine={"max_model_len": 6})
    engine = Engine(breakdown.place(spec, tmp_path), tokens=3, traced=traces.cuda(2))
    assert breakdown.profiled(engine, spec, tmp_path)["steps"]["number"] == 2
    assert {p.max_tokens for p in engine.params.values()} == {3} and engine.recorded == 2


def test_the_place_is_the_same_when_later_turns_became_prompts(spec: Spec, tmp_path: Path) -> None:
    talk = {"prompt": 0, "messages": [], "tools": None, "turns": ["More?"]}
    asked = make_workload(["a"], [[7]], 40, 1, later=[talk], template="t")
    before = replace(spec, workload=asked)
    after = replace(asked, names=("a", "a#2"), prompts=((7,), (7, 9)), later=())
    place = breakdown.place(before, tmp_path)
    assert breakdown.place(replace(spec, workload=after), tmp_path) == place
    others = [spec, replace(before, k=2), replace(before, profile=Case(1))]
    assert place not in [breakdown.place(other, tmp_path) for other in others]


@pytest.mark.parametrize(
    ("traced", "says"),
    [
        (None, "left no trace"),
        (OSError("no CUPTI"), "OSError: no CUPTI"),
        ({"traceEvents": []}, "neither kernels nor operators"),
        ({"traceEvents": 1}, "no trace of torch's profiler"),
    ],
)
def test_what_fails_is_told_and_not_tried_again(spec, tmp_path: Path, traced, says: str) -> None:
    target = breakdown.place(spec, tmp_path)
    target.mkdir()
    write(target / "old.1.pt.trace.json.gz", traces.cuda(1))  # of an attempt that was killed
    found = breakdown.profiled(Engine(target, traced=traced), spec, tmp_path)
    assert says in found["error"] and set(found) == {"error"}
    assert breakdown.found(spec, tmp_path) == found
    assert not breakdown.wanted(spec, tmp_path)


def finish(spec: Spec, folder: Path) -> None:
    """All measurements, as the child leaves them."""
    run = measure.Run(1.0, [[1], [2]], ["stop"] * 2)
    for case in spec.cases:
        known = {"format": measure.FORMAT, "digest": spec.digest(case), "kind": spec.kind}
        about = {"load_seconds": 1, "peak_memory_bytes": 1, "versions": {}, "threads": 1}
        data = known | {"case": vars(case), "run": vars(run)} | about
        spec.path(folder, case).write_text(json.dumps(data))


def test_an_engine_that_dies_under_the_profiler_costs_no_measurement(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(_args: list[str], log: Path, *_: object) -> int:
        log.write_text("")
        finish(spec, tmp_path)
        return -11

    monkeypatch.setattr(measure, "_run_child", child)
    _, found = measure.measure(spec, tmp_path)
    assert [m.case for m in found] == [Case(1), Case(3)]
    assert breakdown.found(spec, tmp_path) == {"error": "the engine died: killed by SIGSEGV"}
    assert not breakdown.wanted(spec, tmp_path)


def test_the_engine_is_loaded_again_for_a_breakdown_that_is_missing(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is measured, nothing is profiled: one more load, no measurement more."""
    finish(spec, tmp_path)
    asked: list[dict] = []

    def child(args: list[str], *_: object) -> int:
        asked.append(json.loads(Path(args[0]).read_text()))
        breakdown.profiled(Engine(breakdown.place(spec, tmp_path)), spec, tmp_path)
        return 0

    monkeypatch.setattr(measure, "_run_child", child)
    for _ in range(2):
        _, found = measure.measure(spec, tmp_path)
        assert [m.case for m in found] == [Case(1), Case(3)] and all(m.reused for m in found)
    assert len(asked) == 1 and asked[0]["cases"] == []
    assert asked[0]["profile"] == vars(Case(3))
    assert replace(spec, profile=None).digest(Case(1)) == spec.digest(Case(1))


# ------------------------------------------------------------------------ the real thing


@pytest.mark.campaign
def test_a_real_engine_with_and_without_a_draft(verifier_dir: Path, tmp_path: Path) -> None:
    import test_serving as serving

    from kimi_eagle.bench import results
    from kimi_eagle.verifier import open_verifier

    verifier = open_verifier(verifier_dir)
    draft = serving.make(verifier, tmp_path / "draft", ", . the\n and of 1 a to is")
    recipe = serving.recipe_for(tmp_path, verifier, draft)
    asked = {"sweep_k": (), "sampling": (), "against": (), "batch_sizes": (2,), "profile": True}
    recipe = recipe.model_copy(update={"benchmark": recipe.benchmark.model_copy(update=asked)})
    lines: list[str] = []
    found = results.run_benchmark(recipe, verifier, draft, tmp_path, on_plan=lines.extend)
    assert all("64 steps profiled" in line for line in lines[1:])
    shares = found["details"]["breakdown"]
    print(json.dumps({k: v["shares"] for k, v in shares.items()}))
    for kind, tokens in (("baseline", 1), ("draft", 1 + serving.K)):
        one = shares[kind]
        assert one["device"] == "cpu" and len(one["ranks"]) == 1
        assert one["steps"] == {
            "number": 64, "with_prefill": 0, "requests": 2.0, "tokens": 2.0 * tokens,
        }  # fmt: skip
        assert one["shares"]["communication"] == one["shares"]["moe"] == 0.0
        assert one["shares"]["dense"] > one["shares"]["attention"] > 0.0
    layers = {k: _calls(shares[k], "_C::cpu_attention_with_kv_cache") for k in shares}
    assert layers["baseline"] == 64 * 30 < layers["draft"]


def _calls(one: dict, name: str) -> int:
    return next(x["calls"] for x in one["longest"] if x["name"] == name)
