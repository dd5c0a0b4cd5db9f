"""Stub for apex's extension ``fused_weight_gradient_mlp_cuda`` that works on any device."""

from megatron_npu.ops.products.weight_gradient import accumulate_weight_gradient

# Upstream chooses by the dtype of main_grad; the operation sees that for itself.
wgrad_gemm_accum_fp32 = accumulate_weight_gradient
wgrad_gemm_accum_fp16 = accumulate_weight_gradient
