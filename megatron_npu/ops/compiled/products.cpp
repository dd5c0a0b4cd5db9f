// Batched products of bf16 matrices (products.h), shared out to threads.

#include "ending.h"
#include "exponential.h"
#include "panels.h"

namespace {

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

constexpr int64_t kRun = 6 * kRows;       // of a left factor's rows: C's stay in L2, beside the panels
constexpr int64_t kWords = 6 * kColumns;  // of a head: their panels stay in L2

// Add kRows x kColumns of C's, of which so many are there, to it.
template <typename A, bool kByRows>
void add_to(float *c, int64_t pitch, int64_t rows, int64_t columns, const uint32_t *a, const uint32_t *b,
            int64_t steps) {
  for (int64_t row = 0; row < rows; ++row)
    __builtin_prefetch(c + row * pitch, 1), __builtin_prefetch(c + row * pitch + kLanes, 1);
  if (rows == kRows && columns >= kColumns) {
    multiply<A, kByRows>(a, b, steps, [&](int64_t row, int64_t half, Floats sum) {
      float *at = c + row * pitch + half * kLanes;
      store(at, load(at, kLanes) + sum, kLanes);
    });
    return;
  }
  multiply<A, kByRows>(a, b, steps, [&](int64_t row, int64_t half, Floats sum) {
    const int64_t count = columns - half * kLanes;
    if (row >= rows || count <= 0) return;
    float *at = c + row * pitch + half * kLanes;
    store(at, load(at, count) + sum, count);
  });
}

// Add to the rows of C from `c` on what a run of A and all of B, which is packed, make.
template <typename A, bool kByRows>
void add_run(const Factor<A> &a, int64_t rows, const uint32_t *panels, int64_t inner, int64_t columns, float *c,
             int64_t pitch) {
  static thread_local Scratch of_a;
  auto *left = of_a.take<uint32_t>(kByRows ? kRows * kPitch : padded(rows, kRows) / kRows * kPanel);
  for (int64_t p = 0; p < inner; p += kInner * A::kDepth) {
    const int64_t deep = std::min(kInner * A::kDepth, inner - p), steps = steps_of<A>(deep);
    const auto add = [&](int64_t i, int64_t j) {
      add_to<A, kByRows>(c + i * pitch + j, pitch, std::min(kRows, rows - i), columns - j,
                         kByRows ? left : left + i / kRows * kPanel, panels + j * steps, steps);
    };
    if (kByRows) {
      for (int64_t i = 0; i < rows; i += kRows) {
        pack_rows<A>(a, i, std::min(kRows, rows - i), p, deep, left);
        for (int64_t j = 0; j < columns; j += kColumns) add(i, j);
      }
    } else {
      pack_columns_of_rows<A>(a, 0, rows, p, deep, left);
      for (int64_t j = 0; j < columns; j += kColumns)
        for (int64_t i = 0; i < rows; i += kRows) add(i, j);
    }
    panels += size_of_panels<A>(deep, columns);
  }
}

// Add `left * right` to C: threads pack the right factor together and share out runs of the left one's rows.
template <typename A, typename T = typename A::Value>
void add_product(const Matrix<T> &left, const Matrix<T> &right, float *c, int64_t pitch, int64_t rows, int64_t columns,
                 int64_t inner, int threads, Ending &ending) {
  static thread_local Scratch of_b;
  auto *panels = of_b.take<uint32_t>(size_of_panels<A>(padded(inner, A::kDepth), columns));
  const int64_t runs = threads * ((rows + threads * kRun - 1) / (threads * kRun));  // as many for each thread
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t j = 0; j < columns; j += kColumns) pack_columns_of_panels<A>(right, inner, columns, j, panels);
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < runs; ++number) {
      const Range run = part_of(rows, kRows, number, runs);
      const Matrix<T> a{left.at(run.begin, 0), left.row, left.column};
      const auto add = left.column == 1 ? add_run<A, true> : add_run<A, false>;
      ending.of([&] { add(a, run.end - run.begin, panels, inner, columns, c + run.begin * pitch, pitch); });
    }
  }
}

