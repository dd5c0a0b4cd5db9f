// Vectors of sixteen, for which g++ takes what the processor has: fp32 to compute with, bf16 in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct bf16 {
  uint16_t bits;
};

struct Range {
  int64_t begin, end;
};

inline Floats all(float value) { return value - Floats{}; }

inline Floats widen(Halves values) { return (Floats)(__builtin_convertvector(values, Bits) << 16); }

inline Halves narrow(Floats values) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
  const Bits bits = (Bits)values, nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(values == values ? nearest : Bits{} + 0x7fc0u, Halves);
#endif
}

// The first `count` values, at most sixteen; the other lanes are 0.
inline Floats load(const float *from, int64_t count) {
  Floats values{};
  if (count >= kLanes)
    std::memcpy(&values, from, sizeof values);
  else
    std::memcpy(&values, from, count * sizeof(float));
  return values;
}

inline Floats load(const bf16 *from, int64_t count) {
  Halves values{};
  if (count >= kLanes)
    std::memcpy(&values, from, sizeof values);
  else
    std::memcpy(&values, from, count * sizeof(bf16));
  return widen(values);
}

inline Bits load(const uint32_t *from) {
  Bits values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline void store(uint32_t *to, Bits values) { std::memcpy(to, &values, sizeof values); }

inline void store(float *to, Floats values, int64_t count) {
  if (count >= kLanes)
    std::memcpy(to, &values, sizeof values);
  else
    std::memcpy(to, &values, count * sizeof(float));
}

inline void store(bf16 *to, Floats values, int64_t count) {
  const Halves rounded = narrow(values);
  if (count >= kLanes)
    std::memcpy(to, &rounded, sizeof rounded);
  else
    std::memcpy(to, &rounded, count * sizeof(bf16));
}

constexpr Ints kNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// What counts of a last vector that is not full; in place of the rest, others.
inline Floats first(Floats values, int64_t count, Floats others = Floats{}) {
  return count >= kLanes ? values : (kNumbers < int32_t(count) ? values : others);
}

inline float sum_of(Floats values) {
  float sums[kLanes];
  std::memcpy(sums, &values, sizeof sums);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

inline float largest_of(Floats values) {
  float each[kLanes];
  std::memcpy(each, &values, sizeof each);
  return *std::max_element(each, each + kLanes);
}

}  // namespace
