// Chains of element-wise steps and the sums behind them, in one pass over memory, for fp32 and bf16 on a CPU.
//
// Only the exponential and rounding to bf16 name instructions of AVX-512. All computation is in fp32, rounded once,
// to nearest even. No sum depends on how many threads there are: rows are added up in fixed chunks, and the chunks
// in order.

#include <algorithm>
#include <limits>
#include <vector>

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
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t at = row * width + i, count = width - i;
      const Floats z = load(input + at, count) + load(bias + i, count), square = z * z;
      // 1 + tanh(u) = 2 / (1 + exp(-2u))
      const Floats s = 1.0f / (1.0f + power_of_two((kLinear + kCubic * square) * z));
      store(output + at, z * s, count);
      if (slope) store(slope + at, s + z * (2 * kK + 6 * kK * kC * square) * (1.0f - s) * s, count);
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

// Which values dropout keeps: those whose 16 random bits, as a number, are at most `most`. No bits: all.
struct Kept {
  const int16_t *bits;
  int16_t most;

  Floats of(Floats values, int64_t at, int64_t count) const {
    if (!bits) return values;
    Shorts drawn{};
    std::memcpy(&drawn, bits + at, std::min(kLanes, count) * sizeof(int16_t));
    return __builtin_convertvector(drawn, Ints) <= int32_t(most) ? values : Floats{};
  }
};

// Softmax of rows, of which one has a finite value at least; `weights`, where it is not null, has them unrounded,
// and those that are not kept, too.
void softmax(const float *scores, float *weights, bf16 *rounded, Kept kept, int64_t rows, int64_t width,
             int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> own(weights ? 0 : width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const float *z = scores + row * width;
      float *e = weights ? weights + row * width : own.data();
      Floats largest = all(-std::numeric_limits<float>::infinity()), sum{};
      for (int64_t i = 0; i < width; i += kLanes) {
        // the last vector begins further left, where the row has as many
        const int64_t start = std::max<int64_t>(0, std::min(i, width - kLanes));
        Floats each = load(z + start, width - start);
        if (width < kLanes) each = kNumbers < int32_t(width) ? each : largest;
        largest = each < largest ? largest : each;  // also where `each` is not a number
      }
      const Floats subtrahend = all(largest_of(largest));
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats each = power_of_two((load(z + i, width - i) - subtrahend) * kLog2E);
        store(e + i, each, width - i);
        sum += first(each, width - i);
      }
      const float scale = 1.0f / sum_of(sum);
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t at = row * width + i, count = width - i;
        const Floats weight = load(e + i, count) * scale;
        if (weights) store(e + i, weight, count);
        store(rounded + at, kept.of(weight, at, count), count);
      }
    }
  }
}

// Its gradient, w * (g - sum(w * g)), where g is that of the weights that were kept.
void softmax_backward(const float *grad, const float *weights, bf16 *output, Kept kept, int64_t rows,
                      int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t start = row * width;
    const float *g = grad + start, *w = weights + start;
    Floats sum{};
    for (int64_t i = 0; i < width; i += kLanes)
      sum += load(w + i, width - i) * kept.of(load(g + i, width - i), start + i, width - i);
    const float along = sum_of(sum);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats given = kept.of(load(g + i, width - i), start + i, width - i);
      store(output + start + i, load(w + i, width - i) * (given - along), width - i);
    }
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

}  // namespace

extern "C" {

#define FOR_BOTH(DEFINE) DEFINE(float, float32) DEFINE(bf16, bfloat16)

#define DEFINE_EXPONENTIALS(T, NAME)                                                                        \
  void exponentials_##NAME(T *values, const float *reference, float *sums, int64_t rows, int64_t width,     \
                           int threads) {                                                                   \
    exponentials(values, reference, sums, rows, width, threads);                                            \
  }
FOR_BOTH(DEFINE_EXPONENTIALS)

#define DEFINE_GELU(T, NAME)                                                                                \
  void gelu_##NAME(const T *input, const float *bias, T *output, T *slope, int64_t rows, int64_t width,     \
                   int threads) {                                                                           \
    gelu(input, bias, output, slope, rows, width, threads);                                                 \
  }
FOR_BOTH(DEFINE_GELU)

#define DEFINE_PRODUCT(T, NAME)                                                                             \
  void product_and_sum_##NAME(const T *left, const T *right, T *output, float *sums, int64_t rows,          \
                              int64_t width, int threads) {                                                 \
    product_and_sum(left, right, output, sums, rows, width, threads);                                       \
  }
FOR_BOTH(DEFINE_PRODUCT)

#define DEFINE_NORM(T, NAME)                                                                                \
  void norm_backward_##NAME(const T *grad, const T *input, const float *mean, const float *rstd,            \
                            const float *factor, T *d_input, float *d_factor, float *d_bias, int64_t rows,  \
                            int64_t width, int threads) {                                                   \
    norm_backward(grad, input, mean, rstd, factor, d_input, d_factor, d_bias, rows, width, threads);        \
  }
FOR_BOTH(DEFINE_NORM)

void softmax_bfloat16(const float *scores, float *weights, bf16 *rounded, const int16_t *bits, int64_t most,
                      int64_t rows, int64_t width, int threads) {
  softmax(scores, weights, rounded, {bits, int16_t(most)}, rows, width, threads);
}

void softmax_backward_bfloat16(const float *grad, const float *weights, bf16 *output, const int16_t *bits,
                               int64_t most, int64_t rows, int64_t width, int threads) {
  softmax_backward(grad, weights, output, {bits, int16_t(most)}, rows, width, threads);
}

// total[i, :] += factor * part[i, :], of which `part` is contiguous
void accumulate_bfloat16(float *total, const bf16 *part, float factor, int64_t rows, int64_t width,
                         int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    float *sum = total + row * stride;
    for (int64_t i = 0; i < width; i += kLanes)
      store(sum + i, load(sum + i, width - i) + factor * load(part + row * width + i, width - i), width - i);
  }
}
}
