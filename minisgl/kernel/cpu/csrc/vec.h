// Sixteen lanes at a time: the few vector operations that every kernel here is written with.
//
// The types are the compiler's own vectors, so +, -, * and comparisons work on any CPU; what has
// an instruction of its own on AVX-512 is written with it, and plainly otherwise. `bf16` and `f16`
// are kept as their 16 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace minisgl {

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));

using bf16 = uint16_t;
using f16 = uint16_t;

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define MINISGL_AVX512 1
#endif
#if defined(MINISGL_AVX512) && defined(__AVX512BF16__)
#define MINISGL_DOT_BF16 1
#endif
#if defined(MINISGL_AVX512) && defined(__AVX512VNNI__)
#define MINISGL_DOT_INT8 1
#endif

template <class V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

inline F32x16 load(const float* p) { return load_as<F32x16>(p); }
inline void store(float* p, F32x16 v) { std::memcpy(p, &v, sizeof v); }
inline F32x16 splat(float x) { return x - F32x16{}; }
inline I32x16 splat(int32_t x) { return x - I32x16{}; }
inline U32x16 splat(uint32_t x) { return x - U32x16{}; }

inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline F32x16 max(F32x16 a, F32x16 b) {
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline F32x16 min(F32x16 a, F32x16 b) {
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// 1 / x to the last bit or the one before: an estimate and one step of Newton's method.
inline F32x16 inverse(F32x16 x) {
#ifdef MINISGL_AVX512
  const F32x16 guess = (F32x16)_mm512_rcp14_ps((__m512)x);
  return fma(guess, fma(-x, guess, splat(1.0f)), guess);
#else
  return 1.0f / x;
#endif
}

inline F32x16 to_f32(I32x16 v) { return __builtin_convertvector(v, F32x16); }

inline float sum(F32x16 v) {
#ifdef MINISGL_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < 16; ++i) total += v[i];
  return total;
#endif
}

// The largest magnitude; a NaN counts as the largest of all.
inline float largest_abs(F32x16 a, F32x16 b) {
  // Without their signs, floats are ordered as integers are, and NaN comes last.
  const I32x16 x = (I32x16)a & 0x7fffffff, y = (I32x16)b & 0x7fffffff;
#ifdef MINISGL_AVX512
  const int32_t top = _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)x, (__m512i)y));
#else
  int32_t top = 0;
  for (int i = 0; i < 16; ++i) top = std::max(top, std::max(x[i], y[i]));
#endif
  float result;
  std::memcpy(&result, &top, 4);
  return result;
}

inline float largest(F32x16 v) {
#ifdef MINISGL_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < 16; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// Whether any lane of a is above that of b.
inline bool any_above(F32x16 a, F32x16 b) {
#ifdef MINISGL_AVX512
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
  return largest(a - b) > 0;
#endif
}


// -- memory -------------------------------------------------------------------------------

template <class T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  template <class U>
  bool operator==(const Aligned<U>&) const { return true; }
};

// A vector whose memory begins with a cache line, so that no load of 64 bytes touches two.
template <class T>
using Buffer = std::vector<T, Aligned<T>>;

// -- sixteen-bit floats -------------------------------------------------------------------

inline float bf16_to_f32(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 f32_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline F32x16 load_bf16(const bf16* p) {
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  F32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = bf16_to_f32(p[i]);
  return v;
#endif
}

inline void store_bf16(bf16* p, F32x16 v) {
#ifdef MINISGL_DOT_BF16
  __m256bh half = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &half, 32);
#else
  for (int i = 0; i < 16; ++i) p[i] = f32_to_bf16(v[i]);
#endif
}

inline float f16_to_f32(f16 x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, fraction = x & 1023;
  float y;
  if (exponent == 0) {  // zero and the subnormals, which are multiples of 2^-24
    y = float(fraction) * 0x1p-24f;
    return sign ? -y : y;
  }
  uint32_t bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
  std::memcpy(&y, &bits, 4);
  return y;
}

inline F32x16 load_f16(const f16* p) {
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  F32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = f16_to_f32(p[i]);
  return v;
#endif
}

inline F32x16 load_u8(const uint8_t* p) {
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  F32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = p[i];
  return v;
#endif
}

inline F32x16 load_i8(const int8_t* p) {
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  F32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = p[i];
  return v;
#endif
}

// Rounded to the nearest integers from -127 to 127, whatever the values; returns their sum.
inline int32_t store_i8(int8_t* p, F32x16 v) {
  v = min(max(v, splat(-127.0f)), splat(127.0f));
#ifdef MINISGL_AVX512
  const __m512i q = _mm512_cvtps_epi32((__m512)v);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(q));
  return _mm512_reduce_add_epi32(q);
#else
  int32_t total = 0;
  for (int i = 0; i < 16; ++i) total += p[i] = int8_t(std::nearbyintf(v[i]));
  return total;
#endif
}

// -- dot products -------------------------------------------------------------------------

// acc[i] += w[2i] * x[0] + w[2i+1] * x[1] for bf16 pairs.
inline F32x16 dot_bf16(F32x16 acc, U32x16 w, uint32_t x) {
#ifdef MINISGL_DOT_BF16
  return (F32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
#else
  const F32x16 low = (F32x16)(w << 16), high = (F32x16)(w & splat(0xffff0000u));
  acc = fma(high, splat(bf16_to_f32(bf16(x >> 16))), acc);
  return fma(low, splat(bf16_to_f32(bf16(x))), acc);
#endif
}

// acc[i] += sum over j of unsigned w[4i+j] * signed x[j], in 32-bit integers.
inline I32x16 dot_int8(I32x16 acc, U32x16 w, uint32_t x) {
#ifdef MINISGL_DOT_INT8
  return (I32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(int(x)));
#else
  for (int j = 0; j < 4; ++j)
    acc += (I32x16)((w >> (8 * j)) & splat(255u)) * splat(int32_t(int8_t(x >> (8 * j))));
  return acc;
#endif
}

// -- exp ----------------------------------------------------------------------------------

// 2^x for x up to 126, 0 far below -126, by the series of e^(x ln 2) up to this degree: at 6 correct to about
// 2 units in the last place of float32, at 4 to 2^-14, which is enough before rounding to bf16.
template <int Degree = 6>
inline F32x16 exp2(F32x16 x) {
#ifdef MINISGL_AVX512
  const F32x16 n = (F32x16)_mm512_roundscale_ps((__m512)x, 8);
#else
  x = max(x, splat(-127.0f));
  const F32x16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F32x16 n = (x + shift) - shift;
#endif
  static constexpr float kTerms[] = {1.0f,         6.9314718e-1f, 2.4022651e-1f, 5.5504109e-2f,
                                     9.6181291e-3f, 1.3333558e-3f, 1.5403530e-4f};
  const F32x16 r = x - n;
  F32x16 p = splat(kTerms[Degree]);
#pragma GCC unroll 6
  for (int i = Degree - 1; i >= 0; --i) p = fma(p, r, splat(kTerms[i]));
#ifdef MINISGL_AVX512
  return (F32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * (F32x16)((__builtin_convertvector(n, I32x16) + 127) << 23);
#endif
}

constexpr float kLog2E = 1.44269504f;

}  // namespace minisgl
