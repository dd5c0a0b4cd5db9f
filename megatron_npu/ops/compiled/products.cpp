// Batched products of bf16 matrices (products.h), shared out to threads.

#include "products.h"

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

}  // namespace

// Whether there is the instruction for pairs.
extern "C" int can_pair() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

extern "C" void product_bfloat16(const bf16 *left, int64_t left_next, int64_t left_row, int64_t left_column,
                                 const bf16 *right, int64_t right_next, int64_t right_row, int64_t right_column,
                                 float *precise, bf16 *rounded, int64_t next, int64_t row, const float *bias,
                                 float factor, int64_t add, int64_t count, int64_t rows, int64_t columns,
                                 int64_t inner, int paired, int threads) {
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
    (paired ? multiply_part<true> : multiply_part<false>)(a, b, c, of_rows, of_columns, inner);
  }
}
