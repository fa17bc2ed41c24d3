"""Which hidden states: ids in one convention, in range, the last one before the final norm.

Convention, here and in vLLM (0.31.0, model_executor/models/deepseek_v2.py and interfaces.py): id k
is the state that enters layer k, `hidden_states[k]` of transformers for k below the number of
layers L; id L is what the last layer gives, before the final norm (transformers' last one is after
it). vLLM answers in ascending order and each id once, whatever it is asked for. speculators 0.3.0
counted the state that leaves layer i; so does SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.record import RIGHTS, of_the_machine

FED = 3
"""Layers that feed a draft (draft-shape-aux-layers)."""


def sglang_ids(layers: Iterable[int]) -> list[int]:
    """`eagle_aux_hidden_state_layer_ids` of a draft as SGLang counts them: our ids less one.

    layers: the ids that feed the draft, without the last one. SGLang names the layer whose output
    it takes and adds one itself (python/sglang/srt/models/llama.py, set_eagle3_layers_to_capture:
    `layers_to_capture = [val + 1 for val in layer_ids]`, captured before layer i runs). Without
    ids in the draft it takes [2, L // 2, L - 3] in our count. Id 0, the embedding's output, has no
    counterpart: ValueError.
    """
    found = [int(k) - 1 for k in layers]
    if any(k < 0 for k in found):
        raise ValueError("the state that enters layer 0 has no id in SGLang")
    return found


def from_sglang(ids: Iterable[int]) -> list[int]:
    """Our ids of the states that SGLang, or speculators 0.3.0, names by the layer they leave."""
    return [int(i) + 1 for i in ids]


@rule(
    "layers-in-range",
    what="Each id of extract.layers is one of the verifier's states: 0 to the number of layers.",
    why="vLLM 0.31.0 compares ids with the layers it passes and says nothing of one it never meets "
    "(model_executor/models/deepseek_v2.py, DeepseekV2Model.forward): fewer states than asked for, "
    "and a shape error in the first step, after the whole load.",
    how="extract.layers against num_hidden_layers of the verifier's configuration.",
    fix="write ids of the verifier's own states; for 61 layers [2, 30, 58, 61]",
    stages=("extract",),
    after=("verifier-config",),
)
def in_range(facts: Facts) -> Iterator[Problem | Note]:
    facts.verifier.check_layers(facts.recipe.extract.layers)
    aux = facts.recipe.extract.layers[:-1]
    if aux and aux[0] > 0:
        yield Note(f"id k is the state entering layer k; for SGLang the draft's are {_as(aux)}")


def _as(layers: Iterable[int]) -> str:
    return f"{sglang_ids(layers)}"


@rule(
    "layers-last",
    what="The last id of extract.layers is the number of layers: the state after the last layer.",
    why="The loss takes the target's distribution from it: speculators 0.9.0 applies final norm "
    "and lm_head to it (models/eagle3/core.py). An id less is another layer's state: the draft "
    "learns a distribution that the verifier never has, and nothing fails.",
    how="extract.layers against num_hidden_layers; the probe of extract shows it on the states.",
    fix="end extract.layers with the number of layers",
    stages=("extract", "train"),
    after=("layers-in-range", "verifier-layers"),
)
def last(facts: Facts) -> Iterator[Problem]:
    layers, count = facts.recipe.extract.layers, facts.verifier.num_layers
    if layers[-1] == count:
        return
    # Of three ids the last one was left out, of four it is another.
    others = layers if len(layers) <= FED else layers[:-1]
    fix = f"write {[*others, count]}"
    if layers[-1] == count - 1 and len(layers) > FED:
        fix = (
            f"write {from_sglang(layers)} if these ids name the layer that a state leaves, as in "
            f"SGLang and speculators 0.3.0; else {[*others, count]}"
        )
    yield Problem(
        f"extract.layers ends with {layers[-1]}",
        where=facts.recipe.name,
        expected=f"{count}: the state after the last layer is the target",
        fix=fix,
    )


@rule(
    "layers-not-the-embedding",
    what="Id 0 is not asked of a latent-attention verifier.",
    why="vLLM 0.31.0 adds the residual before each layer of this family and has none before layer "
    "0 (model_executor/models/deepseek_v2.py, DeepseekV2Model.forward, `hidden_states + residual`)"
    ": TypeError in the profiling run, after the whole load. Other families take id 0.",
    how="extract.layers, where the verifier's configuration has kv_lora_rank.",
    fix="leave 0 out; the draft reads the embedding of its tokens anyway",
    stages=("extract",),
    after=("layers-in-range",),
)
def not_the_embedding(facts: Facts) -> Iterator[Problem]:
    if not facts.verifier.text_config.get("kv_lora_rank"):
        raise NotConcerned("no latent attention")
    if 0 in facts.recipe.extract.layers:
        yield Problem(
            "extract.layers holds 0",
            where=facts.recipe.name,
            expected=f"ids from 1 to {facts.verifier.num_layers} for this family",
        )


@rule(
    "layers-states-whole",
    what="The extracted states are there, as large as they were recorded, and open.",
    why="A shard that a full disk cut, or that was moved away, stops training when it is read, "
    "hours after the start where it is the last one.",
    how="Sizes of all files of the records, and the index of each shard. Every byte: `kimi-eagle "
    "verify RUN --deep`. States that `kimi-eagle clean --hidden` freed concern nobody.",
    fix="kimi-eagle retry RUN, then run it again: such units alone are made anew",
    needs=("states",),
    stages=("train",),
)
def states_whole(facts: Facts) -> Iterator[Problem]:
    faults = [fault for r in facts.extracted if (fault := r.files_whole())]
    # What this machine alone cannot read comes last: nothing is made again for it.
    for fault in sorted(faults, key=of_the_machine)[:1]:
        where, _, what = fault.partition(": ")
        more = f" (of {len(facts.extracted)} units {len(faults)})" if faults[1:] else ""
        yield Problem(
            f"states: {what}{more}", where=where, fix=RIGHTS if of_the_machine(fault) else ""
        )
    if not faults:
        facts.states  # noqa: B018  it raises


@rule(
    "layers-states",
    what="Shards hold the states that their records name: as many, in that order.",
    why="All states but the last feed `fc` side by side, by position (speculators 0.9.0, "
    "models/eagle3/core.py): two of them exchanged have the same shape and train to a worse loss, "
    "and at serving time vLLM feeds them in ascending order.",
    how="Layers in the metadata of each shard against the key of its record.",
    fix="kimi-eagle verify RUN marks such units, then kimi-eagle retry RUN and run it again",
    needs=("states",),
    stages=("train",),
    after=("layers-states-whole",),
)
def states(facts: Facts) -> Iterator[Problem]:
    told = {
        record.kinds["safetensors"]: record.data["parts"].get("layers")
        for record in facts.extracted
    }
    for shard in facts.states.shards:
        wanted = told.get(shard.path) or list(facts.recipe.extract.layers)
        if list(shard.layers) != list(wanted):
            yield Problem(
                f"layers {list(shard.layers)}",
                where=shard.path,
                expected=f"{list(wanted)}, as its record says",
            )


@rule(
    "layers-before-the-norm",
    what="Final norm and lm_head applied to the last state name the verifier's next token.",
    why="A state taken after the norm, of another layer or shifted by a token has the right shape. "
    "speculators 0.3.0 left the norm out of the loss: its targets agreed with the verifier's own "
    "choice in 12.5% of the positions.",
    how="extract probes each unit as it is made (capture/probe.py) and stops at once; train "
    "compares the agreement in the records with extract.probe_min_agreement.",
    fix="kimi-eagle retry RUN, with extract.layers ending with the number of layers",
    needs=("states",),
    stages=("train",),
    after=("layers-states-whole",),
)
def before_the_norm(facts: Facts) -> Iterator[Problem | Note]:
    least, bare = facts.recipe.extract.probe_min_agreement, 0
    for record in facts.extracted:
        probe = record.info.get("probe")
        if probe is None:
            bare += 1
        elif probe["positions"] < 1 or probe["agreement"] < least:
            yield Problem(
                f"the probe agrees at {probe['agreement']:.1%} of {probe['positions']} positions",
                where=f"extract unit {record.unit}",
                expected=f"at least {least:.0%}",
            )
    if bare:
        yield Note(f"{bare} units were not probed")
