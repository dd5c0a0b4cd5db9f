"""Load a model's configuration, tokenizer and weights from a folder or from the hub's cache.

Transformers is imported only when one of these is requested, so that flags and help texts do not require it.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import stranger_weights
from megatron_npu.data import hub
from megatron_npu.safe_files import expanded_size, safe_load

T = TypeVar("T")

_FLAG = "--pretrained-model-name-or-path"
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_MOST_LAYERS = 10_000
# no code of a repository is run; unsaid, transformers asks on the terminal whether to
NO_CODE = {"trust_remote_code": False}


def config(name: str, **changes: Any) -> Any:
    """Return the configuration of a model, which is the same for all of its heads.

    Args:
        name: a folder, or a name on the hub.
        changes: values that replace the stored ones, such as ``num_labels``.

    Raises:
        UsageError: the model does not exist, or has implausibly many layers.
    """
    from transformers import AutoConfig

    found = _loaded(name, lambda: AutoConfig.from_pretrained(name, **changes, **NO_CODE))
    _refuse_endless(name, found)
    return found


def has_head(config: Any, head: str) -> bool:
    """Return True if Transformers has the head of the given Auto class for a model with this
    configuration.
    """
    return type(config) in _auto(head)._model_mapping


def sees_all(config: Any) -> bool:
    """Return True if tokens attend to later tokens, as they do in encoders."""
    decodes = getattr(config, "is_decoder", False) or config.is_encoder_decoder
    return has_head(config, "AutoModelForMaskedLM") and not decodes


def class_names(name: str) -> tuple[str, ...]:
    """Return the names of the classes that a model predicts, ordered by class number.

    Raises:
        UsageError: the model does not exist.
    """
    found = config(name).id2label or {}
    numbered = {int(number): str(label) for number, label in found.items()}
    return tuple(numbered.get(number, f"LABEL_{number}") for number in range(len(numbered)))


def is_cached(name: str, file: str = "config.json") -> bool:
    """Return True if the hub's cache contains the given file of a model."""
    from transformers.utils import cached_file

    found = cached_file(
        name,
        file,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found is not None


def loaded(name: str, auto: Any, config: Any) -> torch.nn.Module:
    """Load a model with an Auto class, and return it with its weights in fp32.

    Raises:
        UsageError: there are no weights.
    """
    _require_as_downloaded(name)
    found = _loaded(name, lambda: auto.from_pretrained(name, config=config, dtype=torch.float32, **NO_CODE))
    return _looked_at(name, found)


def _require_as_downloaded(name: str) -> None:
    """Compare the weights in a folder or in the hub's cache with the hub's checksums, if these are
    available.
    """
    from transformers.utils import cached_file

    if os.environ.get("RANK", "0") != "0":
        return
    place = (
        name
        if Path(name).is_dir()
        else cached_file(
            name,
            "config.json",
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    )
    if place is not None:
        stranger_weights.require_as_downloaded(Path(place) if Path(place).is_dir() else Path(place).parent)


def _looked_at(name: str, model: T) -> T:
    """Warn on rank 0 about values that do not occur in trained models, and return the model."""
    if os.environ.get("RANK", "0") == "0" and isinstance(model, torch.nn.Module):
        stranger_weights.tell_of_implausible(name, model.named_parameters())
    return model


def tokenizer(name: str, config: Any, **options: Any) -> Any:
    """Return a model's tokenizer.

    If it has no padding token, its end token is used for padding.

    Raises:
        UsageError: the tokenizer does not exist, has no tokens, or has more tokens than the model.
    """
    from transformers import AutoTokenizer

    found = _loaded(name, lambda: AutoTokenizer.from_pretrained(name, **options, **NO_CODE))
    entries = getattr(config.get_text_config(), "vocab_size", None)
    if len(found) <= len(set(found.all_special_ids)):  # what Transformers makes of a folder without its files
        raise UsageError(
            f"{_FLAG} {name}: its tokenizer has no vocabulary. Add tokenizer.json, or the tokenizer files "
            "that this type of model uses, to the folder, as save_pretrained writes them."
        )
    if entries is not None and len(found) > entries:
        raise UsageError(
            f"{_FLAG} {name}: its tokenizer has {len(found)} tokens, but its model has embeddings for only "
            f"{entries}. Use the tokenizer that the model was trained with."
        )
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.unk_token
        config.pad_token_id = found.pad_token_id
    return found


def model(name: str, head: str, config: Any) -> torch.nn.Module:
    """Return a model of the given Auto class with weights in fp32.

    A head without stored weights is initialized.

    Raises:
        UsageError: there are no weights.
    """
    auto = _auto(head)
    # from version 5 on the weights would come in the type they are stored in; a stored head may be of other
    # labels than these
    _require_as_downloaded(name)
    found = _loaded(
        name,
        lambda: auto.from_pretrained(
            name, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, **NO_CODE
        ),
    )
    return _looked_at(name, found)


def longest(name: str, tokenizer: Any, config: Any, asked: int | None, otherwise: int = 1024) -> int:
    """Return the maximum number of input tokens: the requested number, or the limit of the model.

    Args:
        name: name of the model.
        tokenizer: the model's tokenizer, which usually has a limit.
        config: the model's configuration, which contains the number of positions if the model has a limit.
        asked: value of ``--seq-length``.
        otherwise: the default if there is no limit.

    Raises:
        UsageError: the requested number exceeds what the model supports, or leaves no room beyond the special
            tokens.
    """
    around = tokenizer.num_special_tokens_to_add(pair=False)
    if asked and asked <= around:
        raise UsageError(
            f"--seq-length must exceed the {around} special tokens that {name} adds to each text, but got "
            f"{asked}. Pass a larger --seq-length."
        )
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    most = min((limit for limit in limits if limit and limit < 1 << 30), default=None)
    if asked and most and asked > most:
        raise UsageError(
            f"--seq-length must be at most {most} for {name}, but got {asked}. Use fewer tokens, or another "
            "model."
        )
    return asked or most or otherwise


def _refuse_endless(name: str, config: Any) -> None:
    """Reject a number of layers that is so large that building the model would exhaust the memory."""
    for key in _LAYERS:
        count = getattr(config, key, None)
        if isinstance(count, int) and count > _MOST_LAYERS:
            raise _refused(
                name, f"{key} is {count:,} in its config.json, but must be at most {_MOST_LAYERS:,}"
            )


def _auto(head: str) -> Any:
    """Return the Transformers Auto class with the given name."""
    import transformers

    return getattr(transformers, head)


def _loaded(name: str, load: Callable[[], T]) -> T:
    for index in Path(name).glob("*.index.json"):
        _require_own_shards(name, index)
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise _refused(name, "the folder does not exist")  # asking the hub takes time where there is none
    hub.use_cache_if_silent(name)
    try:
        with expanded_size.checked():
            return load()
    except UsageError:
        raise
    except pickle.UnpicklingError as error:
        raise _refused(name, safe_load.refused_name(error)) from error
    except Exception as error:  # a stranger's folder may hold anything, and stumble anywhere
        raise _refused(name, _reason_of(name, error)) from error


def _reason_of(name: str, error: Exception) -> str:
    """Return the reason why a model could not be loaded, on one line."""
    if not Path(name).is_dir() and _was_not_asked(error):  # which Transformers says in a paragraph
        return "the model is neither a folder nor in the local hub cache, and the hub cannot be reached"
    return "; ".join(str(error).strip().splitlines()[:2]) or type(error).__name__


def _was_not_asked(error: BaseException) -> bool:
    """Return True if the hub could not be reached and its cache contains no copy."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    reasons: list[BaseException] = [error]
    while reasons[-1].__cause__ is not None:
        reasons.append(reasons[-1].__cause__)
    return any(isinstance(reason, LocalEntryNotFoundError | OfflineModeIsEnabled) for reason in reasons)


def _require_own_shards(name: str, index: Path) -> None:
    """Check that the weight files named by an index are in the same folder as the index file.

    Raises:
        UsageError: a weight file is in another folder, or the given file is not an index.
    """
    try:
        shards = set(json.loads(files.text(index))["weight_map"].values())
        stranger = next((shard for shard in shards if Path(shard).name != shard), None)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _refused(name, f"{index.name} is not a valid index of weight files") from error
    if stranger is not None:
        raise _refused(name, f"{index.name} lists {stranger}, which is not in the folder")


def _refused(name: str, reason: str) -> UsageError:
    return UsageError(
        f"{_FLAG} {name} cannot be loaded: {reason.rstrip('.')}. It must be a folder with config.json, a "
        "tokenizer and model.safetensors, or the name of a model on the hub. Correct the name; a model on "
        "the hub requires a connection, unless it is in the cache (HF_HUB_OFFLINE=1 uses only the cache)."
    )
