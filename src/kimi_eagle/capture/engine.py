"""vLLM as two closed-batch machines: one that answers prompts, one that gives hidden states.

Reads a local verifier directory; writes nothing but, where vLLM has processes of its own, files
in a spool folder that are gone again when the batch is.

A batch goes in together in the caller's order and the engine drains before the next: on one CPU
type the same batch gives the same bytes (DESIGN promise 3). The engine is stepped here
(LLMEngine.add_request / step, public API) instead of by LLM.generate, so that progress shows
while a batch runs and states leave as soon as they exist. The price: scheduling is vLLM's default
and one batch cannot fill another's tail.

Checked against vLLM 0.31.0; only the CPU build was run.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.capture import vllm_cpu
from kimi_eagle.capture.settings import (
    engine_arguments,
    environment,
    in_process,
    prepare_environment,
    settings,
)
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import EngineSection

if TYPE_CHECKING:
    import torch

__all__ = [
    "Answer",
    "ExtractionEngine",
    "GenerationEngine",
    "environment",
    "prepare_environment",
    "settings",
]

FILE_TIMEOUT_S = 300.0
"""Longest wait for the spool file of a request that vLLM called finished."""
IDLE_STEPS = 64
"""Engine steps without requests after which missing states will not come any more."""


@dataclass(frozen=True)
class Answer:
    """token_ids as generated, with the end-of-turn token where finish_reason is `stop`;
    `length` means max_tokens or the engine's max_model_len was reached."""

    token_ids: list[int]
    finish_reason: str


class _Engine:
    """Opening, feeding and closing of a vLLM engine; a context manager."""

    def __init__(self, verifier_path: Path, told: dict[str, Any], trust_remote_code: bool):
        self.verifier_path = Path(verifier_path)
        self.settings = told
        self._trust_remote_code = trust_remote_code
        self._engine: Any = None
        self._internal: dict[str, int] = {}
        self._serial = 0
        self._broken = False

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt the engine takes: one token of max_model_len is for the answer."""
        return self.settings["max_model_len"] - 1

    def _extra_arguments(self) -> dict[str, Any]:
        return {}

    def __enter__(self):
        from vllm import EngineArgs, LLMEngine

        vllm_cpu.prepare(self.settings)
        arguments = engine_arguments(self.settings, self.verifier_path, self._trust_remote_code)
        try:
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(**arguments, **self._extra_arguments())
            )
        except Exception as e:
            raise RunError(
                f"vLLM {self.settings['vllm']} did not load the verifier: {_first_line(e)}",
                where=self.verifier_path,
            ) from e
        return self

    def __exit__(self, *_: object) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
            gc.collect()

    def _submit(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> dict[str, int]:
        """Queue a whole batch; -> vLLM's external request ids to positions in the batch."""
        from vllm.inputs import tokens_input

        if self._broken or self._engine is None:
            raise RunError("the vLLM engine is closed or stopped after an error")
        vocabulary = self._engine.model_config.get_vocab_size()
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.max_prompt_tokens:
                raise RunError(
                    f"prompt of {len(prompt)} tokens",
                    where=f"batch row {i}",
                    expected=f"1 to {self.max_prompt_tokens} (engine max_model_len - 1)",
                )
            if min(prompt) < 0 or max(prompt) >= vocabulary:
                # vLLM 0.31.0 lets some of these through to the embedding, which ends the engine.
                raise RunError(
                    f"token id {max(prompt) if min(prompt) >= 0 else min(prompt)}",
                    where=f"batch row {i}",
                    expected=f"0 to {vocabulary - 1}",
                )
        names: dict[str, int] = {}
        self._internal = {}
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            name = str(self._serial)
            self._serial += 1
            try:
                tokens = tokens_input([int(t) for t in prompt])
                inner = self._engine.add_request(name, tokens, param)
            except Exception as e:  # VLLMValidationError is no ValueError
                self._abort()
                raise RunError(
                    f"vLLM refused the prompt: {_first_line(e)}", where=f"batch row {i}"
                ) from e
            names[name], self._internal[inner] = i, i
        return names

    def _abort(self) -> None:
        """Take back what is still queued and let the engine run dry.

        Called while another exception is on its way, which must not be covered by a new one:
        where vLLM fails here too, this engine takes no further batch.
        """
        try:
            self._engine.abort_request(list(self._internal), internal=True)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            if in_process(self.settings):
                for _ in range(2):  # frees blocks whose states were still to be handed over
                    self._engine.step()
        except Exception:
            self._broken = True


