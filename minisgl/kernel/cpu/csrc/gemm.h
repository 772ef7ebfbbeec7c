// Rows of activations times one panel of weights: C[m][32] = sum over k of x[m][k] * w[panel][k].
//
// Invariant: an element of C is summed over k in one fixed order, whatever the number of rows,
// so a row's result never depends on what else is computed with it.
#pragma once

#include <algorithm>

#include "weights.h"

namespace minisgl {

// Rows of a tile: 24 sums of one vector and what feeds them fit the 32 registers of AVX-512; others
// have half as many, or vectors of a fraction of the size.
#ifdef MINISGL_AVX512
constexpr int kRows = 12;
#else
constexpr int kRows = 4;
#endif

// Activations in the forms that the weights at hand multiply; unused ones are null.
struct Input {
  int64_t stride = 0;     // elements from row to row of f32, b16 and q8, a multiple of 32
  float* f32 = nullptr;
  bf16* b16 = nullptr;
  int8_t* q8 = nullptr;   // blocks of 32 with a scale of their own, per row
  float* scale = nullptr; // [row][stride / 32]
  int32_t* sums = nullptr;  // [row][stride / 32][2]: of q8 over each half of the block

  int64_t blocks() const { return stride / kBlock; }
};

// Quantize 32 values of one row: scale is the largest magnitude over 127.
inline void quantize_block(const Input& x, int64_t row, int64_t block, F32x16 a, F32x16 b) {
  const float top = largest_abs(a, b);
  const float inverse = top > 1e-36f ? 127.0f / top : 0.0f;  // smaller ones would overflow
  int8_t* q = x.q8 + row * x.stride + block * kBlock;
  const int64_t at = row * x.blocks() + block;
  x.scale[at] = top * (1.0f / 127.0f);
  x.sums[2 * at] = store_i8(q, a * inverse);
  x.sums[2 * at + 1] = store_i8(q + 16, b * inverse);
}

// Write 32 values of a row at column 32 * block in every form that the input has.
inline void put_block(const Input& x, int64_t row, int64_t block, F32x16 a, F32x16 b) {
  const int64_t at = row * x.stride + block * kBlock;
  if (x.f32) store(x.f32 + at, a), store(x.f32 + at + 16, b);
  if (x.b16) store_bf16(x.b16 + at, a), store_bf16(x.b16 + at + 16, b);
  if (x.q8) quantize_block(x, row, block, a, b);
}

inline void put_block(const Input& x, int64_t row, int64_t block, const float* values) {
  put_block(x, row, block, load(values), load(values + 16));
}

// Copy a row in every form that `to` has, from an input of as many columns that has them too.
inline void copy_row(const Input& from, int64_t i, const Input& to, int64_t j) {
  const auto copy = [&](auto* source, auto* target, int64_t size) {
    if (target) std::copy_n(source + i * size, size, target + j * size);
  };
  copy(from.f32, to.f32, to.stride);
  copy(from.b16, to.b16, to.stride);
  copy(from.q8, to.q8, to.stride);
  copy(from.scale, to.scale, to.blocks());
  copy(from.sums, to.sums, 2 * to.blocks());
}

namespace detail {

template <int M>
void tile_f32(const uint8_t* w, int k, const Input& x, int64_t row, float* c) {
  const float* p = (const float*)w;
  const float* in = x.f32 + row * x.stride;
  F32x16 acc[M][2] = {};
  for (int i = 0; i < k; ++i, p += kPanel) {
    const F32x16 w0 = load(p), w1 = load(p + 16);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F32x16 a = splat(in[m * x.stride + i]);
      acc[m][0] = fma(a, w0, acc[m][0]);
      acc[m][1] = fma(a, w1, acc[m][1]);
    }
  }
  for (int m = 0; m < M; ++m) store(c + m * kPanel, acc[m][0]), store(c + m * kPanel + 16, acc[m][1]);
}

template <int M>
void tile_bf16(const uint8_t* w, int k, const Input& x, int64_t row, float* c) {
  const uint32_t* in = (const uint32_t*)(x.b16 + row * x.stride);
  const int64_t stride = x.stride / 2;
  const int pairs = (k + 1) / 2;
  F32x16 acc[M][2] = {};
  for (int i = 0; i < pairs; ++i, w += 128) {
    const U32x16 w0 = load_as<U32x16>(w), w1 = load_as<U32x16>(w + 64);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const uint32_t a = in[m * stride + i];
      acc[m][0] = dot_bf16(acc[m][0], w0, a);
      acc[m][1] = dot_bf16(acc[m][1], w1, a);
    }
  }
  for (int m = 0; m < M; ++m) store(c + m * kPanel, acc[m][0]), store(c + m * kPanel + 16, acc[m][1]);
}

