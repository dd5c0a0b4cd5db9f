"""Define the tasks that ``--task`` can select.

Each file contains one task, which is a template for Transformers models.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.tasks.declaration import Declaration

if TYPE_CHECKING:
    from megatron_npu.finetune.rapidformer.templates import Finetuner, PreTrainer


@functools.cache
def every() -> dict[str, type[Declaration]]:
    """Return all tasks by name.

    A class in this package is a task if it has a name.
    """
    found: dict[str, type[Declaration]] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for kind in vars(module).values():
            if not isinstance(kind, type) or not issubclass(kind, Declaration):
                continue
            if kind.__module__ == module.__name__ and "name" in vars(kind):
                if kind.name in found:
                    raise ValueError(
                        f"two task classes have the name {kind.name}: {found[kind.name]}, {kind}"
                    )
                found[kind.name] = kind
    return found


def template_for(name: str | None) -> type[Finetuner] | type[PreTrainer]:
    """Return a task as a template with which a model can be trained.

    Only this call imports the training code.

    Raises:
        UsageError: the task does not exist, or a package that it needs is not installed.
    """
    task = every().get(name or "")
    if task is None:
        raise UsageError(
            f"--task must be {' or '.join(every())}, but got {name}. Pass one of them, or --user-script FILE."
        )
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--task {name} requires the package {error.name}, which cannot be imported ({error}). "
            "Install it: pip install 'megatron_npu[train]'."
        ) from error
    from megatron_npu.finetune.rapidformer import templates

    kind = getattr(templates, task.template)
    return type(task.__name__, (task, kind), {"__doc__": task.__doc__, "__module__": task.__module__})
