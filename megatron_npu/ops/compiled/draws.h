// Which weights dropout keeps: a function of a seed, the row and the key, so that backward draws the same.
#pragma once

#include "vectors.h"

namespace {

constexpr int64_t kLevels = 1 << 16;  // of probabilities

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The weights of one row. Each key's number goes through two rounds of a 32-bit mixer (Wellons' "lowbias32"), with 32
// bits of the row's own before each.
struct Draws {
  uint32_t before, between;
  int64_t keep;  // of kLevels; all of them: nothing is drawn

  static Draws of(uint64_t seed, int64_t row, int64_t keep) {
    const uint64_t key = mixed(seed + 0x9e3779b97f4a7c15u * uint64_t(row + 1));
    return {uint32_t(key), uint32_t(key >> 32), keep};
  }

  bool drop() const { return keep < kLevels; }

  // Of sixteen values from key `at` on, those that are kept; zeros for the others.
  Floats of(Floats values, int64_t at) const {
    Bits x = (Bits)kNumbers + (uint32_t(at) + before);
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15) ^ between) * 0x846ca68bu;
    return ((x ^ (x >> 16)) >> 16) < uint32_t(keep) ? values : Floats{};
  }
};

}  // namespace
