"""A run in Weights & Biases (``--wandb-project``), through its own package; imported only where asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint.checkpoint_description import plain_arguments


class WandbRun:
    """The run there, with the flags as its configuration.

    Args:
        args: what ``validation.check`` returned.

    Raises:
        UsageError: the package cannot begin one: nobody is logged in, or the server is out of reach.
    """

    def __init__(self, args: Namespace) -> None:
        import wandb

        place = Path(args.wandb_save_dir or Path(args.save) / "wandb")
        place.mkdir(parents=True, exist_ok=True)
        further = {"entity": args.wandb_entity} if args.wandb_entity else {}
        try:
            self._run: Any = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name,
                dir=str(place),
                config=plain_arguments(args),
                **further,
            )
        except Exception as error:  # of its own kinds, and of the network's
            raise UsageError(
                f"--wandb-project {args.wandb_project}: {' '.join(str(error).split())}",
                "a run that wandb can begin",
                "`wandb login`, or WANDB_MODE=offline, which keeps it in --wandb-save-dir.",
            ) from error

    @staticmethod
    def of(args: Namespace) -> WandbRun | None:
        """Return the run that the flags ask for; None: they do not."""
        return WandbRun(args) if getattr(args, "wandb_project", None) else None

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Give it the numbers of an iteration."""
        if numbers:
            self._run.log(dict(numbers), step=iteration)

    def close(self, *, went_well: bool) -> None:
        """Let it send what is left, and say whether the run has failed."""
        self._run.finish(exit_code=0 if went_well else 1)
