"""Find the repeated blocks of a Transformer, which are sharded, recomputed and compiled as units."""

from __future__ import annotations

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the model's Transformer blocks in order, each as a pair (name, block).

    A block is an item of the outermost list whose items are all of one class and have at least two weight
    matrices each: ``encoder.layer`` of a BERT, ``transformer.h`` of a GPT-2, both stacks of a T5, the layers
    of ``nn.TransformerEncoder``. A list inside a block, such as a list of experts, belongs to that block. An
    ``nn.Sequential`` needs at least two such items. A block that is used twice (ALBERT) is returned once.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def search(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if not _is_a_stack(child):
                search(path, child)
                continue
            for index, block in child.named_children():
                if id(block) not in seen:
                    seen.add(id(block))
                    found.append((f"{path}.{index}", block))

    if _is_a_stack(model):
        found = list(model.named_children())
    else:
        search("", model)
    return found


def own_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks that do not share weights with any module outside them.

    When the model is sharded, a weight that is shared by two blocks, or by a block and the rest of the model,
    belongs to the model as a whole.
    """
    blocks = repeated_blocks(model)
    owners: dict[int, set[int]] = {}
    inside = {id(part): number for number, (_, block) in enumerate(blocks) for part in block.modules()}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside.get(id(part), -1))
    return [
        (name, block)
        for number, (name, block) in enumerate(blocks)
        if all(owners[id(parameter)] == {number} for parameter in block.parameters())
    ]


def _is_a_stack(module: nn.Module) -> bool:
    """Return True if a module list is a stack of Transformer blocks."""
    if not isinstance(module, _LISTS):
        return False
    items = list(module.children())
    least = 2 if isinstance(module, nn.Sequential) else 1
    return (
        len(items) >= least
        and len({type(item) for item in items}) == 1
        and not isinstance(items[0], _LISTS)
        and all(_matrices(item) >= 2 for item in items)
    )


def _matrices(module: nn.Module) -> int:
    return sum(parameter.ndim >= 2 for parameter in module.parameters())
