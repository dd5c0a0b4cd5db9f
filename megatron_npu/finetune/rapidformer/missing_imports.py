"""Provide names that the scripts in the PAI-Rapidformer document use without importing them."""

from __future__ import annotations

import builtins
import functools
import importlib
import symtable
from collections.abc import Iterator
from typing import Any

from megatron_npu import finetune
from megatron_npu.finetune.rapidformer import state
from megatron_npu.standins import mpu

_TRANSFORMERS = ("AutoTokenizer", "AutoModelForPreTraining", "AutoModelForSequenceClassification")


def unbound(text: str, name: str) -> set[str]:
    """Return the names that a script reads but does not define.

    The set is empty if the script has ``import *``.

    Args:
        text: source of the script; it must compile.
        name: name of the script's file.
    """
    module = symtable.symtable(text, name, "exec")
    tables = list(_with_children(module))
    own = {symbol.get_name() for symbol in module.get_symbols() if _is_bound(symbol)}
    read: set[str] = set()
    for table in tables:
        symbols = table.get_symbols()
        own |= {one.get_name() for one in symbols if one.is_declared_global() and one.is_assigned()}
        read |= {one.get_name() for one in symbols if _is_read(one, of_module=table is module)}
    return {word for word in read - own if not hasattr(builtins, word) and not word.startswith("__")}


def _with_children(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _with_children(child)


def _is_read(symbol: symtable.Symbol, *, of_module: bool) -> bool:
    return symbol.is_referenced() and (of_module or symbol.is_global())


def given(text: str, name: str) -> dict[str, Any]:
    """Return definitions for the names that a script lacks and that the document's scripts use."""
    return {word: value for word in sorted(unbound(text, name)) if (value := _value(word)) is not None}


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _value(word: str) -> Any:
    if word == "torch":
        return importlib.import_module("torch")
    if word == "partial":
        return functools.partial
    if word == "mpu":
        return mpu
    if word == "args":
        return state.get_args()
    if word in _TRANSFORMERS:
        return getattr(importlib.import_module("transformers"), word)
    return getattr(finetune, word) if word in finetune.__all__ else None
