// Products with a right factor that was packed before, for many left ones, into memory that has room to spare.
#pragma once

#include "products.h"

namespace {

constexpr int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

template <typename A>
constexpr int64_t steps_of(int64_t inner) {
  return (inner + A::kDepth - 1) / A::kDepth;
}

// A count cut into runs.
struct Runs {
  int64_t count, length;

  int64_t number() const { return (count + length - 1) / length; }
  Range at(int64_t number) const { return {number * length, std::min(count, (number + 1) * length)}; }
};

// What the panels of a right factor take.
template <typename A>
int64_t size_of_panels(int64_t inner, int64_t columns) {
  return steps_of<A>(inner) * padded(columns, kColumns);
}

// Pack it whole: all columns of as much of the inner dimension as is multiplied at once, then of the next.
template <typename A>
void pack_panels(const Factor<A> &b, int64_t inner, int64_t columns, uint32_t *panels) {
  for (int64_t p = 0; p < inner; p += kInner * A::kDepth) {
    const int64_t deep = std::min(kInner * A::kDepth, inner - p);
    pack_columns<A>(b, p, deep, 0, columns, panels);
    panels += size_of_panels<A>(deep, columns);
  }
}

// The same of one panel's columns.
template <typename A>
void pack_columns_of_panels(const Factor<A> &b, int64_t inner, int64_t columns, int64_t column, uint32_t *panels) {
  for (int64_t p = 0; p < inner; p += kInner * A::kDepth) {
    const int64_t deep = std::min(kInner * A::kDepth, inner - p);
    pack_columns<A>(b, p, deep, column, std::min(kColumns, columns - column), panels + column * steps_of<A>(deep));
    panels += size_of_panels<A>(deep, columns);
  }
}

// Pack kRows rows step by step, as many as are there, for any length of the inner dimension.
template <typename A>
void pack_rows_in_steps(const Factor<A> &a, int64_t i, int64_t rows, int64_t inner, uint32_t *panel) {
  if (a.column != 1) {
    for (int64_t k = 0; k < inner; k += A::kDepth, panel += kLanes)
      store(panel, step_across<A>(a.at(i, k), a.column, rows, k + 1 < inner));
    return;
  }
  for (int64_t k = 0; k < inner; k += kLanes * A::kDepth, panel += kLanes * kLanes)
    transpose<A>(a.at(i, k), a.row, rows, inner - k, panel, kLanes);
}

// Sums in fp32: memory for whole panels, so that rows and columns beyond those of a product may be written.
struct Sums {
  float *data;
  int64_t pitch;
  float factor;
  bool add;
};

// Which part of a product kRows of its rows need.
struct Needed {
  Range columns, inner;
};

// Write `factor * a * b`, or add it; `needed` says of the rows that begin with a number which part to compute.
template <typename A, bool kByRows, typename Choose>
void multiply_panels(const Factor<A> &a, int64_t rows, const uint32_t *panels, int64_t inner, int64_t columns,
                     const Sums &c, Choose needed) {
  static thread_local Scratch of_a;
  constexpr int64_t kDeep = kInner * A::kDepth;
  auto *left = of_a.take<uint32_t>(kByRows ? kRows * kPitch : padded(rows, kRows) / kRows * kPanel);
  for (int64_t p = 0; p < inner; p += kDeep) {
    const int64_t deep = std::min(kDeep, inner - p), steps = steps_of<A>(deep);
    const bool add = c.add || p > 0;
    if (!kByRows) pack_columns_of_rows<A>(a, 0, rows, p, deep, left);
    for (int64_t i = 0; i < rows; i += kRows) {
      const Needed part = needed(i);
      const int64_t first = std::max<int64_t>(0, part.inner.begin - p) / A::kDepth;
      const int64_t end = std::min(deep, part.inner.end - p), count = steps_of<A>(end) - first;
      if (count <= 0) continue;
      if (kByRows) pack_rows<A>(a, i, std::min(kRows, rows - i), p, end, left);
      const uint32_t *panel = kByRows ? left + first : left + i / kRows * kPanel + first * kLanes;
      for (int64_t j = part.columns.begin / kColumns * kColumns; j < part.columns.end; j += kColumns) {
        float *to = c.data + i * c.pitch + j;
        multiply<A, kByRows>(panel, panels + j * steps + first * kColumns, count,
                             [&](int64_t row, int64_t half, Floats sum) {
                               float *at = to + row * c.pitch + half * kLanes;
                               sum *= c.factor;
                               store(at, add ? sum + load(at, kLanes) : sum, kLanes);
                             });
      }
    }
    panels += size_of_panels<A>(deep, columns);
  }
}

}  // namespace
