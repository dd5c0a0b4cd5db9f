// Products of bf16 matrices by fp32's multiply-adds, for processors that have no faster instruction for bf16.
//
// Factors are widened, which is exact, while they are copied into panels (Goto and van de Geijn 2008, "Anatomy of
// High-Performance Matrix Multiplication"); sums are in fp32, each in the order of the inner dimension, whatever
// the number of threads, and rounded once.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kRows = 14, kColumns = 2 * kLanes;  // of C in registers: 28 sums, of 32 vectors
constexpr int64_t kInner = 256;                       // of the inner dimension at once: a panel of A stays in L1
// Distances that are no power of two, at which memory would share few places of a cache.
constexpr int64_t kPitch = kInner + kLanes, kPanel = kInner * kLanes + kLanes;
constexpr int64_t kAhead = 8 * kColumns;              // of a panel of B, which comes from L2
constexpr int64_t kWide = 12 * kColumns;  // columns of a block of C, whose panels of B stay in L2

struct Matrix {  // of the strides one is 1
  const bf16 *data;
  int64_t row, column;

  const bf16 *at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// What becomes of a product: factor * product + bias, and, if asked, what is there already.
struct Result {
  float *precise;  // one of the two
  bf16 *rounded;
  int64_t row;  // stride
  const float *bias;
  float factor;
  bool add;
};

class Scratch {
 public:
  float *take(int64_t count) {
    if (int64_t(memory_.size()) < count + kLanes) memory_.resize(count + kLanes);
    const auto beyond = reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    return memory_.data() + (64 - beyond) % 64 / sizeof(float);
  }

 private:
  std::vector<float> memory_;
};

// Exchange the upper lanes of `low` with the lower ones of `high`, in blocks of `half` lanes.
inline void exchange(Floats &low, Floats &high, int32_t half) {
  const Ints upper = (kNumbers & half) != 0, to_other = upper & (16 - half);  // lanes from 16 on are of `high`
  const Floats first = __builtin_shuffle(low, high, kNumbers + to_other);
  high = __builtin_shuffle(low, high, kNumbers + half + to_other);
  low = first;
}

// Write `rows` rows of `count` values, both at most sixteen, as columns.
inline void transpose(const bf16 *from, int64_t stride, int64_t rows, int64_t count, float *to, int64_t pitch) {
  Floats tile[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) tile[i] = i < rows ? load(from + i * stride, count) : Floats{};
#pragma GCC unroll 4
  for (int32_t half = kLanes / 2; half; half /= 2) {
#pragma GCC unroll 16
    for (int32_t i = 0; i < kLanes; ++i)
      if (!(i & half)) exchange(tile[i], tile[i + half], half);
  }
  for (int64_t i = 0; i < std::min(kLanes, count); ++i) store(to + i * pitch, tile[i], kLanes);
}

// kRows rows of A from (i, p) on, whose values are contiguous, row by row; zeros for those that are not there.
void pack_rows(const Matrix &a, int64_t i, int64_t rows, int64_t p, int64_t inner, float *panel) {
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t k = 0; k < inner; k += kLanes)
      store(panel + row * kPitch + k, row < rows ? load(a.at(i + row, p + k), inner - k) : Floats{}, kLanes);
}

// Any number of rows where columns are contiguous, in panels of kRows, column by column, in place for sixteen.
void pack_columns_of_rows(const Matrix &a, int64_t i, int64_t rows, int64_t p, int64_t inner, float *panels) {
  for (int64_t k = 0; k < inner; ++k)
    for (int64_t row = 0; row < rows; row += kRows)
      store(panels + row / kRows * kPanel + k * kLanes, load(a.at(i + row, p + k), rows - row), kLanes);
}

// Columns of B from (p, j) on, in panels of kColumns, row by row.
void pack_columns(const Matrix &b, int64_t p, int64_t inner, int64_t j, int64_t columns, float *panels) {
  for (int64_t begin = 0; begin < columns; begin += kColumns, panels += inner * kColumns) {
    for (int64_t c = 0; c < kColumns; c += kLanes) {
      const int64_t first = j + begin + c, count = std::max<int64_t>(0, columns - begin - c);
      if (b.column == 1) {
        for (int64_t k = 0; k < inner; ++k)
          store(panels + k * kColumns + c, count ? load(b.at(p + k, first), count) : Floats{}, kLanes);
      } else {
        for (int64_t k = 0; k < inner; k += kLanes)
          transpose(b.at(p + k, first), b.column, count, inner - k, panels + k * kColumns + c, kColumns);
      }
    }
  }
}

typedef Floats Part[kRows][2];

