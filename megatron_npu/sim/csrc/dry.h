// Dry runs: what is computed and what is only given its memory, and which numbers nobody knows.
//
// With the setting `dry` (bytes) an operation whose arguments or results rest in storages above that size runs on
// meta tensors: its results get memory that nobody touches. Smaller operations are computed, so that counters,
// seeds, scales and lengths are what they would be. What a skipped operation says in a small tensor is unknown:
// it reads as one (`true` of all, false of other conditions, 0 of whole numbers), is remembered, and so is
// what is computed from it. Whoever asks for such a value on the host is reported.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "alias.h"
#include "runtime.h"

namespace sim::dry {

using at::Tensor;
using c10::IValue;

inline bool on() { return dry_limit() > 0; }

// Conditions count an eighth: masks and routing maps are read by what comes after them.
inline int64_t bytes_of(const Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const int64_t bytes = tensor.device().type() == c10::DeviceType::Meta ? tensor.numel() * tensor.element_size()
                                                                         : int64_t(tensor.storage().nbytes());
  return bytes / (tensor.scalar_type() == at::kBool ? 8 : 1);
}

template <typename Body>
void each_tensor(const IValue& value, Body body) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) body(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) body(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& element : value.toOptionalTensorList()) {
      std::optional<Tensor> tensor = element;
      if (tensor && tensor->defined()) body(*tensor);
    }
  }
}

inline bool is_large(const Tensor& tensor) { return bytes_of(tensor) > dry_limit(); }

// ---------------------------------------------------------------- numbers that nobody knows

inline std::mutex unknown_mutex;
inline auto& unknown_storages = *new std::unordered_set<const void*>;

inline bool is_unknown(const Tensor& tensor) {
  if (!on_npu(tensor) || !tensor.numel()) return false;
  if (is_large(tensor)) return true;
  std::lock_guard<std::mutex> lock(unknown_mutex);
  return unknown_storages.count(tensor.storage().data()) != 0;
}

inline bool is_unknown(const IValue& value) {
  bool found = false;
  each_tensor(value, [&](const Tensor& tensor) { found = found || is_unknown(tensor); });
  return found;
}

inline void mark(const Tensor& tensor, bool unknown) {
  if (!on_npu(tensor) || !tensor.numel() || is_large(tensor)) return;
  std::lock_guard<std::mutex> lock(unknown_mutex);
  if (unknown) {
    unknown_storages.insert(tensor.storage().data());
  } else {
    unknown_storages.erase(tensor.storage().data());
  }
}

// What asks for an unknown number is told here: Python finds the line.
using Asked = void (*)(const char* operation);
inline std::atomic<Asked> asked{nullptr};

inline void report_asked(const std::string& operation) {
  if (Asked report = asked) report(operation.c_str());
}

// ---------------------------------------------------------------- meta tensors

inline Tensor meta_twin(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() == c10::DeviceType::Meta) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

inline IValue to_meta(const IValue& value) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.dim() == 0 && !on_npu(tensor)) return value;
    return meta_twin(tensor);
  }
  if (value.isTensorList()) {
    std::vector<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(meta_twin(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& element : value.toOptionalTensorList()) {
      std::optional<Tensor> tensor = element;
      list.push_back(tensor ? std::optional<Tensor>(meta_twin(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Writes into a small result of a skipped operation what it reads as.
inline void read_as_one(const Tensor& result, const std::string& operation) {
  if (!on_npu(result) || !result.numel() || is_large(result)) return;
  mark(result, true);
  auto host = host_alias(result);
  const bool all = host.scalar_type() == at::kBool && operation.rfind("aten::all", 0) == 0;
  host.fill_(host.is_floating_point() || all ? 1 : 0);
}

// Fresh memory of the device for a result that is only known by its shape.
inline Tensor from_meta(const Tensor& meta, c10::Device device, const std::string& operation) {
  if (!meta.defined()) return meta;
  auto options = meta.options().device(device).pinned_memory(false);
  Tensor result = meta.is_non_overlapping_and_dense() ? at::empty_strided(meta.sizes(), meta.strides(), options)
                                                      : at::empty(meta.sizes(), options);
  read_as_one(result, operation);
  return result;
}

// Before a copy: whether it is to be done. What comes from the host is known, unless it is large.
inline bool copies(const Tensor& source, const Tensor& target) {
  const bool unknown = is_unknown(source);
  if (unknown && !on_npu(target)) report_asked("aten::copy_");
  if (on_npu(target)) {
    if (is_large(target)) return false;
    const bool whole = target.numel() * target.element_size() >= int64_t(target.storage().nbytes());
    if (unknown || whole) mark(target, unknown);
    if (is_large(source)) host_alias(target).fill_(target.is_floating_point() ? 1 : 0);
    return !is_large(source);
  }
  return true;
}

}  // namespace sim::dry
