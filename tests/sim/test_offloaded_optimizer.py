"""`pretrain --cpu-offload` on a simulated NPU: the losses of the run without it."""

from __future__ import annotations

import pytest

from tests.support import tiny

pytestmark = pytest.mark.simulated
FLAGS = "--mixed-precision --attention-dropout 0 --hidden-dropout 0 --train-iters 4 --eval-iters 0 --no-plot"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    dataset = tiny.write_dataset(tmp_path_factory.mktemp("data") / "numbers")
    return [*tiny.flags_for(dataset), *FLAGS.split()]


def train(log, *flags: str) -> list[dict]:
    from megatron_npu.pretrain.flags import arguments
    from megatron_npu.pretrain.run import pretrain

    pretrain.train(arguments.parse([*flags, "--json-log", str(log)]))
    return tiny.rows(log)


def test_an_offloaded_optimizer_trains_as_one_on_the_device(flags, tmp_path):
    pytest.importorskip("megatron.core")
    plain = train(tmp_path / "plain", *flags)
    offloaded = train(tmp_path / "offloaded", *flags, "--cpu-offload")
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in offloaded] == pytest.approx([row[name] for row in plain], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("--save X", "a checkpoint without the optimizer"),
        ("--load X", "a checkpoint without the optimizer"),
        ("--fsdp-memory-optimization", None),  # one rank: nothing is shared out
    ],
)
def test_where_it_has_no_place_it_is_refused(flags, changes, said):
    from megatron_npu.base.errors import UsageError
    from megatron_npu.pretrain.flags import arguments, validation

    args = arguments.parse([*flags, "--cpu-offload", *changes.split()])
    if said is None:
        assert validation.check(args).optimizer_cpu_offload
        return
    with pytest.raises(UsageError, match=said):
        validation.check(args)