class GenerationEngine(_Engine):
    """Answers prompts; `with GenerationEngine(...) as engine: engine.generate(...)`."""

    def __init__(
        self,
        verifier_path: Path,
        engine: EngineSection,
        seed: int = 0,
        trust_remote_code: bool = False,
    ):
        prepare_environment(engine)
        super().__init__(verifier_path, settings(engine, seed=seed), trust_remote_code)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seeds: Sequence[int] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Answer all prompts (token ids) as one closed batch; answers in the prompts' order.

        temperature 0 is greedy; else each request samples with its own seed, so that an answer
        does not depend on its neighbours' draws. An answer ends with the model's end-of-turn ids
        (generation_config.json and tokenizer, as serving does), after max_tokens, or where the
        engine's max_model_len is reached. on_tokens is called after each step with the number
        of tokens generated so far in this batch. RunError for prompts the engine cannot take.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
            raise UsageError("sampling needs one seed for each prompt")
        room = self.settings["max_model_len"]
        params = [
            SamplingParams(
                max_tokens=max(1, min(max_tokens, room - len(prompt))),
                temperature=temperature,
                top_p=top_p,
                seed=seeds[i] if temperature > 0 else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            for i, prompt in enumerate(prompts)
        ]
        names = self._submit(prompts, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        reasons: list[str | None] = [None] * len(prompts)
        total = 0
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    i, completion = names[output.request_id], output.outputs[0]
                    tokens[i].extend(completion.token_ids)
                    total += len(completion.token_ids)
                    if output.finished:
                        reasons[i] = completion.finish_reason
                if on_tokens is not None:
                    on_tokens(total)
        except BaseException:
            self._abort()
            raise
        for i, reason in enumerate(reasons):
            if reason not in ("stop", "length"):
                raise RunError(f"vLLM ended an answer with {reason!r}", where=f"batch row {i}")
        return [Answer(t, str(r)) for t, r in zip(tokens, reasons, strict=True)]


class ExtractionEngine(_Engine):
    """Hidden states of given tokens; `with ExtractionEngine(...) as engine: engine.extract(...)`.

    layers: ids k of "the state entering layer k"; the number of layers means the state after the
    last layer, before the final norm. vLLM sorts and de-duplicates ids (model_executor/models/
    interfaces.py), so they must come ascending and distinct. spool: a node-local folder, used
    only where vLLM has processes of its own (GPUs, tensor parallel); hand_over overrides
    ("memory" or "file"; memory needs vLLM in this process).
    """

    def __init__(
        self,
        verifier_path: Path,
        engine: EngineSection,
        layers: Sequence[int],
        spool: Path,
        trust_remote_code: bool = False,
        *,
        hand_over: str | None = None,
    ):
        if list(layers) != sorted(set(layers)) or not layers:
            raise UsageError(f"extract.layers: got {list(layers)}", expected="ascending ids")
        prepare_environment(engine)
        super().__init__(verifier_path, settings(engine, layers=layers), trust_remote_code)
        self.layers = tuple(layers)
        self.hand_over = hand_over or ("memory" if in_process(self.settings) else "file")
        self._spool = Path(spool) / f"states-{os.getpid()}"

    def _extra_arguments(self) -> dict[str, Any]:
        name = {"memory": "MemoryConnector", "file": "FileConnector"}[self.hand_over]
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
                },
            },
            "kv_transfer_config": {
                "kv_connector": name,
                "kv_connector_module_path": "kimi_eagle.capture.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(self._spool),
                    "use_synchronization_lock": False,
                },
            },
        }

    def __enter__(self):
        super().__enter__()
        count = self._engine.model_config.get_total_num_hidden_layers()
        if self.layers[-1] > count:
            self.__exit__()
            raise UsageError(
                f"extract.layers: no layer {self.layers[-1]}",
                where=self.verifier_path,
                expected=f"ids 0 to {count}",
            )
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self._spool, ignore_errors=True)

    def extract(
        self,
        batch: Sequence[Sequence[int]],
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor, int]]:
        """States of a closed batch of token id lists, in the batch's order, as they get ready.

        Yields (index, states bfloat16 [T, layers, hidden] on CPU, the engine's greedy next token
        after the last one). on_tokens gets the number of tokens whose states are there. Leaving
        the iterator early takes the rest back from the engine. RunError where the token ids that
        vLLM processed are not those given, where states are missing or have another shape.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        names = self._submit(batch, [params] * len(batch))
        arrived: dict[int, tuple[Any, Any]] = {}
        following: dict[int, int] = {}
        paths: dict[int, Path] = {}
        give, tokens, idle, waited = 0, 0, 0, time.monotonic()
        try:
            while give < len(batch):
                busy = self._engine.has_unfinished_requests()
                if busy or in_process(self.settings):
                    # Without requests, one more step runs the connector for the last states.
                    for output in self._engine.step():
                        if output.finished:
                            i = names[output.request_id]
                            following[i] = output.outputs[0].token_ids[0]
                            paths[i] = Path((output.kv_transfer_params or {})["hidden_states_path"])
                    idle = 0 if busy else idle + 1
                    waited = time.monotonic()
                else:
                    time.sleep(0.002)
                before = len(arrived)
                self._collect(arrived, paths)
                if len(arrived) > before:
                    waited = time.monotonic()
                while give in arrived and give in following:
                    states = self._checked(give, batch[give], *arrived.pop(give))
                    tokens += len(batch[give])
                    if on_tokens is not None:
                        on_tokens(tokens)
                    yield give, states, following.pop(give)
                    give += 1
                if idle > IDLE_STEPS or time.monotonic() - waited > FILE_TIMEOUT_S:
                    raise RunError("vLLM gave no hidden states", where=f"batch row {give}")
        finally:
            if give < len(batch):
                self._abort()
                self._collect({}, paths)

    def _collect(self, arrived: dict[int, tuple[Any, Any]], paths: dict[int, Path]) -> None:
        """Move what the connector has handed over into `arrived`: (token ids, states)."""
        if self.hand_over == "memory":
            from kimi_eagle.capture.connector import finished

            while finished:
                inner, token_ids, states = finished.popleft()
                if inner in self._internal:
                    arrived[self._internal[inner]] = token_ids, states
            return
        from safetensors.torch import load_file

        for i, path in list(paths.items()):
            if path.exists():
                tensors = load_file(path)
                arrived[i] = tensors["token_ids"], tensors["hidden_states"]
                path.unlink()
                del paths[i]

    def _checked(self, i: int, given: Sequence[int], token_ids: Any, states: Any) -> Any:
        import torch

        if token_ids.tolist() != [int(t) for t in given]:
            raise RunError(
                "the token ids that vLLM processed are not those given", where=f"batch row {i}"
            )
        if tuple(states.shape[:2]) != (len(given), len(self.layers)):
            raise RunError(
                f"hidden states of shape {tuple(states.shape)}",
                where=f"batch row {i}",
                expected=f"[{len(given)}, {len(self.layers)}, hidden]",
            )
        return states.to(torch.bfloat16)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:400]