// How each format gives its quads of integers and its scales. `half` is 0 or 1: which 16 outputs.
// Zero is the integer that stands for 0; formats with a minimum have none.
struct Q8 {
  static constexpr int kBytes = 64 + 1024, kZero = 128, kHalves = 1;
  static constexpr bool kMin = false;
  static U32x16 quad(const uint8_t* b, int half, int j) {
    return load_as<U32x16>(b + 64 + j * 128 + half * 64);
  }
  static F32x16 scale(const uint8_t*, const uint8_t* b, int half, int) {
    return load_f16((const f16*)b + 16 * half);
  }
  static F32x16 minimum(const uint8_t*, const uint8_t*, int) { return F32x16{}; }
};

inline U32x16 nibbles(const uint8_t* b, int half, int j) {
  const U32x16 v = load_as<U32x16>(b + (j & 3) * 128 + half * 64);
  return (j < 4 ? v : v >> 4) & splat(0x0f0f0f0fu);
}

struct Q4Zero {
  static constexpr int kBytes = 64 + 512, kZero = 8, kHalves = 1;
  static constexpr bool kMin = false;
  static U32x16 quad(const uint8_t* b, int half, int j) { return nibbles(b + 64, half, j); }
  static F32x16 scale(const uint8_t*, const uint8_t* b, int half, int) {
    return load_f16((const f16*)b + 16 * half);
  }
  static F32x16 minimum(const uint8_t*, const uint8_t*, int) { return F32x16{}; }
};

struct Q4Min {
  static constexpr int kBytes = 128 + 512, kZero = 0, kHalves = 1;
  static constexpr bool kMin = true;
  static U32x16 quad(const uint8_t* b, int half, int j) { return nibbles(b + 128, half, j); }
  static F32x16 scale(const uint8_t*, const uint8_t* b, int half, int) {
    return load_f16((const f16*)b + 16 * half);
  }
  static F32x16 minimum(const uint8_t*, const uint8_t* b, int half) {
    return load_f16((const f16*)b + 32 + 16 * half);
  }
};

// K-quants: `s` is where the block of 256 begins, whose scales multiply those of its blocks of 32.
struct Q4K {
  static constexpr int kHead = 128, kBytes = 64 + 512, kZero = 0, kHalves = 1;
  static constexpr bool kMin = true;
  static U32x16 quad(const uint8_t* b, int half, int j) { return nibbles(b + 64, half, j); }
  static F32x16 scale(const uint8_t* s, const uint8_t* b, int half, int) {
    return load_f16((const f16*)s + 16 * half) * load_u8(b + 16 * half);
  }
  static F32x16 minimum(const uint8_t* s, const uint8_t* b, int half) {
    return -(load_f16((const f16*)s + 32 + 16 * half) * load_u8(b + 32 + 16 * half));
  }
};

struct Q6K {
  static constexpr int kHead = 64, kBytes = 64 + 512 + 256, kZero = 32, kHalves = 2;
  static constexpr bool kMin = false;
  static U32x16 quad(const uint8_t* b, int half, int j) {
    const U32x16 high = load_as<U32x16>(b + 576 + (j >> 2) * 128 + half * 64);
    return nibbles(b + 64, half, j) | (((high >> (2 * (j & 3))) & splat(0x03030303u)) << 4);
  }
  static F32x16 scale(const uint8_t* s, const uint8_t* b, int half, int part) {
    return load_f16((const f16*)s + 16 * half) * load_i8((const int8_t*)b + 32 * part + 16 * half);
  }
  static F32x16 minimum(const uint8_t*, const uint8_t*, int) { return F32x16{}; }
};

