// Attention of one tile, forward and backward: a run of queries over the keys that any of them sees, head by head.
//
// Scores and weights of a head stay in the cache of the core that has computed them. Softmax is in fp32, weights and
// gradients of scores are rounded to bf16 before they are multiplied, as in any bf16 kernel.

#include "products.h"
#include "softmax.h"

namespace {

constexpr int64_t kApart = 2 * kLanes;  // of rows of scores, so that these are no power of two apart

template <typename T>
struct Rows {  // of each head, with contiguous values
  T *data;
  int64_t next, row;

  T *of(int64_t head) const { return data + head * next; }
};

Matrix matrix(const Rows<bf16> &rows, int64_t head) { return {rows.of(head), rows.row, 1}; }

Matrix transposed(const Rows<bf16> &rows, int64_t head) { return {rows.of(head), 1, rows.row}; }

Result rounded(const Rows<bf16> &rows, int64_t head, float factor) {
  return {nullptr, rows.of(head), rows.row, nullptr, factor, false};
}

Result added(const Rows<float> &rows, int64_t head, float factor) {
  return {rows.of(head), nullptr, rows.row, nullptr, factor, true};
}

}  // namespace

extern "C" {

// As `_Tile` in attention.py.
struct Tile {
  Rows<bf16> query, key, value;
  int64_t heads, rows, keys, size, value_size;
  int64_t repeats;     // rows of one query
  int64_t begin, end;  // the keys that the first query sees, of any number; the next one sees those one further
  float scale, gain;   // of scores, and of what dropout keeps
  const int16_t *bits;  // of `Kept`, for all weights
  int64_t most;
};
}

namespace {

struct Head {
  const Tile &tile;
  int64_t number;

  Range seen(int64_t row) const {
    const int64_t query = row / tile.repeats;
    const int64_t begin = std::clamp<int64_t>(tile.begin + query, 0, tile.keys);
    return {begin, std::clamp(tile.end + query, begin, tile.keys)};
  }

  Kept kept(int64_t row) const {
    return Kept{tile.bits, int16_t(tile.most)}.from((number * tile.rows + row) * tile.keys);
  }

  int64_t pitch() const { return (tile.keys / kApart + 2) * kApart - kLanes; }
  Range rows() const { return {0, tile.rows}; }
  Range keys() const { return {0, tile.keys}; }
};

// Softmax of the scores, which become the weights; those that are kept are rounded.
template <bool kPaired>
void weights_of(const Head &head, float *scores, bf16 *kept) {
  const Tile &tile = head.tile;
  const int64_t pitch = head.pitch();
  multiply_part<kPaired>(matrix(tile.query, head.number), transposed(tile.key, head.number),
                         {scores, nullptr, pitch, nullptr, tile.scale, false}, head.rows(), head.keys(), tile.size);
  for (int64_t row = 0; row < tile.rows; ++row) {
    float *of_row = scores + row * pitch;
    softmax_row(of_row, of_row, kept + row * pitch, head.kept(row), head.seen(row), tile.keys);
  }
}

template <bool kPaired>
void forward(const Head &head, const Rows<bf16> &output) {
  static thread_local Scratch of_weights, of_kept;
  const Tile &tile = head.tile;
  const int64_t pitch = head.pitch();
  auto *kept = of_kept.take<bf16>(tile.rows * pitch);
  weights_of<kPaired>(head, of_weights.take<float>(tile.rows * pitch), kept);
  multiply_part<kPaired>({kept, pitch, 1}, matrix(tile.value, head.number), rounded(output, head.number, tile.gain),
                         head.rows(), {0, tile.value_size}, tile.keys);
}

template <bool kPaired>
void backward(const Head &head, const Rows<bf16> &grad, const Rows<bf16> &d_query, const Rows<float> &d_key,
              const Rows<float> &d_value) {
  static thread_local Scratch of_weights, of_grad, of_rounded;
  const Tile &tile = head.tile;
  const int64_t pitch = head.pitch(), number = head.number;
  auto *weights = of_weights.take<float>(tile.rows * pitch), *d_weights = of_grad.take<float>(tile.rows * pitch);
  auto *narrow = of_rounded.take<bf16>(tile.rows * pitch);  // the weights, then the gradient of the scores
  const Matrix by_rows{narrow, pitch, 1}, by_keys{narrow, 1, pitch};
  const Range size{0, tile.size}, value_size{0, tile.value_size};
  weights_of<kPaired>(head, weights, narrow);
  multiply_part<kPaired>(by_keys, matrix(grad, number), added(d_value, number, tile.gain), head.keys(), value_size,
                         tile.rows);
  multiply_part<kPaired>(matrix(grad, number), transposed(tile.value, number),
                         {d_weights, nullptr, pitch, nullptr, tile.gain, false}, head.rows(), head.keys(),
                         tile.value_size);
  for (int64_t row = 0; row < tile.rows; ++row)
    softmax_backward_row(d_weights + row * pitch, weights + row * pitch, narrow + row * pitch, head.kept(row),
                         head.seen(row), tile.keys);
  multiply_part<kPaired>(by_rows, matrix(tile.key, number), rounded(d_query, number, tile.scale), head.rows(), size,
                         tile.keys);
  multiply_part<kPaired>(by_keys, matrix(tile.query, number), added(d_key, number, tile.scale), head.keys(), size,
                         tile.rows);
}

}  // namespace

extern "C" {

void attention_forward(const Tile *tile, const Rows<bf16> *output, int paired, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t head = 0; head < tile->heads; ++head)
    (paired ? forward<true> : forward<false>)({*tile, head}, *output);
}

void attention_backward(const Tile *tile, const Rows<bf16> *grad, const Rows<bf16> *d_query,
                        const Rows<float> *d_key, const Rows<float> *d_value, int paired, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t head = 0; head < tile->heads; ++head)
    (paired ? backward<true> : backward<false>)({*tile, head}, *grad, *d_query, *d_key, *d_value);
}
}