// kRows x kColumns of C from a panel of A, packed by rows or by columns, and one of B.
template <bool kByRows>
inline void multiply(const float *a, const float *b, int64_t inner, Part &part) {
  constexpr int64_t kRow = kByRows ? kPitch : 1, kStep = kByRows ? 1 : kLanes;
  Part sums = {};  // in registers
  for (int64_t k = 0; k < inner; ++k, a += kStep, b += kColumns) {
    __builtin_prefetch(b + kAhead), __builtin_prefetch(b + kAhead + kLanes);
    const Floats left = load(b, kLanes), right = load(b + kLanes, kLanes);
#pragma GCC unroll 14
    for (int64_t i = 0; i < kRows; ++i) {
      const Floats each = all(a[i * kRow]);
      sums[i][0] += each * left;
      sums[i][1] += each * right;
    }
  }
#pragma GCC unroll 14
  for (int64_t i = 0; i < kRows; ++i) part[i][0] = sums[i][0], part[i][1] = sums[i][1];
}

// Where a part of C is, and which part of its inner dimension was multiplied.
struct Place {
  int64_t i, j, rows, columns;
  bool begins, ends;
};

// Add what was multiplied before, if any, from `sums`; write it there again, or, at the end, to C.
inline void write(const Part &part, const Place &at, float *sums, const Result &c) {
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

struct Range {
  int64_t begin, end;
};

// Rows and columns of C, by one thread.
template <bool kByRows>
void multiply_block(const Matrix &a, const Matrix &b, const Result &c, Range rows, Range columns,
                    int64_t inner) {
  constexpr int64_t kTall = (kByRows ? 64 : 24) * kRows;  // of columns, all panels are packed, and stay in L2
  static thread_local Scratch of_a, of_b, of_sums;
  float *left = of_a.take(kByRows ? kRows * kPitch : kTall / kRows * kPanel);
  float *right = of_b.take(kInner * kWide), *sums = of_sums.take(kTall * kWide);
  Part part;
  for (int64_t i = rows.begin; i < rows.end; i += kTall) {
    for (int64_t j = columns.begin; j < columns.end; j += kWide) {
      const int64_t tall = std::min(kTall, rows.end - i), wide = std::min(kWide, columns.end - j);
      for (int64_t p = 0; p < inner; p += kInner) {
        const int64_t deep = std::min(kInner, inner - p);
        pack_columns(b, p, deep, j, wide, right);
        if (!kByRows) pack_columns_of_rows(a, i, tall, p, deep, left);
        for (int64_t row = 0; row < tall; row += kRows) {
          Place at{i + row, j, std::min(kRows, tall - row), 0, p == 0, p + deep == inner};
          if (kByRows) pack_rows(a, at.i, at.rows, p, deep, left);
          const float *panel = kByRows ? left : left + row / kRows * kPanel;
          for (int64_t column = 0; column < wide; column += kColumns) {
            multiply<kByRows>(panel, right + column * deep, deep, part);
            at.j = j + column, at.columns = std::min(kColumns, wide - column);
            write(part, at, sums + row * kWide + column, c);
          }
        }
      }
    }
  }
}

// The `number`-th of `parts` parts of `count`, in units.
inline Range part_of(int64_t count, int64_t unit, int64_t number, int64_t parts) {
  const int64_t units = (count + unit - 1) / unit;
  return {std::min(count, units * number / parts * unit), std::min(count, units * (number + 1) / parts * unit)};
}

// How many of `threads` are to share the rows of one product, others its columns: so that each packs little.
int64_t threads_down(int64_t rows, int64_t columns, int64_t threads) {
  int64_t best = 1;
  for (int64_t down = 2; down <= threads; ++down)
    if (threads % down == 0 &&
        rows / down + columns * down / threads < rows / best + columns * best / threads)
      best = down;
  return best;
}

}  // namespace

extern "C" void product_bfloat16(const bf16 *left, int64_t left_next, int64_t left_row, int64_t left_column,
                                 const bf16 *right, int64_t right_next, int64_t right_row, int64_t right_column,
                                 float *precise, bf16 *rounded, int64_t next, int64_t row, const float *bias,
                                 float factor, int64_t add, int64_t count, int64_t rows, int64_t columns,
                                 int64_t inner, int threads) {
  const int64_t together = count >= threads ? 1 : threads;  // of one product
  const int64_t down = threads_down(rows, columns, together), across = together / down;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t each = 0; each < count * together; ++each) {
    const int64_t number = each / together, part = each % together;
    const Matrix a{left + number * left_next, left_row, left_column};
    const Matrix b{right + number * right_next, right_row, right_column};
    const int64_t at = number * next;
    const Result c{precise ? precise + at : nullptr, rounded ? rounded + at : nullptr, row, bias, factor, add != 0};
    const Range of_rows = part_of(rows, kRows, part / across, down);
    const Range of_columns = part_of(columns, kColumns, part % across, across);
    (left_column == 1 ? multiply_block<true> : multiply_block<false>)(a, b, c, of_rows, of_columns, inner);
  }
}
