"""Simulate the memory of fake CUDA tensors by applying torch's caching allocator to their storages."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_npu.planning.fake_cuda.machine import Tensors
from megatron_npu.planning.fake_cuda.traffic import Traffic
from megatron_npu.planning.replay import Allocator, Block

aten = torch.ops.aten
# cuBLAS' workspace on Hopper (at::cuda::getChosenWorkspaceSize), one for each thread that multiplies
_WORKSPACE = 32 << 20
WORKSPACE = "cuBLAS's workspace"  # what a snapshot names it
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_FLASH_BACKWARD = {aten._scaled_dot_product_flash_attention_backward, aten._flash_attention_backward}


class CountedTensors(Tensors):
    """Fake tensors whose storages are tracked by a simulated allocator.

    Attributes:
        allocator: the simulated allocator.
        workspaces: the bytes of cuBLAS workspaces in it.
        traffic: the traffic that the rank has sent.
        running: the operation that runs, or has run last.
    """

    def __init__(self, received: dict[int, list[int]], allocator: Allocator) -> None:
        super().__init__(received)
        self.allocator = allocator
        self.workspaces = 0
        self.traffic = Traffic()
        self.running = ""
        self._blocks: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._multiplying: set[int] = set()
        self._lock = threading.RLock()  # backward runs on threads of its own

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", func)
        self.traffic.note(packet, args)
        if packet in _PRODUCTS:
            self._workspace(args)
        self.running = str(packet)
        result = super().dispatch(func, types, args, kwargs)
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.device.type == "cuda":
                self._see(each)
        if packet in _FLASH_BACKWARD:
            self._inside_flash_backward(args[1])
        return result

    def address(self, tensor: Tensor) -> int:
        """Return the address of a tensor's memory, or 0 if the tensor has no memory."""
        known = self._blocks.get(tensor.untyped_storage()._cdata)
        return known[1].address if known else 0

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._blocks or not size:
                return
            block = self.allocator.allocate(size)

            def gone(_: Any, key: int = key) -> None:
                with self._lock:
                    self.allocator.free(self._blocks.pop(key)[1])

            self._blocks[key] = (weakref.ref(storage, gone), block)

    def _workspace(self, args: Any) -> None:
        thread = threading.get_ident()
        if thread in self._multiplying:
            return
        if any(isinstance(each, Tensor) and each.device.type == "cuda" for each in args):
            self._multiplying.add(thread)
            self.running = WORKSPACE
            self.workspaces += self.allocator.allocate(_WORKSPACE).size

    def _inside_flash_backward(self, query: Tensor) -> None:
        """Count the fp32 buffer for the gradient of the queries, ``[b, a, s, d]``, with sizes rounded as
        in the kernel.
        """
        batch, heads, length, channels = query.shape
        rows = -(-length // 128) * 128
        wide = -(-channels // 32) * 32
        with self._lock:
            taken = [self.allocator.allocate(4 * batch * heads * rows * n) for n in (1, wide)]
            for block in taken:
                self.allocator.free(block)
