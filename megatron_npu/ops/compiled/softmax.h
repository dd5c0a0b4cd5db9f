// The softmax of one row and its gradient, with dropout, for fp32 scores and weights that are rounded to bf16.
#pragma once

#include <algorithm>
#include <limits>

#include "exponential.h"

namespace {

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

// Softmax of scores of which one is finite. `weights` gets it unrounded, and may be the scores' own memory; `rounded`
// what is kept of it.
inline void softmax_row(const float *scores, float *weights, bf16 *rounded, Kept kept, int64_t width) {
  Floats largest = all(-std::numeric_limits<float>::infinity()), sum{};
  for (int64_t i = 0; i < width; i += kLanes) {
    // the last vector begins further left, where the row has as many
    const int64_t start = std::max<int64_t>(0, std::min(i, width - kLanes)), count = width - start;
    Floats each = load(scores + start, count);
    if (count < kLanes) each = kNumbers < int32_t(count) ? each : largest;
    largest = each < largest ? largest : each;  // also where `each` is not a number
  }
  const Floats subtrahend = all(largest_of(largest));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const Floats each = power_of_two((load(scores + i, count) - subtrahend) * kLog2E);
    store(weights + i, each, count);
    sum += first(each, count);
  }
  const float scale = 1.0f / sum_of(sum);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const Floats weight = load(weights + i, count) * scale;
    store(weights + i, weight, count);
    store(rounded + i, kept.of(weight, i, count), count);
  }
}

// Its gradient, w * (g - sum(w * g)), where g is that of the weights that were kept.
inline void softmax_backward_row(const float *grad, const float *weights, bf16 *output, Kept kept, int64_t width) {
  Floats sum{};
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    sum += load(weights + i, count) * first(kept.of(load(grad + i, count), i, count), count);
  }
  const float along = sum_of(sum);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    store(output + i, load(weights + i, count) * (kept.of(load(grad + i, count), i, count) - along), count);
  }
}

}  // namespace
