// Chains of element-wise steps and the sums behind them, in one pass over memory, for fp32 and bf16 on a CPU.
//
// Only the exponential and rounding to bf16 name instructions of AVX-512. All computation is in fp32, rounded once,
// to nearest even. No sum depends on how many threads there are: rows are added up in fixed chunks, and the chunks
// in order.

#include <algorithm>
#include <vector>

#include "ending.h"
#include "softmax.h"

namespace {

constexpr int64_t kChunk = 64;  // rows that one sum over rows takes

// Add up the partial sums of chunks, [chunks, width], into a row.
void add_chunks(const std::vector<float> &parts, int64_t width, float *sums) {
  std::fill(sums, sums + width, 0.0f);
  for (size_t start = 0; start < parts.size(); start += width)
    for (int64_t i = 0; i < width; ++i) sums[i] += parts[start + i];
}

template <typename T>
void exponentials(T *values, const float *reference, float *sums, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    T *z = values + row * width;
    const Floats subtrahend = all(reference[row]);
    Floats sum{};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats e = power_of_two((load(z + i, width - i) - subtrahend) * kLog2E);
      store(z + i, e, width - i);
      sum += first(e, width - i);
    }
    sums[row] += sum_of(sum);
  }
}

template <typename T>
void gelu(const T *input, const float *bias, T *output, T *slope, int64_t rows, int64_t width, int threads) {
  constexpr float kK = 0.7978845608f, kC = 0.044715f;  // sqrt(2 / pi), and the factor of the cube
  constexpr float kLinear = -2 * kLog2E * kK, kCubic = kLinear * kC;
  constexpr float kStraight = 32;  // from here on the slope is 1, and 0 on the other side
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t at = row * width + i, count = width - i;
      const Floats z = load(input + at, count) + load(bias + i, count), square = z * z;
      // 1 + tanh(u) = 2 / (1 + exp(-2u))
      const Floats s = 1.0f / (1.0f + power_of_two((kLinear + kCubic * square) * z));
      store(output + at, z * s, count);
      if (!slope) continue;
      // far out the curve is straight, and the cube of what is there no number
      const Floats near = z > kStraight ? all(kStraight) : (z < -kStraight ? all(-kStraight) : z);
      store(slope + at, s + near * (2 * kK + 6 * kK * kC * (near * near)) * (1.0f - s) * s, count);
    }
  }
}

template <typename T>
void product_and_sum(const T *left, const T *right, T *output, float *sums, int64_t rows, int64_t width,
                     int threads) {
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  std::vector<float> parts(chunks * width);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    float *part = parts.data() + chunk * width;
    for (int64_t row = chunk * kChunk; row < std::min(rows, (chunk + 1) * kChunk); ++row) {
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t at = row * width + i, count = width - i;
        const Floats product = load(left + at, count) * load(right + at, count);
        store(output + at, product, count);
        store(part + i, load(part + i, count) + product, count);
      }
    }
  }
  add_chunks(parts, width, sums);
}

void softmax(const float *scores, float *weights, bf16 *rounded, Kept kept, int64_t rows, int64_t width,
             int threads, Ending &ending) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> own;
    if (!weights) ending.of([&] { own.resize(width); });
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      if (ending.failed()) continue;
      const int64_t at = row * width;
      softmax_row(scores + at, weights ? weights + at : own.data(), rounded + at, kept.from(at), width);
    }
  }
}

void softmax_backward(const float *grad, const float *weights, bf16 *output, Kept kept, int64_t rows,
                      int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * width;
    softmax_backward_row(grad + at, weights + at, output + at, kept.from(at), width);
  }
}

