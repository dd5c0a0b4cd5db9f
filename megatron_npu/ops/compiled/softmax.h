// The softmax of one row and its gradient, with dropout, for fp32 scores and weights that are rounded to bf16.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

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

// 2^x: a polynomial of least relative error (2^-23 of 2^f, |f| <= 1/2), times a power of two. Not a number stays so.
inline Floats power_of_two(Floats x) {
#ifdef __AVX512F__
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // of an infinite x the difference is none: the polynomial is 1 there
  const Floats f = (Floats)_mm512_maskz_sub_ps(
      _mm512_cmp_ps_mask((__m512)x, (__m512)whole, _CMP_NEQ_UQ), (__m512)x, (__m512)whole);
#else
  x = x < -127.0f ? all(-127.0f) : x;  // beyond: 0 and 2^127
  x = x > 127.0f ? all(127.0f) : x;
  const Floats shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);  // 1.5 * 2^23: to whole numbers
#endif
  Floats series = f * 1.327647178e-3f + 9.675541333e-3f;
  series = series * f + 5.550713274e-2f;
  series = series * f + 2.402211972e-1f;
  series = series * f + 6.931469671e-1f;
  series = series * f + 1.000000072f;
#ifdef __AVX512F__
  return (Floats)_mm512_scalef_ps((__m512)series, (__m512)whole);
#else
  return series * (Floats)(((Bits)shifted << 23) + (127u << 23));  // the whole number is in the last bits
#endif
}

constexpr float kLog2E = 1.44269504f;
// Which values of a row dropout keeps: those whose 16 random bits, as a number, are at most `most`. No bits: all.
struct Kept {
  const int16_t *bits;
  int16_t most;

  Kept from(int64_t at) const { return {bits ? bits + at : nullptr, most}; }

  Floats of(Floats values, int64_t at, int64_t count) const {
    if (!bits) return values;
    Shorts drawn{};
    std::memcpy(&drawn, bits + at, std::min(kLanes, count) * sizeof(int16_t));
    return __builtin_convertvector(drawn, Ints) <= int32_t(most) ? values : Floats{};
  }
};

inline void zero_others(bf16 *row, Range seen, int64_t width) {
  std::fill(row, row + seen.begin, bf16{}), std::fill(row + seen.end, row + width, bf16{});
}

// Softmax of those of `width` scores that a row sees, of which one is finite. `weights` gets them unrounded, and may be
// the scores' own memory; `rounded` those that are kept, and zeros for all others.
inline void softmax_row(const float *scores, float *weights, bf16 *rounded, Kept kept, Range seen, int64_t width) {
  Floats largest = all(-std::numeric_limits<float>::infinity()), sum{};
  for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
    // the last vector begins further left, where the row has as many
    const int64_t start = std::max(seen.begin, std::min(i, seen.end - kLanes)), count = seen.end - start;
    Floats each = load(scores + start, count);
    if (count < kLanes) each = kNumbers < int32_t(count) ? each : largest;
    largest = each < largest ? largest : each;  // also where `each` is not a number
  }
  const Floats subtrahend = all(largest_of(largest));
  for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
    const int64_t count = seen.end - i;
    const Floats each = power_of_two((load(scores + i, count) - subtrahend) * kLog2E);
    store(weights + i, each, count);
    sum += first(each, count);
  }
  const float scale = 1.0f / sum_of(sum);
  zero_others(rounded, seen, width);
  for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
    const int64_t count = seen.end - i;
    const Floats weight = load(weights + i, count) * scale;
    store(weights + i, weight, count);
    store(rounded + i, kept.of(weight, i, count), count);
  }
}

// Its gradient, w * (g - sum(w * g)), where g is that of the weights that were kept.
inline void softmax_backward_row(const float *grad, const float *weights, bf16 *output, Kept kept, Range seen,
                                 int64_t width) {
  Floats sum{};
  for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
    const int64_t count = seen.end - i;
    sum += load(weights + i, count) * first(kept.of(load(grad + i, count), i, count), count);
  }
  const float along = sum_of(sum);
  zero_others(output, seen, width);
  for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
    const int64_t count = seen.end - i;
    store(output + i, load(weights + i, count) * (kept.of(load(grad + i, count), i, count) - along), count);
  }
}

}  // namespace
