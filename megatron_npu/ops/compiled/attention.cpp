// Attention by blocks of keys that stay in a core's cache, forward and backward, head by head (Dao 2023,
// "FlashAttention-2").
//
// Softmax is in fp32 and in powers of two. Of bf16 factors, weights and gradients of scores are rounded to bf16 before
// they are multiplied, as in any bf16 kernel; what blocks add up is in fp32.

#include <cmath>
#include <limits>
#include <memory>

#include "draws.h"
#include "ending.h"
#include "exponential.h"
#include "panels.h"

extern "C" {

// As `_Rows` in abi.py.
struct Rows {  // of each head, with contiguous values
  void *data;
  int64_t next, row;
};

// As `_Call` in abi.py.
struct Call {
  Rows query, key, value;
  int64_t heads, rows, keys, size, value_size;
  int64_t repeats;     // rows of one query
  int64_t begin, end;  // the keys that the first query sees, of any number; the next one sees those one further
  float scale, gain;   // of scores, and of what dropout keeps
  uint64_t seed;
  int64_t keep;  // of kLevels
};
}

namespace {

constexpr int64_t kQueries = 8 * kRows;   // rows of scores at once
constexpr int64_t kKeys = 6 * kColumns;   // columns of them: no more than are multiplied at once
constexpr int64_t kPitchOfScores = kKeys + kLanes;  // so that rows are no power of two apart
constexpr int64_t kUnits = 16;  // of work, at least: threads share them out

template <typename T>
T *values(const Rows &rows, int64_t head, int64_t row = 0) {
  return static_cast<T *>(rows.data) + head * rows.next + row * rows.row;
}

template <typename T>
Matrix<T> matrix(const Rows &rows, int64_t head, int64_t row = 0) {
  return {values<T>(rows, head, row), rows.row, 1};
}

template <typename T>
Matrix<T> transposed(const Rows &rows, int64_t head, int64_t row = 0) {
  return {values<T>(rows, head, row), 1, rows.row};
}

// A head of a call, of whose blocks one part is computed by itself.
struct Unit {
  const Call &call;
  int64_t head, part, parts;

  Range seen(int64_t row) const {
    const int64_t query = row / call.repeats;
    const int64_t begin = std::clamp<int64_t>(call.begin + query, 0, call.keys);
    return {begin, std::clamp(call.end + query, begin, call.keys)};
  }

  Draws draws(int64_t row) const { return Draws::of(call.seed, head * call.rows + row, call.keep); }
};

// Scores of a run of rows and a block of keys.
struct Block {
  const Unit &unit;
  Range rows, keys;

  int64_t height() const { return rows.end - rows.begin; }
  int64_t width() const { return keys.end - keys.begin; }

  // The columns that a row of the block sees.
  Range seen(int64_t row) const {
    const Range all = unit.seen(rows.begin + row);
    const int64_t begin = std::clamp<int64_t>(all.begin - keys.begin, 0, width());
    return {begin, std::clamp(all.end - keys.begin, begin, width())};
  }

  // The columns that some of kRows rows see: each sees no less than the one before begins with, or ends with.
  Range seen_by_rows(int64_t row) const {
    return {seen(row).begin, seen(std::min(row + kRows, height()) - 1).end};
  }

  bool is_seen() const { return seen(height() - 1).end > seen(0).begin; }

  // The rows that see some of kRows columns.
  Range seeing(int64_t column) const {
    const Call &call = unit.call;
    const int64_t last = std::min(column + kRows, width()) - 1;
    const int64_t query = keys.begin + column - call.end + 1, beyond = keys.begin + last - call.begin + 1;
    const int64_t begin = std::clamp<int64_t>(query * call.repeats - rows.begin, 0, height());
    return {begin, std::clamp(beyond * call.repeats - rows.begin, begin, height())};
  }
};

// Write the scores, in powers of two or of any factor, of the columns that rows see.
template <typename A>
void multiply_seen(const Block &block, const Factor<A> &rows, const uint32_t *panels, int64_t inner, float factor,
                   float *scores) {
  multiply_panels<A, true>(rows, block.height(), panels, inner, block.width(), {scores, kPitchOfScores, factor, false},
                           [&](int64_t row) { return Needed{block.seen_by_rows(row), {0, inner}}; });
}

// Add the product of weights and values of the columns that rows see, which are `width` long.
template <typename A>
void add_along_keys(const Block &block, const typename A::Value *weights, const uint32_t *panels, int64_t width,
                    float factor, float *sums) {
  multiply_panels<A, true>({weights, kPitchOfScores, 1}, block.height(), panels, block.width(), width,
                           {sums, padded(width, kColumns), factor, true},
                           [&](int64_t row) { return Needed{{0, width}, block.seen_by_rows(row)}; });
}

// Add the product of weights and values of the rows that see columns.
template <typename A>
void add_along_rows(const Block &block, const typename A::Value *weights, const uint32_t *panels, int64_t width,
                    float factor, float *sums) {
  multiply_panels<A, false>({weights, 1, kPitchOfScores}, block.width(), panels, block.height(), width,
                            {sums, padded(width, kColumns), factor, true},
                            [&](int64_t column) { return Needed{{0, width}, block.seeing(column)}; });
}

template <typename T>
void zero_others(T *row, Range seen, int64_t width) {
  std::fill(row, row + seen.begin, T{}), std::fill(row + seen.end, row + width, T{});
}

// One row's softmax as far as it has come: of all scores so far the largest, and the sum of the powers of two of what
// each is less than that.
struct Softmax {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0.0f;

