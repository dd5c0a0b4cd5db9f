// Products of matrices whose sums are fp32, in one of three arithmetics.
//
// Factors are copied into panels (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication");
// sums are in fp32, each in the order of the inner dimension, whatever the number of threads, and rounded once.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kRows = 14, kColumns = 2 * kLanes;  // of C in registers: 28 sums, of 32 vectors
constexpr int64_t kInner = 192;  // steps of the inner dimension at once: a panel of A stays in L1
// Distances that are no power of two, at which memory would share few places of a cache.
constexpr int64_t kPitch = kInner + kLanes, kPanel = kInner * kLanes + kLanes;
constexpr int64_t kAhead = 8 * kColumns;              // of a panel of B, which comes from L2
constexpr int64_t kEarly = 16;  // steps that packing asks for before it takes them
constexpr int64_t kWide = 12 * kColumns;  // columns of a block of C, whose panels of B stay in L2

// A step of an arithmetic is 32 bits of a panel, and kDepth values of the inner dimension.
struct Single {
  typedef float Value;
  static constexpr int64_t kDepth = 1;
};

// By fp32's multiply-adds, for processors that have no faster instruction for bf16; widening is exact.
struct Widened {
  typedef bf16 Value;
  static constexpr int64_t kDepth = 1;
};

// By an instruction that adds the products of two neighbouring values, where it has twice the rate.
struct Paired {
  typedef bf16 Value;
  static constexpr int64_t kDepth = 2;
};

template <typename T>
struct Matrix {  // of the strides one is 1
  const T *data;
  int64_t row, column;

  const T *at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// What becomes of a product: factor * product + bias, and, if asked, what is there already.
template <typename T>
struct Result {
  float *precise;  // one of the two
  T *rounded;
  int64_t row;  // stride
  const float *bias;
  float factor;
  bool add;
};

template <typename A>
using Factor = Matrix<typename A::Value>;

template <typename A>
using Product = Result<typename A::Value>;

class Scratch {
 public:
  template <typename T>
  T *take(int64_t count) {
    if (int64_t(memory_.size()) < count + kLanes) memory_.resize(count + kLanes);
    const auto beyond = reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    return reinterpret_cast<T *>(memory_.data() + (64 - beyond) % 64 / sizeof(float));
  }

 private:
  std::vector<float> memory_;
};

// Sixteen steps of one row or column, of which the inner dimension is contiguous and `count` values are left.
template <typename A>
inline Bits steps_along(const typename A::Value *from, int64_t count) {
  if constexpr (A::kDepth == 1) {
    return (Bits)load(from, count);
  } else {
    Bits values{};
    std::memcpy(&values, from, count >= 2 * kLanes ? sizeof values : count * sizeof(bf16));
    return values;
  }
}

// A step of sixteen rows or columns, `count` of them there, whose next value of the inner dimension is `next` further.
template <typename A>
inline Bits step_across(const typename A::Value *from, int64_t next, int64_t count, bool has_second) {
  __builtin_prefetch(from + kEarly * next), __builtin_prefetch(from + (kEarly + 1) * next);
  if constexpr (A::kDepth == 1) {
    return (Bits)load(from, count);
  } else {
    // a widened value has its bits above those of zero: as the second of a pair
    const Bits first = (Bits)load(from, count) >> 16;
    return has_second ? first | (Bits)load(from + next, count) : first;
  }
}

// Exchange the upper lanes of `low` with the lower ones of `high`, in blocks of `half` lanes.
inline void exchange(Bits &low, Bits &high, int32_t half) {
  const Ints upper = (kNumbers & half) != 0, to_other = upper & (16 - half);  // lanes from 16 on are of `high`
  const Bits first = __builtin_shuffle(low, high, kNumbers + to_other);
  high = __builtin_shuffle(low, high, kNumbers + half + to_other);
  low = first;
}

// Write sixteen steps of `rows` rows, of which `count` values are there, as columns.
template <typename A>
inline void transpose(const typename A::Value *from, int64_t stride, int64_t rows, int64_t count, uint32_t *to,
                      int64_t pitch) {
  Bits tile[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    __builtin_prefetch(from + (i + kLanes) * stride);
    tile[i] = i < rows ? steps_along<A>(from + i * stride, count) : Bits{};
  }
#pragma GCC unroll 4
  for (int32_t half = kLanes / 2; half; half /= 2) {
#pragma GCC unroll 16
    for (int32_t i = 0; i < kLanes; ++i)
      if (!(i & half)) exchange(tile[i], tile[i + half], half);
  }
  const int64_t steps = (count + A::kDepth - 1) / A::kDepth;
  for (int64_t i = 0; i < std::min(kLanes, steps); ++i) store(to + i * pitch, tile[i]);
}

// kRows rows of A from (i, p) on, whose values are contiguous, row by row; zeros for those that are not there.
template <typename A>
void pack_rows(const Factor<A> &a, int64_t i, int64_t rows, int64_t p, int64_t inner, uint32_t *panel) {
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t k = 0; k < inner; k += kLanes * A::kDepth) {
      __builtin_prefetch(a.at(i + row + kRows, p + k));
      store(panel + row * kPitch + k / A::kDepth,
            row < rows ? steps_along<A>(a.at(i + row, p + k), inner - k) : Bits{});
    }
}

