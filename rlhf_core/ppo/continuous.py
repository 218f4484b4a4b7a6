"""Continuous batching of transformers: a paged cache, in which waiting prompts replace ended rows. The only module that
depends on private parts of transformers' manager."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from rlhf_core.determinism import stream
from rlhf_core.models.packed import plain_attention
from rlhf_core.models.sampling import Sampled
from rlhf_core.ppo.engines import Key, Prompts, Rules, blank_generation_config

NEEDED = ("_run_generation_loop", "warmup", "start", "stop", "add_requests", "get_result", "is_running")
"""Methods of the manager that this module calls or replaces."""
SECONDS_TO_STOP = 30.0
TOKENS_OF_PASS = 1024
"""Of a pass through the model, if there are not more rows. The manager keeps a mask of them times all cached tokens."""


class ContinuousEngine:
    """An engine that keeps the manager, and so its cache, from call to call. There are no CUDA graphs: transformers
    records them only where attention needs no mask, and that of `sdpa`, which is used here, needs one.

    It does not follow rule 3: one generator, seeded by all keys together, draws for all rows in the scheduler's order,
    so a response depends on the whole batch.

    Args:
        rules: of sampling.
        page: tokens per page of the cache.
    """

    def __init__(self, rules: Rules, page: int = 64) -> None:
        self.rules, self.page = rules, page
        self.manager: KeptManager | None = None

    def __call__(self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]) -> Sampled:
        """See `Engine`. It computes in the precision (autocast) of the caller. Raises RuntimeError when transformers
        leaves a request unanswered."""
        if not prompts:
            return Sampled([], [], [])
        seed = int(stream(*(number for key in keys for number in key)).integers(2**31))
        devices = [policy.device] if policy.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), blank_generation_config(policy), plain_attention(policy):
            torch.manual_seed(seed)
            kept, self.manager = self._kept(policy, prompts, seed), None
            answers = kept.generate([list(prompt) for prompt in prompts])
        self.manager = kept  # not after a failure
        rows = [self.rules.cut(answer.generated_tokens, answer.logprobs) for answer in answers]
        return Sampled([r for r, _, _ in rows], [p for _, p, _ in rows], [e for _, _, e in rows])

    def _kept(self, policy: PreTrainedModel, prompts: Prompts, seed: int) -> "KeptManager":
        """The manager of the last call; another one for another policy, or where its cache is too small."""
        rows = min(self.rules.rows, len(prompts))
        longest = max(len(prompt) for prompt in prompts) + self.rules.max_new_tokens
        pages = -(-longest // self.page)
        kept = self.manager
        if kept is None or kept.policy is not policy or rows > kept.rows or pages > kept.pages:
            if kept is not None and kept.policy is policy:
                rows, pages = max(rows, kept.rows), max(pages, kept.pages)
            self.manager = kept = None  # its memory first
            return KeptManager(policy, self._generation(), self._batching(rows, pages, seed), rows, pages)
        return kept

    def _generation(self) -> GenerationConfig:
        rules = self.rules
        return GenerationConfig(
            do_sample=True,
            temperature=rules.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=rules.max_new_tokens,
            eos_token_id=sorted(rules.stop_ids) or -1,
            pad_token_id=rules.pad_id,
        )

    def _batching(self, rows: int, pages: int, seed: int) -> Any:
        """A cache for `rows` sequences of `pages` pages, no attention kernel from the hub, and no block that two
        prompts share: shared blocks would outlive a change of the weights."""
        return ContinuousBatchingConfig(
            return_logprobs=True,
            seed=seed,
            auto_switch_to_flash=False,
            allow_block_sharing=False,
            page_size=self.page,
            num_blocks=rows * pages + 1,
            max_requests_per_batch=rows,
            max_batch_tokens=max(rows, TOKENS_OF_PASS),
        )


class KeptManager:
    """The manager of transformers for one policy, its thread stopped between two calls. The policy's weights may change
    in place meanwhile. Raises RuntimeError where the installed transformers has another manager."""

    def __init__(self, policy: PreTrainedModel, generation: Any, batching: Any, rows: int, pages: int) -> None:
        if missing := [name for name in NEEDED if not callable(getattr(ContinuousBatchingManager, name, None))]:
            raise RuntimeError(
                f"transformers {transformers.__version__}: its continuous batching has no {', '.join(missing)}; "
                "use ppo.engine: leash or transformers"
            )
        self.policy, self.rows, self.pages = policy, rows, pages
        with torch.no_grad():
            self.manager: Any = policy.init_continuous_batching(
                generation_config=generation, continuous_batching_config=batching
            )
        with _precision_of_this_thread(policy.device.type):
            self.manager.warmup()  # also makes the cache
        _cast_into(self.manager.batch_processor.cache)
        loop = self.manager._run_generation_loop
        self.manager._run_generation_loop = lambda: self._in_precision(loop)
        self.precision: AbstractContextManager[None] | None = None

    def generate(self, prompts: list[list[int]]) -> list[Any]:
        """The answers in the order of the prompts, with the weights and in the precision of this moment."""
        self.precision = _precision_of_this_thread(self.policy.device.type)
        self.manager.start()
        try:
            names = self.manager.add_requests(inputs=prompts)
            answers = self._collect(len(names))
        finally:
            self.manager.stop(block=True, timeout=SECONDS_TO_STOP, keep_for_next_session=True)
            del self.policy._cached_continuous_batching_manager  # the policy must stay copyable
        self._require_fresh_cache()
        errors = {answer.error for answer in answers.values() if answer.error}
        if set(answers) != set(names) or errors:
            raise RuntimeError(f"continuous batching answered {len(answers)} of {len(prompts)} prompts: {errors}")
        return [answers[name] for name in names]

    def _collect(self, count: int) -> dict[str, Any]:
        """Finished answers by the name of their request; fewer than `count` where the thread has ended."""
        answers: dict[str, Any] = {}
        while len(answers) < count:
            answer = self.manager.get_result(timeout=1)
            if answer is not None and answer.is_finished():
                answers[answer.request_id] = answer
            elif answer is None and not self.manager.is_running():
                break
        return answers

    def _in_precision(self, loop: Callable[[], None]) -> None:
        """The manager's thread: autocast is a setting of each thread."""
        assert self.precision is not None
        with self.precision:
            loop()

    def _require_fresh_cache(self) -> None:
        """No block may be found again by its content after the weights have changed."""
        if self.manager.batch_processor is None or self.manager.batch_processor.cache.use_prefix_sharing:
            raise RuntimeError(
                f"transformers {transformers.__version__}: continuous batching shares blocks of the cache between "
                "calls, although the weights change; use ppo.engine: leash or transformers"
            )


def _cast_into(cache: Any) -> None:
    """Make a paged cache accept keys and values of another precision: under autocast values are bfloat16, and keys
    behind a rotary embedding float32."""
    update, dtype = cache.update, cache.dtype

    def cast_and_update(key_states: Tensor, value_states: Tensor, **named: Any) -> Any:
        return update(key_states=key_states.to(dtype), value_states=value_states.to(dtype), **named)

    cache.update = cast_and_update


def _precision_of_this_thread(kind: str) -> AbstractContextManager[None]:
    """Autocast as in the calling thread, without its cache of cast weights: a manager that records CUDA graphs
    would read the casts of old weights."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