  float normalizer() const { return largest + std::log2(sum); }

  // Take a block's scores; write the powers that are kept, rounded. Return what all before is to be multiplied by.
  template <typename T>
  float add(const float *scores, T *rounded, Range seen, int64_t width, const Draws &draws, int64_t key) {
    zero_others(rounded, seen, width);
    if (seen.begin == seen.end) return 1.0f;
    Floats most = all(largest);
    for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
      const Floats each = first(load(scores + i, kLanes), seen.end - i, most);
      most = each < most ? most : each;  // also where `each` is not a number
    }
    const float before = largest;
    largest = largest_of(most);
    const Floats subtrahend = all(std::isinf(largest) && largest < 0 ? 0.0f : largest);
    Floats sums{};
    for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
      const int64_t count = seen.end - i;
      const Floats power = power_of_two(load(scores + i, kLanes) - subtrahend);
      sums += first(power, count);
      store(rounded + i, draws.drop() ? draws.of(power, key + i) : power, count);
    }
    const float factor = before == largest ? 1.0f : std::exp2(before - largest);
    sum = sum * factor + sum_of(sums);
    return factor;
  }
};

template <typename T>
void round_row(const float *from, int64_t width, float factor, T *to) {
  for (int64_t i = 0; i < width; i += kLanes) store(to + i, load(from + i, width - i) * factor, width - i);
}

template <typename T>
float dot(const T *left, const T *right, int64_t width) {
  Floats sums{};
  for (int64_t i = 0; i < width; i += kLanes) sums += load(left + i, width - i) * load(right + i, width - i);
  return sum_of(sums);
}

// The panels of one factor of a head, run by run.
template <typename A>
class PanelsOfRuns {
 public:
  template <typename Make>
  PanelsOfRuns(Scratch &memory, const Runs &runs, int64_t width, bool transposed, Make factor)
      : size_(transposed ? size_of_panels<A>(width, runs.length) : size_of_panels<A>(runs.length, width)),
        data_(memory.take<uint32_t>(size_ * runs.number())) {
    for (int64_t number = 0; number < runs.number(); ++number) {
      const Range run = runs.at(number);
      const int64_t length = run.end - run.begin;
      if (transposed) pack_panels<A>(factor(run.begin), width, length, data_ + number * size_);
      else pack_panels<A>(factor(run.begin), length, width, data_ + number * size_);
    }
  }

  const uint32_t *of(int64_t number) const { return data_ + number * size_; }

 private:
  int64_t size_;
  uint32_t *data_;
};

template <typename A, typename T = typename A::Value>
void forward(const Unit &unit, const Rows &output, const Rows &normalizer) {
  static thread_local Scratch of_keys, of_values, of_scores, of_weights, of_sums;
  const Call &call = unit.call;
  const int64_t head = unit.head, wide = padded(call.value_size, kColumns);
  const Runs rows{call.rows, kQueries}, keys{call.keys, kKeys};
  const PanelsOfRuns<A> of_k(of_keys, keys, call.size, true,
                             [&](int64_t key) { return transposed<T>(call.key, head, key); });
  const PanelsOfRuns<A> of_v(of_values, keys, call.value_size, false,
                             [&](int64_t key) { return matrix<T>(call.value, head, key); });
  auto *scores = of_scores.take<float>(kQueries * kPitchOfScores + kLanes);
  T *weights = of_weights.take<T>(kQueries * kPitchOfScores + kLanes);
  auto *sums = of_sums.take<float>(kQueries * wide);
  for (int64_t number = unit.part; number < rows.number(); number += unit.parts) {
    const Range run = rows.at(number);
    Softmax softmax[kQueries];
    std::fill(sums, sums + kQueries * wide, 0.0f);
    for (int64_t of_key = 0; of_key < keys.number(); ++of_key) {
      const Block block{unit, run, keys.at(of_key)};
      if (!block.is_seen()) continue;
      multiply_seen<A>(block, matrix<T>(call.query, head, run.begin), of_k.of(of_key), call.size, call.scale * kLog2E,
                       scores);
      for (int64_t row = 0; row < block.height(); ++row) {
        const int64_t at = row * kPitchOfScores;
        const float factor = softmax[row].add(scores + at, weights + at, block.seen(row), block.width(),
                                              unit.draws(run.begin + row), block.keys.begin);
        if (factor != 1.0f) round_row(sums + row * wide, wide, factor, sums + row * wide);
      }
      add_along_keys<A>(block, weights, of_v.of(of_key), call.value_size, 1.0f, sums);
    }
    for (int64_t row = 0; row < run.end - run.begin; ++row) {
      const float factor = softmax[row].sum == 0.0f ? 0.0f : call.gain / softmax[row].sum;
      round_row(sums + row * wide, call.value_size, factor, values<T>(output, head, run.begin + row));
      *values<float>(normalizer, head, run.begin + row) = softmax[row].normalizer();
    }
  }
}