// dx = rstd * (g - mean(g) - n * mean(g * n)) of g = dy * factor and the normalized input n; an RMS norm, whose
// `mean` and `d_bias` are null, has no term of the mean.
template <typename T>
void norm_backward(const T *grad, const T *input, const float *mean, const float *rstd, const float *factor,
                   T *d_input, float *d_factor, float *d_bias, int64_t rows, int64_t width, int threads) {
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  std::vector<float> of_factor(chunks * width), of_bias(chunks * width);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    float *df = of_factor.data() + chunk * width, *db = of_bias.data() + chunk * width;
    for (int64_t row = chunk * kChunk; row < std::min(rows, (chunk + 1) * kChunk); ++row) {
      const T *dy = grad + row * width, *x = input + row * width;
      const float center = mean ? mean[row] : 0.0f, scale = rstd[row];
      Floats sums{}, products{};
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats g = load(dy + i, width - i) * load(factor + i, width - i);
        sums += g;
        products += g * ((load(x + i, width - i) - center) * scale);
      }
      const float sum = mean ? sum_of(sums) / width : 0.0f, along = sum_of(products) / width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t count = width - i;
        const Floats g = load(dy + i, count), n = (load(x + i, count) - center) * scale;
        store(d_input + row * width + i, scale * (g * load(factor + i, count) - sum - n * along), count);
        store(df + i, load(df + i, count) + g * n, count);
        store(db + i, load(db + i, count) + g, count);
      }
    }
  }
  add_chunks(of_factor, width, d_factor);
  if (d_bias) add_chunks(of_bias, width, d_bias);
}

// total[i, :] += factor * part[i, :], of which `part` is contiguous
void accumulate(float *total, const bf16 *part, float factor, int64_t rows, int64_t width, int64_t stride,
                int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    float *sum = total + row * stride;
    for (int64_t i = 0; i < width; i += kLanes)
      store(sum + i, load(sum + i, width - i) + factor * load(part + row * width + i, width - i), width - i);
  }
}

}  // namespace

extern "C" {

#define FOR_BOTH(DEFINE) DEFINE(float, float32) DEFINE(bf16, bfloat16)

#define DEFINE_EXPONENTIALS(T, NAME)                                                                        \
  int exponentials_##NAME(T *values, const float *reference, float *sums, int64_t rows, int64_t width,      \
                          int threads) {                                                                    \
    return ended([&](Ending &) { exponentials(values, reference, sums, rows, width, threads); });           \
  }
FOR_BOTH(DEFINE_EXPONENTIALS)

#define DEFINE_GELU(T, NAME)                                                                                \
  int gelu_##NAME(const T *input, const float *bias, T *output, T *slope, int64_t rows, int64_t width,      \
                  int threads) {                                                                            \
    return ended([&](Ending &) { gelu(input, bias, output, slope, rows, width, threads); });                \
  }
FOR_BOTH(DEFINE_GELU)

#define DEFINE_PRODUCT(T, NAME)                                                                             \
  int product_and_sum_##NAME(const T *left, const T *right, T *output, float *sums, int64_t rows,           \
                             int64_t width, int threads) {                                                  \
    return ended([&](Ending &) { product_and_sum(left, right, output, sums, rows, width, threads); });      \
  }
FOR_BOTH(DEFINE_PRODUCT)

#define DEFINE_NORM(T, NAME)                                                                                \
  int norm_backward_##NAME(const T *grad, const T *input, const float *mean, const float *rstd,             \
                           const float *factor, T *d_input, float *d_factor, float *d_bias, int64_t rows,   \
                           int64_t width, int threads) {                                                    \
    return ended([&](Ending &) {                                                                            \
      norm_backward(grad, input, mean, rstd, factor, d_input, d_factor, d_bias, rows, width, threads);      \
    });                                                                                                     \
  }
FOR_BOTH(DEFINE_NORM)

int softmax_bfloat16(const float *scores, float *weights, bf16 *rounded, const int16_t *bits, int64_t most,
                     int64_t rows, int64_t width, int threads) {
  return ended([&](Ending &ending) {
    softmax(scores, weights, rounded, {bits, int16_t(most)}, rows, width, threads, ending);
  });
}

int softmax_backward_bfloat16(const float *grad, const float *weights, bf16 *output, const int16_t *bits,
                              int64_t most, int64_t rows, int64_t width, int threads) {
  return ended([&](Ending &) {
    softmax_backward(grad, weights, output, {bits, int16_t(most)}, rows, width, threads);
  });
}

int accumulate_bfloat16(float *total, const bf16 *part, float factor, int64_t rows, int64_t width,
                        int64_t stride, int threads) {
  return ended([&](Ending &) { accumulate(total, part, factor, rows, width, stride, threads); });
}
}