// Write exp(left * right + bias - reference), and add up what they come to in each row.
template <typename A, typename T = typename A::Value>
void exponentials_of_product(const Matrix<T> &left, const Matrix<T> &right, const float *bias, const float *reference,
                             T *output, int64_t pitch, float *sums, int64_t rows, int64_t columns, int64_t inner,
                             int threads, Ending &ending) {
  static thread_local Scratch of_a, of_sums;
  const int64_t steps = steps_of<A>(inner), panel = steps * kLanes;
  const Runs runs{columns, kWords};  // for any number of threads the same, as sums are
  auto *lefts = of_a.take<uint32_t>(padded(rows, kRows) / kRows * panel);
  auto *parts = of_sums.take<float>(runs.number() * rows);
#pragma omp parallel num_threads(threads)
  {
    static thread_local Scratch of_b, of_row;
    uint32_t *panels = nullptr;
    float *in_lanes = nullptr;
    ending.of([&] { panels = of_b.take<uint32_t>(steps * kWords), in_lanes = of_row.take<float>(kRows * kLanes); });
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i += kRows)
      pack_rows_in_steps<A>(left, i, std::min(kRows, rows - i), inner, lefts + i / kRows * panel);
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < runs.number(); ++number) {
      if (ending.failed()) continue;
      const Range run = runs.at(number);
      const int64_t words = run.end - run.begin;
      pack_columns<A>(right, 0, inner, run.begin, words, panels);
      for (int64_t i = 0; i < rows; i += kRows) {
        const int64_t there = std::min(kRows, rows - i);
        std::fill(in_lanes, in_lanes + kRows * kLanes, 0.0f);
        for (int64_t j = 0; j < words; j += kColumns)
          multiply<A, false>(lefts + i / kRows * panel, panels + j * steps, steps,
                             [&](int64_t row, int64_t half, Floats logits) {
                               const int64_t at = j + half * kLanes, count = words - at;
                               if (row >= there || count <= 0) return;
                               if (bias) logits += load(bias + run.begin + at, count);
                               const Floats each = power_of_two((logits - reference[i + row]) * kLog2E);
                               store(output + (i + row) * pitch + run.begin + at, each, count);
                               float *sum = in_lanes + row * kLanes;
                               store(sum, load(sum, kLanes) + first(each, count), kLanes);
                             });
        for (int64_t row = 0; row < there; ++row)
          parts[number * rows + i + row] = sum_of(load(in_lanes + row * kLanes, kLanes));
      }
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t number = 0; number < runs.number(); ++number) sums[row] += parts[number * rows + row];
  }
}

// Write `count` products; threads share them out, or the parts of each.
template <typename A>
void multiply_all(const Matrix<bf16> &left, int64_t left_next, const Matrix<bf16> &right, int64_t right_next,
                  const Result<bf16> &result, int64_t next, int64_t count, int64_t rows, int64_t columns,
                  int64_t inner, int threads, Ending &ending) {
  const int64_t together = count >= threads ? 1 : threads;  // of one product
  const int64_t down = threads_down(rows, columns, together), across = together / down;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t each = 0; each < count * together; ++each) {
    const int64_t number = each / together, part = each % together, at = number * next;
    const Matrix<bf16> a{left.data + number * left_next, left.row, left.column};
    const Matrix<bf16> b{right.data + number * right_next, right.row, right.column};
    const Result<bf16> c{result.precise ? result.precise + at : nullptr,
                         result.rounded ? result.rounded + at : nullptr,
                         result.row,
                         result.bias,
                         result.factor,
                         result.add};
    const Range of_rows = part_of(rows, kRows, part / across, down);
    const Range of_columns = part_of(columns, kColumns, part % across, across);
    ending.of([&] { multiply_part<A>(a, b, c, of_rows, of_columns, inner); });
  }
}

}  // namespace

// Whether there is the instruction for pairs.
extern "C" int can_pair() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

extern "C" int product_bfloat16(const bf16 *left, int64_t left_next, int64_t left_row, int64_t left_column,
                                const bf16 *right, int64_t right_next, int64_t right_row, int64_t right_column,
                                float *precise, bf16 *rounded, int64_t next, int64_t row, const float *bias,
                                float factor, int64_t add, int64_t count, int64_t rows, int64_t columns,
                                int64_t inner, int paired, int threads) {
  return ended([&](Ending &ending) {
    (paired ? multiply_all<Paired> : multiply_all<Widened>)(
        {left, left_row, left_column}, left_next, {right, right_row, right_column}, right_next,
        {precise, rounded, row, bias, factor, add != 0}, next, count, rows, columns, inner, threads, ending);
  });
}

extern "C" {

#define DEFINE_PRODUCTS(A, NAME)                                                                                 \
  int add_product_##NAME(const A::Value *left, int64_t left_row, int64_t left_column, const A::Value *right,     \
                         int64_t right_row, int64_t right_column, float *c, int64_t pitch, int64_t rows,         \
                         int64_t columns, int64_t inner, int threads) {                                          \
    return ended([&](Ending &ending) {                                                                           \
      add_product<A>({left, left_row, left_column}, {right, right_row, right_column}, c, pitch, rows, columns,   \
                     inner, threads, ending);                                                                    \
    });                                                                                                          \
  }                                                                                                              \
  int exponentials_of_product_##NAME(const A::Value *left, int64_t left_row, int64_t left_column,                \
                                     const A::Value *right, int64_t right_row, int64_t right_column,             \
                                     const float *bias, const float *reference, A::Value *output, int64_t pitch, \
                                     float *sums, int64_t rows, int64_t columns, int64_t inner, int threads) {   \
    return ended([&](Ending &ending) {                                                                           \
      exponentials_of_product<A>({left, left_row, left_column}, {right, right_row, right_column}, bias,          \
                                 reference, output, pitch, sums, rows, columns, inner, threads, ending);         \
    });                                                                                                          \
  }

DEFINE_PRODUCTS(Widened, widened)
DEFINE_PRODUCTS(Paired, paired)
}