// What backward is given and writes.
struct Gradients {
  Rows output, normalizer, grad, d_query, d_key, d_value;
};

// Replace scores by the weights of what is seen; write those that are kept, rounded.
template <typename T>
void weights_row(float *scores, T *rounded, float normalizer, Range seen, int64_t width, const Draws &draws,
                 int64_t key) {
  zero_others(rounded, seen, width);
  for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
    const Floats weight = power_of_two(load(scores + i, kLanes) - normalizer);
    store(scores + i, weight, seen.end - i);
    store(rounded + i, draws.drop() ? draws.of(weight, key + i) : weight, seen.end - i);
  }
}

// Replace the weights by the gradient of the scores, w * (g - sum(w * g)), where g is that of the weights kept.
template <typename T>
void gradient_row(const float *weights, const float *grad, T *rounded, float along, Range seen, const Draws &draws,
                  int64_t key) {
  for (int64_t i = seen.begin; i < seen.end; i += kLanes) {
    const Floats g = load(grad + i, kLanes), kept = draws.drop() ? draws.of(g, key + i) : g;
    store(rounded + i, load(weights + i, kLanes) * (kept - along), seen.end - i);
  }
}

// The gradients of keys and values of a part of the blocks, and of queries what these blocks add to them.
template <typename A, typename T = typename A::Value>
void backward(const Unit &unit, const Gradients &all, float *d_query) {
  static thread_local Scratch of_rows[3], of_keys[3], of_scores, of_grad, of_weights, of_sums[2];
  const Call &call = unit.call;
  const int64_t head = unit.head;
  const int64_t wide = padded(call.size, kColumns), wide_value = padded(call.value_size, kColumns);
  const Runs rows{call.rows, kQueries}, keys{call.keys, kKeys};
  const PanelsOfRuns<A> of_q(of_rows[0], rows, call.size, false,
                             [&](int64_t row) { return matrix<T>(call.query, head, row); });
  const PanelsOfRuns<A> of_g(of_rows[1], rows, call.value_size, false,
                             [&](int64_t row) { return matrix<T>(all.grad, head, row); });
  auto *along = of_rows[2].take<float>(call.rows);
  for (int64_t row = 0; row < call.rows; ++row)
    along[row] = dot(values<T>(all.grad, head, row), values<T>(all.output, head, row), call.value_size);
  auto *k_across = of_keys[0].take<uint32_t>(size_of_panels<A>(call.size, kKeys));
  auto *v_across = of_keys[1].take<uint32_t>(size_of_panels<A>(call.value_size, kKeys));
  auto *k_along = of_keys[2].take<uint32_t>(size_of_panels<A>(kKeys, call.size));
  auto *scores = of_scores.take<float>(kQueries * kPitchOfScores + kLanes);
  auto *d_weights = of_grad.take<float>(kQueries * kPitchOfScores + kLanes);
  T *weights = of_weights.take<T>(kQueries * kPitchOfScores + kLanes);
  auto *d_key = of_sums[0].take<float>((kKeys + kRows) * wide);
  auto *d_value = of_sums[1].take<float>((kKeys + kRows) * wide_value);
  std::fill(d_query, d_query + padded(call.rows, kQueries) * wide, 0.0f);
  for (int64_t of_key = unit.part; of_key < keys.number(); of_key += unit.parts) {
    const Range run = keys.at(of_key);
    const int64_t length = run.end - run.begin;
    pack_panels<A>(transposed<T>(call.key, head, run.begin), call.size, length, k_across);
    pack_panels<A>(transposed<T>(call.value, head, run.begin), call.value_size, length, v_across);
    pack_panels<A>(matrix<T>(call.key, head, run.begin), length, call.size, k_along);
    std::fill(d_key, d_key + (kKeys + kRows) * wide, 0.0f);
    std::fill(d_value, d_value + (kKeys + kRows) * wide_value, 0.0f);
    for (int64_t number = 0; number < rows.number(); ++number) {
      const Block block{unit, rows.at(number), run};
      if (!block.is_seen()) continue;
      const int64_t begin = block.rows.begin;
      multiply_seen<A>(block, matrix<T>(call.query, head, begin), k_across, call.size, call.scale * kLog2E, scores);
      for (int64_t row = 0; row < block.height(); ++row)
        weights_row(scores + row * kPitchOfScores, weights + row * kPitchOfScores,
                    *values<float>(all.normalizer, head, begin + row), block.seen(row), length,
                    unit.draws(begin + row), run.begin);
      add_along_rows<A>(block, weights, of_g.of(number), call.value_size, call.gain, d_value);
      multiply_seen<A>(block, matrix<T>(all.grad, head, begin), v_across, call.value_size, call.gain, d_weights);
      for (int64_t row = 0; row < block.height(); ++row)
        gradient_row(scores + row * kPitchOfScores, d_weights + row * kPitchOfScores, weights + row * kPitchOfScores,
                     along[begin + row], block.seen(row), unit.draws(begin + row), run.begin);
      add_along_keys<A>(block, weights, k_along, call.size, call.scale, d_query + begin * wide);
      add_along_rows<A>(block, weights, of_q.of(number), call.size, call.scale, d_key);
    }
    for (int64_t key = 0; key < length; ++key) {
      round_row(d_key + key * wide, call.size, 1.0f, values<T>(all.d_key, head, run.begin + key));
      round_row(d_value + key * wide_value, call.value_size, 1.0f, values<T>(all.d_value, head, run.begin + key));
    }
  }
}