// Any number of rows where columns are contiguous, in panels of kRows, step by step, in place for sixteen.
template <typename A>
void pack_columns_of_rows(const Factor<A> &a, int64_t i, int64_t rows, int64_t p, int64_t inner, uint32_t *panels) {
  for (int64_t k = 0; k < inner; k += A::kDepth)
    for (int64_t row = 0; row < rows; row += kRows)
      store(panels + row / kRows * kPanel + k / A::kDepth * kLanes,
            step_across<A>(a.at(i + row, p + k), a.column, rows - row, k + 1 < inner));
}

// Columns of B from (p, j) on, in panels of kColumns, step by step.
template <typename A>
void pack_columns(const Factor<A> &b, int64_t p, int64_t inner, int64_t j, int64_t columns, uint32_t *panels) {
  const int64_t size = (inner + A::kDepth - 1) / A::kDepth * kColumns;
  for (int64_t begin = 0; begin < columns; begin += kColumns, panels += size) {
    for (int64_t c = 0; c < kColumns; c += kLanes) {
      const int64_t first = j + begin + c, count = std::max<int64_t>(0, columns - begin - c);
      uint32_t *to = panels + c;
      if (b.column == 1) {
        for (int64_t k = 0; k < inner; k += A::kDepth, to += kColumns)
          store(to, count ? step_across<A>(b.at(p + k, first), b.row, count, k + 1 < inner) : Bits{});
      } else {
        for (int64_t k = 0; k < inner; k += kLanes * A::kDepth, to += kLanes * kColumns)
          transpose<A>(b.at(p + k, first), b.column, count, inner - k, to, kColumns);
      }
    }
  }
}

// Add the product of a step of a row, which all lanes have, and of sixteen columns.
template <typename A>
inline void add_product(Floats &sum, uint32_t row, Bits columns) {
  const Bits each = row + Bits{};
#ifdef __AVX512BF16__
  if constexpr (A::kDepth == 2) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)each, (__m512bh)columns);
    return;
  }
#endif
  sum += (Floats)each * (Floats)columns;
}

// kRows x kColumns of C from a panel of A, packed by rows or by columns, and one of B: `write` gets each row's halves.
template <typename A, bool kByRows, typename Write>
inline void multiply(const uint32_t *a, const uint32_t *b, int64_t steps, Write write) {
  constexpr int64_t kRow = kByRows ? kPitch : 1, kStep = kByRows ? 1 : kLanes;
  Floats sums[kRows][2] = {};  // in registers
  for (int64_t k = 0; k < steps; ++k, a += kStep, b += kColumns) {
    __builtin_prefetch(b + kAhead), __builtin_prefetch(b + kAhead + kLanes);
    const Bits left = load(b), right = load(b + kLanes);
#pragma GCC unroll 14
    for (int64_t i = 0; i < kRows; ++i) {
      add_product<A>(sums[i][0], a[i * kRow], left);
      add_product<A>(sums[i][1], a[i * kRow], right);
    }
  }
#pragma GCC unroll 14
  for (int64_t i = 0; i < kRows; ++i) write(i, 0, sums[i][0]), write(i, 1, sums[i][1]);
}

typedef Floats Part[kRows][2];

