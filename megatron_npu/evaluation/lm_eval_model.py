"""Implement the lm-eval model ``megatron_npu``, which evaluates Megatron checkpoints directly.

Checkpoints need no conversion. Checkpoints are loaded like in ``megatron-npu generate``, and the results
equal those of ``--model hf`` on the exported model.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron_npu import devices, watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer, special_token
from megatron_npu.evaluation import model_args
from megatron_npu.evaluation.gen_kwargs import Wish
from megatron_npu.generation import trained_model
from megatron_npu.generation.chat_template import ChatTemplate
from megatron_npu.generation.sampling import leader
from megatron_npu.generation.sampling.growing_text import GrowingText
from megatron_npu.generation.sampling.leader import Leader
from megatron_npu.generation.sampling.sampler import Sample, Sampler
from megatron_npu.generation.sampling.scores import Score
from megatron_npu.generation.trained_model import CheckpointFlags, TrainedModel
from megatron_npu.pretrain.run import layout

_BLOCK = 16  # batches between two looks at the progress
_BATCH = 8  # of --batch_size auto, too

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, ids of context and of continuation


@register_model("megatron_npu")
class MegatronNpu(TemplateLM):
    """A checkpoint for evaluation by lm-eval, which runs in one or several processes.

    If neither parallel size is given, each process has a copy of the model, and the requests are divided
    among the processes. If a size is given, the processes share one model, and the first process sends all
    requests (see ``Leader``); the other processes never leave the constructor.

    Args:
        load: the folder that was given to ``--save``. None, as without ``--model_args``, is rejected.
        vocab_file, merge_file: the current paths of the tokenizer's files, if they have moved.
        fp16, bf16: whether to use this precision in place of the precision of the training run.
        tensor_model_parallel_size, pipeline_model_parallel_size: the number of processes that share each
            layer, and the number of pipeline stages.
        max_length: the maximum number of input tokens. If None, it is the number of positions of the model.
        max_gen_toks: the default number of tokens to generate.
        batch_size: the number of texts per forward pass.
        max_batch_size: accepted for lm-eval's batch size ``auto``, which selects the default here.
        device: the device of this process, or ``cuda``, which is mapped to that device.
        unknown: unsupported arguments, which are rejected by name.

    Raises:
        UsageError: the checkpoint does not exist, or an argument is invalid.
    """

    backend = "causal"

    def __init__(
        self,
        load: str | None = None,
        vocab_file: str | None = None,
        merge_file: str | None = None,
        fp16: bool = False,
        bf16: bool = False,
        tensor_model_parallel_size: int | None = None,
        pipeline_model_parallel_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = _BATCH,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        model_args.require_known(load, unknown, device)
        is_auto = str(batch_size).startswith("auto")
        self.batch = _BATCH if is_auto else model_args.count("--batch_size", batch_size, "this evaluation")
        self.max_gen_toks = model_args.count("max_gen_toks", max_gen_toks)
        self._drawn = 0  # texts, so that a request that is repeated is drawn again
        sizes = _sizes(tensor_model_parallel_size, pipeline_model_parallel_size)
        precision = model_args.switch("fp16", fp16), model_args.switch("bf16", bf16)
        longest = None if max_length is None else model_args.count("max_length", max_length)
        given = CheckpointFlags(str(load), vocab_file, merge_file, *precision)
        self._held = contextlib.ExitStack()
        atexit.register(self.close)
        self._model = self._enter(given, sizes)
        self.max_length = longest or self._model.sampler.positions
        if self.max_length > self._model.sampler.positions:
            raise UsageError(
                f"max_length in --model_args must be at most {self._model.sampler.positions}, the number of "
                f"positions of the model, but got {max_length}. Lower max_length."
            )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Any:
        """Create the model from ``--model_args`` and the options beside it, as lm-eval does."""
        model_args.require_once(arg_dict, additional_config or {})
        return super().create_from_arg_obj(arg_dict, additional_config)

    def close(self) -> None:
        """Free the model, and end the other processes.

        The object cannot be used after this call.
        """
        self._held.close()

    def _enter(self, given: CheckpointFlags, sizes: tuple[int | None, int | None]) -> TrainedModel:
        """Load the model, and prepare to send requests to the other processes.

        If several processes share the model, only the first returns.
        """
        copies = sizes == (None, None)
        share = (
            layout.copies
            if copies
            else functools.partial(layout.of_all_processes, tensor=sizes[0], pipeline=sizes[1])
        )
        patience = int(leader.PATIENCE.total_seconds()) // 60
        model = self._held.enter_context(
            trained_model.held(given, share, distributed_timeout_minutes=patience)
        )
        self._asked: Sampler | Leader = model.sampler
        if copies:
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
            if self._world_size > 1:
                self._group = dist.new_group(backend="gloo", timeout=leader.PATIENCE)
        else:
            first = self._held.enter_context(leader.leading(model.sampler))
            if first is None:  # the first process has ended
                self.close()
                raise SystemExit(0)
            self._asked = first
        # lm-eval prepares and reckons between the requests, and one process may have more to do than another
        self._held.enter_context(watchdog.phase(watchdog.WAITING))
        self._device = devices.current().torch_device()
        return model

    # what lm-eval asks of several processes

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all processes, and return the result."""
        if self._world_size == 1:
            return tensor
        found: list[Any] = [None] * self._world_size
        dist.all_gather_object(found, tensor.cpu(), group=self._group)
        return torch.cat([one.reshape(1) if one.dim() == 0 else one for one in found])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Gather objects from all processes.

        Return them on one process, and None on the others.
        """
        if self._world_size == 1:
            return [obj]
        found: list[Any] = [None] * self._world_size
        dist.all_gather_object(found, obj, group=self._group)
        return found if self._rank == dst else None

    def barrier(self) -> None:
        """Wait for all processes."""
        if self._world_size > 1:
            dist.barrier(group=self._group)

    # tokens

    @property
    def eot_token_id(self) -> int:
        """The id of the end-of-text token."""
        return self._model.tokenizer.eod

    @functools.cached_property
    def prefix_token_id(self) -> int:
        """The id that precedes a text without context: the tokenizer's start token or, without one, its
        end token.
        """
        tokenizer = self._model.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            return tokenizer.eod
        token = special_token(Path(self._model.args.tokenizer_model), "bos_token")
        return tokenizer.eod if token is None else tokenizer.vocabulary.get(token, tokenizer.eod)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, by default preceded by the tokenizer's start tokens.

        If the text already starts with these tokens, for example because a chat template added them, they are
        not added again.
        """
        tokenizer = self._model.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            return tokenizer.encode(string)
        if add_special_tokens is None:
            prefix = tokenizer.token(self.prefix_token_id)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return tokenizer.encode(string, special_tokens=add_special_tokens)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """Decode ids to text, leaving out special tokens."""
        tokenizer = self._model.tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tokens = [token for token in tokens if token not in tokenizer.special_ids]
        return tokenizer.decode(tokens)

    # chat

    @property
    def tokenizer_name(self) -> str:
        """A name that identifies this tokenizer in the caches of lm-eval."""
        args = self._model.args
        file = args.tokenizer_model or args.vocab_file or args.tokenizer_type
        return str(file).replace("/", "__")

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        found = self._model.chat_template()
        if found is None:
            raise UsageError(
                "--apply_chat_template requires a Hugging Face tokenizer with a chat template, but this "
                "checkpoint has no chat template. Remove it."
            )
        return found

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, or None if no chat template is to be applied."""
        return self._template.source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Convert messages to text with the chat template."""
        return self._template.render(chat_history, begin_answer=add_generation_prompt)

    # requests

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each request's continuation, and whether greedy decoding would
        generate it.

        If a text is too long, only its last tokens are used. Requests whose texts differ only in their last
        token, such as one-token answers to the same question, share one computation.
        """
        texts, firsts = [], []
        for _, context, continuation in requests:
            _require(context, continuation, self.max_length)
            text = [*context, *continuation][-(self.max_length + 1) :]
            texts.append(text)
            firsts.append(len(text) - len(continuation))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(texts)
        # those that are read once stand side by side
        order = sorted(range(len(texts)), key=lambda place: (-len(texts[place]), texts[place]))
        for some in self._blocks(order, "log-likelihoods", disable_tqdm):
            scores = self._score([texts[place] for place in some], [firsts[place] for place in some])
            for place, score in zip(some, scores, strict=True):
                answers[place] = math.fsum(score.logprobs), all(score.greedy)
                if requests[place][0] is not None:  # a window of loglikelihood_rolling
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], answers[place])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, computed in windows of the model's context length."""
        windows: list[Request] = []
        numbers = []
        for (string,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(string),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += found
            numbers.append(len(found))
        answers = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [math.fsum(logprob for logprob, _ in itertools.islice(answers, n)) for n in numbers]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated continuations, each up to its first stop string."""
        answers = [""] * len(requests)
        wishes: dict[Wish, list[int]] = {}
        for place, request in enumerate(requests):
            wishes.setdefault(Wish.of(request.args[1], self.max_gen_toks), []).append(place)
        for wish, places in wishes.items():
            prompts = {place: self._prompt(requests[place].args[0], wish) for place in places}
            order = sorted(places, key=lambda place: -len(prompts[place]))
            for some in self._blocks(order, "texts", disable_tqdm):
                texts = self._draw([prompts[place] for place in some], wish)
                for place, text in zip(some, texts, strict=True):
                    answers[place] = text
                    self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return answers

    def _blocks(self, order: Sequence[int], what: str, quiet: bool) -> Iterator[Sequence[int]]:
        """Yield groups of request indices, each for several batches, and show the progress."""
        size = _BLOCK * self.batch
        with tqdm(total=len(order), desc=f"megatron_npu: {what}", disable=quiet or self._rank > 0) as bar:
            for start in range(0, len(order), size):
                some = order[start : start + size]
                yield some
                bar.update(len(some))

    @watchdog.phase("evaluating")
    def _score(self, texts: list[list[int]], firsts: list[int]) -> list[Score]:
        return self._asked.score(texts, firsts, batch=self.batch)

    def _prompt(self, context: str, wish: Wish) -> list[int]:
        """Return the last ids of a context, so that the context and the answer together fit into the
        model.
        """
        room = self.max_length - wish.tokens
        if room < 1:
            raise UsageError(
                "the number of tokens to generate (max_gen_toks) must be less than the model's "
                f"{self.max_length} positions, but it is {wish.tokens}. Add --gen_kwargs "
                f"max_gen_toks={self.max_length // 2}."
            )
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]

    @watchdog.phase("evaluating")
    def _draw(self, prompts: list[list[int]], wish: Wish) -> list[str]:
        tokenizer = self._model.tokenizer
        until = handle_stop_sequences(list(wish.until), eos=tokenizer.decode([tokenizer.eod]))
        growing = [GrowingText(tokenizer, prompt) for prompt in prompts]
        texts = [""] * len(prompts)

        def watch(row: int, sample: Sample) -> bool:
            texts[row] += growing[row].added(sample.tokens)
            return any(stop in texts[row] for stop in until if stop)

        self._drawn += len(prompts)
        samples = self._asked.sample(prompts, wish.options(self._drawn), watch, self.batch)
        return [
            postprocess_generated_text(self.tok_decode(sample.tokens), stop=until, think_end_token=None)
            for sample in samples
        ]


def _sizes(tensor: int | None, pipeline: int | None) -> tuple[int | None, int | None]:
    """Return the two parallel sizes of ``--model_args`` as numbers, or None where none is given."""
    given = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    found = [None if value is None else model_args.count(name, value) for name, value in given.items()]
    return found[0], found[1]


def _require(context: list[int], continuation: list[int], longest: int) -> None:
    if not context or not 0 < len(continuation) <= longest:
        raise UsageError(
            f"the example has a context of {len(context)} tokens and a continuation of {len(continuation)}; "
            f"each must have at least one token, and together they must have at most {longest} tokens. "
            "Remove the example."
        )