// Into how many parts a head is cut: no matter how many threads there are, since their sums differ in a bit.
int64_t parts_of(const Call &call, int64_t blocks) {
  return std::clamp<int64_t>((kUnits + call.heads - 1) / call.heads, 1, std::max<int64_t>(1, blocks));
}

template <typename A>
void forward_of_all(const Call &call, const Rows &output, const Rows &normalizer, int threads, Ending &ending) {
  const int64_t parts = parts_of(call, Runs{call.rows, kQueries}.number());
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t each = 0; each < call.heads * parts; ++each)
    ending.of([&] { forward<A>({call, each / parts, each % parts, parts}, output, normalizer); });
}

template <typename A, typename T = typename A::Value>
void backward_of_all(const Call &call, const Gradients &all, int threads, Ending &ending) {
  const int64_t parts = parts_of(call, Runs{call.keys, kKeys}.number());
  const int64_t wide = padded(call.size, kColumns), size = padded(call.rows, kQueries) * wide;
  const std::unique_ptr<float[]> d_query(new float[call.heads * parts * size]);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (int64_t each = 0; each < call.heads * parts; ++each)
      ending.of([&] { backward<A>({call, each / parts, each % parts, parts}, all, d_query.get() + each * size); });
#pragma omp for schedule(static)
    for (int64_t each = 0; each < call.heads * call.rows; ++each) {
      if (ending.failed()) continue;
      const int64_t head = each / call.rows, row = each % call.rows;
      float *sums = d_query.get() + head * parts * size + row * wide;
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t i = 0; i < wide; ++i) sums[i] += sums[part * size + i];
      round_row(sums, call.size, 1.0f, values<T>(all.d_query, head, row));
    }
  }
}

}  // namespace

extern "C" {

// What Python compares with its own, which a mistake would make another.
int64_t size_of_call() { return sizeof(Call); }
int64_t size_of_rows() { return sizeof(Rows); }

#define DEFINE_ATTENTION(A, NAME)                                                                              \
  int attention_forward_##NAME(const Call *call, const Rows *output, const Rows *normalizer, int threads) {    \
    return ended([&](Ending &ending) { forward_of_all<A>(*call, *output, *normalizer, threads, ending); });    \
  }                                                                                                            \
  int attention_backward_##NAME(const Call *call, const Rows *output, const Rows *normalizer, const Rows *grad, \
                                const Rows *d_query, const Rows *d_key, const Rows *d_value, int threads) {    \
    return ended([&](Ending &ending) {                                                                         \
      backward_of_all<A>(*call, {*output, *normalizer, *grad, *d_query, *d_key, *d_value}, threads, ending);   \
    });                                                                                                        \
  }

DEFINE_ATTENTION(Single, single)
DEFINE_ATTENTION(Widened, widened)
DEFINE_ATTENTION(Paired, paired)
}