// Where a part of C is, and which part of its inner dimension was multiplied.
struct Place {
  int64_t i, j, rows, columns;
  bool begins, ends;
};

// Add what was multiplied before, if any, from `sums`; write it there again, or, at the end, to C.
template <typename T>
inline void write(const Part &part, const Place &at, float *sums, const Result<T> &c) {
  for (int64_t row = 0; row < at.rows; ++row) {
    for (int64_t half = 0; half * kLanes < at.columns; ++half) {
      const int64_t column = half * kLanes, count = at.columns - column;
      float *sum = sums + row * kWide + column;
      const int64_t to = (at.i + row) * c.row + at.j + column;
      Floats value = part[row][half];
      if (!at.begins) value += load(sum, kLanes);
      if (!at.ends) {
        store(sum, value, kLanes);
        continue;
      }
      value *= c.factor;
      if (c.bias) value += load(c.bias + at.j + column, count);
      if (c.precise)
        store(c.precise + to, c.add ? value + load(c.precise + to, count) : value, count);
      else
        store(c.rounded + to, c.add ? value + load(c.rounded + to, count) : value, count);
    }
  }
}

// Ask for what `write` will read or write.
template <typename T>
inline void prefetch(const Place &at, const float *sums, const Result<T> &c) {
  for (int64_t row = 0; row < at.rows; ++row) {
    const int64_t to = (at.i + row) * c.row + at.j;
    for (int64_t column = 0; column < at.columns; column += kLanes) {
      if (!at.begins) __builtin_prefetch(sums + row * kWide + column, 1);
      if (!at.ends) continue;
      if (c.precise) __builtin_prefetch(c.precise + to + column, 1);
      else __builtin_prefetch(c.rounded + to + column, 1);
    }
  }
}

// Rows and columns of C, by one thread.
template <typename A, bool kByRows>
void multiply_block(const Factor<A> &a, const Factor<A> &b, const Product<A> &c, Range rows, Range columns,
                    int64_t inner) {
  constexpr int64_t kTall = (kByRows ? 64 : 24) * kRows;  // of columns, all panels are packed, and stay in L2
  constexpr int64_t kDeep = kInner * A::kDepth;
  static thread_local Scratch of_a, of_b, of_sums;
  auto *left = of_a.take<uint32_t>(kByRows ? kRows * kPitch : kTall / kRows * kPanel);
  auto *right = of_b.take<uint32_t>(kInner * kWide);
  auto *sums = of_sums.take<float>(kTall * kWide);
  Part part;
  for (int64_t i = rows.begin; i < rows.end; i += kTall) {
    for (int64_t j = columns.begin; j < columns.end; j += kWide) {
      const int64_t tall = std::min(kTall, rows.end - i), wide = std::min(kWide, columns.end - j);
      for (int64_t p = 0; p < inner; p += kDeep) {
        const int64_t deep = std::min(kDeep, inner - p), steps = (deep + A::kDepth - 1) / A::kDepth;
        pack_columns<A>(b, p, deep, j, wide, right);
        if (!kByRows) pack_columns_of_rows<A>(a, i, tall, p, deep, left);
        for (int64_t row = 0; row < tall; row += kRows) {
          Place at{i + row, j, std::min(kRows, tall - row), 0, p == 0, p + deep == inner};
          if (kByRows) pack_rows<A>(a, at.i, at.rows, p, deep, left);
          const uint32_t *panel = kByRows ? left : left + row / kRows * kPanel;
          for (int64_t column = 0; column < wide; column += kColumns) {
            at.j = j + column, at.columns = std::min(kColumns, wide - column);
            prefetch(at, sums + row * kWide + column, c);
            multiply<A, kByRows>(panel, right + column * steps, steps,
                                 [&](int64_t i, int64_t half, Floats sum) { part[i][half] = sum; });
            write(part, at, sums + row * kWide + column, c);
          }
        }
      }
    }
  }
}

// One of `count` products, or part of it.
template <typename A>
void multiply_part(const Factor<A> &a, const Factor<A> &b, const Product<A> &c, Range rows, Range columns,
                   int64_t inner) {
  (a.column == 1 ? multiply_block<A, true> : multiply_block<A, false>)(a, b, c, rows, columns, inner);
}

}  // namespace
