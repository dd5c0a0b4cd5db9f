// The 16-bit floats as stored: `Stored` bits, computed with as `Computed`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sim {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// bf16 is the upper half of a float.
struct BFloat16 {
  using Stored = uint16_t;
  using Computed = float;
  static float load(uint16_t value) { return float_of(uint32_t{value} << 16); }
  static uint16_t store(float value) {
    constexpr uint16_t quiet_nan = 0x7fc0;
    if (std::isnan(value)) return quiet_nan;
    const uint32_t bits = bits_of(value);
    const uint32_t half_but_one = 0x7fff, odd = (bits >> 16) & 1;  // to nearest, ties to even
    return static_cast<uint16_t>((bits + half_but_one + odd) >> 16);
  }
};

// IEEE binary16: 1 sign bit, 5 exponent bits (bias 15), 10 fraction bits. Written out because compilers
// before GCC 13 do not have _Float16 in C++ on every machine.
struct Half {
  using Stored = uint16_t;
  using Computed = float;
  static constexpr uint32_t kBiasDifference = 127 - 15;
  static constexpr float kSmallest = 1.0f / (1 << 24);  // the unit of subnormal numbers

  static float load(uint16_t value) {
    const uint32_t sign = uint32_t{value & 0x8000u} << 16, exponent = (value >> 10) & 0x1f,
                   fraction = value & 0x3ff;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(fraction) * kSmallest;
      return sign ? -magnitude : magnitude;
    }
    const uint32_t wide = exponent == 0x1f ? 0xff : exponent + kBiasDifference;  // infinity and NaN stay so
    return float_of(sign | wide << 23 | fraction << 13);
  }

  static uint16_t store(float value) {
    constexpr uint32_t first_infinite = 0x477ff000;  // 65520 is halfway to the first number that is too large
    constexpr uint32_t first_normal = 0x38800000;    // 2^-14
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    if (std::isnan(value)) return sign | 0x7e00;
    if (magnitude >= first_infinite) return sign | 0x7c00;
    if (magnitude < first_normal) {
      return sign | static_cast<uint16_t>(std::nearbyint(float_of(magnitude) / kSmallest));
    }
    const uint32_t half_but_one = 0xfff, odd = (magnitude >> 13) & 1;  // to nearest, ties to even
    return sign | static_cast<uint16_t>((magnitude + half_but_one + odd - (kBiasDifference << 23)) >> 13);
  }
};

}  // namespace sim
