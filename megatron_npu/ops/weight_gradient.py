"""Weight gradient of a linear layer, added straight into the gradient buffer."""

from __future__ import annotations

from torch import Tensor


def accumulate_weight_gradient(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add ``grad_outputᵀ · input`` to ``main_grad``.

    Args:
        input: ``[..., h_in]``, what the layer was given.
        grad_output: ``[..., h_out]``.
        main_grad: ``[h_out, h_in]``, fp32, or the dtype of the others; changed in place.
    """
    input = input.reshape(-1, input.size(-1))
    grad_output = grad_output.reshape(-1, grad_output.size(-1))
    if main_grad.dtype == input.dtype:
        main_grad.addmm_(grad_output.t(), input)
    else:
        main_grad.add_(grad_output.t() @ input)
