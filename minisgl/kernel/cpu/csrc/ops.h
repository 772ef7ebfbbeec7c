// What happens between the projections, a row at a time in float32: norms, RoPE, activations.
#pragma once

#include "gemm.h"

namespace minisgl {

// y = x / sqrt(mean(x^2) + eps) * weight over n values; y may be x.
inline void rmsnorm(const float* x, const float* weight, float eps, int n, float* y) {
  F32x16 squares[2] = {};
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    const F32x16 a = load(x + i), b = load(x + i + 16);
    squares[0] = fma(a, a, squares[0]);
    squares[1] = fma(b, b, squares[1]);
  }
  float total = sum(squares[0] + squares[1]);
  for (; i < n; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / float(n) + eps);
  for (i = 0; i + 16 <= n; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

// Rotate the first `rotary` values of a head in place, pairing i with i + rotary / 2 (NeoX);
// `table` is the position's row: cosines, then sines.
inline void rope(float* x, const float* table, int rotary) {
  const int half = rotary / 2;
  const float *cosines = table, *sines = table + half;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const F32x16 a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosines[i] - b * sines[i];
    x[half + i] = b * cosines[i] + a * sines[i];
  }
}

enum class Act : int { Silu = 0, Gelu = 1, GeluTanh = 2 };

// x * sigmoid(t), the common form of SiLU (t = x) and of GELU's tanh approximation.
inline F32x16 gated(F32x16 x, F32x16 t) {
  t = min(max(t, splat(-87.0f)), splat(87.0f));
  return x * inverse(1.0f + exp2(-kLog2E * t));
}

inline F32x16 apply(Act act, F32x16 x) {
  if (act == Act::Silu) return gated(x, x);
  // 0.5 x (1 + tanh(u)) = x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
  if (act == Act::GeluTanh) return gated(x, 1.5957691216f * (x + 0.044715f * x * x * x));
  F32x16 y;
  for (int i = 0; i < 16; ++i) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  return y;
}

// A row of n values in every form that the input has; n is padded with zeros up to the stride.
inline void put_row(const Input& x, int64_t row, const float* values, int n) {
  int i = 0;
  for (; i + kBlock <= n; i += kBlock) put_block(x, row, i / kBlock, values + i);
  if (i == n) return;
  float rest[kBlock] = {};
  std::copy(values + i, values + n, rest);
  put_block(x, row, i / kBlock, rest);
}

}  // namespace minisgl
