// Powers, for exponentials in few instructions.
#pragma once

#include "vectors.h"

namespace {

#ifdef __AVX512F__
constexpr __mmask16 kAllLanes = 0xffff;  // of instructions whose form without a mask g++ 12 warns of
#endif

// 2^x: a polynomial of least relative error (2^-23 of 2^f, |f| <= 1/2), times a power of two. Not a number stays so.
inline Floats power_of_two(Floats x) {
#ifdef __AVX512F__
  const Floats whole = (Floats)_mm512_maskz_roundscale_ps(
      kAllLanes, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // of an infinite x the difference is none: the polynomial is 1 there
  const Floats f = (Floats)_mm512_maskz_sub_ps(
      _mm512_cmp_ps_mask((__m512)x, (__m512)whole, _CMP_NEQ_UQ), (__m512)x, (__m512)whole);
#else
  x = x < -127.0f ? all(-127.0f) : x;  // beyond: 0, and more than any number
  x = x > 128.0f ? all(128.0f) : x;
  const Floats shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);  // 1.5 * 2^23: to whole numbers
#endif
  Floats series = f * 1.327647178e-3f + 9.675541333e-3f;
  series = series * f + 5.550713274e-2f;
  series = series * f + 2.402211972e-1f;
  series = series * f + 6.931469671e-1f;
  series = series * f + 1.000000072f;
#ifdef __AVX512F__
  return (Floats)_mm512_maskz_scalef_ps(kAllLanes, (__m512)series, (__m512)whole);
#else
  return series * (Floats)(((Bits)shifted << 23) + (127u << 23));  // the whole number is in the last bits
#endif
}

constexpr float kLog2E = 1.44269504f;

}  // namespace
