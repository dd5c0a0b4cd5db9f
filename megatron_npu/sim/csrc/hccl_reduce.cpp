#include "hccl_reduce.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "half.h"

namespace sim::hccl {

namespace {

// How elements are stored and what they are computed in.
template <class T>
struct Plain {
  using Stored = T;
  using Computed = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
  return false;
}

// Integers wrap around, which C++ defines only for unsigned ones.
template <class T>
using Wrapping =
    typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::common_type<T>>::type;

struct Sum {
  template <class T>
  static T combine(T a, T b) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct Product {
  template <class T>
  static T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    return static_cast<T>(a * b);
  }
};
struct Maximum {  // NaN wins, as in torch
  template <class T>
  static T combine(T a, T b) {
    return a > b || is_nan(a) ? a : b;
  }
};
struct Minimum {
  template <class T>
  static T combine(T a, T b) {
    return a < b || is_nan(a) ? a : b;
  }
};

// Blocks small enough for the cache keep the inner loops simple enough for the compiler to vectorise.
constexpr size_t kBlock = 1024;

template <class Format, class Step>
void reduce_with(char* result, const std::vector<const char*>& parts, size_t count) {
  using Stored = typename Format::Stored;
  typename Format::Computed total[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = std::min(kBlock, count - start);
    const auto* first = reinterpret_cast<const Stored*>(parts[0]) + start;
    for (size_t i = 0; i < length; i++) total[i] = Format::load(first[i]);
    for (size_t part = 1; part < parts.size(); part++) {
      const auto* next = reinterpret_cast<const Stored*>(parts[part]) + start;
      for (size_t i = 0; i < length; i++) total[i] = Step::combine(total[i], Format::load(next[i]));
    }
    auto* out = reinterpret_cast<Stored*>(result) + start;
    for (size_t i = 0; i < length; i++) out[i] = Format::store(total[i]);
  }
}

template <class Format>
void reduce_as(char* result, const std::vector<const char*>& parts, size_t count, uint32_t reduction) {
  switch (reduction) {
    case HCCL_REDUCE_SUM: return reduce_with<Format, Sum>(result, parts, count);
    case HCCL_REDUCE_PROD: return reduce_with<Format, Product>(result, parts, count);
    case HCCL_REDUCE_MAX: return reduce_with<Format, Maximum>(result, parts, count);
    case HCCL_REDUCE_MIN: return reduce_with<Format, Minimum>(result, parts, count);
  }
}

}  // namespace

bool can_reduce(uint32_t dtype, uint32_t reduction) {
  if (reduction > HCCL_REDUCE_MIN) return false;
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32: return true;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_BFP16: return reduction != HCCL_REDUCE_PROD;
    default: return false;
  }
}

void reduce(char* result, const std::vector<const char*>& parts, size_t count, uint32_t dtype,
            uint32_t reduction) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<Plain<int8_t>>(result, parts, count, reduction);
    case HCCL_DATA_TYPE_INT16: return reduce_as<Plain<int16_t>>(result, parts, count, reduction);
    case HCCL_DATA_TYPE_INT32: return reduce_as<Plain<int32_t>>(result, parts, count, reduction);
    case HCCL_DATA_TYPE_INT64: return reduce_as<Plain<int64_t>>(result, parts, count, reduction);
    case HCCL_DATA_TYPE_FP16: return reduce_as<Half>(result, parts, count, reduction);
    case HCCL_DATA_TYPE_FP32: return reduce_as<Plain<float>>(result, parts, count, reduction);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<BFloat16>(result, parts, count, reduction);
  }
}

}  // namespace sim::hccl