template <class Q, int M>
__attribute__((always_inline)) inline void add_block(const uint8_t* s, const uint8_t* b, const int8_t* q, int64_t stride,
                      const float* scales, const int32_t* sums, int64_t blocks, F32x16 (*acc)[2]) {
  constexpr int kQuads = 8 / Q::kHalves;
#pragma GCC unroll 2
  for (int part = 0; part < Q::kHalves; ++part) {
    I32x16 t[M][2];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      int32_t zero = 0;
      if (Q::kZero) {
        const int32_t* sum = sums + 2 * m * blocks;
        zero = -Q::kZero * (Q::kHalves == 1 ? sum[0] + sum[1] : sum[part]);
      }
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) t[m][h] = splat(zero);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kQuads; ++j) {
      const int quad = part * kQuads + j;
      U32x16 w[2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) w[h] = Q::quad(b, h, quad);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        uint32_t a;
        std::memcpy(&a, q + m * stride + 4 * quad, 4);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) t[m][h] = dot_int8(t[m][h], w[h], a);
      }
    }
    F32x16 d[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) d[h] = Q::scale(s, b, h, part);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        acc[m][h] = fma(to_f32(t[m][h]), d[h] * scales[m * blocks], acc[m][h]);
  }
  if (Q::kMin) {
    F32x16 low[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) low[h] = Q::minimum(s, b, h);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const int32_t* sum = sums + 2 * m * blocks;
      const float total = scales[m * blocks] * float(sum[0] + sum[1]);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) acc[m][h] = fma(low[h], splat(total), acc[m][h]);
    }
  }
}

// Six rows of 32 outputs fill the registers: their sums in floats and in integers.
template <class Q, int M, bool Super>
void tile_quant(const uint8_t* w, int k, const Input& x, int64_t row, float* c) {
  if constexpr (M > 6) {
    constexpr int kFirst = (M + 1) / 2;
    tile_quant<Q, kFirst, Super>(w, k, x, row, c);
    tile_quant<Q, M - kFirst, Super>(w, k, x, row + kFirst, c + kFirst * kPanel);
    return;
  }
  const int64_t blocks = x.blocks();
  F32x16 acc[M][2] = {};
  const uint8_t *s = w, *b = w;
  const int8_t* q = x.q8 + row * x.stride;
  const float* scales = x.scale + row * blocks;
  const int32_t* sums = x.sums + 2 * row * blocks;
  for (int i = 0; i < k / kBlock; ++i) {
    if constexpr (Super) {
      if (i % 8 == 0) s = b, b += Q::kHead;
    }
    add_block<Q, M>(s, b, q + i * kBlock, x.stride, scales + i, sums + 2 * i, blocks, acc);
    b += Q::kBytes;
  }
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < 2; ++h) store(c + m * kPanel + 16 * h, acc[m][h]);
}

}  // namespace detail

// Functions for every number of rows: f(M, ...) names that for M.
#ifdef MINISGL_AVX512
#define MINISGL_ROWS(f, ...) \
  {f(1, __VA_ARGS__), f(2, __VA_ARGS__), f(3, __VA_ARGS__), f(4, __VA_ARGS__), f(5, __VA_ARGS__), \
   f(6, __VA_ARGS__), f(7, __VA_ARGS__), f(8, __VA_ARGS__), f(9, __VA_ARGS__), f(10, __VA_ARGS__), \
   f(11, __VA_ARGS__), f(12, __VA_ARGS__)}
#else
#define MINISGL_ROWS(f, ...) \
  {f(1, __VA_ARGS__), f(2, __VA_ARGS__), f(3, __VA_ARGS__), f(4, __VA_ARGS__)}
#endif

// Rows [row, row + m) of x, m up to `kRows`, times a panel; c is [m][32].
void multiply_tile(const Weight& w, int panel, const Input& x, int64_t row, int m, float* c);

// The i-th of `tiles` equal parts of `rows`: where it begins.
inline int64_t tile_start(int64_t rows, int64_t tiles, int64_t i) { return rows * i / tiles; }

}  // namespace minisgl
