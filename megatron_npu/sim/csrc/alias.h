// Host tensors over device memory, and the way back: what lets a CPU kernel work for an NPU tensor.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace sim {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

inline bool on_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNpu; }

inline char* first_byte(const at::Tensor& tensor) {
  auto* start = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  return start ? start + tensor.storage_offset() * tensor.element_size() : nullptr;
}

// A CPU tensor over the memory of an NPU tensor: same sizes, strides, offset, conjugate and negative bits.
// Any other tensor is returned as it is. Its storage does not own the memory and can be resized, so that a
// kernel may resize its `out` argument; `take_over` then brings the result back.
inline at::Tensor host_alias(const at::Tensor& tensor) {
  if (!on_npu(tensor)) return tensor;
  c10::DataPtr memory(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(memory),
                       c10::GetCPUAllocator(), /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// A fresh NPU tensor with the content of a fresh host tensor.
inline at::Tensor to_device(at::Tensor host, c10::Device device) {
  if (!host.defined() || on_npu(host)) return host;
  if (!host.is_non_overlapping_and_dense()) host = host.contiguous();
  auto options = host.options().device(device).pinned_memory(false);
  auto result = at::empty_strided(host.sizes(), host.strides(), options);
  if (host.numel()) std::memcpy(first_byte(result), host.const_data_ptr(), host.numel() * host.element_size());
  if (host.is_conj()) result._set_conj(true);
  if (host.is_neg()) result._set_neg(true);
  return result;
}

// After a kernel has written `alias`: if it has resized it or given it other memory, `original` follows.
inline void take_over(const at::Tensor& original, const at::Tensor& alias) {
  if (!on_npu(original) || !alias.defined()) return;
  bool same_memory = alias.numel() == 0 || alias.const_data_ptr() == first_byte(original);
  if (same_memory && alias.sizes() == original.sizes() && alias.strides() == original.strides()) return;
  if (alias.sizes() != original.sizes()) original.resize_(alias.sizes());
  if (alias.numel() && !(same_memory && alias.strides() == original.strides())) host_alias(original).copy_(alias);
}

}  // namespace sim
